"""integration/benchmarks/goodput_simulation.py: the policy with a model of vLLM's steps."""

from __future__ import annotations

import pytest
from goodput_load import WORKLOADS, LoadObjectives, trace
from goodput_simulation import (
    COST,
    REST_S,
    STREAM_S,
    Clock,
    Plain,
    SimulatedEngine,
    SimulatedPair,
    SimulatedRequest,
    simulate,
)

ROWS = trace(WORKLOADS["random"], 11, 25, seed=1, salt=1)
STEP_S, TOKEN_S, PAIR_S = COST.step_ns * 1e-9, COST.token_ns * 1e-9, COST.pair_ps * 1e-12


def test_a_prompt_by_itself_takes_what_its_steps_cost() -> None:
    (told,) = simulate(
        [{"input_length": 1000, "output_length": 3, "timestamp": 1.0}], clock := Clock(), Plain(clock)
    )
    prompt = STEP_S + 1000 * TOKEN_S + 1000 * 500 * PAIR_S + STREAM_S
    assert told.ttft == pytest.approx((prompt + REST_S) * 1e3)
    assert told.gaps == pytest.approx([(STEP_S + STREAM_S) * 1e3] * 2)
    assert clock.now == pytest.approx(1.0 + prompt + 2 * (STEP_S + STREAM_S))


@pytest.mark.parametrize(("step_tokens", "waits"), [(64, True), (128, False)])
def test_prompts_that_take_whole_steps_keep_later_requests_waiting(step_tokens: int, waits: bool) -> None:
    """vLLM does the same with two prompts in steps of twice their threshold."""
    clock = Clock()
    engine = SimulatedEngine(clock, step_tokens, threshold=32)
    long = [SimulatedRequest(3200, 2, 0.0), SimulatedRequest(3200, 2, 0.0)]
    behind = SimulatedRequest(10, 2, 0.0)
    for request in (*long, behind):
        engine.add(request)
    clock.run()
    assert (behind.times[0] > long[0].times[0]) == waits


@pytest.mark.parametrize("steps", [(256, 512), (256, 1024)])
def test_no_stream_waits_for_prompts_that_decode_computes(steps: tuple[int, int]) -> None:
    clock = Clock()
    pair = SimulatedPair(clock, LoadObjectives(1000, 25), *steps)
    told = simulate(ROWS, clock, pair)
    assert [answer.tokens for answer in told] == [row["output_length"] for row in ROWS]
    assert pair.reasons["decode_sooner"] > 50
    assert max(gap for answer in told for gap in answer.gaps) < 50, "without room in each step it is 358 ms"
    assert sum(engine.load.running for engine in pair.engines.values()) == 0


def test_every_request_leaves_the_pools() -> None:
    clock = Clock()
    pair = SimulatedPair(clock, LoadObjectives(400, 15), 256, 1024)
    simulate(ROWS[:50], clock, pair)
    assert [member.outstanding for pool in pair.pools.values() for member in pool.choices()] == [0, 0]
