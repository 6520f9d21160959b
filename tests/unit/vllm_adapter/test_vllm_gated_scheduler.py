"""GatedScheduler: prompts that a gate holds cost a step nothing, and each starts in its turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, PARAMS_OF_P, SLIDING, Stage, model, prompt, vllm_config

from kv_connector.vllm.scheduling.gated_scheduler import GatedQueue, GatedScheduler

__all__ = ["model"]

POOL = 41  # blocks: a P's share is 20, and 13 for an engine that is P and D
POLICIES = ["fcfs", "priority"]


def gated(
    model: Path,
    role: str = "kv_producer",
    policy: str = "fcfs",
    scheduler: type[Scheduler] = GatedScheduler,
    load_failures: str = "fail",
) -> Stage:
    config = vllm_config(model, role, budget=4000, policy=load_failures)
    config.scheduler_config.policy = policy  # type: ignore[assignment]
    return Stage(config, (FULL,), POOL, scheduler)


def add(stage: Stage, name: str, blocks: int, params: dict[str, Any] = PARAMS_OF_P, **more: Any) -> None:
    stage.add(name, prompt(blocks * BLOCK - 1, sum(name.encode())), params | {"transfer_id": name}, **more)


def scheduled(stage: Stage, **reports: Any) -> list[str]:
    output, _ = stage.schedule()
    stage.update(output, **reports)
    return list(output.num_scheduled_tokens)


def waiting(stage: Stage) -> list[str]:
    return sorted(request.request_id for request in stage.scheduler.waiting)


class Looks:
    """Counts prefix cache lookups of vLLM, and calls of the gates."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = self.questions = 0
        manager, side = stage.scheduler.kv_cache_manager, stage.side
        lookup = manager.get_computed_blocks_for_connector

        def counted_lookup(*arguments: Any) -> Any:
            self.lookups += 1
            return lookup(*arguments)

        monkeypatch.setattr(manager, "get_computed_blocks_for_connector", counted_lookup)
        for gate in side.gates:
            assert gate is not None
            monkeypatch.setattr(gate, "must_wait", self._counted(gate.must_wait))

    def _counted(self, must_wait: Any) -> Any:
        def counted(*arguments: Any) -> bool:
            self.questions += 1
            answer: bool = must_wait(*arguments)
            return answer

        return counted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [10, 1000, 5000])
def test_step_does_not_look_at_held_prompts(
    model: Path, monkeypatch: pytest.MonkeyPatch, policy: str, count: int
) -> None:
    stage = gated(model, policy=policy)
    add(stage, "first", 20)
    assert scheduled(stage) == ["first"]
    looks = Looks(stage, monkeypatch)
    for number in range(count):
        add(stage, f"held {number:04}", 2)
    assert scheduled(stage) == []
    assert looks.lookups == 0
    assert count <= looks.questions <= count + 4, "each is put aside once"
    looks.questions = 0
    assert scheduled(stage) == []
    assert looks.lookups == 0
    assert looks.questions <= 4, "of those aside the first alone"
    assert len(stage.scheduler.waiting) == count
    stats = stage.scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_skipped_waiting_reqs) == (0, count)
    # In the step after D has reserved the first, as many start as vLLM runs at a time.
    assert scheduled(stage, reserved=["first"]) == []
    looks.questions = 0
    assert scheduled(stage) == [f"held {number:04}" for number in range(8)]
    assert looks.lookups == 8
    assert looks.questions <= 8 * 6


@pytest.mark.parametrize("count", [10, 1000, 5000])
def test_step_of_decode_does_not_look_at_deferred_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    stage = gated(model, "kv_consumer")
    add(stage, "first", 20, PARAMS_OF_D)
    assert scheduled(stage) == []
    looks = Looks(stage, monkeypatch)
    for number in range(count):
        add(stage, f"load {number:04}", 30, PARAMS_OF_D)
    assert scheduled(stage) == []
    assert looks.lookups == 0
    assert count <= looks.questions <= count + 4, "each is put aside once"
    looks.questions = 0
    assert scheduled(stage) == []
    assert looks.lookups == 0
    assert looks.questions <= 4, "of those aside the first alone"
    # Those that the prefill engine has reported are looked at: the first has no room.
    reported = [f"load {number:04}" for number in range(3)]
    assert scheduled(stage, due=reported) == []
    looks.questions = 0
    assert scheduled(stage) == []
    assert looks.lookups == 1
    assert looks.questions <= 4


