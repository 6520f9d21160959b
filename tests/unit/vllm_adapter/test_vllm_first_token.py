"""D's requests begin with the token that P sampled: vLLM's real scheduler, with a pretended model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.request import RequestStatus
from vllm_stage import BLOCK, FULL, PARAMS_OF_D, SLIDING, WINDOW, Stage, model, prompt, vllm_config

from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.forced_token import KEY
from kv_connector.vllm.scheduling.first_token import FirstTokenAsyncScheduler, FirstTokenScheduler
from kv_connector.vllm.scheduling.gated_scheduler import GatedAsyncScheduler, GatedScheduler

__all__ = ["model"]

PARAMS = PARAMS_OF_D | {"early_token": True}
SAMPLED = 9
MakeDecode = Callable[..., Stage]


class Step(NamedTuple):
    """The scheduler's message to the workers about a new request."""

    behind: list[int]
    """Tokens behind the prompt."""
    before: int
    """Number of computed tokens."""
    tokens: int
    """Number of tokens to compute."""
    forced: int | None


@pytest.fixture
def v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configures engines as on a GPU. No runner exists here."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


@pytest.fixture(params=[FirstTokenScheduler, FirstTokenAsyncScheduler])
def decode(request: pytest.FixtureRequest, v2: None, model: Path) -> MakeDecode:
    def make(*specs: Any, **options: Any) -> Stage:
        return Stage(vllm_config(model, "kv_consumer", **options), specs or (FULL,), 200, request.param)

    return make


def first_step(stage: Stage, tokens: int, sampled: int = SAMPLED, **reports: Any) -> Step:
    """Returns the first step of the request "d", after its pages have arrived."""
    stage.step(received=["d"], sampled={"d": sampled}, **reports)
    output, _ = stage.schedule()
    (new,) = output.scheduled_new_reqs
    assert new.prompt_token_ids == prompt(tokens)
    behind = new.prefill_token_ids[tokens:]
    forced = new.sampling_params.extra_args.get(KEY)
    stage.update(output)
    return Step(behind, new.num_computed_tokens, output.num_scheduled_tokens["d"], forced)


def run_out(stage: Stage) -> None:
    for _ in range(4):
        stage.step()
    stage.assert_idle()


