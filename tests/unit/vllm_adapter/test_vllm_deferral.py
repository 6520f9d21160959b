"""KV loads whose prompts queue at P leave blocks to other requests, in vLLM's own scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm_stage import ADDRESS, BLOCK, FULL, PARAMS_OF_D, PARAMS_OF_P, Stage, model, prompt, vllm_config

from kv_connector.agent.commands import DeferLoad, EndLendings, PromptNext, ReleaseTransfer
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.scheduling.content import content_key_of, hash_basis
from kv_connector.vllm.scheduling.gated_scheduler import GatedScheduler

__all__ = ["model"]

POOL = 41  # blocks, of which vLLM keeps one
BUDGET = 8 * BLOCK  # tokens of a step


def engine(model: Path, role: str = "kv_consumer", scheduler: type[Any] = GatedScheduler) -> Stage:
    return Stage(vllm_config(model, role, budget=BUDGET), (FULL,), POOL, scheduler)


def load(stage: Stage, name: str, blocks: int, **more: Any) -> None:
    stage.add(name, tokens(name, blocks), PARAMS_OF_D | {"transfer_id": name}, **more)


def tokens(name: str, blocks: int) -> list[int]:
    return prompt(blocks * BLOCK - 1, sum(name.encode()))


def commands(metadata: StepMetadata, kind: type[Any]) -> list[str]:
    return [command.transfer_id for command in metadata.commands if isinstance(command, kind)]


def finish(stage: Stage) -> None:
    for _ in range(40):
        stage.step()
    stage.assert_idle()


def computed(stage: Stage, **reports: Any) -> list[str]:
    output, _ = stage.schedule()
    stage.update(output, **reports)
    return list(output.num_scheduled_tokens)


# --- The decode engine


@pytest.mark.parametrize("scheduler", [GatedScheduler, None], ids=["gated", "of vLLM"])
def test_load_without_room_leaves_the_blocks_to_requests_behind_it(model: Path, scheduler: Any) -> None:
    stage = engine(model) if scheduler else engine(model, scheduler=vllm_scheduler())
    for name in ("a", "b", "c"):
        load(stage, name, 10)
    stage.add("alone", tokens("alone", 8), max_tokens=2)
    output, metadata = stage.schedule()
    # 10 of 40 blocks leave 30 free, 20 leave 20, and 30 would leave only 10.
    assert commands(metadata, DecodeRequest) == ["a", "b"]
    assert [one for one in metadata.commands if isinstance(one, DeferLoad)] == [DeferLoad("c", ADDRESS)]
    assert list(output.num_scheduled_tokens) == ["alone"]
    assert stage.blocks_in_use == 28
    assert metadata.waiting == (("c", ADDRESS),)
    stage.update(output)
    output, metadata = stage.schedule()
    assert not commands(metadata, DeferLoad), "it is sent once"
    stage.update(output, due=["c"])
    assert commands(stage.step(), DecodeRequest) == ["c"]
    for name in ("a", "b", "c"):
        stage.step(received=[name])
    finish(stage)


def vllm_scheduler() -> type[Any]:
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def test_load_enters_without_a_report_once_there_is_room(model: Path) -> None:
    stage = engine(model)
    stage.add("long", tokens("long", 8), max_tokens=3)
    load(stage, "a", 12)
    load(stage, "b", 8)
    assert commands(stage.step(), DeferLoad) == ["b"]
    for _ in range(2):
        assert not commands(stage.step(), DecodeRequest)
    assert commands(stage.step(), DecodeRequest) == ["b"], "the running request has ended"
    stage.step(due=["b"])
    stage.step(received=["a", "b"])
    finish(stage)


def test_deferred_load_keeps_its_place_before_later_requests(model: Path) -> None:
    stage = engine(model)
    load(stage, "a", 20, arrival_time=1.0)
    load(stage, "b", 15, arrival_time=2.0)
    assert commands(stage.step(), DeferLoad) == ["b"]
    stage.add("later", tokens("later", 19), arrival_time=3.0)
    output, metadata = stage.schedule()
    stage.update(output, due=["b"])
    assert list(output.num_scheduled_tokens) == ["later"]
    stage.add("last", tokens("last", 3), arrival_time=4.0)
    assert not commands(stage.step(received=["a"]), DecodeRequest), "19 of 20 blocks are in use"
    for _ in range(5):
        metadata = stage.step()
        if commands(metadata, DecodeRequest):
            break
    assert commands(metadata, DecodeRequest) == ["b"]
    stage.step(received=["b"])
    finish(stage)


def test_deferred_load_whose_client_leaves_is_released(model: Path) -> None:
    stage = engine(model)
    load(stage, "a", 20)
    load(stage, "b", 10)
    assert commands(stage.step(), DeferLoad) == ["b"]
    stage.abort("b")
    assert commands(stage.step(due=["b"]), ReleaseTransfer) == ["b"]
    stage.step(received=["a"])
    finish(stage)


@pytest.mark.parametrize("early_token", [False, True])
def test_deferred_load_computes_its_prompt_after_a_reset(model: Path, early_token: bool) -> None:
    """It returns from its gate to vLLM's queue, and needs no notice."""
    stage = engine(model)
    load(stage, "a", 20)
    stage.add("b", tokens("b", 10), PARAMS_OF_D | {"transfer_id": "b", "early_token": early_token})
    assert commands(stage.step(), DeferLoad) == ["b"]
    stage.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    metadata = stage.step(received=["a"], due=["b"])
    assert commands(metadata, DecodeRequest if early_token else ReleaseTransfer) == ["b"]
    stage.scheduler.set_pause_state(PauseState.UNPAUSED)
    if early_token:
        load(stage, "c", 8)
        # First, a takes the whole steps. Then c enters: b is no longer before it at the gate.
        assert [one for _ in range(4) for one in commands(stage.step(), DecodeRequest)] == ["c"]
        stage.step(received=["b", "c"], sampled={"b": 9})  # of b, the first token alone
    computed_here: set[str] = set()
    for _ in range(12):
        computed_here |= {*computed(stage)}
    assert "b" in computed_here
    stage.assert_idle()