@pytest.mark.parametrize("count", [10, 1000])
def test_step_of_an_engine_of_both_roles_does_not_look_at_held_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    stage = gated(model, "kv_both")
    add(stage, "loading", 13, PARAMS_OF_D)
    add(stage, "computing", 13)
    assert scheduled(stage) == ["computing"]
    for number in range(count):
        add(stage, f"load {number:04}", 2, PARAMS_OF_D)
        add(stage, f"prompt {number:04}", 2)
    assert scheduled(stage) == []
    looks = Looks(stage, monkeypatch)
    assert scheduled(stage, reserved=["computing"]) == []
    assert looks.lookups == 0
    assert looks.questions <= 8
    assert scheduled(stage, received=["loading"])[:6] == [f"prompt {number:04}" for number in range(6)]


def test_held_prompts_start_in_their_order(model: Path) -> None:
    stage = gated(model)
    sizes = {"a": 12, "b": 9, "c": 3, "d": 20, "e": 1, "f": 2}
    for name, blocks in sizes.items():
        add(stage, name, blocks)
    seen: list[str] = []
    before: list[str] = []
    for _ in range(20):
        before = scheduled(stage, sent=before)
        seen += before
    assert seen == list(sizes)
    stage.assert_idle()


def test_prompt_that_decode_has_room_for_starts_at_once(model: Path) -> None:
    stage = gated(model)
    for name, blocks in {"first": 20, "second": 10, "third": 5}.items():
        add(stage, name, blocks)
    assert scheduled(stage) == ["first"]
    assert scheduled(stage, reserved=["third"]) == []
    assert scheduled(stage) == ["third"]


def test_prompt_that_leaves_the_gate_returns_to_its_place(model: Path) -> None:
    """It returns behind the older request that waits for blocks, so that this one is not starved."""
    stage = gated(model)
    add(stage, "first", 20)
    assert scheduled(stage) == ["first"]
    stage.add("older", prompt(25 * BLOCK), arrival_time=1.0)
    add(stage, "held", 5, arrival_time=2.0)
    stage.add("younger", prompt(5 * BLOCK), arrival_time=3.0)
    assert scheduled(stage) == []
    stage.scheduler.waiting.remove_request(younger := stage.scheduler.requests["younger"])
    stage.scheduler.waiting.remove_request(older := stage.scheduler.requests["older"])
    assert scheduled(stage) == [], "now held is put aside"
    stage.scheduler.waiting.add_request(older)
    stage.scheduler.waiting.add_request(younger)
    assert scheduled(stage, reserved=["held"]) == []
    queue = stage.scheduler.waiting
    assert [request.request_id for request in queue] == ["older", "held", "younger"]
    assert scheduled(stage, sent=["first"]) == []
    assert scheduled(stage) == ["older", "held", "younger"]


@pytest.mark.parametrize("policy", POLICIES)
def test_aborted_prompt_leaves_the_queue(model: Path, policy: str) -> None:
    stage = gated(model, policy=policy)
    for name, blocks in {"first": 20, "second": 10, "third": 5, "fourth": 6}.items():
        add(stage, name, blocks)
    assert scheduled(stage) == ["first"]
    assert waiting(stage) == ["fourth", "second", "third"]
    stage.abort("second")
    assert waiting(stage) == ["fourth", "third"]
    stage.abort("fourth")
    assert scheduled(stage, reserved=["first"], sent=["second", "fourth"]) == []
    assert scheduled(stage) == ["third"]
    assert waiting(stage) == []
    stage.step(sent=["first", "third"])
    stage.assert_idle()


def test_all_aborted_at_once_leave_nothing(model: Path) -> None:
    stage = gated(model)
    for name, blocks in {"first": 20, "second": 10, "third": 5}.items():
        add(stage, name, blocks)
    assert scheduled(stage) == ["first"]
    stage.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert waiting(stage) == []
    stage.step(sent=["first", "second", "third"])
    stage.step()
    stage.assert_idle()


@pytest.mark.parametrize("scheduler", [GatedScheduler, Scheduler])
def test_urgent_prompt_passes_held_ones(model: Path, scheduler: type[Scheduler]) -> None:
    stage = gated(model, policy="priority", scheduler=scheduler)
    add(stage, "holding", 15, priority=5)
    assert scheduled(stage) == ["holding"]
    add(stage, "large", 10, priority=5)
    assert scheduled(stage) == []
    add(stage, "small", 2, priority=5)
    assert scheduled(stage) == []
    add(stage, "urgent", 2, priority=0)
    assert scheduled(stage) == ["urgent"]
    add(stage, "most urgent", 4, priority=-1)
    assert scheduled(stage) == []
    assert scheduled(stage, reserved=["holding"]) == []
    assert scheduled(stage) == ["most urgent", "large", "small"]


def test_prompt_that_was_put_aside_starts_after_a_pause(model: Path) -> None:
    """A reset preempts the prompt that holds the gate. It returns before those that the gate holds."""
    stage = gated(model)
    config = stage.scheduler.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 4000
    stage.scheduler.max_num_scheduled_tokens = 256
    add(stage, "first", 20)
    add(stage, "second", 10)
    assert scheduled(stage) == ["first"]
    assert waiting(stage) == ["second"]
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert waiting(stage) == ["first", "second"]
    for _ in range(3):
        assert scheduled(stage) == ["first"]
    assert scheduled(stage, sent=["first"]) == []
    assert scheduled(stage) == ["second"]


