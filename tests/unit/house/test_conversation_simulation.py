"""integration/benchmarks/conversation_simulation.py: the policies with a model of vLLM's prefix caches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import conversation_simulation
import goodput_simulation
import pytest
from conversation_simulation import (
    LENDING,
    Conversation,
    HeldBlocks,
    SimulatedBlocks,
    SimulatedFleet,
    Workshape,
    policies,
    spread,
)
from msgspec.structs import replace as changed
from second_source import RequestTimes, SecondSource

from kv_connector.router.engines.members import TEXT_SIDES

SHAPE = Workshape(10, 4, 0, 300, 100, 40, 3, 0.0)


def served(name: str, shape: Workshape = SHAPE) -> tuple[SimulatedFleet, int]:
    fleet = SimulatedFleet(policies()[name], 2, 2, 1 << 20, lends=name == LENDING)
    return fleet, fleet.run(shape, 1)


def computed(blocks: SimulatedBlocks, tokens: list[str]) -> HeldBlocks:
    held = blocks.take(tokens)
    assert held is not None
    blocks.computed(held, tokens)
    return held


def test_blocks_keep_whole_blocks_and_the_last_token_is_always_computed() -> None:
    blocks = SimulatedBlocks(64)
    blocks.give_back(computed(blocks, ["a"] * 40))
    assert blocks.hit(["a"] * 40) == 32
    assert blocks.hit(["a"] * 32) == 16
    blocks.give_back(computed(blocks, ["b"] * 64))
    assert blocks.hit(["a"] * 40) == 0


def test_blocks_of_a_running_request_are_not_taken() -> None:
    blocks = SimulatedBlocks(64)
    running = computed(blocks, ["a"] * 32)
    blocks.give_back(computed(blocks, ["b"] * 32))
    assert blocks.take(["c"] * 40) is None
    blocks.give_back(computed(blocks, ["c"] * 32))
    assert blocks.hit(["a"] * 40) == 32
    assert blocks.hit(["b"] * 40) == 0
    blocks.give_back(running)
    assert blocks.take(["d"] * 64) is not None


def test_last_block_of_a_request_and_blocks_without_contents_are_taken_first() -> None:
    blocks = SimulatedBlocks(64)
    blocks.give_back(computed(blocks, ["a"] * 40))  # the third block is not full
    for taken, left in ((16, 32), (32, 32), (48, 16)):
        held = blocks.take(["b"] * taken)
        assert held is not None
        assert blocks.hit(["a"] * 40) == left
        blocks.give_back(held)


def test_engines_have_95_percent_of_the_predicted_tokens_after_1000_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines evict all the time. Their conversations need three times as many blocks as they have."""
    monkeypatch.setattr(conversation_simulation, "BLOCK", 32)
    monkeypatch.setattr(conversation_simulation, "TOKEN_CHARACTERS", 1)
    cost = changed(goodput_simulation.COST, step_ns=6_000_000, token_ns=200_000, pair_ps=0)
    monkeypatch.setattr(goodput_simulation, "COST", cost)
    fleet = SimulatedFleet(policies()["cache_aware"], 2, 2, 9_600, lends=False)
    fleet.run(Workshape(126, 8, 0, 400, 80, 40, 30, 6.0), 1)
    for side in TEXT_SIDES:
        assert fleet.forecasts[side].predicted > 50_000
        assert fleet.forecasts[side].share >= 0.95, side


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
        assert [(one.outstanding, one.context, one.workload.backlog.uncached) for one in members] == [
            (0, 0, 0)
        ] * 4


def test_conversation_has_the_tokens_of_its_messages() -> None:
    one = Conversation(1, Random(1))
    one.say("user", 10)
    assert len(one.tokens()) == 10 + 4 + 3


def test_second_source_saves_nothing_if_one_nic_carries_all_pages_anyway() -> None:
    """The prefill engine computes 400 of 32,400 tokens in 23 ms. A token moves in 4 us."""
    missing, third, load = 32_400, 32_000, 32_000 * 4e-6

    def gain(begins: float, lent: int) -> float:
        found = SecondSource(4e-6)
        request = RequestTimes(0.0, begins, begins + 0.023, missing, third, lends=lent > 0)
        found.add(request, lent)
        assert (found.missing, found.third) == (missing, third)
        assert found.waits == [pytest.approx(missing * 4e-6 - 0.023)]
        return found.gains[0]

    assert gain(begins=0.0, lent=0) == 0  # the decode engine's NIC receives all pages
    assert gain(begins=load, lent=third) == pytest.approx(400 * 4e-6)  # the lender's NIC sends them twice
    assert gain(begins=load, lent=0) == pytest.approx(missing * 4e-6 - 0.023)  # two lenders
    assert gain(begins=0.5, lent=0) == pytest.approx(missing * 4e-6 - 0.023)  # a queue


def test_second_source_counts_what_third_engines_have() -> None:
    fleet, _ = served("fewest_outstanding")
    found = fleet.second_source
    assert found.missing == fleet.moved
    assert 0 < found.third < found.missing
    assert len(found.gains) == len(found.waits) == len(fleet.firsts)
    assert all(0 <= gain <= wait for gain, wait in zip(found.gains, found.waits, strict=True))