def test_load_with_a_notice_takes_no_room_from_later_ones(model: Path) -> None:
    stage = engine(model)
    load(stage, "a", 20)
    load(stage, "b", 10)
    assert commands(stage.step(), DeferLoad) == ["b"]
    stage.step(due=["b"])
    assert commands(stage.step(received=["a"]), DecodeRequest) == ["b"]
    while "a" in stage.scheduler.requests:
        stage.step()
    load(stage, "c", 12)
    assert commands(stage.step(), DecodeRequest) == ["c"], "no prompt waits, and 30 blocks are free"
    stage.step(received=["b", "c"])
    finish(stage)


@pytest.mark.parametrize("due", [False, True])
def test_deferred_load_enters_after_a_pause(model: Path, due: bool) -> None:
    """A notice of P counts also in a pause. Without one, the pause ends the lent prefix that takes the
    room."""
    stage = engine(model)
    cached = stage.add("cached", tokens("cached", 3))
    while stage.scheduler.has_requests():
        stage.step()
    content = content_key_of(cached, hash_basis("sha256", BLOCK), BLOCK)
    stage.step(requested=[PrefixRequested("x", content, 0, BLOCK)])
    load(stage, "a", 10)
    load(stage, "b", 10)
    metadata = stage.step()
    assert commands(metadata, DecodeRequest) == ["a"]
    assert commands(metadata, DeferLoad) == ["b"], "with the lent blocks, fewer than 20 would stay free"
    stage.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    metadata = stage.step(sent=[] if due else ["x"], due=["b"] if due else [])
    assert any(isinstance(command, EndLendings) for command in metadata.commands)
    assert not commands(stage.step(), DecodeRequest)
    stage.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert commands(stage.step(sent=["x"] if due else []), DecodeRequest) == ["b"]
    stage.step(received=["a", "b"])
    finish(stage)