def test_held_load_computes_alone_after_a_pause(model: Path) -> None:
    """A reset releases the waiting loads, so the gate no longer holds them."""
    stage = gated(model, "kv_both")
    add(stage, "loading", 13, PARAMS_OF_D)
    add(stage, "held", 3, PARAMS_OF_D)
    assert scheduled(stage) == []
    assert waiting(stage) == ["held"]
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert scheduled(stage) == ["held"]


@pytest.mark.parametrize("report", ["failed", "discarded"])
def test_load_that_fails_does_not_hold_up_loads_behind_it(model: Path, report: str) -> None:
    """Computing the prompt takes more blocks of the sliding window than loading it.

    It waits for the other loads, and these waited behind it. Found by the fuzzer.
    """
    config = vllm_config(model, "kv_consumer", policy="recompute" if report == "failed" else "fail")
    stage = Stage(config, (FULL, SLIDING), 62, GatedScheduler)
    tokens = {"fails": 480, "a": 462, "b": 301, "c": 245}
    for name, length in tokens.items():
        params = PARAMS_OF_D | {"transfer_id": name}
        stage.add(name, prompt(length, sum(name.encode())), params)
    stage.step(due=list(tokens))
    stage.step()
    assert [request.request_id for request in stage.scheduler.kv_holding_waiting] == list(tokens)
    assert stage.blocks_in_use > 50
    reports: dict[str, Any] = {report: ["fails"]}
    stage.step(received=list(tokens), **reports)
    for _ in range(8):
        stage.step()
    stage.assert_idle()


@pytest.mark.parametrize("report", ["failed", "discarded"])
def test_urgent_load_does_not_wait_for_loads_that_lost_their_blocks(model: Path, report: str) -> None:
    """vLLM reserved blocks for the prompts of these loads, which waited behind the urgent load.

    Found by the fuzzer.
    """
    stage = gated(model, "kv_consumer", "priority", load_failures="recompute")
    others = ["a", "b", "c"]
    for name in others:
        add(stage, name, 12, PARAMS_OF_D)
    stage.step(due=others)
    stage.step()
    assert [request.request_id for request in stage.scheduler.kv_holding_waiting] == others
    add(stage, "urgent", 20, PARAMS_OF_D, priority=-1)
    reports: dict[str, Any] = {report: others}
    stage.step(received=others, due=["urgent"], **reports)
    stage.step()
    stage.step()
    assert [request.request_id for request in stage.scheduler.kv_holding_waiting] == ["urgent"]
    stage.step(received=["urgent"])
    stage.step()
    stage.step()
    stage.assert_idle()


def test_load_leaves_room_for_a_prompt_that_begins_in_the_same_step(model: Path) -> None:
    stage = gated(model, "kv_consumer")
    stage.scheduler.scheduler_config.long_prefill_token_threshold = 2 * BLOCK
    add(stage, "local", 20, {})
    add(stage, "load", 25, PARAMS_OF_D)
    assert scheduled(stage, due=["load"]) == ["local"]
    assert not stage.scheduler.kv_holding_waiting
    for _ in range(10):
        stage.step()
    assert [request.request_id for request in stage.scheduler.kv_holding_waiting] == ["load"]
    stage.step(received=["load"])
    for _ in range(2):
        stage.step()
    stage.assert_idle()


@pytest.mark.parametrize(
    ("blocks", "lengths"),
    [(36, [417, 417, 417]), (38, [449, 229, 449, 417]), (34, [449, 229, 385])],
)
def test_loads_leave_room_for_their_last_tokens(model: Path, blocks: int, lengths: list[int]) -> None:
    """A prompt's last token may begin a block in each group. Loads held all blocks, and none could run.

    Found by clients that leave at any moment, once in some thousand requests.
    """
    config = vllm_config(model, "kv_consumer", policy="recompute")
    stage = Stage(config, (FULL, SLIDING, SLIDING), blocks, GatedScheduler)
    names = [f"r{number}" for number in range(len(lengths))]
    for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
        stage.add(name, prompt(length, number), PARAMS_OF_D | {"transfer_id": name})
    loaded: set[str] = set()
    for _ in range(20):
        loading = {request.request_id for request in stage.scheduler.kv_holding_waiting} - loaded
        stage.step(due=names, received=sorted(loading))
        loaded |= loading
    assert loaded == set(names)
    stage.assert_idle()


def test_decode_engine_has_a_queue_for_deferred_loads(model: Path) -> None:
    assert isinstance(gated(model, "kv_consumer").scheduler.waiting, GatedQueue)
