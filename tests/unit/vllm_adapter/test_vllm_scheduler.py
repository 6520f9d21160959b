"""The connector's scheduler side under vLLM's real scheduler and block pool."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from protocol_setup import layout, worker
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.request import RequestStatus
from vllm_stage import (
    ADDRESS,
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    SHAPE,
    SLIDING,
    WINDOW,
    MakeStage,
    Stage,
    model,
    prompt,
    stage,
)

from kv_connector.agent.commands import CancelLoad, FailLoad, FinishPrefill, ReleaseTransfer, SetRanks
from kv_connector.protocol.actions import Address
from kv_connector.protocol.requests import DecodeRequest, PrefillRequest
from kv_connector.protocol.wire.prompt_hash import prompt_hash
from kv_connector.vllm.forced_token import KEY
from kv_connector.vllm.metadata import DescribedRank, StepMetadata

__all__ = ["model", "stage"]

CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=WINDOW)


@pytest.fixture
def prefill(stage: MakeStage) -> Stage:
    return stage("kv_producer")


@pytest.fixture
def decode(stage: MakeStage) -> Stage:
    return stage("kv_consumer")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's log lines: inside vLLM they do not propagate to the root logger."""
    logger = logging.getLogger("kv_connector")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def named_blocks(*steps: StepMetadata) -> list[dict[int, int]]:
    """Returns, per group, the block id of each logical block, over all steps. Each is named once."""
    groups: list[dict[int, int]] = []
    for step in steps:
        for pages in step.new_pages:
            groups = groups or [{} for _ in pages.groups]
            for known, group in zip(groups, pages.groups, strict=True):
                for logical, block in enumerate(group.blocks, group.first):
                    assert logical not in known
                    known[logical] = block
    return groups


def reservation(step: StepMetadata) -> DecodeRequest:
    (command,) = (c for c in step.commands if isinstance(c, DecodeRequest))
    return command


