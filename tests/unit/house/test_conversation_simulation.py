"""integration/benchmarks/conversation_simulation.py: the policies with a model of vLLM's prefix caches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from conversation_simulation import LENDING, Cache, Conversation, Fleet, Workshape, policies, spread

SHAPE = Workshape(10, 4, 0, 300, 100, 40, 3, 0.0)


def served(name: str, shape: Workshape = SHAPE) -> tuple[Fleet, int]:
    fleet = Fleet(policies()[name], 2, 2, 1 << 20, lends=name == LENDING)
    return fleet, fleet.run(shape, 1)


def test_cache_keeps_whole_blocks_and_always_computes_the_last_token() -> None:
    cache = Cache(64)
    cache.add(["a"] * 40)
    assert cache.hit(["a"] * 40) == 32
    assert cache.hit(["a"] * 32) == 16
    cache.add(["b"] * 64)
    assert cache.hit(["a"] * 40) == 0


def test_cache_aware_computes_and_moves_less_than_fewest_outstanding() -> None:
    (fewest, new), (aware, same) = served("fewest_outstanding"), served("cache_aware")
    assert new == same
    assert sum(aware.computed.values()) < sum(fewest.computed.values())
    assert aware.moved < fewest.moved
    for counts in (aware.computed, aware.generated):
        assert spread(counts.values()) <= 1.5


def test_prefill_engines_compute_no_long_answers_if_engines_lend() -> None:
    shape = replace(SHAPE, answer=400)
    (lending, _), (alone, _) = served(LENDING, shape), served("cache_aware", shape)
    assert sum(lending.computed.values()) < 0.7 * sum(alone.computed.values())
    assert lending.lent > 0 == alone.lent
    assert lending.moved < 1.2 * alone.moved


def test_conversations_leave_nothing_behind() -> None:
    for name in policies():
        fleet, _ = served(name)
        members = [one for pool in fleet.pools.values() for one in pool.choices()]
        assert [(one.outstanding, one.context, one.workload.queued()) for one in members] == [(0, 0, 0)] * 4


def test_conversation_has_the_tokens_of_its_messages() -> None:
    one = Conversation(1, Random(1))
    one.say("user", 10)
    assert len(one.tokens()) == 10 + 4 + 3
