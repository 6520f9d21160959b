"""vLLM empties its prefix cache while requests with transfers live, under its real scheduler and block pool.

pause_generation(mode="keep") does that for new weights.
"""

import itertools
from collections import Counter

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus
from vllm_stage import (
    ADDRESS,
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    SLIDING,
    MakeStage,
    Stage,
    model,
    prompt,
    stage,
)

from kv_connector.agent.commands import CacheCleared, CancelLoad, FinishPrefill, ReleaseTransfer
from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.forced_token import KEY

__all__ = ["model", "stage"]


def load(engine: Stage, name: str, seed: int, max_tokens: int = 3) -> None:
    engine.add(f"d-{name}", prompt(100, seed), dict(PARAMS_OF_D, transfer_id=name), max_tokens=max_tokens)


def pause(engine: Stage) -> None:
    """Does what EngineCore does for mode="keep" with clear_cache=True, once no step is in flight."""
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def resume(engine: Stage) -> None:
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


def finish(engine: Stage) -> None:
    for _ in range(20):
        engine.step()
    engine.assert_idle()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_loads_of_before_are_given_up_and_computed_here(stage: MakeStage, policy: str) -> None:
    decode = stage("kv_consumer", blocks=14, policy=policy)
    load(decode, "runs", 1, max_tokens=20)
    decode.step()
    decode.step(received=["d-runs"])
    decode.step()
    ticks = itertools.count()
    decode.side._decode.clock = lambda: float(next(ticks))
    load(decode, "is over", 2)
    load(decode, "loads", 3)
    decode.step(due=["loads"])
    decode.step()
    load(decode, "waits", 4)
    output, metadata = decode.schedule()
    assert metadata.waiting == (("waits", ADDRESS),)
    decode.update(output, received=["d-is over"])

    pause(decode)
    assert decode.blocks_in_use == 4, "pages may still land for the load"
    metadata = decode.step()
    assert set(metadata.commands) == {CancelLoad("d-loads"), ReleaseTransfer("waits", ADDRESS)}
    assert metadata.waiting == ()
    assert not decode.side.has_unsent_commands()

    resume(decode)
    computed: Counter[str] = Counter()
    for number in range(30):
        output, metadata = decode.schedule()
        assert not any(isinstance(command, DecodeRequest) for command in metadata.commands)
        computed.update(output.num_scheduled_tokens)
        decode.update(output, received=["d-loads"] if number == 0 else [])
    # Each request computes its prompt, and all its tokens except the last one.
    assert computed == {"d-runs": 119, "d-is over": 102, "d-loads": 102, "d-waits": 102}
    decode.assert_idle()


