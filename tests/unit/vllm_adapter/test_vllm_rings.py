"""Compressed caches, windows of latents and rings under vLLM's scheduler: P's names and D's targets."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_scheduler import named_blocks, reservation
from test_vllm_state_requests import load, run
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)
from vllm_stage import BLOCK, PARAMS_OF_D, PARAMS_OF_P, Stage, model, prompt, vllm_config

from kv_connector.vllm.model.model_facts import hit_tokens
from kv_connector.vllm.scheduling.block_tables import BlockTables
from kv_connector.vllm.scheduling.transferred_blocks import blocks_of

__all__ = ["model"]

PER_STATE = 4
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
COMPRESSED = MLAAttentionSpec(block_size=BLOCK, tokens_per_state=PER_STATE, **LATENT)
# The keys of the groups that are not compressed yet: with an overlap of one group, 8 tokens.
OPEN = 2 * PER_STATE
WINDOW = SlidingWindowMLASpec(block_size=PER_STATE, sliding_window=OPEN, **LATENT)
RING = CircularBufferSpec(block_size=OPEN, **LATENT)
LENGTHS = [2, 3, OPEN, OPEN + 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 600]

MakeStage = Callable[..., Stage]


@pytest.fixture
def stage(model: Path) -> MakeStage:
    def make(role: str, *specs: Any) -> Stage:
        return Stage(vllm_config(model, role), specs, 400)

    return make


class TestWindows:
    """DeepSeek-V4's caches: one state for several tokens, and the window from which it is made."""

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_prefill_engine_names_every_compressed_block_and_the_window(
        self, stage: MakeStage, tokens: int
    ) -> None:
        prefill = stage("kv_producer", COMPRESSED, WINDOW)
        prefill.add("p", prompt(tokens), dict(PARAMS_OF_P))
        compressed, window = named_blocks(*run(prefill, "p"))
        assert list(compressed) == [*range(-(-tokens // BLOCK))]
        # The last token attends to itself and the tokens before it. D computes that token again.
        first = max(0, tokens - OPEN)
        needed = range(first // PER_STATE, -(-tokens // PER_STATE))
        assert {*needed} <= {*window}
        assert all(window[logical] for logical in needed)
        prefill.step()
        prefill.step(sent=["p"])
        prefill.assert_idle()

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_decode_engine_loads_the_window_of_the_last_token(self, stage: MakeStage, tokens: int) -> None:
        decode = stage("kv_consumer", COMPRESSED, WINDOW)
        asked = load(decode, prompt(tokens))
        compressed, window = asked.groups
        assert len(compressed.blocks) == -(-(tokens - 1) // BLOCK)
        first = max(0, tokens - OPEN)
        assert window.needed == first
        used = {logical for logical, block in enumerate(window.blocks, window.first) if block}
        assert {*range(first // PER_STATE, -(-(tokens - 1) // PER_STATE))} <= used
        decode.assert_idle()

    def test_shared_beginning_is_loaded_once_if_its_window_is_here(self, stage: MakeStage) -> None:
        decode = stage("kv_consumer", COMPRESSED, WINDOW)
        text = prompt(4 * BLOCK + 1)
        load(decode, text, "first")
        asked = load(decode, [*text[: 4 * BLOCK], *prompt(30, seed=9)])
        assert asked.first_token == 4 * BLOCK
        assert asked.groups[0].first == 4
        decode.assert_idle()

    def test_worker_and_scheduler_have_one_hit_unit(self, model: Path) -> None:
        """A worker's group has a spec for each layer: the latents of DeepSeek-V4 and of its indexer."""
        indexer = replace(COMPRESSED, head_size=32)
        of_layers = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": COMPRESSED, "b": indexer})
        groups = [KVCacheGroupSpec(["a", "b"], of_layers), KVCacheGroupSpec(["c"], WINDOW)]
        of_worker = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups)
        config = vllm_config(model, "kv_both")
        of_scheduler = generate_scheduler_kv_cache_config([of_worker])
        assert hit_tokens(config, of_worker) == hit_tokens(config, of_scheduler) == BLOCK


class TestRings:
    """DeepSeek-V4.1, Qwen4, GLM-5-next and Step5: a ring of the keys that are not compressed yet."""

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_ring_before_the_last_token_goes_with_the_last_chunk(self, stage: MakeStage, tokens: int) -> None:
        prefill = stage("kv_producer", COMPRESSED, RING)
        request = prefill.add("p", prompt(tokens), dict(PARAMS_OF_P), max_tokens=40)
        computed = 0
        while not request.is_finished():
            output, metadata = prefill.schedule()
            computed += output.num_scheduled_tokens["p"]
            (new,) = metadata.new_pages
            (ring,) = prefill.tables("p")[1]
            assert new.last == (computed == tokens - 1)
            assert (new.groups[1].first, new.groups[1].blocks) == (0, (ring,) if new.last else ())
            prefill.update(output)
        assert computed == tokens - 1, "the ring has no key of the token that D computes"
        held = prefill.scheduler.kv_cache_manager.block_pool.blocks[ring]
        assert held.ref_cnt == 1
        prefill.step()
        assert held.ref_cnt == 1, "until it is sent"
        prefill.step(sent=["p"])
        prefill.assert_idle()

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_decode_engine_loads_the_ring_whatever_the_length(self, stage: MakeStage, tokens: int) -> None:
        decode = stage("kv_consumer", COMPRESSED, RING)
        decode.add("d", prompt(tokens), dict(PARAMS_OF_D), max_tokens=3)
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        compressed, (ring,) = decode.tables("d")
        assert (asked.groups[0].first, asked.groups[0].blocks) == (0, tuple(compressed))
        assert (asked.groups[1].first, asked.groups[1].blocks) == (0, (ring,))
        decode.update(output, received=["d"])
        output, _ = decode.schedule()
        assert output.num_scheduled_tokens == {"d": 1}
        decode.update(output)
        for _ in range(3):
            decode.step()
        decode.assert_idle()

    def test_ring_is_loaded_with_the_tokens_behind_a_local_hit(self, stage: MakeStage) -> None:
        """A ring is in no prefix cache. At the end of a block no key is open."""
        decode = stage("kv_consumer", COMPRESSED, RING)
        text = prompt(4 * BLOCK + 6)
        load(decode, text, "first")
        asked = load(decode, [*text[: 4 * BLOCK], *prompt(30, seed=9)])
        assert asked.first_token == 4 * BLOCK
        assert (asked.groups[0].first, len(asked.groups[1].blocks)) == (4, 1)
        decode.assert_idle()

    def test_prefill_engine_sends_its_ring_after_a_local_hit(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", COMPRESSED, RING)
        for number, cached in enumerate((0, 3 * BLOCK)):
            request = prefill.add("p", prompt(4 * BLOCK), dict(PARAMS_OF_P))
            output, metadata = prefill.schedule()
            assert request.num_computed_tokens - output.num_scheduled_tokens["p"] == cached
            prefill.update(output)
            pages, ring = named_blocks(metadata, *run(prefill, "p"))
            assert (len(pages), list(ring)) == (4, [0]), number
            prefill.step()
            prefill.step(sent=["p"])
            prefill.assert_idle()

    def test_prompt_of_one_token_has_no_ring(self, stage: MakeStage) -> None:
        prefill = stage("kv_producer", COMPRESSED, RING)
        prefill.add("p", prompt(1), dict(PARAMS_OF_P))
        assert [group.blocks for group in prefill.step().new_pages[0].groups][1] == ()
        prefill.step(sent=["p"])
        prefill.assert_idle()

    def test_held_prompts_count_their_ring(self, stage: MakeStage) -> None:
        side = stage("kv_producer", COMPRESSED, RING)
        blocks = BlockTables(side.scheduler.kv_cache_manager)
        assert blocks_of(blocks, (BLOCK, 0), 3 * BLOCK + 1) == 4 + 1
