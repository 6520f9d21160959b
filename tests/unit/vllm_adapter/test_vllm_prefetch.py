"""Prefetches: requests that load a prefix for a later request and compute nothing, under vLLM's scheduler."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm_stage import BLOCK, FULL, PARAMS_OF_P, MakeStage, Stage, model, prompt, stage, vllm_config

from kv_connector.agent.commands import CancelLoad, ReleaseTransfer, WithdrawPrefix
from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import DecodeRequest, PrefixRequest
from kv_connector.vllm.scheduling.first_token import has_own_scheduler
from kv_connector.vllm.scheduling.gated_scheduler import GatedAsyncScheduler, GatedScheduler
from kv_connector.vllm.scheduling.prefix_borrower import MOST_AT_ONCE, MOST_PREFETCHES

__all__ = ["model", "stage"]

LENDER = Address("10.0.0.2", 5700, prefixes=True)
FIRST = 4 * BLOCK + 5
"""Tokens of the prompt, which the engine has computed."""
TOKENS = FIRST + 3 * BLOCK
"""Tokens of the prompt and its answer."""
LENT = TOKENS // BLOCK * BLOCK
LACKS = LENT - 4 * BLOCK


def ahead(most: int = 4 * BLOCK, tokens: int = TOKENS) -> dict[str, Any]:
    address = {"host": LENDER.host, "port": LENDER.port}
    return {"prefix_from": {**address, "tokens": tokens, "prefetch": most}}


def engine_with_prompt(
    model: Path, scheduler: type[Scheduler] = GatedScheduler, blocks: int = 100, role: str = "kv_producer"
) -> Stage:
    """Returns an engine that has computed the prompt, and would rather compute any answer than load it."""
    engine = Stage(vllm_config(model, role), (FULL,), blocks, scheduler)
    engine.add("first turn", prompt(FIRST))
    run(engine)
    costs = engine.side._borrower.costs
    costs.compute_seconds = lambda before, tokens: 0.001
    costs.answered(LENDER, 0.5)
    costs.loaded(LENDER, 1000, 0.5, 0.4)
    engine.outputs.clear()
    return engine


def run(engine: Stage) -> None:
    while engine.scheduler.has_requests():
        engine.step()


def question(engine: Stage) -> PrefixRequest:
    (found,) = (one for one in engine.step().commands if isinstance(one, PrefixRequest))
    return found


def begin_load(engine: Stage, **options: Any) -> str:
    """Brings a prefetch to its load. Returns the lending's transfer id."""
    engine.add("ahead", prompt(TOKENS), ahead(**options))
    asked = question(engine)
    assert asked.first_token == 4 * BLOCK
    output, _ = engine.schedule()
    engine.update(output, answers={asked.transfer_id: LENT})
    (load,) = (one for one in engine.step().commands if isinstance(one, DecodeRequest))
    assert (load.first_token, load.prompt_tokens) == (4 * BLOCK, LENT)
    return asked.transfer_id


def end(engine: Stage) -> int:
    """Runs the engine until it is idle. Returns the tokens that the prefetch has loaded."""
    for _ in range(4):
        output, _ = engine.schedule()
        assert "ahead" not in output.num_scheduled_tokens, "it computes nothing"
        engine.update(output)
    engine.assert_idle()
    (told,) = (output for output in engine.outputs if output.request_id == "ahead")
    assert (told.new_token_ids, told.finish_reason) == ([], FinishReason.LENGTH)
    assert told.kv_transfer_params is not None
    return int(told.kv_transfer_params["prefetched_tokens"])


def lacking(engine: Stage, tokens: int = TOKENS + 50) -> int:
    """Returns the tokens of the next turn that the engine computes."""
    engine.add("next turn", prompt(tokens), {**PARAMS_OF_P, "transfer_id": "next"})
    output, _ = engine.schedule()
    engine.update(output)
    return output.num_scheduled_tokens["next turn"]


@pytest.mark.parametrize(
    ("scheduler", "role"), [(GatedScheduler, "kv_producer"), (GatedAsyncScheduler, "kv_both")]
)
def test_prefetch_loads_the_answer_and_computes_nothing(
    model: Path, scheduler: type[Scheduler], role: str
) -> None:
    engine = engine_with_prompt(model, scheduler, role=role)
    transfer_id = begin_load(engine)
    engine.step(received=[transfer_id])
    assert end(engine) == LACKS
    assert lacking(engine) == TOKENS + 50 - LENT


