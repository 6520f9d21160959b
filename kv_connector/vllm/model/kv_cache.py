"""kv_layout: translates vLLM's KV cache configuration into this project's layout and memory ranges.

A part of a page is described only as far as two engines that divide it differently can be sure of it. If each
token of a head has separate bytes, heads and tokens are described. If a kernel packs the tokens of a block,
only heads are. If nothing but the length is known, the page is described as a whole. Other engines can take
only parts that are described. The planner reports what does not fit, from both sides' layouts.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.agent.config import PageMemory
from kv_connector.protocol.pages.geometry import (
    Place,
    Units,
    in_kernel_blocks,
    latent,
    opaque_page,
    units_of_rank,
    vector_planes,
)
from kv_connector.protocol.pages.layout import Axis, GroupLayout, KvLayout, LayerLayout, Part
from kv_connector.vllm.internals import (
    CircularBufferSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    get_kv_quant_mode,
)
from kv_connector.vllm.model.configuration import UnsupportedConfiguration
from kv_connector.vllm.model.model_facts import (
    block_tokens,
    element_type,
    group_kind,
    kv_heads,
    kv_scales,
    layer_module,
    layer_spec,
)
from kv_connector.vllm.model.recurrent_pages import state_pages

# Backends whose pages hold K and then V for each head and token, in separate bytes. Their pages have the head
# slots of vLLM's view. Some backends have other pages in some modes.
_PLAIN = {
    *("FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_ATTN_DIFFKV"),
    *("AMX_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA"),
    *("FLASHINFER_MLA_SPARSE", "FLASHMLA", "FLASHMLA_SPARSE", "TOKENSPEED_MLA", "TRITON_MLA"),
}
# Quantizations of these pages. The scales belong to the layer, or lie behind the numbers of each head and
# token.
_PLAIN_MODES = {
    *("NONE", "FP8_PER_TENSOR"),
    *("FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD"),
}

# The packings of CPU_ATTN that keep a plane of K and one of V for each head.
_PLANES = {"vec", "vec16"}

Pages = tuple[str, tuple[Part, ...]]  # a layer's format, and its parts


def kv_layout(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], rank: int
) -> tuple[KvLayout, tuple[PageMemory, ...]]:
    """Returns the layout of one rank's pages and the memory ranges that hold them, one for each storage.

    ``tensors``: vLLM's views by layer name, [kernel blocks, heads, tokens, content]. The addresses are
    computed from the configuration, which counts in the scheduler's blocks, and are checked against the
    views. A layer that only shares another layer's pages is in ``tensors`` but not in the configuration, and
    so not in the layout. ``rank``: the rank of tensor parallelism. All its ranks call this at the same time.

    Call it after vLLM has chosen its attention backends. Raises UnsupportedConfiguration for pages that
    cannot be described.
    """
    order = [
        (name, group)
        for group, spec in enumerate(kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
    ]
    # The order is the same on both sides. In a model without a drafter it is about the order of the forward
    # pass.
    order.sort(key=lambda layer: (_layer_index(layer[0]), layer[0]))
    places = _places(kv_cache_config.kv_cache_tensors)
    storages = [tensors[name].untyped_storage() for name, _ in order]
    memory = {storage.data_ptr(): PageMemory(storage.data_ptr(), storage.nbytes()) for storage in storages}
    regions = {base: index for index, base in enumerate(memory)}
    scales = kv_scales(vllm_config, [name for name, _ in order])
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layers = []
    for (name, group), storage in zip(order, storages, strict=True):
        tensor, base = tensors[name], storage.data_ptr()
        offset, block_stride = places[name]
        _check_device(tensor)
        if tensor.data_ptr() != base + offset:
            raise UnsupportedConfiguration(
                f"layer {name} starts {tensor.data_ptr() - base} bytes into its KV cache storage, but its "
                f"configuration says {offset}: kv-connector does not support this placement of a KV cache."
            )
        spec = layer_spec(kv_cache_config.kv_cache_groups[group], name)
        module = layer_module(vllm_config, name)
        place = Place(regions[base], offset, block_stride)
        view = _View.of(name, tensor, kv_cache_config.num_blocks, block_stride)
        if isinstance(spec, MambaSpec):
            pages = state_pages(spec, module, place, (rank, ranks), tensor.device.type)
        elif isinstance(spec, CircularBufferSpec):
            pages = _ring_pages(name, spec, module, place, view, (rank, ranks))
        else:
            total = kv_heads(vllm_config, spec.num_kv_heads)
            units = None if total is None else units_of_rank(total, rank, ranks)
            numbers = element_type(module, spec) + _scales(scales[name])
            pages = _attention_pages(name, spec, module, place, view, units, (rank, ranks), numbers)
        layers.append(LayerLayout(name, group, *pages, needed=not of_drafter(vllm_config, name)))
    groups = tuple(
        GroupLayout(
            kv_cache_config.num_blocks, block_tokens(group.kv_cache_spec), group_kind(group.kv_cache_spec)
        )
        for group in kv_cache_config.kv_cache_groups
    )
    return KvLayout(groups, tuple(layers)), tuple(memory.values())


@dataclass(frozen=True)
class _View:
    """The first kernel block of a layer's first page, as a kernel sees it: [heads, tokens, content].

    Strides are in bytes.
    """

    splits: int  # kernel blocks of a page
    split_stride: int
    heads: int
    tokens: int  # states, if several tokens share one
    content: int  # bytes of one token of one head
    head_stride: int
    token_stride: int

    @staticmethod
    def of(name: str, tensor: Any, num_blocks: int, block_stride: int) -> _View:
        """Makes the view of a layer.

        Raises UnsupportedConfiguration if tensor and configuration do not match. An attention backend may
        split a scheduler block into several kernel blocks. The view then has that many times more blocks.
        """
        element = tensor.element_size()
        blocks, heads, tokens, content = tensor.shape
        split_stride, head_stride, token_stride, content_stride = (n * element for n in tensor.stride())
        splits, rest = divmod(blocks, num_blocks)
        if rest or split_stride * splits != block_stride or (content > 1 and content_stride != element):
            raise UnsupportedConfiguration(
                f"layer {name} stores its KV cache as {tuple(tensor.shape)} with strides {tensor.stride()}, "
                f"but its configuration has {num_blocks} blocks every {block_stride} bytes. kv-connector "
                "does not support this placement. Set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC."
            )
        return _View(
            splits, split_stride, heads, tokens, content * element, max(1, head_stride), max(1, token_stride)
        )

    @property
    def axes(self) -> list[tuple[str, int, int]]:
        """Name, count and stride of heads and tokens, the wider steps first."""
        axes = [("heads", self.heads, self.head_stride), ("tokens", self.tokens, self.token_stride)]
        return sorted((axis for axis in axes if axis[1] > 1), key=lambda axis: -axis[2])

    @property
    def nbytes(self) -> int:
        return self.heads * self.tokens * self.content

    @property
    def in_one_piece(self) -> bool:
        return self.nbytes == self.content + sum((count - 1) * stride for _, count, stride in self.axes)

    @property
    def heads_in_one_piece(self) -> bool:
        """Whether the page is one piece in which each head is one piece."""
        return self.in_one_piece and (self.tokens == 1 or self.token_stride == self.content)

    def divided(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Returns the parts of the whole page, from the parts of the first kernel block."""
        return parts if self.splits == 1 else in_kernel_blocks(parts, self.splits, self.split_stride)


