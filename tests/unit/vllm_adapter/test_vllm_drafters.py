"""Speculative decoding: the drafter's KV cache travels with the model's, in uniform and in hybrid models.

The model decides on each token, whatever is drafted. Only the speed depends on a drafter's pages.
"""

from pathlib import Path

import pytest
from test_vllm_kv_cache import assert_runs_are_the_tensors
from test_vllm_scheduler import named_blocks, reservation
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm_pages import make_rank, name
from vllm_stage import (
    BLOCK,
    FULL,
    PARAMS_OF_D,
    PARAMS_OF_P,
    SLIDING,
    WINDOW,
    Stage,
    get_kv_cache_groups,
    model,
    prompt,
    vllm_config,
)

from kv_connector.vllm.model.configuration import check_configuration

__all__ = ["model"]

UNIFORM, HYBRID = [FULL, FULL], [FULL, SLIDING, FULL]
both_kinds_of_model = pytest.mark.parametrize("specs", [UNIFORM, HYBRID], ids=["uniform", "hybrid"])


@both_kinds_of_model
def test_its_layers_are_moved_like_any_other(model: Path, specs: list[KVCacheSpec]) -> None:
    """vLLM groups the layers, and marks a group as the drafter's if there are several groups."""
    config = vllm_config(model, "kv_both", drafter="eagle")
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = get_kv_cache_groups(config, {name(layer): spec for layer, spec in enumerate(specs)})
    groups[-1].is_eagle_group = len(groups) > 1  # as vLLM marks the drafter's group
    check_configuration(config, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups))
    rank = make_rank(config, groups)
    assert [layer.name for layer in rank.layout.layers] == [name(layer) for layer in range(len(specs))]
    assert_runs_are_the_tensors(rank)


@both_kinds_of_model
@pytest.mark.parametrize("drafter", ["eagle", "draft_model"])
@pytest.mark.parametrize("cached", [0, 3 * BLOCK])
def test_decode_requests_all_but_the_last_token_and_prefill_has_them(
    model: Path, specs: list[KVCacheSpec], drafter: str, cached: int
) -> None:
    """The drafter's KV of a token depends on the next token, which P knows for all that it sends.

    D drafts behind the prompt, in blocks that it takes once the pages are here.
    """
    specs = specs[:2] if specs is HYBRID else specs[:1]
    prefill = Stage(vllm_config(model, "kv_producer", drafter=drafter), specs)
    decode = Stage(vllm_config(model, "kv_consumer", drafter=drafter), specs)
    for tokens in (cached + 2, 2 * WINDOW, 2 * WINDOW + 1, 2 * WINDOW + 2, 250, 600):
        text = prompt(tokens, seed=tokens)
        if cached:
            decode.add("first", text[: cached + 1])
            decode.step()
            decode.step()
        prefill.add("p", text, dict(PARAMS_OF_P))
        named = named_blocks(*(prefill.step() for _ in range(-(-tokens // 256))))
        decode.add("d", text, dict(PARAMS_OF_D))
        output, metadata = decode.schedule()
        asked = reservation(metadata)
        if cached:
            # vLLM drops the last block of a hit: the drafter's KV of the block's last token was made with
            # another next token.
            assert asked.first_token == cached - (BLOCK if drafter == "eagle" else 0)
        for index, target in enumerate(asked.groups):
            oldest = max(asked.first_token, tokens - WINDOW if index else 0)
            wanted = {i for i, block in enumerate(target.blocks, target.first) if block}
            assert {token // BLOCK for token in range(oldest, tokens - 1)} <= wanted <= named[index].keys()
            assert target.first + len(target.blocks) == -(-(tokens - 1) // BLOCK)
        decode.update(output, received=["d"])
        drafting, _ = decode.schedule()
        # The last token, and three drafts that are still to be made.
        assert drafting.num_scheduled_tokens == {"d": 4}
        assert all(len(table) * BLOCK >= tokens + 3 for table in decode.tables("d"))
        decode.update(drafting)
        decode.step()
        prefill.step()
        prefill.step(sent=["p"])
        prefill.assert_idle()
        decode.assert_idle()