@pytest.mark.parametrize(
    ("same", "had"),
    [
        pytest.param(FIRST + BLOCK + 3, 5 * BLOCK, id="other answer, as of a tool call"),
        pytest.param(FIRST - 3, 4 * BLOCK, id="other end of the prompt, as of an empty thinking part"),
        pytest.param(2 * BLOCK + 1, 2 * BLOCK, id="other question, in the middle of the prompt"),
    ],
)
def test_next_turn_has_the_loaded_tokens_up_to_its_first_other_token(
    model: Path, same: int, had: int
) -> None:
    """The router guesses the next turn. A wrong guess costs a load, and the engine computes the rest."""
    engine = engine_with_prompt(model)
    transfer_id = begin_load(engine)
    engine.step(received=[transfer_id])
    assert end(engine) == LACKS
    other = [*prompt(TOKENS)[:same], *prompt(TOKENS + 50 - same, seed=9)]
    assert other[same] != prompt(TOKENS)[same]
    engine.add("next turn", other, {**PARAMS_OF_P, "transfer_id": "next"})
    output, _ = engine.schedule()
    engine.update(output)
    assert output.num_scheduled_tokens["next turn"] == TOKENS + 50 - had


def test_prefetch_of_one_tenant_serves_no_other(model: Path) -> None:
    engine = engine_with_prompt(model)
    transfer_id = begin_load(engine)
    engine.step(received=[transfer_id])
    assert end(engine) == LACKS
    engine.add("next turn", prompt(TOKENS), {**PARAMS_OF_P, "transfer_id": "next"}, cache_salt="tenant")
    output, _ = engine.schedule()
    engine.update(output)
    assert output.num_scheduled_tokens["next turn"] == TOKENS


def test_next_turn_during_the_load_computes_the_answer(model: Path) -> None:
    engine = engine_with_prompt(model)
    transfer_id = begin_load(engine)
    assert lacking(engine) == TOKENS + 50 - 4 * BLOCK
    engine.step(received=[transfer_id], sent=["next turn"])
    assert end(engine) == LACKS