class TestPrefill:
    def test_each_block_is_named_once_over_the_chunks(self, prefill: Stage) -> None:
        prefill.add("p", prompt(600), dict(PARAMS_OF_P))
        first, metadata = prefill.schedule()
        assert metadata.commands == (PrefillRequest("p", "t", 600, prompt_hash(prompt(600))),)
        prefill.update(first)
        second = prefill.step()
        third, last = prefill.schedule()
        table = prefill.tables("p")[0]
        prefill.update(third)
        assert named_blocks(metadata, second, last) == [dict(enumerate(table))]
        assert len(table) == 19
        assert [step.new_pages[0].last for step in (metadata, second, last)] == [False, False, True]
        # 256 tokens are 8 whole blocks.
        assert [len(step.new_pages[0].groups[0].blocks) for step in (metadata, second, last)] == [8, 8, 3]
        assert prefill.step(sent=["p"]).commands == (FinishPrefill("p", "t", True, "", sampled=7),)
        prefill.assert_idle()

    def test_a_chunk_that_ends_inside_a_block_does_not_name_it(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=50)
        prefill.add("p", prompt(70), dict(PARAMS_OF_P))
        steps = [prefill.step(), prefill.step()]
        assert [step.new_pages[0].groups[0].first for step in steps] == [0, 1]
        assert [len(step.new_pages[0].groups[0].blocks) for step in steps] == [1, 2]
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_cached_blocks_are_named_with_the_first_step(self, prefill: Stage) -> None:
        prefill.add("first", prompt(100))
        prefill.step()
        prefill.add("p", prompt(100), dict(PARAMS_OF_P))
        output, metadata = prefill.schedule()
        assert output.num_scheduled_tokens == {"p": 4}
        assert named_blocks(metadata) == [dict(enumerate(prefill.tables("p")[0]))]
        prefill.update(output)
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_blocks_behind_the_final_window_are_never_named(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", FULL, SLIDING)
        prefill.add("p", prompt(600), dict(PARAMS_OF_P))
        steps = [prefill.step() for _ in range(3)]
        full, sliding = named_blocks(*steps)
        assert sorted(full) == list(range(19))
        # Token 599 attends to 536..599.
        assert sorted(sliding) == [536 // BLOCK, 17, 18]
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_a_preempted_prompt_is_named_again(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", blocks=20, budget=256)
        prefill.add("old", prompt(250, seed=1), dict(PARAMS_OF_P, transfer_id="old"), max_tokens=40)
        prefill.step(reserved=["old"])
        prefill.add("young", prompt(300, seed=2), dict(PARAMS_OF_P, transfer_id="young"), max_tokens=40)
        steps = [prefill.step()]
        while not steps[-1].preempted and len(steps) < 100:
            steps.append(prefill.step())
        assert steps[-1].preempted == ("young",)
        before = [pages for step in steps for pages in step.new_pages if pages.transfer_id == "young"]
        assert before
        after: list[Any] = []
        finished: set[str] = set()
        for _ in range(200):
            output, step = prefill.schedule()
            after += [pages for pages in step.new_pages if pages.transfer_id == "young"]
            done = {c.request_id for c in step.commands if isinstance(c, FinishPrefill)}
            prefill.update(output, sent=done)
            finished |= done
            if not prefill.scheduler.has_requests():
                break
        assert finished == {"old", "young"}
        assert after[0].groups[0].first == 0
        assert sum(len(pages.groups[0].blocks) for pages in after) == 10
        assert after[-1].last
        prefill.assert_idle()

    def test_an_abort_before_the_first_step_is_reported_and_leaves_nothing(self, prefill: Stage) -> None:
        prefill.add("p", prompt(100), dict(PARAMS_OF_P))
        prefill.abort("p")
        _, metadata = prefill.schedule()
        assert [type(command) for command in metadata.commands] == [PrefillRequest, FinishPrefill]
        finish = metadata.commands[1]
        assert isinstance(finish, FinishPrefill)
        assert not finish.ok
        assert finish.aborted
        assert "FINISHED_ABORTED" in finish.reason
        assert prefill.scheduler.has_requests(), "the engine steps until the workers have forgotten it too"
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_an_abort_within_the_prompt_keeps_the_blocks_until_they_are_no_longer_read(
        self, prefill: Stage
    ) -> None:
        prefill.add("p", prompt(600), dict(PARAMS_OF_P))
        prefill.step()
        prefill.abort("p")
        assert prefill.blocks_in_use > 0
        (finish,) = prefill.step().commands
        assert isinstance(finish, FinishPrefill)
        assert not finish.ok
        assert finish.aborted
        assert prefill.blocks_in_use > 0
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_a_stop_token_right_after_the_prompt_is_success(self, prefill: Stage) -> None:
        request = prefill.add("p", prompt(40), dict(PARAMS_OF_P), max_tokens=5)
        assert request.sampling_params is not None
        request.sampling_params.stop_token_ids = [7]
        prefill.step()
        assert request.status is RequestStatus.FINISHED_STOPPED
        assert prefill.step(sent=["p"]).commands == (FinishPrefill("p", "t", True, "", sampled=7),)
        prefill.assert_idle()

    def test_serial_dispatch_gives_decode_the_params_that_it_needs(
        self, prefill: Stage, decode: Stage
    ) -> None:
        # The fields that NIXL's proxy sends to P.
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        prefill.add("p", prompt(40), {"do_remote_decode": True, "do_remote_prefill": False, **nothing})
        output, metadata = prefill.schedule()
        params = prefill.update(output)["p"]
        (expected,) = metadata.commands
        assert isinstance(expected, PrefillRequest)
        assert params["transfer_id"] == expected.transfer_id
        decode.add("d", prompt(40), params)
        request = reservation(decode.step())
        assert (request.transfer_id, request.engine) == (expected.transfer_id, ADDRESS)
        assert request.prompt_hash == expected.prompt_hash

    def test_other_routers_words_mean_the_same(self, prefill: Stage, decode: Stage) -> None:
        """tests/unit/vllm_adapter/test_dialects.py has all of them."""
        prefill.add("p", prompt(40), {"remote_decoder": {"kv_request_id": "t"}})
        output, metadata = prefill.schedule()
        answer = prefill.update(output)["p"]
        (expected,) = metadata.commands
        assert isinstance(expected, PrefillRequest)
        assert expected.transfer_id == "t"
        assert "remote_decoder" not in answer
        address = f"___prefill_addr_host:{ADDRESS.host},handshake:{ADDRESS.port},notify:1___decode_addr_x_0"
        decode.add(f"cmpl-{address}-0-1a", prompt(40), {"do_remote_prefill": True, "transfer_id": "t"})
        request = reservation(decode.step())
        assert (request.transfer_id, request.engine) == ("t", ADDRESS)

    def test_the_prompt_hash_covers_whatever_a_block_hash_covers(self, decode: Stage) -> None:
        """Otherwise D would keep KV of one picture under the block hashes of another one."""

        def medium(kind: str, offset: int, content: str) -> MultiModalFeatureSpec:
            return MultiModalFeatureSpec(None, kind, content, PlaceholderRange(offset, 8))

        variants: list[dict[str, Any]] = [
            {},
            {"lora_request": LoRARequest("one", 1, "/here")},
            {"lora_request": LoRARequest("two", 1, "/here")},
            {"lora_request": LoRARequest("one", 1, "/there")},
            {"cache_salt": "tenant"},
            {"cache_salt": "another"},
            {"mm_features": [medium("image", 8, "x")]},
            {"mm_features": [medium("image", 16, "x")]},
            {"mm_features": [medium("image", 8, "y")]},
            {"mm_features": [medium("audio", 8, "x")]},
            {"mm_features": [medium("video", 8, "x")]},
            {"mm_features": [medium("image", 8, "x"), medium("image", 24, "x")]},
            {"mm_features": [medium("image", 8, "x"), medium("image", 24, "y")]},
        ]
        hashes = []
        for number, more in enumerate([*variants, *variants]):
            decode.add(f"d{number}", prompt(40), PARAMS_OF_D | {"transfer_id": f"t{number}"}, **more)
            hashes.append(reservation(decode.step()).prompt_hash)
            decode.abort(f"d{number}")
            decode.step(received=[f"d{number}"])
        first, again = hashes[: len(variants)], hashes[len(variants) :]
        assert first == again
        assert len(set(first)) == len(variants)

    def test_a_prompt_with_embeddings_between_its_tokens_is_not_transferred(
        self, prefill: Stage, decode: Stage, log: pytest.LogCaptureFixture
    ) -> None:
        """No hash covers the embeddings: the token ids in their places do not identify them."""
        embeds = torch.zeros(40, 4)
        for engine, params in ((prefill, PARAMS_OF_P), (decode, PARAMS_OF_D)):
            places = [number % 2 == 0 for number in range(40)]
            engine.add("r", prompt(40), dict(params), prompt_embeds=embeds, prompt_is_token_ids=places)
            assert "the prompt has embeddings" in log.text
            log.clear()
            assert engine.step().commands == ()

    @pytest.mark.parametrize("token", [-1, 1 << 32])
    def test_token_ids_that_have_no_hash_leave_nothing_behind(
        self, prefill: Stage, decode: Stage, token: int, log: pytest.LogCaptureFixture
    ) -> None:
        for engine, params in ((prefill, PARAMS_OF_P), (decode, PARAMS_OF_D)):
            engine.add("r", [*prompt(40), token], dict(params))
            assert "the prompt's token ids are not all unsigned 32-bit integers" in log.text
            log.clear()
            assert engine.step().commands == ()
            engine.step()
            engine.assert_idle()
            engine.add("again", prompt(40), dict(params))
            assert log.text == ""

    def test_a_second_request_of_a_transfer_is_computed_alone(
        self, prefill: Stage, log: pytest.LogCaptureFixture
    ) -> None:
        prefill.add("p", prompt(40), dict(PARAMS_OF_P))
        prefill.add("q", prompt(40), dict(PARAMS_OF_P))
        metadata = prefill.step()
        assert len(metadata.commands) == len(metadata.new_pages) == 1
        assert "transfer t belongs to another live request" in log.text
        prefill.step(sent=["p"])
        prefill.assert_idle()


class TestSpeculation:
    """P's pool has 100 blocks, 99 of them usable. A prompt of 700 tokens takes 22."""

    @staticmethod
    def add(prefill: Stage, *names: str) -> None:
        for seed, name in enumerate(names):
            prefill.add(name, prompt(700, seed), dict(PARAMS_OF_P, transfer_id=f"t-{name}"))

    @staticmethod
    def running(prefill: Stage) -> list[str]:
        return [request.request_id for request in prefill.scheduler.running]

    def test_prompts_without_a_reservation_take_half_the_pool(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=2000)
        self.add(prefill, "a", "b", "c", "d")
        output, _ = prefill.schedule()
        assert sorted(output.num_scheduled_tokens) == ["a", "b"]
        prefill.update(output)
        # The prompts are computed and finished, and hold their blocks until D requests them.
        assert prefill.step().new_pages == ()
        assert prefill.blocks_in_use == 44

    def test_a_reservation_lets_its_prompt_through(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=2000)
        self.add(prefill, "a", "b", "c", "d")
        prefill.step()
        prefill.step(reserved=["t-d", "t-unknown"])
        output, _ = prefill.schedule()
        assert list(output.num_scheduled_tokens) == ["d"]
        prefill.update(output)
        prefill.step(reserved=["t-a"])
        output, _ = prefill.schedule()
        assert list(output.num_scheduled_tokens) == ["c"]
        prefill.update(output)
        prefill.step(sent=["a", "b", "c", "d"])
        prefill.assert_idle()

    def test_a_prompt_of_more_than_half_goes_alone(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=4000)
        prefill.add("big", prompt(2400, seed=9), dict(PARAMS_OF_P, transfer_id="big"))
        prefill.add("small", prompt(100, seed=8), dict(PARAMS_OF_P, transfer_id="small"))
        output, _ = prefill.schedule()
        assert list(output.num_scheduled_tokens) == ["big"]
        prefill.update(output)
        prefill.step(sent=["big"])
        output, _ = prefill.schedule()
        assert list(output.num_scheduled_tokens) == ["small"]
        prefill.update(output)
        prefill.step(sent=["small"])
        prefill.assert_idle()

    def test_serial_dispatch_and_own_requests_are_not_limited(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=4000)
        # NIXL's flow names no transfer. This project's router does, and reports that D follows later.
        named = [{"transfer_id": f"t-{number}", "serial": True} for number in range(3)]
        for seed, params in enumerate(({}, *named)):
            prefill.add(f"p{seed}", prompt(700, seed), {"do_remote_decode": True, **params})
        prefill.add("own", prompt(100, seed=7))
        output, _ = prefill.schedule()
        assert sorted(output.num_scheduled_tokens) == ["own", "p0", "p1", "p2", "p3"]
        prefill.update(output)
        prefill.step(sent=["p0", "p1", "p2", "p3"])
        prefill.assert_idle()

    def test_a_preempted_prompt_counts_again_when_it_has_blocks(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", budget=4000)
        self.add(prefill, "a", "b", "c")
        prefill.schedule()
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        output, metadata = prefill.schedule()
        assert metadata.computes
        assert sorted(metadata.preempted) == ["t-a", "t-b"]
        assert sorted(output.num_scheduled_tokens) == ["a", "b"]
        prefill.update(output)
        output, _ = prefill.schedule()
        assert output.num_scheduled_tokens == {}, "they fill half of the blocks, and no D has asked"


class TestDecode:
    def test_load_then_one_token_then_free(self, decode: Stage) -> None:
        request = decode.add("d", prompt(100), dict(PARAMS_OF_D), max_tokens=3)
        output, metadata = decode.schedule()
        assert output.total_num_scheduled_tokens == 0
        assert not metadata.computes
        table = decode.tables("d")[0]
        asked = reservation(metadata)
        assert asked == DecodeRequest("d", "t", ADDRESS, 100, 0, prompt_hash(prompt(100)), asked.groups)
        assert (asked.groups[0].first, asked.groups[0].blocks) == (0, tuple(table))
        assert len(table) == 4
        decode.update(output)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        decode.step(received=["d"])
        output, metadata = decode.schedule()
        assert output.num_scheduled_tokens == {"d": 1}
        assert metadata.commands == ()
        decode.update(output)
        for _ in range(3):
            decode.step()
        decode.assert_idle()

    def test_request_continues_with_the_prefill_token_when_its_client_has_it(self, decode: Stage) -> None:
        decode.add("d", prompt(100), PARAMS_OF_D | {"early_token": True}, max_tokens=3)
        output, metadata = decode.schedule()
        assert reservation(metadata).wants_sampled
        decode.update(output, received=["d"], sampled={"d": 9, "unknown": 8})
        output, _ = decode.schedule()
        (new,) = output.scheduled_new_reqs
        assert new.sampling_params.extra_args[KEY] == 9
        decode.update(output)
        for _ in range(3):
            decode.step()
        decode.assert_idle()

    @pytest.mark.parametrize("tokens", [1, BLOCK + 1])
    def test_decode_waits_for_the_prefill_token_though_nothing_else_is_wanted(
        self, decode: Stage, tokens: int
    ) -> None:
        """vLLM has in advance all of the prompt that it can have."""
        decode.add("first", prompt(tokens), max_tokens=2)
        for _ in range(4):
            decode.step()
        decode.add("d", prompt(tokens), PARAMS_OF_D | {"early_token": True}, max_tokens=2)
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        assert (asked.first_token, asked.wants_sampled) == (tokens - 1, True)
        assert [len(group.blocks) for group in asked.groups] == [1]
        decode.update(output, received=["d"], sampled={"d": 9})
        output, _ = decode.schedule()
        assert output.num_scheduled_tokens == {"d": 1}
        assert output.scheduled_new_reqs[0].sampling_params.extra_args[KEY] == 9
        decode.update(output)
        for _ in range(3):
            decode.step()
        decode.assert_idle()

    def test_engine_that_drafts_does_not_request_the_prefill_token(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", drafter="eagle")
        assert not decode.side._decode._early_tokens

    def test_samples_of_one_prompt_are_loaded_once(self, decode: Stage) -> None:
        """With n > 1 the first sample loads, and the others find its blocks."""
        shared = dict(PARAMS_OF_D)
        for name in ("d0", "d1", "d2"):
            decode.add(name, prompt(100), shared)
        assert shared == PARAMS_OF_D
        output, metadata = decode.schedule()
        assert reservation(metadata).request_id == "d0"
        assert output.total_num_scheduled_tokens == 0
        decode.update(output)
        assert decode.step().commands == ()
        decode.step(received=["d0"])
        output, metadata = decode.schedule()
        # 96 of 100 tokens are whole blocks.
        assert output.num_scheduled_tokens == {"d0": 1, "d1": 4, "d2": 4}
        assert metadata.commands == ()
        decode.update(output)
        decode.step()
        decode.assert_idle()

    @pytest.mark.parametrize("loading", [False, True])
    def test_samples_whose_first_one_leaves_go_on(self, decode: Stage, loading: bool) -> None:
        decode.add("d0", prompt(100), dict(PARAMS_OF_D))
        decode.add("d1", prompt(100), dict(PARAMS_OF_D))
        if loading:
            decode.step()
        decode.abort("d0")
        output, metadata = decode.schedule()
        if loading:
            assert metadata.commands == (CancelLoad("d0"),)
            assert output.total_num_scheduled_tokens == 0
            decode.update(output)
            decode.step(received=["d0"])
            output, metadata = decode.schedule()
        else:
            assert metadata.commands == (ReleaseTransfer("t", ADDRESS),)
        assert output.num_scheduled_tokens == {"d1": 100}
        decode.update(output)
        decode.step()
        decode.assert_idle()

    def test_a_sample_that_leaves_early_is_forgotten(self, decode: Stage) -> None:
        decode.add("d0", prompt(100), dict(PARAMS_OF_D))
        decode.add("d1", prompt(100), dict(PARAMS_OF_D))
        decode.step()
        decode.abort("d1")
        decode.step(received=["d0"])
        decode.step()
        decode.step()
        decode.assert_idle()

    def test_another_prompt_under_a_transfers_name_is_computed_alone(
        self, decode: Stage, log: pytest.LogCaptureFixture
    ) -> None:
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.add("other", prompt(100, seed=2), dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        assert "transfer t belongs to another live request" in log.text
        assert reservation(metadata).request_id == "d"
        assert output.num_scheduled_tokens == {"other": 100}
        decode.update(output)

    def test_only_blocks_that_the_own_cache_lacks_are_requested(self, decode: Stage) -> None:
        decode.add("first", prompt(70))
        decode.step()
        decode.step()
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        assert asked.first_token == 64
        assert asked.groups[0].first == 2
        assert asked.groups[0].blocks == tuple(decode.tables("d")[0][2:])
        decode.update(output)

    @pytest.mark.parametrize("tokens", [1, 65])
    def test_a_prompt_that_needs_nothing_is_released(self, decode: Stage, tokens: int) -> None:
        """One token is recomputed anyway. Of 65 tokens, the first 64 are in D's own cache."""
        decode.add("first", prompt(70))
        decode.step()
        decode.step()
        decode.add("d", prompt(tokens), dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        assert metadata.commands == (ReleaseTransfer("t", ADDRESS),)
        assert output.num_scheduled_tokens == {"d": 1}
        decode.update(output)
        decode.step()
        decode.assert_idle()

    def test_a_request_that_must_not_read_caches_is_released(self, decode: Stage) -> None:
        request = decode.add("d", prompt(100), dict(PARAMS_OF_D))
        request.skip_reading_prefix_cache = True
        assert decode.step().commands == (ReleaseTransfer("t", ADDRESS),)
        decode.step()
        decode.assert_idle()

    def test_an_abort_before_any_blocks_releases_and_takes_one_more_step(self, decode: Stage) -> None:
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.abort("d")
        connector = decode.scheduler.connector
        assert connector is not None
        assert connector.has_pending_push_work()
        assert decode.step().commands == (ReleaseTransfer("t", ADDRESS),)
        assert not connector.has_pending_push_work()
        decode.assert_idle()

    def test_an_abort_while_pages_arrive_keeps_the_blocks_until_they_have_stopped(
        self, decode: Stage
    ) -> None:
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.step()
        decode.abort("d")
        assert decode.step().commands == (CancelLoad("d"),)
        assert decode.blocks_in_use == 4
        decode.step(received=["d"])
        decode.assert_idle()

    def test_a_load_that_ends_in_the_step_of_its_abort(self, decode: Stage) -> None:
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.step()
        output, _ = decode.schedule()
        decode.abort("d")
        decode.update(output, received=["d"])
        assert decode.step().commands == (CancelLoad("d"),)
        decode.assert_idle()

    def test_a_failed_load_fails_the_request(self, decode: Stage) -> None:
        request = decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.step()
        decode.step(received=["d"], failed=["d"])
        assert request.status is RequestStatus.FINISHED_ERROR
        decode.step()
        decode.assert_idle()

    def test_failed_load_is_recomputed_with_the_recompute_policy(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", policy="recompute")
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        decode.step()
        decode.step(received=["d"], failed=["d"])
        output, metadata = decode.schedule()
        assert output.num_scheduled_tokens == {"d": 100}
        assert metadata.commands == ()
        decode.update(output)
        decode.step()
        decode.assert_idle()

    def test_waiting_list_goes_to_workers_a_few_times_a_second(self, stage: MakeStage) -> None:
        decode, now, entries = stage("kv_consumer", blocks=12), 100.0, 0
        decode.side._decode.clock = lambda: now
        for number in range(100):
            params = dict(PARAMS_OF_D, transfer_id=str(number))
            decode.add(f"d{number}", prompt(320, number), params)
            now += 0.01
            entries += len(decode.step().waiting or ())
        assert len(decode.side._decode._waiting) == 99
        # One list in 0.25 s, with the length of the queue: not 100 lists and 4,950 entries.
        assert entries <= 25 + 50 + 75 + 100
        now += 1
        waiting = decode.step().waiting
        assert waiting is not None
        assert len(waiting) == 99
        assert len({id(address) for _, address in waiting}) == 1
        for number in range(100):
            decode.abort(f"d{number}")
        assert decode.step().waiting == ()

    def test_requests_without_blocks_are_listed_as_waiting(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", blocks=6)
        decode.add("d", prompt(100, seed=1), dict(PARAMS_OF_D, transfer_id="one"))
        decode.add("e", prompt(100, seed=2), dict(PARAMS_OF_D, transfer_id="two"))
        metadata = decode.step()
        assert reservation(metadata).request_id == "d"
        assert metadata.waiting == (("two", ADDRESS),)
        assert decode.step().waiting is None
        decode.step(received=["d"])
        decode.step()
        metadata = decode.step()
        assert reservation(metadata).request_id == "e"
        assert metadata.waiting == ()

    def test_after_a_preemption_the_prompt_is_computed_locally(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", blocks=12)
        decode.add("old", prompt(150, seed=1), dict(PARAMS_OF_D, transfer_id="old"), max_tokens=100)
        decode.add("young", prompt(150, seed=2), dict(PARAMS_OF_D, transfer_id="young"), max_tokens=100)
        decode.step(due=["young"])
        decode.step()
        decode.step(received=["old", "young"])
        loads = 0
        preempted = False
        for _ in range(400):
            output, metadata = decode.schedule()
            preempted |= bool(output.preempted_req_ids)
            loads += sum(isinstance(command, DecodeRequest) for command in metadata.commands)
            decode.update(output)
            if not decode.scheduler.has_requests():
                break
        assert preempted
        assert loads == 0
        decode.assert_idle()

    def test_a_reservation_that_cannot_be_built_fails_instead_of_hanging(
        self, decode: Stage, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(decode.side._decode, "_reservation", broken)
        decode.add("d", prompt(100), dict(PARAMS_OF_D))
        assert decode.step().commands == (FailLoad("d"),)
        assert "broken" in log.text
        decode.step(received=["d"], failed=["d"])
        decode.step()
        decode.assert_idle()


@pytest.mark.parametrize(("group", "reach"), [(SLIDING, WINDOW), (CHUNKED, None)], ids=["sliding", "chunked"])
@pytest.mark.parametrize("cached", [0, 64])
def test_decode_requests_all_that_its_token_attends_to_and_prefill_keeps_it(
    stage: MakeStage, group: Any, reach: int | None, cached: int
) -> None:
    """The test covers every length around window and block bounds.

    vLLM's own count of "skipped" tokens is off by one for a D that recomputes the last token. P frees the
    oldest window block at its request's end.
    """
    prefill, decode = stage("kv_producer", FULL, group), stage("kv_consumer", FULL, group)
    for tokens in range(cached + 2, 230):
        text = prompt(tokens, seed=tokens)
        if cached:
            decode.add("first", text[: cached + 1])
            decode.step()
            decode.step()
        prefill.add("p", text, dict(PARAMS_OF_P))
        named = named_blocks(prefill.step())
        prefill.schedule()  # ships FinishPrefill; the blocks are not read yet
        decode.add("d", text, dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        assert asked.first_token in (0, cached)
        last = tokens - 1
        oldest = max(0, last - reach + 1) if reach else last // WINDOW * WINDOW
        for index, target in enumerate(asked.groups):
            wanted = {i for i, block in enumerate(target.blocks, target.first) if block}
            attended = range(oldest if index else 0, last)
            assert {t // BLOCK for t in attended if t >= asked.first_token} <= wanted
            table = decode.tables("d")[index]
            assert all(table[t // BLOCK] for t in attended)
            assert wanted <= named[index].keys()
        pool = prefill.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].ref_cnt > 0 for blocks in named for block in blocks.values() if block)
        decode.update(output, received=["d"])
        decode.step()
        decode.step()
        prefill.step(sent=["p"])
        prefill.assert_idle()
        decode.assert_idle()


@pytest.mark.parametrize(
    ("role", "params", "problem"),
    [
        ("kv_consumer", {**PARAMS_OF_D, "remote_host": None}, "remote_host must be"),
        ("kv_consumer", PARAMS_OF_P, "do_remote_decode is for a prefill engine"),
        ("kv_producer", PARAMS_OF_D, "do_remote_prefill is for a decode engine"),
    ],
)
def test_unusable_parameters_are_named_and_the_prompt_is_computed_alone(
    stage: MakeStage, role: str, params: dict[str, Any], problem: str, log: pytest.LogCaptureFixture
) -> None:
    engine = stage(role)
    engine.add("r", prompt(40), dict(params))
    assert problem in log.text
    output, metadata = engine.schedule()
    assert output.num_scheduled_tokens == {"r": 40}
    assert metadata.commands == metadata.new_pages == ()
    engine.update(output)
    engine.step()
    engine.assert_idle()


def test_workers_receive_each_others_addresses_before_any_request(prefill: Stage) -> None:
    connector = prefill.scheduler.connector
    assert connector is not None
    assert not connector.has_pending_push_work(), "a single worker has nobody to hear of"
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    addresses = [Address("10.0.0.2", 5600 + number) for number in range(4)]
    ranks = {
        place: worker(layout(), address, stage=place[0])
        for place, address in zip(places, addresses, strict=True)
    }
    connector.set_xfer_handshake_metadata_pp_aware(
        {place: DescribedRank(ranks[place]) for place in reversed(places)}
    )
    assert connector.has_pending_push_work(), "or the engine would not step"
    assert prefill.step().commands == (SetRanks(tuple(ranks[place] for place in places)),)
    assert not connector.has_pending_push_work()
    assert prefill.side._prefill.address == addresses[0], "what routers are told"


def test_an_engine_may_play_both_roles(stage: MakeStage) -> None:
    both = stage("kv_both")
    both.add("p", prompt(40, seed=1), dict(PARAMS_OF_P, transfer_id="out"))
    both.add("d", prompt(40, seed=2), dict(PARAMS_OF_D, transfer_id="in"))
    metadata = both.step()
    assert [type(command) for command in metadata.commands] == [PrefillRequest, DecodeRequest]
    both.step(sent=["p"], received=["d"])
    both.step()
    both.step()
    both.assert_idle()


@pytest.mark.parametrize(
    ("proposed", "problem"),
    [
        ({"host": ADDRESS.host, "port": ADDRESS.port, "tokens": 64}, "names this engine itself"),
        ({"host": "10.0.0.2", "port": 5600, "tokens": 0}, "prefix_from.tokens must be 1 to"),
    ],
)
def test_prefill_request_keeps_its_transfer_when_its_prefix_is_not_loaded(
    prefill: Stage, proposed: dict[str, Any], problem: str, log: pytest.LogCaptureFixture
) -> None:
    prefill.add("p", prompt(100), {**PARAMS_OF_P, "prefix_from": proposed})
    assert "request p: its prefix is computed, not loaded" in log.text
    assert problem in log.text
    assert any(isinstance(command, PrefillRequest) for command in prefill.step().commands)