def test_finished_load_that_waits_for_its_next_block_does_not_fail_a_reset(
    stage: MakeStage,
) -> None:
    """vLLM has promoted the request: it waits with the blocks of its load, and vLLM cannot preempt it."""
    decode = stage("kv_consumer", blocks=14)
    decode.add("loads", prompt(3 * BLOCK + 1, 1), PARAMS_OF_D, max_tokens=3)
    decode.step()
    decode.add("runs", prompt(10 * BLOCK - 70, 2), max_tokens=90)
    while decode.blocks_in_use < 13:
        decode.step()
    decode.step(received=["loads"])
    output, _ = decode.schedule()
    assert list(output.num_scheduled_tokens) == ["runs"], "no block is free for the load's last token"
    decode.update(output)
    loaded = decode.scheduler.requests["loads"]
    assert (loaded.status, loaded.num_computed_tokens) == (RequestStatus.WAITING, 3 * BLOCK)

    pause(decode)
    assert (decode.blocks_in_use, loaded.num_computed_tokens) == (0, 0)
    resume(decode)
    computed: Counter[str] = Counter()
    while decode.scheduler.has_requests():
        output, _ = decode.schedule()
        computed.update(output.num_scheduled_tokens)
        decode.update(output)
    assert computed["loads"] == 3 * BLOCK + 3, "it computes its prompt here"
    finish(decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("together", [True, False])
def test_a_load_of_other_weights_is_computed_here_whatever_the_policy(
    stage: MakeStage, policy: str, together: bool
) -> None:
    """The first of several workers knows it before the last one has ended."""
    decode = stage("kv_consumer", policy=policy)
    load(decode, "t", 1)
    decode.step()
    used = decode.blocks_in_use
    if together:
        decode.step(discarded=["d-t"], received=["d-t"])
    else:
        decode.step(discarded=["d-t"])
        assert decode.blocks_in_use == used, "pages may still land"
        decode.step(received=["d-t"])
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d-t": 100}
    decode.update(output)
    finish(decode)


def test_earlier_load_whose_client_may_have_the_prefill_token_waits_for_it(stage: MakeStage) -> None:
    """It then computes its prompt locally, like every other request."""
    decode = stage("kv_consumer")
    decode.add("d-t", prompt(100, 1), PARAMS_OF_D | {"early_token": True}, max_tokens=3)
    decode.step()
    pause(decode)
    assert decode.step().commands == ()
    resume(decode)
    decode.step(received=["d-t"], sampled={"d-t": 9})
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d-t": 100}
    (new,) = output.scheduled_new_reqs
    assert new.sampling_params.extra_args[KEY] == 9
    decode.update(output)
    finish(decode)


def waits_for_room(decode: Stage, **sampling: int) -> None:
    load(decode, "loads", 1)
    decode.step()
    decode.add("d-t", prompt(100, 2), PARAMS_OF_D | {"early_token": True}, max_tokens=4, sampling=sampling)
    output, metadata = decode.schedule()
    assert metadata.waiting == (("t", ADDRESS),)
    decode.update(output)


@pytest.mark.parametrize("sampled", [{"d-t": 9}, {}])
def test_request_that_waits_for_room_requests_only_the_prefill_token_after_a_reset(
    stage: MakeStage, sampled: dict[str, int]
) -> None:
    """The request goes out before the engine resumes, because a pause of P waits for it.

    P may have sampled with the earlier weights, and the client may have the token.
    """
    decode = stage("kv_consumer", blocks=8)
    waits_for_room(decode)
    pause(decode)
    assert decode.side.has_unsent_commands()
    metadata = decode.step()
    cancel, asked = metadata.commands
    assert cancel == CancelLoad("d-loads")
    assert isinstance(asked, DecodeRequest)
    assert (asked.request_id, asked.wants_sampled, asked.groups) == ("d-t", True, (GroupTarget(0, ()),))
    assert metadata.waiting == ()
    pause(decode)
    assert decode.step().commands == (), "it is asked once"
    resume(decode)
    decode.step(received=["d-loads"])
    for _ in range(6):
        output, _ = decode.schedule()
        assert "d-t" not in output.num_scheduled_tokens
        decode.update(output)
    # The result is the same if P is gone: the client has no token then, and nothing is missing.
    failed = [] if sampled else ["d-t"]
    decode.step(received=["d-t"], failed=failed, sampled=sampled)
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d-t": 100}
    (new,) = output.scheduled_new_reqs
    assert new.sampling_params.extra_args.get(KEY) == sampled.get("d-t")
    decode.update(output)
    finish(decode)


def test_request_that_waits_for_the_prefill_token_leaves_when_aborted(stage: MakeStage) -> None:
    """vLLM forgets the request at once. The engine takes steps until the workers have forgotten it, too."""
    decode = stage("kv_consumer", blocks=8)
    waits_for_room(decode)
    pause(decode)
    decode.step(received=["d-loads"])
    decode.abort("d-t")
    assert decode.step().commands == (CancelLoad("d-t"),)
    assert decode.side.has_unsent_commands()
    pause(decode)  # no page may land for it
    resume(decode)
    load(decode, "t", 2)  # with the same id
    metadata = decode.step()
    assert not any(isinstance(command, DecodeRequest) for command in metadata.commands)
    decode.step(received=["d-t"])
    assert not decode.side.has_unsent_commands()
    finish(decode)


def test_request_that_needs_its_whole_prompt_computed_keeps_its_blocks(stage: MakeStage) -> None:
    """vLLM neither loads nor holds the request, which needs the whole prompt computed."""
    decode = stage("kv_consumer", blocks=8)
    waits_for_room(decode, prompt_logprobs=0)
    pause(decode)
    decode.abort("d-loads")
    decode.step(received=["d-loads"])
    resume(decode)
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d-t": 100}
    used = decode.blocks_in_use
    decode.update(output, received=["d-t"], sampled={"d-t": 9})
    assert decode.blocks_in_use == used
    finish(decode)


def test_a_second_reset_before_the_load_has_stopped(stage: MakeStage) -> None:
    decode = stage("kv_consumer")
    load(decode, "t", 1)
    decode.step()
    pause(decode)
    pause(decode)
    assert decode.step().commands == (CancelLoad("d-t"),)
    resume(decode)
    decode.step(received=["d-t"])
    output, _ = decode.schedule()
    assert output.num_scheduled_tokens == {"d-t": 100}
    decode.update(output)
    finish(decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_of_before_that_fails(stage: MakeStage, policy: str) -> None:
    decode = stage("kv_consumer", policy=policy)
    load(decode, "t", 1)
    decode.step()
    pause(decode)
    resume(decode)
    decode.step()
    decode.step(received=["d-t"], failed=["d-t"])
    finish(decode)


def test_a_load_of_before_that_is_aborted(stage: MakeStage) -> None:
    decode = stage("kv_consumer")
    load(decode, "t", 1)
    decode.step()
    pause(decode)
    decode.abort("d-t")
    assert decode.blocks_in_use == 4
    decode.step(received=["d-t"])
    finish(decode)


def test_two_loads_that_share_blocks_keep_them(stage: MakeStage) -> None:
    decode = stage("kv_consumer")
    decode.add("first", prompt(70))
    decode.step()
    decode.step()
    for name in ("a", "b"):
        load(decode, name, 1)
    decode.step()
    assert decode.blocks_in_use == 6, "two blocks are cached, each load has two more"
    pause(decode)
    assert decode.blocks_in_use == 6
    resume(decode)
    decode.step(received=["d-a"])
    decode.step(received=["d-b"])
    finish(decode)


def test_earlier_prompts_are_computed_anew_and_prefill_is_notified(stage: MakeStage) -> None:
    """One prompt is in the middle, and one is complete.

    The connector holds window blocks of the complete one.
    """
    prefill = stage("kv_producer", FULL, SLIDING, budget=320)
    prefill.add("complete", prompt(300, 1), dict(PARAMS_OF_P, transfer_id="complete"), max_tokens=40)
    prefill.step(reserved=["complete"])
    prefill.add("middle", prompt(600, 2), dict(PARAMS_OF_P, transfer_id="middle"))
    prefill.step(reserved=["middle"])
    pause(prefill)
    assert prefill.blocks_in_use == 0
    metadata = prefill.step()
    assert metadata.commands == (CacheCleared(),)
    resume(prefill)
    ended: set[str] = set()
    preempted = set(metadata.preempted)
    for _ in range(60):
        output, metadata = prefill.schedule()
        preempted |= set(metadata.preempted)
        done = {c.request_id for c in metadata.commands if isinstance(c, FinishPrefill)}
        prefill.update(output, sent=done)
        ended |= done
    assert preempted == {"complete", "middle"}
    assert ended == {"complete", "middle"}
    prefill.assert_idle()


def test_a_reset_that_fails_changes_nothing(stage: MakeStage) -> None:
    """A finished prompt's blocks are still to be read. A pause waits for that, but a bare reset does not."""
    both = stage("kv_both", budget=4000)
    both.add("p", prompt(40, 7), dict(PARAMS_OF_P, transfer_id="p"))
    load(both, "t", 1)
    both.step()
    both.step()
    used = both.blocks_in_use
    assert not both.scheduler.reset_prefix_cache(reset_connector=False)
    assert both.blocks_in_use == used
    assert both.step().commands == ()
    both.step(sent=["p"], received=["d-t"])
    output, _ = both.schedule()
    assert output.num_scheduled_tokens == {"d-t": 1}, "it was loaded"
    both.update(output)
    finish(both)


@pytest.mark.parametrize("before", [False, True])
def test_failed_reset_releases_no_request(stage: MakeStage, before: bool) -> None:
    """A request without transfer runs. P's pushed pages and D's waiting loads stay as they are.

    ``before``: an earlier reset emptied the cache without a call of the connector.
    """
    both = stage("kv_both", blocks=20, budget=100)
    seconds = itertools.count()
    both.side._decode.clock = lambda: next(seconds)
    assert not before or both.scheduler.reset_prefix_cache()
    both.add("own", prompt(100, 7), max_tokens=40)
    both.step()
    both.add("p", prompt(300, 8), dict(PARAMS_OF_P, transfer_id="p"))
    load(both, "t", 1)
    both.step()
    load(both, "waits", 2)
    metadata = both.step()
    assert ("waits", ADDRESS) in (metadata.waiting or ())
    assert not both.scheduler.reset_prefix_cache(reset_connector=True)
    assert both.step().commands == ()


def test_a_finished_request_in_hand_is_not_reset(stage: MakeStage) -> None:
    """The request has no blocks, but the workers have still to forget it."""
    prefill = stage("kv_producer")
    prefill.add("p", prompt(40), dict(PARAMS_OF_P))
    prefill.abort("p")
    assert not prefill.scheduler.reset_prefix_cache(reset_connector=True)
    prefill.step()
    prefill.step(sent=["p"])
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    prefill.assert_idle()