def test_next_turn_before_the_answer_of_the_lender_is_not_held_up(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    assert lacking(engine) == TOKENS + 50 - 4 * BLOCK
    # By now the engine has the answer's blocks itself.
    engine.step(answers={asked.transfer_id: LENT}, sent=["next turn"])
    metadata = engine.step()
    assert ReleaseTransfer(asked.transfer_id, LENDER) in metadata.commands
    assert end(engine) == 0


def test_prefetch_whose_pages_are_no_longer_held_ends(model: Path) -> None:
    engine = engine_with_prompt(model)
    now = [100.0]
    engine.side._borrower.clock = lambda: now[0]
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    output, _ = engine.schedule()
    engine.update(output, answers={asked.transfer_id: LENT})
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    now[0] += 1.5
    assert engine.step().commands == (ReleaseTransfer(asked.transfer_id, LENDER),)
    pool.free_blocks(taken)
    assert end(engine) == 0


def test_refused_prefetch_ends_without_computing(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    engine.step(answers={asked.transfer_id: 0})
    assert end(engine) == 0
    assert lacking(engine) == TOKENS + 50 - 4 * BLOCK


def test_failed_load_of_a_prefetch_ends_without_computing(model: Path) -> None:
    engine = engine_with_prompt(model)
    transfer_id = begin_load(engine)
    engine.step(received=[transfer_id], discarded=[transfer_id])
    assert end(engine) == 0
    assert lacking(engine) == TOKENS + 50 - 4 * BLOCK


@pytest.mark.parametrize("phase", ["asked", "loading"])
def test_cancelled_prefetch_leaves_nothing(model: Path, phase: str) -> None:
    engine = engine_with_prompt(model)
    if phase == "asked":
        engine.add("ahead", prompt(TOKENS), ahead())
        transfer_id = question(engine).transfer_id
        engine.abort("ahead")
        assert WithdrawPrefix(transfer_id) in engine.step().commands
    else:
        transfer_id = begin_load(engine)
        engine.abort("ahead")
        assert CancelLoad(transfer_id) in engine.step().commands
        engine.step(received=[transfer_id])
    run(engine)
    engine.assert_idle()
    assert not engine.outputs


def test_prefetch_of_a_cache_that_is_emptied_ends(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert WithdrawPrefix(asked.transfer_id) in engine.step().commands
    assert end(engine) == 0


def assert_not_requested(engine: Stage) -> None:
    metadata = engine.step()
    assert not any(isinstance(one, PrefixRequest) for one in metadata.commands)
    assert end(engine) == 0


def test_prefetch_is_not_requested_for_a_prompt_that_the_engine_has_dropped(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead(most=LACKS - 1))
    assert_not_requested(engine)


def test_prefetch_is_not_requested_for_what_the_engine_has(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(FIRST), ahead(tokens=FIRST))
    assert_not_requested(engine)


@pytest.mark.parametrize("prefetch", [False, True])
def test_prefetch_is_not_requested_from_a_lender_that_was_late(model: Path, prefetch: bool) -> None:
    engine = engine_with_prompt(model)
    engine.side._borrower.costs.late(LENDER, prefetch=prefetch)
    engine.add("ahead", prompt(TOKENS), ahead())
    assert_not_requested(engine)


def test_late_prefetch_keeps_no_prompt_from_its_lender(model: Path) -> None:
    engine = engine_with_prompt(model)
    transfer_id = begin_load(engine)
    costs, begin = engine.side._borrower.costs, engine.side._borrower._prefixes["ahead"].since
    engine.side._borrower.clock = lambda: begin + 2
    assert CancelLoad(transfer_id) in engine.step().commands
    engine.step(received=[transfer_id], discarded=[transfer_id])
    assert end(engine) == 0
    assert costs.was_late_for_prefetch(LENDER)
    costs.compute_seconds = lambda before, tokens: 60.0
    params = ahead()
    del params["prefix_from"]["prefetch"]
    engine.add("next turn", prompt(TOKENS), params)
    assert question(engine).lender == LENDER


@pytest.mark.parametrize("prefetches", [False, True])
def test_prefetch_is_not_requested_beside_many_loads(model: Path, prefetches: bool) -> None:
    engine = engine_with_prompt(model, blocks=2000)
    engine.side._borrower.costs.compute_seconds = lambda before, tokens: None
    params, most = ahead(most=TOKENS), MOST_PREFETCHES if prefetches else MOST_AT_ONCE
    if not prefetches:
        del params["prefix_from"]["prefetch"]
    for number in range(most):
        engine.add(f"{number}", [number, *prompt(TOKENS)], params)
    metadata = engine.step()
    assert sum(isinstance(one, PrefixRequest) for one in metadata.commands) == most
    engine.add("ahead", prompt(TOKENS), ahead())
    output, metadata = engine.schedule()
    engine.update(output)
    assert not any(isinstance(one, PrefixRequest) for one in metadata.commands)
    assert [one.request_id for one in engine.outputs] == ["ahead"]


def test_many_prefetches_leave_room_for_a_request_that_waits(model: Path) -> None:
    engine = engine_with_prompt(model, blocks=2000)
    engine.side._borrower.costs.compute_seconds = lambda before, tokens: None
    for number in range(MOST_AT_ONCE + 1):
        engine.add(f"{number}", [number, *prompt(TOKENS)], ahead(most=TOKENS))
    engine.step()
    params = ahead()
    del params["prefix_from"]["prefetch"]
    engine.add("waits", prompt(TOKENS), params)
    assert question(engine).first_token == 4 * BLOCK


def test_prefetch_is_not_loaded_if_the_lender_has_more_than_its_limit(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead(most=LACKS - 1, tokens=LENT - BLOCK))
    asked = question(engine)
    output, _ = engine.schedule()
    engine.update(output, answers={asked.transfer_id: LENT})
    assert ReleaseTransfer(asked.transfer_id, LENDER) in engine.step().commands
    assert end(engine) == 0


def test_prefetch_is_not_requested_if_it_needs_more_than_half_of_the_free_blocks(model: Path) -> None:
    engine = engine_with_prompt(model, blocks=13)  # one is vLLM's own
    engine.add("stream", prompt(6 * BLOCK, seed=9), max_tokens=100)
    while not engine.said("stream"):
        engine.step()
    engine.add("ahead", prompt(TOKENS), ahead())
    metadata = engine.step()
    assert not any(isinstance(one, PrefixRequest) for one in metadata.commands)
    engine.abort("stream")
    assert end(engine) == 0


def test_prefetch_that_vllm_has_no_blocks_for_does_not_hold_up_others(model: Path) -> None:
    engine = engine_with_prompt(model, blocks=24)
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    engine.add("stream", prompt(17 * BLOCK, seed=9), max_tokens=20)
    output, _ = engine.schedule()
    engine.update(output, answers={asked.transfer_id: LENT})
    while not engine.said("stream"):
        engine.step()
    engine.add("other", prompt(10, seed=3))
    run_others = [engine.step() for _ in range(3)]
    assert any(ReleaseTransfer(asked.transfer_id, LENDER) in metadata.commands for metadata in run_others)
    assert engine.said("other")
    engine.abort("stream")
    assert end(engine) == 0


def test_prefetch_is_no_workload_of_the_engine(model: Path) -> None:
    engine = engine_with_prompt(model)
    engine.add("ahead", prompt(TOKENS), ahead())
    assert engine.side.expects_prompt("ahead")
    engine.add("other", prompt(TOKENS, seed=5))
    assert not engine.side.expects_prompt("other")


def test_prefetch_is_computed_by_another_scheduler(stage: MakeStage) -> None:
    """Only this project's scheduler can end it. Its engine does not report that it prefetches."""
    engine = stage("kv_producer")
    engine.add("ahead", prompt(TOKENS), ahead())
    asked = question(engine)
    engine.step(answers={asked.transfer_id: 0})
    run(engine)
    assert engine.said("ahead") == [7]


@pytest.mark.parametrize(
    ("chosen", "layout", "own"),
    [
        (None, None, True),
        (None, "LBHNC", False),
        ("kv_connector.vllm.scheduling.gated_scheduler.GatedScheduler", None, True),
        ("kv_connector.vllm.scheduling.first_token.FirstTokenScheduler", "LBHNC", True),
        ("my.Scheduler", None, False),
        (Scheduler, None, False),
    ],
)
def test_engine_prefetches_with_a_scheduler_of_this_project(
    model: Path, monkeypatch: pytest.MonkeyPatch, chosen: Any, layout: str | None, own: bool
) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    if layout is not None:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    config = vllm_config(model, "kv_producer")
    config.scheduler_config.scheduler_cls = chosen
    assert has_own_scheduler(config) is own


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_prefetches_in_any_order_with_other_requests_leave_nothing(model: Path, role: str) -> None:
    """The pool is short: vLLM has no blocks for some prefetches, and evicts others' prompts."""
    rng = Random(47)
    scheduler = GatedScheduler if role == "kv_producer" else GatedAsyncScheduler
    outcomes: Counter[str] = Counter()
    for _ in range(12):
        engine = engine_with_prompt(model, scheduler, blocks=rng.choice([16, 24, 60]), role=role)
        begun, ended, asked, loading = set[str](), set[str](), list[str](), list[str]()
        for number in range(60):
            kind, name = rng.randrange(8), f"r{number}"
            if kind < 2:
                begun.add(name)
                engine.add(
                    name, prompt(TOKENS, rng.choice([1, 1, 2])), ahead(most=rng.choice([50, 128, 999]))
                )
            elif kind == 2:
                engine.add(f"user {number}", prompt(TOKENS + 20, rng.randrange(1, 9)), max_tokens=9)
            elif kind == 3 and (live := sorted(begun - ended)):
                engine.abort(gone := rng.choice(live))
                ended.add(gone)
            elif kind == 4 and rng.randrange(4) == 0:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            output, metadata = engine.schedule()
            assert not begun.intersection(output.num_scheduled_tokens), "a prefetch computes nothing"
            answers = {one: rng.choice([0, LENT, 5 * BLOCK]) for one in asked if rng.randrange(2)}
            received = [one for one in loading if rng.randrange(2)]
            failed = [one for one in received if rng.randrange(4) == 0]
            engine.update(output, answers=answers, received=received, discarded=failed)
            asked = [one for one in asked if one not in answers]
            loading = [one for one in loading if one not in received]
            for command in metadata.commands:
                if isinstance(command, PrefixRequest):
                    asked.append(command.transfer_id)
                elif isinstance(command, DecodeRequest):
                    loading.append(command.transfer_id)
                elif isinstance(command, WithdrawPrefix) and command.transfer_id in asked:
                    asked.remove(command.transfer_id)
        for _ in range(200):
            output, metadata = engine.schedule()
            loads = [one.transfer_id for one in metadata.commands if isinstance(one, DecodeRequest)]
            asked += [one.transfer_id for one in metadata.commands if isinstance(one, PrefixRequest)]
            engine.update(output, answers=dict.fromkeys(asked, 0), received=loading)
            asked, loading = [], loads
        engine.assert_idle()
        told = [output for output in engine.outputs if output.request_id in begun]
        names = [output.request_id for output in told]
        assert len(names) == len({*names}), "each ends once"
        assert {*names} >= begun - ended
        for output in told:
            loaded = (output.kv_transfer_params or {})["prefetched_tokens"]
            outcomes["loaded" if loaded else "declined"] += 1
    assert outcomes["loaded"] > 5
    assert outcomes["declined"] > 5