def test_engine_of_both_roles_defers_no_load(model: Path) -> None:
    stage = engine(model, "kv_both")
    load(stage, "a", 13)
    load(stage, "b", 13)
    metadata = stage.step()
    assert commands(metadata, DecodeRequest) == ["a"]
    assert not commands(metadata, DeferLoad)
    stage.step(received=["a"], due=["b"])
    assert commands(stage.step(), DecodeRequest) == ["b"]
    stage.step(received=["b"])
    finish(stage)


# --- The prefill engine


def add(stage: Stage, name: str, blocks: int) -> None:
    stage.add(name, prompt(blocks * BLOCK, sum(name.encode())), PARAMS_OF_P | {"transfer_id": name})


def test_prompts_of_the_next_step_are_reported(model: Path) -> None:
    stage = engine(model, "kv_producer")
    for name in "abcdef":
        add(stage, name, 4)
    # A step computes 8 blocks: a and b in the first, c and d in the second.
    assert commands(stage.step(), PromptNext) == ["c", "d"]
    assert commands(stage.step(reserved="abcdef"), PromptNext) == ["e", "f"]
    assert not commands(stage.step(sent="ab"), PromptNext)
    stage.step(sent="cd")
    stage.step(sent="ef")
    stage.assert_idle()


def test_prompt_behind_a_long_one_is_reported_with_the_last_steps(model: Path) -> None:
    stage = engine(model, "kv_producer")
    add(stage, "long", 19)
    add(stage, "next", 1)
    assert not commands(stage.step(), PromptNext), "11 blocks of the first prompt are left"
    assert commands(stage.step(), PromptNext) == ["next"], "3 blocks are left"
    computed(stage)
    computed(stage, reserved=["long", "next"])
    computed(stage, sent=["long", "next"])
    stage.step()
    stage.assert_idle()


def test_prompt_that_the_gate_holds_is_reported(model: Path) -> None:
    """It waits for its D, which takes blocks only after the report."""
    stage = engine(model, "kv_producer")
    for name in ("first", "second", "third"):
        add(stage, name, 15)
    reported: list[str] = []
    for _ in range(6):
        reported += commands(stage.step(), PromptNext)
    # The gate's share are 20 blocks, which the first prompt nearly fills.
    assert reported == ["second", "third"]
    stage.step(reserved=["third"])
    assert computed(stage) == ["third"], "D has room for it, whatever the gate holds"
    computed(stage)
    computed(stage, sent=["third"], reserved=["first", "second"])
    computed(stage)
    computed(stage)
    computed(stage, sent=["first", "second"])
    finish(stage)


def test_prompt_that_leaves_the_queue_is_not_reported(model: Path) -> None:
    stage = engine(model, "kv_producer")
    for name, blocks in {"long": 19, "gone": 8, "next": 4}.items():
        add(stage, name, blocks)
    stage.step()
    stage.abort("gone")
    assert commands(stage.step(sent=["gone"]), PromptNext) == ["next"]
    stage.step(reserved=["long", "next"])
    stage.step()
    stage.step(sent=["long", "next"])
    finish(stage)


def test_prompt_that_ends_after_a_reset_delays_no_report(model: Path) -> None:
    """vLLM names the requests that a reset preempted with its next step, also those that have ended since."""
    stage = engine(model, "kv_producer")
    add(stage, "gone", 19)
    stage.step()
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.abort("gone")
    stage.step()
    stage.step(sent=["gone"])
    for name in "ab":
        add(stage, name, 8)
    assert commands(stage.step(), PromptNext) == ["b"]
    stage.step(reserved="ab")
    stage.step(sent="a")
    stage.step(sent="b")
    finish(stage)
