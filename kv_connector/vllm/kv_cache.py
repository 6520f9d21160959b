"""Where vLLM has put its pages: from its KV cache configuration to our layout and memory ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kv_connector.agent.agent import MemoryRange
from kv_connector.protocol.geometry import Place, opaque_page
from kv_connector.protocol.layout import GroupLayout, KvLayout, LayerLayout
from kv_connector.vllm.internals import UnsupportedConfiguration, block_tokens, group_kind


def kv_layout(kv_cache_config: Any, tensors: Mapping[str, Any]) -> tuple[KvLayout, tuple[MemoryRange, ...]]:
    """The layout of one rank's pages and the memory ranges that hold them, one per storage.

    ``tensors`` are vLLM's views by layer name, [kernel blocks, heads, tokens, content]. The addresses come
    from the configuration, which counts in the scheduler's blocks, and are checked against the views. Layers
    that only share another layer's pages are in ``tensors`` but not in the configuration, and so not in the
    layout.

    Raises UnsupportedConfiguration where a page is not one run of bytes.
    """
    order = [
        (name, group)
        for group, spec in enumerate(kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
    ]
    # The same on both sides; in a model without a drafter, about the order of the forward pass.
    order.sort(key=lambda layer: (_layer_index(layer[0]), layer[0]))
    places = _places(kv_cache_config.kv_cache_tensors)
    storages = [tensors[name].untyped_storage() for name, _ in order]
    memory = {storage.data_ptr(): MemoryRange(storage.data_ptr(), storage.nbytes()) for storage in storages}
    regions = {base: index for index, base in enumerate(memory)}
    layers = []
    for (name, group), storage in zip(order, storages, strict=True):
        tensor, base = tensors[name], storage.data_ptr()
        offset, block_stride = places[name]
        if tensor.data_ptr() != base + offset:
            raise UnsupportedConfiguration(
                f"layer {name} starts {tensor.data_ptr() - base} bytes into its KV cache storage, its "
                f"configuration says {offset}: kv-connector does not know this way of placing a KV cache."
            )
        layers.append(
            LayerLayout(
                name=name,
                group=group,
                format="",
                parts=opaque_page(
                    Place(regions[base], offset, block_stride),
                    _page_bytes(name, tensor, kv_cache_config.num_blocks, block_stride),
                ),
            )
        )
    groups = tuple(
        GroupLayout(
            kv_cache_config.num_blocks, block_tokens(group.kv_cache_spec), group_kind(group.kv_cache_spec)
        )
        for group in kv_cache_config.kv_cache_groups
    )
    return KvLayout(groups, tuple(layers)), tuple(memory.values())


def _layer_index(name: str) -> tuple[int, ...]:
    """(3,) of `model.layers.3.self_attn.attn`, (3, 1) of the second attention module of LongCat's layer 3."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _places(kv_cache_tensors: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """(offset of block 0, block stride) in bytes by layer name."""
    return {
        name: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }


def _page_bytes(name: str, tensor: Any, num_blocks: int, block_stride: int) -> int:
    """Bytes of one scheduler block in this layer, which must lie in one piece.

    An attention backend may split a scheduler block into several kernel blocks: the view then has that many
    more.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedConfiguration(
            f"WriteImmConnector moves KV caches in CPU and CUDA memory; this one is on {tensor.device}."
        )
    blocks, *shape = tensor.shape
    kernel_stride, *strides = tensor.stride()
    kernel_page = math.prod(shape)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    split, rest = divmod(blocks, num_blocks)
    if rest or span != kernel_page or kernel_stride * split * tensor.element_size() != block_stride:
        raise UnsupportedConfiguration(
            f"layer {name} stores its KV cache as {tuple(tensor.shape)} with strides {tensor.stride()}: "
            f"a page is not one run of bytes. Set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC."
        )
    if split > 1 and kernel_stride != kernel_page:
        raise UnsupportedConfiguration(
            f"layer {name} splits each block into {split} kernel blocks with gaps between them. "
            f"Lower --block-size to the attention backend's own."
        )
    return int(kernel_page * split * tensor.element_size())
