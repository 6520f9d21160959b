"""The router's forecast of the prefixes that each engine has cached."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_prompts import TOKENS, prompt

from kv_connector.router.bodies.prompt import PREFIX_BYTES, Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.prefix_cache import Pin, PrefixCache


class Engine:
    """An engine with the simplest prefix cache."""

    def __init__(self, room: int) -> None:
        self._room = room  # pieces
        self._blocks: list[int] = []  # the least recently used first

    def compute(self, prompt: Prompt) -> int:
        """Computes a prompt; returns how many of its tokens were cached before."""
        had = self.leading(prompt)
        for prefix in reversed(prompt.prefixes):
            if prefix in self._blocks:
                self._blocks.remove(prefix)
            self._blocks.append(prefix)
        self._blocks = self._blocks[max(0, len(self._blocks) - self._room) :]
        return had * TOKENS

    def leading(self, prompt: Prompt) -> int:
        had = 0
        while had < len(prompt.prefixes) and prompt.prefixes[had] in self._blocks:
            had += 1
        return had


@dataclass
class Router:
    """A router with one engine, which reports ``room`` for so many pieces."""

    room: int | None
    engine: Engine

    def __post_init__(self) -> None:
        self.cache = PrefixCache()

    def forecast(self, prompt: Prompt) -> int:
        """Returns the forecast, in pieces."""
        return self.cache.cached(prompt) // PREFIX_BYTES

    def send(self, prompt: Prompt) -> tuple[int, int]:
        """Returns the tokens that the engine had, and the bytes that it was expected to have."""
        expected = self.cache.cached(prompt)
        return self.engine.compute(prompt), expected

    def hear(self, prompt: Prompt, cached: int, expected: int) -> None:
        self.cache.corrected(prompt, cached, len(prompt.prefixes) * TOKENS, expected)
        self.cache.prompt_computed(prompt, None if self.room is None else self.room * TOKENS)

    def ask(self, prompt: Prompt) -> None:
        self.hear(prompt, *self.send(prompt))


# Of few letters, so that many prompts begin alike.
prompts = st.lists(st.sampled_from("ab"), min_size=1, max_size=7).map(prompt)


@given(st.lists(prompts), st.integers(0, 20), prompts)
def test_prefix_cache_with_known_capacity_predicts_every_hit(
    asked: list[Prompt], room: int, probe: Prompt
) -> None:
    router = Router(room, Engine(room))
    for one in asked:
        assert router.forecast(one) == router.engine.leading(one)
        router.ask(one)
        assert router.forecast(probe) == router.engine.leading(probe)


@given(st.data(), st.integers(0, 20), st.integers(0, 20))
def test_forecasts_fit_the_room_and_hold_each_prefix_with_its_beginning(
    data: st.DataObject, room: int, keeps: int
) -> None:
    router = Router(room, Engine(keeps))
    waiting: list[tuple[Prompt, int, int]] = []
    seen: set[Prompt] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        hears = data.draw(st.booleans())
        if waiting and hears:
            router.hear(*waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        else:
            one = data.draw(prompts)
            seen.add(one)
            waiting.append((one, *router.send(one)))
        held = {prefix for each in seen for prefix in each.prefixes[: router.forecast(each)]}
        assert len(held) <= room
        every = {prefix for each in seen for prefix in each.prefixes}
        single = {
            prefix
            for prefix in every
            if router.forecast(Prompt("m", 0, None, (prefix,), ends=(PREFIX_BYTES,)))
        }
        assert single == held  # no prefix is held without the prefixes before it


def test_an_engine_that_was_sent_nothing_has_nothing() -> None:
    cache = PrefixCache()
    assert cache.cached(prompt("abc")) == 0


def test_cache_has_the_common_beginning_of_a_computed_prompt() -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt("abc"))
    assert cache.cached(prompt("abd")) == 2 * PREFIX_BYTES


def test_after_its_answer_an_engine_has_all_of_the_prompt_whatever_it_had_before() -> None:
    router = Router(None, Engine(100))
    router.ask(prompt("abcdef"))
    assert router.forecast(prompt("abcdef")) == 6


def test_cache_is_right_after_a_loss_that_was_known_before_the_answer() -> None:
    router = Router(10, Engine(10))
    first = prompt(range(10))
    router.ask(first)
    _, expected = router.send(first)
    router.ask(prompt(range(100, 110)))
    assert router.forecast(first) == 0
    router.hear(first, 0, expected)
    assert router.forecast(first) == 10
    router.ask(prompt("a"))
    assert router.forecast(first) == 9, "its room is as large as before"


def test_prompts_that_are_computed_side_by_side_do_not_miss_each_other() -> None:
    """Neither prompt finds the pieces that the other is still computing. These pieces do not count as
    missed."""
    router = Router(None, Engine(100))
    early, late = prompt("abcdefgh"), prompt("abcdefxy")
    router.ask(prompt(range(8)))
    expected = [router.cache.cached(one) for one in (early, late)]
    assert expected == [0, 0]
    for one in (early, late):
        router.hear(one, 0, 0)
    assert [router.forecast(one) for one in (prompt(range(8)), early, late)] == [8, 8, 8]


@pytest.mark.parametrize("keeps", [0, 55])
def test_forecast_shrinks_when_an_engine_keeps_less_than_it_reports(keeps: int) -> None:
    router = Router(1000, Engine(keeps))
    asked = random.Random(1).choices([prompt([name, *range(10)]) for name in range(20)], k=500)
    wrong = []
    for one in asked:
        wrong.append(router.forecast(one) > router.engine.leading(one))
        router.ask(one)
    assert sum(wrong) <= 20  # there are 20 prefixes, and each is missed once
    assert sum(wrong[250:]) <= 2


def test_forecast_grows_when_an_engine_keeps_more_than_expected() -> None:
    router = Router(1000, Engine(0))
    others = [prompt([name, *range(10)]) for name in range(20)]
    for _ in range(3):
        for one in others:
            router.ask(one)
    router.engine = Engine(1000)
    for _ in range(4):
        for one in others:
            router.ask(one)
    assert [router.forecast(one) for one in others] == [11] * 20


def test_a_hit_that_ends_within_a_block_is_no_loss() -> None:
    """The first half of the bytes may be fewer than half of the tokens. That is not a loss either."""
    router = Router(None, Engine(1000))
    first, again = prompt([1, *range(9)]), prompt([2, *range(9)])
    for one in (first, again):
        router.ask(one)
    for _ in range(100):
        router.hear(first, 6 * TOKENS, first.size)
    assert router.forecast(again) == 10


@pytest.mark.parametrize(
    ("cached", "tokens"), [(0, 0), (-TOKENS, 3 * TOKENS), (9 * TOKENS, 3 * TOKENS), (5, -1)]
)
def test_a_nonsensical_answer_does_no_harm(cached: int, tokens: int) -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt("abc"))
    cache.corrected(prompt("abc"), cached, tokens, 0)
    cache.prompt_computed(prompt("abc"))
    assert cache.cached(prompt("abc")) == 3 * PREFIX_BYTES


def test_room_is_counted_in_the_tokens_of_the_prompts_that_it_holds() -> None:
    """A token id has eight bytes here, so a piece has half as many tokens as a piece of text."""
    cache = PrefixCache()
    pieces = [prompt([number]) for number in range(1000)]
    for one in pieces:
        cache.prompt_computed(replace(one, tokens=one.size // 8), 100 * TOKENS)
    assert sum(cache.cached(one) > 0 for one in pieces) == pytest.approx(200, abs=2)


def test_room_is_counted_in_forecast_tokens_of_text() -> None:
    cache = PrefixCache()
    pieces = [prompt([number]) for number in range(1000)]
    for one in pieces:
        cache.prompt_computed(one, 100 * TOKENS, tokens=one.size // 8)
    assert sum(cache.cached(one) > 0 for one in pieces) == pytest.approx(200, abs=2)


@pytest.mark.parametrize(("tokens", "counts"), [(500, True), (125, False)])
def test_loss_of_a_short_text_counts_if_it_has_many_tokens(tokens: int, counts: bool) -> None:
    """A loss of fewer than 256 tokens may be less than a block."""
    cache, short = PrefixCache(), Prompt("m", 500, None, (1,), ends=(500,))
    cache.prompt_computed(short)
    cache.corrected(short, 0, tokens, expected=500)
    cache.prompt_computed(prompt("a"))
    assert (cache.cached(short) == 0) is counts


def test_prompts_that_an_engine_receives_take_room_before_they_have_arrived() -> None:
    cache = PrefixCache()
    pieces = [prompt([number]) for number in range(20)]

    def held() -> list[int]:
        return [number for number, one in enumerate(pieces) if cache.cached(one)]

    for one in pieces[:10]:
        cache.prompt_computed(one, 10 * TOKENS)
    cache.load(3 * TOKENS)
    assert held() == list(range(3, 10))
    cache.prompt_computed(pieces[10], 10 * TOKENS)
    assert held() == list(range(4, 11))
    cache.load(-3 * TOKENS)
    for one in pieces[11:]:
        cache.prompt_computed(one, 10 * TOKENS)
    assert held() == list(range(10, 20))


def test_rest_behind_the_last_prefix_takes_room() -> None:
    half = PREFIX_BYTES // 2
    cache, pieces = (
        PrefixCache(),
        [replace(prompt([number]), size=PREFIX_BYTES + half) for number in range(5)],
    )
    for one in pieces:
        cache.prompt_computed(one, 6 * TOKENS)  # four prompts
    assert [cache.cached(one) > 0 for one in pieces] == [False, True, True, True, True]
    assert cache._bytes == 6 * PREFIX_BYTES


@pytest.mark.parametrize("runs", [False, True])
def test_prompt_that_grows_takes_the_room_of_its_bytes(runs: bool) -> None:
    """A rest becomes a part of the next prefix."""
    cache, grown = PrefixCache(), prompt("abcdef")
    for size in range(100, grown.size, 300):
        whole = size // PREFIX_BYTES
        one = replace(grown, size=size, prefixes=grown.prefixes[:whole], ends=grown.ends[:whole])
        cache.prompt_computed(one)
        assert cache._bytes == (size if whole else 0)
        if runs:
            pinned(cache, one)


def pinned(cache: PrefixCache, prompt: Prompt) -> Pin:
    pin = Pin(prompt.prefixes)
    cache.pin(pin)
    return pin


def test_prefixes_of_running_requests_stay_and_then_are_the_most_recently_used() -> None:
    cache = PrefixCache()
    pieces = [prompt([number]) for number in range(20)]

    def compute(numbers: Iterable[int]) -> list[int]:
        for number in numbers:
            cache.prompt_computed(pieces[number], 4 * TOKENS)
        return [number for number, one in enumerate(pieces) if cache.cached(one)]

    compute(range(4))
    pins = [pinned(cache, pieces[0]), pinned(cache, pieces[0]), pinned(cache, pieces[1])]
    assert compute(range(4, 9)) == [0, 1, 7, 8]
    cache.unpin(pins[0])
    assert compute([9]) == [0, 1, 8, 9]
    cache.unpin(pins[1])
    assert compute([10]) == [0, 1, 9, 10]
    assert compute([11, 12, 13]) == [1, 11, 12, 13]


def test_pins_take_room_from_all_other_prefixes() -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt("abcd"), 4 * TOKENS)
    pin = pinned(cache, prompt("abcd"))
    cache.prompt_computed(prompt("x"), 4 * TOKENS)
    assert [cache.cached(prompt(of)) // PREFIX_BYTES for of in ("abcd", "x")] == [4, 0]
    cache.unpin(pin)
    cache.prompt_computed(prompt("x"), 4 * TOKENS)
    assert [cache.cached(prompt(of)) // PREFIX_BYTES for of in ("abcd", "x")] == [3, 1]


def test_a_second_pin_of_a_request_comes_before_the_end_of_the_first() -> None:
    endpoint = Endpoint.parse("http://d:1")
    pool = Pool([endpoint])
    with pool.lease(endpoint, prompt=prompt("ab")) as lease:
        cache = lease.workload.cache
        cache.prompt_computed(prompt("ab"), 2 * TOKENS)
        lease.pin()
        cache.load(2 * TOKENS)  # no room is left
        lease.pin()
        assert cache.cached(prompt("ab")) == 2 * PREFIX_BYTES
    assert cache.cached(prompt("ab")) == 0


def test_pin_ends_with_the_contents_of_the_cache() -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt("ab"))
    pin = pinned(cache, prompt("ab"))
    cache.clear()
    assert cache.cached(prompt("ab")) == len(cache) == 0
    cache.prompt_computed(prompt("ab"), 2 * TOKENS)
    pinned(cache, prompt("ab"))
    cache.unpin(pin)
    cache.prompt_computed(prompt("x"), 2 * TOKENS)
    assert cache.cached(prompt("ab")) == 2 * PREFIX_BYTES


def test_a_second_pin_of_a_request_adds_what_the_engine_has_got_since() -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt("ab"))
    pin = Pin(prompt("abcd").prefixes)
    for runs in ("abc", "abcd"):
        cache.pin(pin)
        cache.prompt_computed(prompt(runs))
    cache.clear()
    cache.prompt_computed(prompt("abc"), 3 * TOKENS)
    cache.pin(pin)
    cache.prompt_computed(prompt("x"), 3 * TOKENS)
    assert cache.cached(prompt("abc")) == 3 * PREFIX_BYTES
    cache.unpin(pin)
    cache.prompt_computed(prompt("x"), 3 * TOKENS)
    assert cache.cached(prompt("abc")) == 2 * PREFIX_BYTES


def test_engine_without_a_reported_capacity_gets_the_default_capacity() -> None:
    cache = PrefixCache()
    pieces = [prompt([number]) for number in range(3000)]
    for one in pieces:
        cache.prompt_computed(one)
    held = [cache.cached(one) > 0 for one in pieces]
    assert sum(held) * TOKENS == pytest.approx(400_000, rel=0.01)
    assert held == sorted(held)


def test_room_that_an_engine_has_no_more_is_given_up() -> None:
    cache = PrefixCache()
    cache.prompt_computed(prompt(range(10)))
    cache.prompt_computed(prompt("a"), 4 * TOKENS)
    assert [cache.cached(prompt(of)) // PREFIX_BYTES for of in ("a", range(10))] == [1, 3]
