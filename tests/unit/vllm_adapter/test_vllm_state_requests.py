"""Models with recurrent states: what P computes and names, and where D reads, under vLLM's real scheduler."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_scheduler import named_blocks, reservation
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus
from vllm_stage import (
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    SLIDING,
    Stage,
    model,
    prompt,
    vllm_config,
)

from kv_connector.agent.commands import FinishPrefill, ReleaseTransfer
from kv_connector.protocol.requests import DecodeRequest, PrefillRequest
from kv_connector.protocol.wire.prompt_hash import prompt_hash
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.patches import leave_last_token

__all__ = ["model"]

CACHED = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 96), (4, 32, 16)),
    dtypes=(torch.float32, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)
"""With prefix caching: a state in each column of the table that ends at the end of a block of tokens."""
UNCACHED = replace(CACHED, block_size=4096, mamba_cache_mode="none")
"""Without prefix caching: one column."""
DRAFTS = 2

MakeStage = Callable[..., Stage]

both_modes = pytest.mark.parametrize("state", [CACHED, UNCACHED], ids=["align", "none"])
with_drafts = pytest.mark.parametrize("drafts", [0, DRAFTS], ids=["plain", "drafts"])


@pytest.fixture
def stage(model: Path) -> MakeStage:
    def make(role: str, *specs: Any, state: MambaSpec = CACHED, **options: Any) -> Stage:
        blocks = options.pop("blocks", 100)
        config = vllm_config(model, role, **options)
        config.cache_config.mamba_cache_mode = state.mamba_cache_mode
        config.cache_config.enable_prefix_caching = state.block_size == BLOCK
        return Stage(config, [*(specs or (FULL,)), state], blocks)

    return make


@pytest.fixture
def prefill(stage: MakeStage) -> Stage:
    return stage("kv_producer")


@pytest.fixture
def decode(stage: MakeStage) -> Iterator[Stage]:
    made = stage("kv_consumer")
    yield made
    made.assert_idle()


def run(stage: Stage, request_id: str) -> list[StepMetadata]:
    """Runs steps until the request has left the scheduler. No page is reported sent yet."""
    steps = []
    while not stage.scheduler.requests[request_id].is_finished():
        steps.append(stage.step())
        assert len(steps) < 100
    return steps


def load(stage: Stage, text: list[int], name: str = "d") -> DecodeRequest:
    """Loads a request, decodes it to its end, and returns its reservation."""
    stage.add(name, text, dict(PARAMS_OF_D, transfer_id=name), max_tokens=2)
    output, metadata = stage.schedule()
    assert output.total_num_scheduled_tokens == 0
    asked = reservation(metadata)
    stage.update(output, received=[name])
    output, _ = stage.schedule()
    assert output.num_scheduled_tokens == {name: 1}
    stage.update(output)
    while stage.scheduler.has_requests():
        stage.step()
    return asked


class TestPrefill:
    @both_modes
    @with_drafts
    @pytest.mark.parametrize("tokens", [2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 600])
    def test_the_state_before_the_last_token_goes_with_the_last_chunk(
        self, stage: MakeStage, state: MambaSpec, drafts: int, tokens: int
    ) -> None:
        prefill = stage("kv_producer", state=replace(state, num_speculative_blocks=drafts))
        text = prompt(tokens)
        request = prefill.add("p", text, dict(PARAMS_OF_P), max_tokens=40)
        computed = 0
        pages: list[Any] = []
        while not request.is_finished():
            output, metadata = prefill.schedule()
            if not pages:
                expected = (PrefillRequest("p", "t", tokens, prompt_hash(text)),)
                assert metadata.commands == expected, "both sides compare the whole prompt"
            computed += output.num_scheduled_tokens["p"]
            (new,) = metadata.new_pages
            assert new.last == (computed == tokens - 1)
            full, states = prefill.tables("p")
            column = (tokens - 2) // state.block_size
            assert new.groups[1].blocks == ((states[column],) if new.last else ())
            assert new.groups[1].first == 0
            pages.append(metadata)
            prefill.update(output)
        assert computed == tokens - 1
        assert named_blocks(*pages)[0] == dict(enumerate(full))
        assert len(full) == -(-(tokens - 1) // BLOCK)
        assert len(text) == tokens, "it belongs to who sent it"
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
        held = prefill.scheduler.kv_cache_manager.block_pool.blocks[states[column]]
        assert (held.is_null, held.ref_cnt) == (False, 1)
        assert prefill.step().commands == (FinishPrefill("p", "t", True, ""),)
        assert (held.is_null, held.ref_cnt) == (False, 1), "until it is sent"
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_prefill_request_ends_with_one_token_whatever_the_client_requests(self, prefill: Stage) -> None:
        """The next token would be computed into the state that is being sent."""
        request = prefill.add("p", prompt(40), dict(PARAMS_OF_P), max_tokens=40)
        assert request.sampling_params is not None
        request.sampling_params.min_tokens = 10
        prefill.step()
        prefill.step()
        assert request.is_finished()
        assert prefill.step(sent=["p"]).new_pages == ()
        prefill.assert_idle()

    @both_modes
    def test_no_further_token_is_begun_while_the_first_is_under_way(
        self, stage: MakeStage, state: MambaSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With async scheduling a step is scheduled before the previous one has ended."""
        monkeypatch.setattr("vllm_stage.Scheduler", AsyncScheduler)
        prefill = stage("kv_producer", state=state)
        prefill.add("p", prompt(BLOCK), dict(PARAMS_OF_P), max_tokens=40)
        under_way = [prefill.schedule()[0]]
        while under_way[-1].num_scheduled_tokens:
            under_way.append(prefill.schedule()[0])
        assert sum(output.num_scheduled_tokens.get("p", 0) for output in under_way) == BLOCK - 1
        for output in under_way:
            prefill.update(output)
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_local_requests_are_left_alone(self, prefill: Stage) -> None:
        request = prefill.add("own", prompt(40), max_tokens=3)
        for _ in range(5):
            prefill.step()
        assert request.num_prompt_tokens == 40
        assert request.num_output_tokens == 3
        prefill.assert_idle()

    def test_its_cached_states_serve_the_next_prompt(self, prefill: Stage) -> None:
        for number, cached in enumerate((0, 3 * BLOCK)):
            request = prefill.add("p", prompt(4 * BLOCK + 1), dict(PARAMS_OF_P))
            output, metadata = prefill.schedule()
            assert request.num_computed_tokens - output.num_scheduled_tokens["p"] == cached
            prefill.update(output)
            steps = [metadata, *run(prefill, "p")]
            full, state = named_blocks(*steps)
            assert (len(full), list(state)) == (4, [0]), number
            prefill.step()
            prefill.step(sent=["p"])
            prefill.assert_idle()

    def test_a_prompt_of_one_token_has_no_state_to_send(self, prefill: Stage) -> None:
        request = prefill.add("p", prompt(1), dict(PARAMS_OF_P))
        metadata = prefill.step()
        assert request.num_prompt_tokens == 1
        assert [group.blocks for group in metadata.new_pages[0].groups] == [(1,), ()]
        assert metadata.new_pages[0].last
        assert prefill.step(sent=["p"]).commands == (FinishPrefill("p", "t", True, "", sampled=7),)
        prefill.assert_idle()

    def test_prompt_logprobs_are_of_the_whole_prompt_and_its_state_is_not_sent(self, prefill: Stage) -> None:
        sampling = SamplingParams(
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=1,
            extra_args={"kv_transfer_params": dict(PARAMS_OF_P)},
        )
        request = Request("p", prompt(40), sampling, None, block_hasher=prefill._hasher)
        prefill.scheduler.add_request(request)
        assert [step.new_pages for step in run(prefill, "p")] == [(), ()]
        assert request.num_prompt_tokens == 40
        (finish,) = prefill.step(sent=["p"]).commands
        assert isinstance(finish, FinishPrefill)
        assert not finish.ok
        assert "prompt_logprobs" in finish.reason
        prefill.assert_idle()

    def test_a_preempted_prompt_is_cut_once_and_its_state_named_again(self, prefill: Stage) -> None:
        request = prefill.add("p", prompt(300), dict(PARAMS_OF_P))
        prefill.schedule()
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        output, metadata = prefill.schedule()
        assert metadata.preempted == ("t",)
        prefill.update(output)
        steps = [metadata, *run(prefill, "p")]
        assert request.num_prompt_tokens == 299
        full, state = named_blocks(*steps)
        assert (len(full), len(state)) == (10, 1)
        prefill.step()
        prefill.step(sent=["p"])
        prefill.assert_idle()

    @pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
    def test_shortened_prompt_equals_a_prompt_without_its_last_token(
        self, prefill: Stage, tokens: int
    ) -> None:
        def make(text: list[int]) -> Request:
            sampling = SamplingParams(max_tokens=9)
            return Request("p", text, sampling, None, block_hasher=prefill._hasher)

        cut, own = make(prompt(tokens)), make(prompt(tokens)[:-1])
        leave_last_token(cut)
        for attribute in ("block_hashes", "num_prompt_tokens", "num_tokens", "prompt_token_ids"):
            assert getattr(cut, attribute) == getattr(own, attribute)
        assert list(cut.all_token_ids) == list(own.all_token_ids)
        assert cut.max_tokens == 1

    def test_embeddings_are_cut_with_their_tokens(self, prefill: Stage) -> None:
        embeds = torch.zeros(4, 8)
        request = Request("p", [1, 2, 3, 4], SamplingParams(max_tokens=9), None)
        request.prompt_embeds, request.prompt_is_token_ids = embeds, [True, False, True, True]
        leave_last_token(request)
        assert (len(request.prompt_embeds), len(embeds)) == (3, 4)
        assert request.prompt_is_token_ids == [True, False, True]

    def test_prompt_counts_with_its_state_while_decode_has_no_room(self, stage: MakeStage) -> None:
        """Half of 99 blocks has room for two prompts of 22, and their states.

        A state takes one block, and one for each draft.
        """
        for drafts, room in ((0, 2), (3, 1)):
            state = replace(CACHED, num_speculative_blocks=drafts)
            prefill = stage("kv_producer", state=state, budget=2000)
            for name in ("a", "b", "c"):
                prefill.add(name, prompt(700, ord(name)), dict(PARAMS_OF_P, transfer_id=name))
            output, _ = prefill.schedule()
            assert len(output.num_scheduled_tokens) == room