def _attention_pages(
    name: str,
    spec: Any,
    module: Any,
    place: Place,
    view: _View,
    units: Units | None,
    rank: tuple[int, int],
    numbers: str,
) -> Pages:
    """Returns format and parts of an attention layer's pages.

    ``units``: the model's KV heads on this rank, None if unknown. ``numbers``: describes the elements of the
    pages.
    """
    backend = module.get_attn_backend().get_name()
    latents = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    holder = _own(spec, rank) if latents else rank
    usual = (
        spec.num_head_slots is None
        and spec.num_kv_heads == view.heads
        and spec.block_size == view.splits * view.tokens * spec.tokens_per_state
    )
    if spec.tokens_per_state != 1:
        numbers += f", {spec.tokens_per_state} tokens a state"
    # When vLLM merges the specs of a group, a window of latents loses its mode. The layer keeps the mode.
    modes = {spec.kv_quant_mode.name, get_kv_quant_mode(getattr(module, "kv_cache_dtype", "auto")).name}
    plain = usual and backend in _PLAIN and modes <= _PLAIN_MODES
    if latents:
        if plain and view.in_one_piece and holder is None:
            parts = latent(place, view.tokens, view.content)
            return f"{numbers}, a latent of {spec.head_size}", view.divided(parts)
    elif units is not None:
        numbers += f", {spec.head_size} + {spec.head_size_v} a head"
        if plain:
            heads = Axis("shard", view.heads, view.head_stride)
            tokens = Axis("token", view.tokens, view.token_stride)
            return numbers, view.divided((place.part("kv", [heads, tokens], view.content, units),))
        if usual and backend == "CPU_ATTN" and view.heads_in_one_piece:
            return _cpu_pages(spec, module, place, view, units, numbers)
    return _whole_pages(
        name, place, view, f"{numbers} of {backend}{_kernel_pages(spec, module, view)}", holder
    )