@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, 100])
def test_the_first_step_computes_the_second_token(decode: MakeDecode, tokens: int) -> None:
    stage = decode()
    stage.add("d", prompt(tokens), PARAMS, max_tokens=3)
    output, metadata = stage.schedule()
    (asked,) = metadata.commands
    assert isinstance(asked, DecodeRequest)
    assert len(asked.groups[0].blocks) == -(-tokens // BLOCK)
    stage.update(output)
    assert not stage.said("d")
    assert first_step(stage, tokens) == Step([SAMPLED], tokens, 1, None)
    assert stage.said("d") == [SAMPLED, 7]
    run_out(stage)
    assert stage.said("d") == [SAMPLED, 7, 7]
    told = stage.outputs[0]
    assert [event.type for event in told.events] == [
        EngineCoreEventType.QUEUED,
        EngineCoreEventType.SCHEDULED,
    ]
    assert told.prefill_stats.num_prompt_tokens == tokens
    assert [output.prefill_stats for output in stage.outputs[1:]] == [None, None]
    assert stage.outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_window_keeps_the_block_that_the_last_token_attends_to(decode: MakeDecode) -> None:
    """The first step computes that token, too."""
    tokens = WINDOW + BLOCK - 1
    stage = decode(FULL, SLIDING)
    stage.add("d", prompt(tokens), PARAMS, max_tokens=3)
    stage.step()
    assert first_step(stage, tokens) == Step([SAMPLED], tokens - 1, 2, None)
    run_out(stage)
    assert stage.said("d") == [SAMPLED, 7, 7]


def test_its_answer_may_end_with_the_second(decode: MakeDecode) -> None:
    """vLLM must know that in advance, if it schedules a step before the output of the previous one."""
    stage = decode()
    stage.add("d", prompt(100), PARAMS, max_tokens=2)
    stage.step()
    stage.step(received=["d"], sampled={"d": SAMPLED})
    output, _ = stage.schedule()
    ahead, _ = stage.schedule()
    assert (output.num_scheduled_tokens, ahead.num_scheduled_tokens) == ({"d": 1}, {})
    stage.update(output)
    stage.update(ahead)
    assert stage.said("d") == [SAMPLED, 7]
    run_out(stage)


@pytest.mark.parametrize(
    ("sampled", "tokens", "max_tokens", "sampling"),
    [
        (SAMPLED, 100, 1, {}),
        (SAMPLED, 4095, 3, {}),
        (SAMPLED, 100, 3, {"stop_token_ids": [SAMPLED]}),
        (SAMPLED, 100, 3, {"logprobs": 0}),
        (1 << 30, 100, 3, {}),
    ],
    ids=["last of the answer", "last that the model takes", "stop token", "log probabilities", "no token"],
)
def test_else_the_prompts_last_token_is_computed_again(
    decode: MakeDecode, sampled: int, tokens: int, max_tokens: int, sampling: dict[str, Any]
) -> None:
    stage = decode()
    stage.add("d", prompt(tokens), PARAMS, max_tokens, sampling)
    stage.step()
    assert first_step(stage, tokens, sampled) == Step([], tokens - 1, 1, sampled)
    run_out(stage)


def test_an_end_of_the_answer_is_computed_again(decode: MakeDecode) -> None:
    stage = decode()
    request = stage.add("d", prompt(100), PARAMS, max_tokens=3)
    request.sampling_params._eos_token_id = SAMPLED
    stage.step()
    assert first_step(stage, 100) == Step([], 99, 1, SAMPLED)
    run_out(stage)


@pytest.mark.parametrize("reports", [{"failed": ["d"]}, {"discarded": ["d"]}])
def test_without_its_pages_it_computes_its_prompt(decode: MakeDecode, reports: dict[str, Any]) -> None:
    stage = decode(policy="recompute")
    stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    assert first_step(stage, 100, **reports) == Step([], 0, 100, SAMPLED)
    run_out(stage)


def test_aborted_request_gets_no_first_token(decode: MakeDecode) -> None:
    stage = decode()
    stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    stage.abort("d")
    stage.step(received=["d"], sampled={"d": SAMPLED})
    assert not stage.outputs
    run_out(stage)


def test_one_that_leaves_behind_it_frees_its_blocks(decode: MakeDecode) -> None:
    stage = decode()
    stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    stage.step(received=["d"], sampled={"d": SAMPLED})
    assert stage.said("d") == [SAMPLED]
    stage.abort("d")
    run_out(stage)


def test_a_cache_that_is_emptied_behind_it_costs_the_pages(decode: MakeDecode) -> None:
    stage = decode()
    request = stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    stage.step(received=["d"], sampled={"d": SAMPLED})
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert stage.scheduler.reset_prefix_cache()
    output, _ = stage.schedule()
    assert output.num_scheduled_tokens == {"d": 101}
    stage.update(output)
    run_out(stage)
    assert stage.said("d") == [SAMPLED, 7, 7]


def test_the_grammar_goes_on_behind_it(decode: MakeDecode, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, accepted = decode(), []

    def accept(request: Any, tokens: list[int]) -> bool:
        accepted.append(list(tokens))
        assert request.all_token_ids[-1] == tokens[-1]
        return True

    monkeypatch.setattr(stage.scheduler.structured_output_manager, "accept_tokens", accept)
    stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    first_step(stage, 100)
    assert accepted == [[SAMPLED], [7]]
    run_out(stage)


def test_a_token_that_the_grammar_does_not_allow_ends_the_answer(
    decode: MakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = decode()
    monkeypatch.setattr(stage.scheduler.structured_output_manager, "accept_tokens", lambda *_: False)
    stage.add("d", prompt(100), PARAMS, max_tokens=3)
    stage.step()
    stage.step(received=["d"], sampled={"d": SAMPLED})
    (told,) = stage.outputs
    assert told.finish_reason is FinishReason.ERROR
    run_out(stage)


def test_no_first_token_is_given_when_every_token_has_more_than_its_id(v2: None, model: Path) -> None:
    config = vllm_config(model, "kv_consumer")
    config.model_config.return_sampling_mask = True
    stage = Stage(config, (FULL,), 100, FirstTokenScheduler)
    assert not stage.side._decode.gives_first_tokens


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
@pytest.mark.parametrize("ahead", [False, True])
def test_vllm_chooses_the_first_token_scheduler_for_a_decode_engine(
    v2: None, model: Path, role: str, ahead: bool
) -> None:
    config = vllm_config(model, role)
    config.scheduler_config.async_scheduling = ahead
    WriteImmConnector.get_required_kvcache_layout(config)
    chosen = config.scheduler_config.get_scheduler_cls()
    assert chosen is (FirstTokenAsyncScheduler if ahead else FirstTokenScheduler)


@pytest.mark.parametrize("ahead", [False, True])
def test_vllm_takes_a_gated_scheduler_for_prefill(v2: None, model: Path, ahead: bool) -> None:
    config = vllm_config(model, "kv_producer")
    config.scheduler_config.async_scheduling = ahead
    WriteImmConnector.get_required_kvcache_layout(config)
    chosen = config.scheduler_config.get_scheduler_cls()
    assert chosen is (GatedAsyncScheduler if ahead else GatedScheduler)


def test_vllm_takes_a_gated_scheduler_for_both_roles_with_runner_v1(model: Path) -> None:
    config = vllm_config(model, "kv_both")
    WriteImmConnector.get_required_kvcache_layout(config)
    assert issubclass(config.scheduler_config.get_scheduler_cls(), GatedScheduler)


def gives_first_tokens(config: Any) -> bool:
    WriteImmConnector.get_required_kvcache_layout(config)
    chosen = config.scheduler_config.get_scheduler_cls()
    assert issubclass(chosen, GatedScheduler)
    return issubclass(chosen, FirstTokenScheduler)


def test_decode_does_not_begin_with_the_prefill_token_with_runner_v1(model: Path) -> None:
    assert not gives_first_tokens(vllm_config(model, "kv_consumer"))


def test_decode_does_not_begin_with_the_prefill_token_when_it_drafts(v2: None, model: Path) -> None:
    """Such a D does not request P's token."""
    assert not gives_first_tokens(vllm_config(model, "kv_consumer", drafter="eagle"))


def test_configured_scheduler_class_is_kept(v2: None, model: Path) -> None:
    config = vllm_config(model, "kv_consumer")
    config.scheduler_config.scheduler_cls = Scheduler
    WriteImmConnector.get_required_kvcache_layout(config)
    assert config.scheduler_config.scheduler_cls is Scheduler


def test_it_is_chosen_by_a_connector_within_another_and_finds_it(v2: None, model: Path) -> None:
    config = vllm_config(model, "kv_consumer")
    ours = config.kv_transfer_config
    within = {
        "kv_connector": ours.kv_connector,
        "kv_connector_module_path": ours.kv_connector_module_path,
        "kv_role": ours.kv_role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": ours.kv_connector_extra_config,
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_consumer",
        engine_id=ours.engine_id,
        kv_connector_extra_config={"connectors": [within]},
    )
    MultiConnector.get_required_kvcache_layout(config)
    stage = Stage(config, (FULL,), 100, config.scheduler_config.get_scheduler_cls())
    (connector,) = stage.scheduler.connector._connectors
    assert connector.scheduler._decode.gives_first_tokens