class TestDecode:
    @both_modes
    @with_drafts
    @pytest.mark.parametrize("tokens", [2, 3, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 600])
    def test_the_state_goes_where_the_last_token_reads_it(
        self, stage: MakeStage, state: MambaSpec, drafts: int, tokens: int
    ) -> None:
        decode = stage("kv_consumer", state=replace(state, num_speculative_blocks=drafts))
        decode.add("d", prompt(tokens), dict(PARAMS_OF_D), max_tokens=3)
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        full, states = decode.tables("d")
        column = (tokens - 2) // state.block_size
        assert [block for block in states[: column + 1] if block] == [states[column]]
        assert (asked.groups[1].first, asked.groups[1].blocks) == (0, (states[column],))
        assert (asked.groups[0].first, asked.groups[0].blocks) == (0, tuple(full))
        assert asked.prompt_tokens == tokens
        assert asked.prompt_hash == prompt_hash(prompt(tokens))
        decode.update(output, received=["d"])
        output, _ = decode.schedule()
        assert output.num_scheduled_tokens == {"d": 1}
        assert decode.tables("d")[1][column] == states[column], "the step reads it there"
        decode.update(output)
        for _ in range(3):
            decode.step()
        decode.assert_idle()

    def test_a_prompt_of_one_token_is_computed_alone(self, decode: Stage) -> None:
        decode.add("d", prompt(1), dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        assert [type(command) for command in metadata.commands] == [ReleaseTransfer]
        assert output.num_scheduled_tokens == {"d": 1}
        decode.update(output)
        decode.step()

    @pytest.mark.parametrize("tokens", [4 * BLOCK + 2, 3 * BLOCK + 1])
    def test_attention_pages_that_are_here_are_not_loaded_with_the_state(
        self, decode: Stage, tokens: int
    ) -> None:
        """D has the pages of a shared beginning from another loaded prompt, but no state of it."""
        shared = 3 * BLOCK
        text = prompt(tokens)
        load(decode, [*text[:shared], *prompt(20, seed=9)], "first")
        asked = load(decode, text)
        # vLLM loads only if at least one token is left to load.
        local = shared if tokens - 1 > shared else shared - BLOCK
        assert asked.first_token == local
        assert asked.groups[0].first == local // BLOCK
        assert len(asked.groups[0].blocks) == -(-(tokens - 1) // BLOCK) - local // BLOCK
        assert len(asked.groups[1].blocks) == 1

    def test_with_the_state_here_too_nothing_is_loaded(self, decode: Stage) -> None:
        text = prompt(3 * BLOCK + 1)
        load(decode, text, "first")
        decode.add("d", text, dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        assert [type(command) for command in metadata.commands] == [ReleaseTransfer]
        assert output.num_scheduled_tokens == {"d": 1}
        decode.update(output)
        decode.step()

    def test_a_window_that_is_not_here_is_loaded_below_the_hit(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", FULL, SLIDING)
        text = prompt(5 * BLOCK + 9)
        load(decode, text, "first")
        pool = decode.scheduler.kv_cache_manager.block_pool
        find = decode.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit_per_group
        found, hits = find(hashes(decode, text), len(text) - 1)
        assert hits[:2] == (5 * BLOCK, 5 * BLOCK)
        pool.evict_blocks({block.block_id for block in found[1] if not block.is_null})
        asked = load(decode, text)
        assert (asked.first_token, asked.groups[0].first) == (5 * BLOCK, 5)
        # The last of 169 tokens attends to 105..168.
        assert asked.groups[1].first == 105 // BLOCK
        assert all(asked.groups[1].blocks)
        assert len(asked.groups[1].blocks) == 3
        decode.assert_idle()

    def test_vllm_zeroes_no_block_that_is_being_loaded(self, decode: Stage) -> None:
        decode.add("own", prompt(70, seed=2))
        decode.add("d", prompt(300), dict(PARAMS_OF_D), max_tokens=BLOCK)
        output, metadata = decode.schedule()
        loaded = {block for group in reservation(metadata).groups for block in group.blocks}
        own = set(decode.tables("own")[0])
        assert output.new_block_ids_to_zero is not None
        assert set(output.new_block_ids_to_zero) == own
        assert not loaded & own
        decode.update(output, received=["d"])
        while decode.scheduler.has_requests():
            output, _ = decode.schedule()
            assert not loaded & set(output.new_block_ids_to_zero or ())
            decode.update(output)

    def test_a_failed_load_does_not_go_on_from_pages_without_a_state(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", policy="recompute")
        text = prompt(4 * BLOCK + 2)
        load(decode, [*text[: 3 * BLOCK], *prompt(20, seed=9)], "first")
        request = decode.add("d", text, dict(PARAMS_OF_D))
        decode.step(received=["d"], failed=["d"])
        output, metadata = decode.schedule()
        assert metadata.commands == ()
        assert request.num_computed_tokens == output.num_scheduled_tokens["d"], "from the first token on"
        decode.update(output)
        while decode.scheduler.has_requests():
            decode.step()
        decode.assert_idle()


def hashes(stage: Stage, text: list[int]) -> list[Any]:
    return Request("h", text, SamplingParams(), None, block_hasher=stage._hasher).block_hashes


class TestHitsInsideBlocks:
    """``--prefix-match-unit``: hits of vLLM's prefix cache may end inside a block.

    vLLM gives a connector the hit up to the beginning of that block, and drops the rest of the hit if the
    connector has more.
    """

    UNIT = 8

    @pytest.fixture
    def engine(self, model: Path) -> Callable[[str], Stage]:
        def make(role: str) -> Stage:
            config = vllm_config(model, role)
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.prefix_match_unit = self.UNIT
            made = Stage(config, (FULL, CACHED))
            assert made.scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits
            return made

        return make

    @pytest.mark.parametrize("tail", [2 * UNIT, 3 * UNIT + 5], ids=["state too", "no state"])
    def test_load_begins_with_the_block_in_which_the_local_hit_ends(
        self, engine: Callable[[str], Stage], tail: int
    ) -> None:
        """The first prompt ends inside the fourth block. Its state is cached if it ends at a unit's end."""
        decode = engine("kv_consumer")
        begin = prompt(3 * BLOCK + tail + 1)
        load(decode, begin, "first")
        text = [*begin, *prompt(50, seed=9)]
        find = decode.scheduler.kv_cache_manager.get_computed_blocks_for_connector
        _, local, _, diverged = find(Request("h", text, SamplingParams(), None, block_hasher=decode._hasher))
        assert (local, diverged) == (3 * BLOCK + tail // self.UNIT * self.UNIT, tail % self.UNIT > 0)
        asked = load(decode, text)
        assert (asked.first_token, asked.groups[0].first) == (3 * BLOCK, 3)
        assert len(asked.groups[0].blocks) == -(-(len(text) - 1) // BLOCK) - 3
        assert len(asked.groups[1].blocks) == 1
        decode.assert_idle()

    def test_prompt_that_is_here_up_to_its_last_token_is_not_loaded(
        self, engine: Callable[[str], Stage]
    ) -> None:
        decode = engine("kv_consumer")
        text = prompt(3 * BLOCK + 2 * self.UNIT + 1)
        load(decode, text, "first")
        decode.add("d", text, dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        assert [type(command) for command in metadata.commands] == [ReleaseTransfer]
        assert output.num_scheduled_tokens == {"d": 1}
        decode.update(output)
        decode.step()
        decode.assert_idle()

    def test_prefill_engine_sends_its_copy_of_the_block_in_which_its_hit_ends(
        self, engine: Callable[[str], Stage]
    ) -> None:
        """vLLM copies that block at the beginning of the step, because the prompt goes on in it.

        The prefill engine computes all but the last token, and vLLM caches the last unit before that end.
        """
        prefill = engine("kv_producer")
        begin = prompt(3 * BLOCK + 2 * self.UNIT + 1)
        prefill.add("p", begin, dict(PARAMS_OF_P))
        run(prefill, "p")
        prefill.step()
        prefill.step(sent=["p"])
        text = [*begin, *prompt(50, seed=9)]
        prefill.add("q", text, dict(PARAMS_OF_P, transfer_id="q"))
        output, metadata = prefill.schedule()
        computed = output.scheduled_new_reqs[0].num_computed_tokens
        assert computed == 3 * BLOCK + self.UNIT
        copies = {copy.dst_block_id for copy in output.kv_cache_block_copies}
        assert prefill.tables("q")[0][3] in copies
        steps = [metadata]
        while not steps[-1].new_pages[0].last:
            prefill.update(output)
            output, metadata = prefill.schedule()
            steps.append(metadata)
        full, states = prefill.tables("q")
        prefill.update(output)
        named, state = named_blocks(*steps)
        assert named == dict(enumerate(full))
        assert list(state.values()) == [states[(len(text) - 2) // BLOCK]]
        prefill.step()
        prefill.step(sent=["q"])
        prefill.assert_idle()