def _kernel_pages(spec: Any, module: Any, view: _View) -> str:
    """Returns a description of the kernel's pages within a page of a compressed cache, or "".

    vLLM shows connectors whole blocks, and binds smaller pages to the layer. Their size depends on the GPU.
    Some kernels keep the keys of a page before its scales.
    """
    bound = getattr(module, "kv_cache", None)
    if spec.tokens_per_state == 1 or not isinstance(bound, torch.Tensor) or bound.dim() < 2:
        return ""
    stride = bound.stride(0) * bound.element_size()
    return "" if stride == view.split_stride else f" in kernel pages of {stride} bytes"


def _own(spec: Any, rank: tuple[int, int]) -> tuple[int, int] | None:
    """Returns None if vLLM declares the pages equal on all ranks, else ``rank``, which has its own pages.

    vLLM treats pages without a declaration as divided among the ranks.
    """
    return None if spec.max_tp_shards == 1 else rank


def _ring_pages(name: str, spec: Any, module: Any, place: Place, view: _View, rank: tuple[int, int]) -> Pages:
    """Returns the pages of a ring: the keys of the tokens that are not compressed yet, by position.

    A key's place is its position modulo the ring's length, so rings of two lengths differ everywhere.
    """
    numbers = f"a ring of {element_type(module, spec)} for {module.get_attn_backend().get_name()}"
    if view.splits != 1:
        raise UnsupportedConfiguration(
            f"layer {name} divides its ring buffer into {view.splits} kernel blocks. kv-connector does not "
            "know the order of their keys. Use another attention backend."
        )
    return _whole_pages(name, place, view, numbers, _own(spec, rank))


def _cpu_pages(spec: Any, module: Any, place: Place, view: _View, units: Units, numbers: str) -> Pages:
    """Returns the pages of CPU_ATTN: a part for each head, in the packing of the kernel."""
    numbers += f", {module.isa} on {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if module.isa in _PLANES and spec.head_size == spec.head_size_v:
        element = view.content // (2 * spec.head_size)
        return numbers, view.divided(vector_planes(place, units, view.tokens, spec.head_size, element))
    head = view.tokens * view.content
    heads = place.part("kv", [Axis("shard", view.heads, head)], head, units)
    return f"{numbers} in blocks of {view.tokens}", view.divided((heads,))


def _whole_pages(name: str, place: Place, view: _View, numbers: str, holder: tuple[int, int] | None) -> Pages:
    """Returns pages that are described as a whole.

    ``holder``: (rank, ranks) if each rank has different pages. None: all ranks have the same pages.
    """
    sizes = " x ".join(f"{count} {what}" for what, count, _ in view.axes)
    if not view.in_one_piece:
        raise UnsupportedConfiguration(
            f"layer {name} stores a page ({numbers}, {sizes}) in several pieces, and kv-connector does not "
            "know their order. Set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC."
        )
    ranks = "" if holder is None else f", each rank of {holder[1]} its own"
    parts = opaque_page(place, view.nbytes, holder)
    return f"{numbers}, whole pages of {sizes} x {view.content} bytes{ranks}", view.divided(parts)


def _scales(scales: Sequence[Sequence[float]]) -> str:
    """Returns a description of the scales of K and V. Empty: the cache is not quantized."""
    if not scales:
        return ""
    if all(len(one) == 1 for one in scales):
        return f" times {', '.join(str(one[0]) for one in scales)}"
    digest = hashlib.blake2b(repr(scales).encode(), digest_size=8).hexdigest()
    return f" times {max(map(len, scales))} scales each (digest {digest})"


def _check_device(tensor: Any) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedConfiguration(
            f"WriteImmConnector transfers KV caches in CPU and CUDA memory; this one is on {tensor.device}."
        )


def of_drafter(vllm_config: Any, name: str) -> bool:
    """Returns whether the layer belongs to a drafter.

    vLLM numbers a drafter's layers behind the model's own layers, or gives their names another prefix.
    """
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if drafter is None:
        return False
    own = vllm_config.model_config.hf_text_config.num_hidden_layers
    return name.startswith("draft_model.") or _layer_index(name)[:1] >= (own,)


def _layer_index(name: str) -> tuple[int, ...]:
    """Returns the numbers in a layer's name.

    They are (3,) for `model.layers.3.self_attn.attn`, and (3, 1) for the second attention module of LongCat's
    layer 3.
    """
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _places(kv_cache_tensors: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Returns the offset of block 0 and the block stride, in bytes, by layer name."""
    return {
        name: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
