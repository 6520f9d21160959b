"""LastBlocks: which blocks D clears before it loads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm_pages import caches, name
from vllm_stage import ADDRESS, BLOCK, FULL, model, vllm_config

from kv_connector.protocol.pages.layout import GroupTarget
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.vllm.model.last_block import LastBlocks

__all__ = ["model"]

STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((2, 512),),
    dtypes=(torch.float32,),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


@pytest.fixture
def config(model: Path) -> Any:
    return vllm_config(model, "kv_consumer")


def load(tokens: int, *blocks: tuple[int, ...]) -> DecodeRequest:
    """Loads ``tokens`` tokens. The prompt has one more, which D computes."""
    groups = tuple(GroupTarget(0, table) for table in blocks)
    return DecodeRequest("d", "t", ADDRESS, tokens + 1, 0, None, groups)


def emptied(config: Any, groups: list[KVCacheGroupSpec], request: DecodeRequest, splits: int = 1) -> set[int]:
    """Returns the blocks that held something before the load and hold nothing after it.

    The groups share their memory.
    """
    kernel_blocks = [group.kv_cache_spec.block_size // splits for group in groups]
    cache, tensors = caches(config, groups, kernel_blocks=kernel_blocks)
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(7)
    LastBlocks(cache, tensors).clear(request)
    pages = tensors[groups[-1].layer_names[0]].reshape(cache.num_blocks, -1).contiguous()
    contents = [set(page.view(torch.uint8).tolist()) for page in pages]
    assert all(len(content) == 1 for content in contents)
    return {block for block, content in enumerate(contents) if content == {0}}


def test_the_last_block_beside_states_is_emptied_if_the_prompt_does_not_fill_it(config: Any) -> None:
    groups = [KVCacheGroupSpec([name(0)], STATE), KVCacheGroupSpec([name(1)], FULL)]
    assert emptied(config, groups, load(BLOCK + 5, (4,), (2, 3))) == {3}
    # The block has only the prompt's last token, as its first.
    assert emptied(config, groups, load(BLOCK, (4,), (2, 3))) == {3}
    for full in (load(2 * BLOCK, (4,), (2, 3)), load(BLOCK + 5, (4,), ()), load(5, (4,), (0,))):
        assert emptied(config, groups, full) == set()


def test_a_block_of_several_kernel_blocks_is_emptied_as_a_whole(config: Any) -> None:
    """Two precisions share the blocks here."""
    groups = [KVCacheGroupSpec([name(0)], FULL), KVCacheGroupSpec([name(1)], replace(FULL))]
    request = load(BLOCK + 5, (1, 4), (2, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCacheConfig, "has_mixed_precision_kv_cache", property(lambda _: True))
        assert emptied(config, groups, request, splits=2) == {4, 3}


def test_no_block_is_emptied_when_vllm_zeroes_no_blocks(config: Any) -> None:
    layers = [KVCacheGroupSpec([name(0)], FULL), KVCacheGroupSpec([name(1)], replace(FULL))]
    assert emptied(config, layers, load(BLOCK + 5, (1, 4), (2, 3))) == set()
