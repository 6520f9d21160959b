"""The index of the prefixes that all engines have cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from checkpoints import BASE
from hypothesis import given
from hypothesis import strategies as st
from router_prompts import TOKENS, prompt

from kv_connector.control.membership import Leave, Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.bodies.prompt import PREFIX_BYTES, Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prefix_cache import Pin, PrefixCache, PrefixIndex


def engine(number: int) -> Endpoint:
    return Endpoint.parse(f"http://h:{8000 + number}")


def fleet(count: int, most: int = 1 << 19) -> tuple[PrefixIndex, list[PrefixCache]]:
    index, caches = PrefixIndex(most), [PrefixCache() for _ in range(count)]
    for cache in caches:
        index.add(cache)
    return index, caches


def found(index: PrefixIndex, caches: Sequence[PrefixCache], seen: Prompt) -> list[int]:
    """Returns the bytes that the index finds for each cache."""
    matches = index.matches(seen)
    return [next((nbytes for mask, nbytes in matches if mask & cache.bit), 0) for cache in caches]


# Of few letters, so that many prompts begin alike.
prompts = st.lists(st.sampled_from("ab"), min_size=1, max_size=7).map(prompt)
steps = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["sent", "sent", "hit", "missed", "pin", "pin", "again", "unpin", "clear", "leave"]),
        prompts,
        st.integers(0, 12),
    ),
    max_size=40,
)


@given(steps, prompts, st.integers(1, 30))
def test_index_finds_what_each_cache_holds(
    done: list[tuple[int, str, Prompt, int]], probe: Prompt, most: int
) -> None:
    index, caches = fleet(5, most)
    pins: list[list[Pin]] = [[] for _ in caches]
    for number, what, one, room in done:
        cache = caches[number]
        match what:
            case "sent":
                cache.prompt_computed(one, room * TOKENS)
            case "hit" | "missed":
                tokens = len(one.prefixes) * TOKENS
                cache.corrected(one, tokens if what == "hit" else 0, tokens, one.size)
            case "pin":
                pins[number].append(Pin(one.prefixes))
                cache.pin(pins[number][-1])
            case "again":
                if pins[number]:
                    cache.pin(pins[number][room % len(pins[number])])
            case "unpin":
                if pins[number]:
                    cache.unpin(pins[number].pop(room % len(pins[number])))
            case "clear":
                cache.clear()
            case _:
                index.remove(cache)
                for pin in pins[number]:
                    cache.unpin(pin)
                pins[number].clear()
                assert len(cache) == 0
                cache = caches[number] = PrefixCache()
                index.add(cache)
        assert len(index) == sum(map(len, caches)) <= most
        assert found(index, caches, probe) == [one.cached(probe) for one in caches]
        for each in caches:
            held = [prefix for prefix in probe.prefixes if prefix in each]
            assert held == list(probe.prefixes[: len(held)]), "a prefix is held without those before it"
    mask, nbytes = next(iter(index.matches(probe)), (0, 0))
    longest = max(one.cached(probe) for one in caches)
    assert nbytes == longest
    assert mask == sum(one.bit for one in caches if longest and one.cached(probe) == longest)


def test_index_finds_nothing_of_an_engine_that_was_removed() -> None:
    index, (first, second) = fleet(2)
    for cache in (first, second):
        cache.prompt_computed(prompt("abc"))
    index.remove(first)
    index.remove(first)
    assert len(first) == 0, "leases of the engine may keep its cache for long"
    assert index.matches(prompt("abc")) == [(second.bit, 3 * PREFIX_BYTES)]
    assert len(index) == 3
    index.remove(second)
    assert len(index) == 0


def test_index_takes_the_bit_of_a_removed_engine_for_the_next() -> None:
    index, (first, second) = fleet(2)
    first.prompt_computed(prompt("abc"))
    bit = first.bit
    index.remove(first)
    third = PrefixCache()
    third.prompt_computed(prompt("ab"))
    index.add(third)
    assert (third.bit, second.bit) == (bit, 2)
    assert index.matches(prompt("abc")) == [(bit, 2 * PREFIX_BYTES)]


def test_index_finds_the_longest_beginning_first() -> None:
    index, (first, second, third) = fleet(3)
    for cache, pieces in ((first, "abcd"), (second, "abc"), (third, "xyz")):
        cache.prompt_computed(prompt(pieces))
    assert index.matches(prompt("abcde")) == [
        (first.bit, 4 * PREFIX_BYTES),
        (first.bit | second.bit, 3 * PREFIX_BYTES),
    ]
    assert index.matches(prompt("q")) == []


def test_index_that_is_full_shrinks_the_largest_cache() -> None:
    _, (large, small) = fleet(2, most=10)
    small.prompt_computed(prompt("ab"))
    large.prompt_computed(prompt(range(20)))
    assert (len(large), len(small)) == (8, 2)
    assert large.cached(prompt(range(20))) == 8 * PREFIX_BYTES, "the beginning stays"


def test_index_that_is_full_of_pinned_prefixes_takes_no_new_ones() -> None:
    _, (large, small) = fleet(2, most=10)
    large.prompt_computed(prompt(range(10)))
    pin = Pin(prompt(range(10)).prefixes)
    large.pin(pin)
    small.prompt_computed(prompt("ab"))
    assert (len(large), len(small)) == (10, 0)
    large.unpin(pin)
    small.prompt_computed(prompt("ab"))
    assert (len(large), len(small)) == (8, 2)


def test_index_with_a_pinned_largest_cache_shrinks_another_one() -> None:
    _, (pinned, old, new) = fleet(3, most=9)
    pinned.prompt_computed(prompt(range(5)))
    pinned.pin(Pin(prompt(range(5)).prefixes))
    old.prompt_computed(prompt("abcd"))
    new.prompt_computed(prompt("xy"))
    assert [len(one) for one in (pinned, old, new)] == [5, 3, 1]


def test_prefix_that_is_hidden_behind_two_beginnings_counts_once() -> None:
    index, (cache,) = fleet(1, most=5)
    whole = prompt("abcd")
    for beginning in ("abc", "ab"):
        cache.prompt_computed(whole.hidden_behind(prompt(beginning)))
    assert len(cache) == 5
    assert cache.drop_oldest(5, 1 << 30) == 5 * PREFIX_BYTES
    cache.prompt_computed(prompt("vwxyz"), 5 * TOKENS)
    assert found(index, [cache], prompt("vwxyz")) == [5 * PREFIX_BYTES]


def test_cache_that_joins_a_full_index_with_pinned_prefixes_keeps_them() -> None:
    index, (first,) = fleet(1, most=4)
    first.prompt_computed(prompt("abcd"))
    first.pin(Pin(prompt("abcd").prefixes))
    second = PrefixCache()
    second.prompt_computed(prompt("wxyz"))
    second.pin(Pin(prompt("wxyz").prefixes))
    index.add(second)
    first.prompt_computed(prompt("e"))
    assert (len(first), len(second)) == (4, 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=20), st.integers(4, 30))
def test_index_takes_no_prefix_of_an_engine_within_its_part(floods: list[tuple[int, int]], most: int) -> None:
    index, caches = fleet(5, most)
    part = most // 5
    caches[4].prompt_computed(prompt(range(part)))
    for number, (which, length) in enumerate(floods):
        caches[which].prompt_computed(prompt([f"flood {number}", *range(length)]))
        assert len(caches[4]) == part
        assert len(index) <= most


def short_messages(name: str, count: int, nbytes: int) -> Prompt:
    """Returns a prompt of so many messages, of so many bytes each."""
    prefixes = tuple(hash((name, number)) for number in range(count))
    ends = tuple(nbytes * (number + 1) for number in range(count))
    return Prompt("m", nbytes * count, None, prefixes, ends=ends)


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_flood_of_short_messages_costs_others_no_more_bytes_than_it_has(count: int) -> None:
    index, caches = fleet(4, most=400)
    others = [prompt([number]) for number in range(400)]
    for number, one in enumerate(others):
        caches[number % 4].prompt_computed(one)
    for number in range(20):
        flood = short_messages(f"flood {number}", count, 10)
        before = sum(caches[at % 4].cached(one) for at, one in enumerate(others))
        caches[number % 4].prompt_computed(flood)
        lost = before - sum(caches[at % 4].cached(one) for at, one in enumerate(others))
        assert lost < flood.size + PREFIX_BYTES, "the last one may be larger than what is left to drop"
        assert len(index) <= 400
        assert caches[number % 4].cached(flood) > 0


def test_index_that_is_too_full_when_an_engine_joins_shrinks_with_the_next_prompt() -> None:
    index, (first,) = fleet(1, most=10)
    first.prompt_computed(prompt("abcdefghij"))
    second = PrefixCache()
    second.prompt_computed(prompt(range(10)))
    index.add(second)
    second.prompt_computed(prompt(range(10)))
    assert (len(first), len(second)) == (5, 5)


def test_new_engine_keeps_its_part_of_a_full_index() -> None:
    _, (old, new) = fleet(2, most=10)
    old.prompt_computed(prompt("abcdefghij"))
    new.prompt_computed(prompt(range(20)))
    assert (len(old), len(new)) == (5, 5)


def test_cache_takes_a_loss_of_less_than_a_block_for_none() -> None:
    """Engines count hits in blocks, and always compute the last token."""
    cache = PrefixCache()
    short, other = (Prompt("m", 100, None, (hash(name),), ends=(100,)) for name in "ab")
    for _ in range(3):
        cache.prompt_computed(short)
        cache.corrected(short, 0, 25, 100)
    cache.prompt_computed(prompt(range(50)))
    cache.prompt_computed(other)
    assert [cache.cached(one) for one in (short, other)] == [100, 100]


class Fleet:
    """Engines that register."""

    def __init__(self, listed: Sequence[Endpoint] = ()) -> None:
        pools = {side: Pool() for side in Side}
        self.members = Members(
            pools, {Side.PREFILL: [], Side.DECODE: listed}, Incidents(), suspect=3.0, dead=5.0
        )
        self.pools = pools
        for one in listed:
            self.members.answered(one)

    def register(self, incarnation: str = "1", **facts: Any) -> Endpoint:
        address = ("http://h:8000", "h", 5600)
        return self.members.register(
            0.0, Register("d", incarnation, Role.DECODE, *address, **{"checkpoint": BASE, **facts})
        )

    def send(self, endpoint: Endpoint) -> None:
        workload = self.pools[Side.DECODE].workload(endpoint)
        assert workload is not None
        workload.cache.prompt_computed(prompt("abc"))

    def has(self) -> bool:
        return self.members.index.matches(prompt("abc")) != []


def test_index_drops_an_engine_that_restarts_at_its_address() -> None:
    fleet = Fleet()
    fleet.send(fleet.register("1"))
    fleet.register("1")
    assert fleet.has(), "it has registered again"
    fleet.register("2")
    assert not fleet.has()
    assert len(fleet.members.index) == 0


@pytest.mark.parametrize("news", [{"weights": "v2"}, {"checkpoint": None}, {"asleep": True}])
def test_index_drops_the_prefixes_of_an_engine_with_other_weights_or_asleep(news: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.send(fleet.register())
    fleet.register(**news)
    assert not fleet.has()


def test_index_drops_an_engine_that_leaves_or_is_dead() -> None:
    fleet = Fleet()
    fleet.send(fleet.register())
    fleet.members.leave(Leave("d", "1"))
    assert not fleet.has()
    fleet.send(fleet.register("2"))
    fleet.members.tick(6.0)
    fleet.members.tick(12.0)
    assert not fleet.has()


def test_index_drops_a_listed_engine_that_restarts_without_registering() -> None:
    listed = engine(0)
    fleet = Fleet([listed])
    fleet.send(listed)
    fleet.members.failed(listed, "its /health answers 500")
    fleet.members.answered(listed)
    assert fleet.has(), "the same process answers again"
    fleet.members.failed(listed, "refused", gone=True)
    fleet.members.answered(listed)
    assert not fleet.has()
