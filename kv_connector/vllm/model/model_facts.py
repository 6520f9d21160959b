"""Facts of the model and of its KV cache, from vLLM's configuration, specs and layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kv_connector.protocol.session.fingerprint import engine_fingerprint, model_identity
from kv_connector.protocol.wire.messages import Fingerprint
from kv_connector.vllm.internals import (
    VLLM_VERSION,
    CircularBufferSpec,
    KVCacheSpecKind,
    MambaSpec,
    SlidingWindowSpec,
    current_platform,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_spec_kind,
    get_tp_group,
    is_quantized_kv_cache,
    iter_layer_specs,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)

# Parts of the keys by which models' configurations name their numbers of KV heads.
_KV_HEADS = ("kv_heads", "key_value_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")


def rank_fingerprint(vllm_config: Any) -> Fingerprint:
    """Returns the fingerprint that peers compare, in addition to the layouts."""
    model = vllm_config.model_config
    identity = model_identity(model.architectures, model.hf_text_config.to_dict())
    return engine_fingerprint(f"vllm {VLLM_VERSION}", identity, str(model.dtype))


def block_tokens(kv_cache_spec: Any) -> int:
    """Returns the tokens in a block of a KV cache group, or 0 for recurrent states and rings.

    A block of recurrent states is a row. A request has one, the state after its last token, at any place in
    the request's table. A ring is a row too: each request has one, whose content depends on its last token.
    """
    if get_kv_cache_spec_kind(kv_cache_spec) is KVCacheSpecKind.MAMBA or _is_ring(kv_cache_spec):
        return 0
    return int(kv_cache_spec.block_size)


def hashed_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the tokens of a block that vLLM hashes."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hit_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the tokens in whose multiples vLLM finds prompts in its prefix cache.

    If groups have blocks of several sizes, this is mostly the least common multiple of the sizes. Hashes are
    of blocks as large as their greatest common divisor, so that they fit each group.
    """
    # A worker's group can have a spec for each layer, for which vLLM has no manager. The scheduler's has one.
    scheduled = generate_scheduler_kv_cache_config([kv_cache_config])
    sizes = resolve_kv_cache_block_sizes(scheduled, vllm_config)
    return int(resolve_cache_hit_alignment_tokens(scheduled, vllm_config, *sizes))


def kv_cache_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the tokens for which the KV cache has room, as vLLM logs at its start.

    The number is for requests of the longest length. If groups keep a window or one state, it is more than
    blocks times their size.
    """
    return int(get_kv_cache_capacity(vllm_config, kv_cache_config)[0])


def keeps_answers(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Returns whether vLLM's prefix cache keeps what the engine generates, and not prompts alone.

    By default vLLM caches a sliding window only where a prompt ends. A hit needs the window in front of it.
    """
    if vllm_config.cache_config.prefix_cache_retention_interval != 0:
        return True
    specs = (
        spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)
    )
    return not any(isinstance(spec, SlidingWindowSpec) for spec in specs)


def retained_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Returns the least value of ``--prefix-cache-retention-interval`` with which answers are kept."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[0])


def group_kind(kv_cache_spec: Any) -> str:
    """Returns the kind of attention of a KV cache group, with its window.

    It decides which blocks a request keeps.
    """
    spec = next(iter(iter_layer_specs(kv_cache_spec)))
    if isinstance(spec, MambaSpec):
        return "recurrent state"  # each layer describes the kind of its state
    if isinstance(spec, CircularBufferSpec):
        return "ring of open keys"
    kind: str = get_kv_cache_spec_kind(kv_cache_spec).value
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    # A drafter of several MTP modules reads a few tokens behind the window.
    behind = getattr(spec, "extra_retained_tokens", 0)
    return f"{kind} {window + behind}" if window else kind


def _is_ring(kv_cache_spec: Any) -> bool:
    return any(isinstance(spec, CircularBufferSpec) for spec in iter_layer_specs(kv_cache_spec))


def layer_spec(group: Any, name: str) -> Any:
    """Returns vLLM's spec of one layer's pages. The layers of a group may have pages of several sizes."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


def layer_module(vllm_config: Any, name: str) -> Any:
    """Returns the layer that writes the pages. It has vLLM's choices for them as attributes."""
    return vllm_config.compilation_config.static_forward_context[name]


def kv_heads(vllm_config: Any, of_rank: int) -> int | None:
    """Returns the KV heads of the whole model in a layer with ``of_rank`` heads on each rank. None: unknown.

    The layer does not know the number. The model's configuration has it, or has several, if its layers differ
    or a drafter has its own. The right number is the only one that results in ``of_rank``.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return of_rank
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    said = {
        heads
        for model in (vllm_config.model_config, drafter)
        if model is not None
        for heads in (
            model.get_total_num_kv_heads(),
            *_head_counts([model.hf_text_config.to_dict(), model.model_arch_config.per_layer_overrides]),
        )
    }
    fitting = [
        heads
        for heads in said
        if heads > 0 and max(1, heads // ranks) == of_rank and 0 in (heads % ranks, ranks % heads)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _head_counts(config: Any) -> Iterator[int]:
    """Yields all numbers of KV heads in a model's configuration, for whatever purpose."""
    if isinstance(config, dict):
        for key, value in config.items():
            if isinstance(value, int) and any(name in str(key) for name in _KV_HEADS):
                yield value
            yield from _head_counts(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _head_counts(value)


def element_type(layer: Any, spec: Any) -> str:
    """Returns the element type of a layer's pages, with its quantization."""
    name: str = getattr(layer, "kv_cache_dtype", "auto")
    if name in ("fp8", "fp8_e4m3"):
        return str(current_platform.fp8_dtype()).removeprefix("torch.")
    return name if is_quantized_kv_cache(name) else str(spec.dtype).removeprefix("torch.")


def kv_scales(vllm_config: Any, layer_names: Sequence[str]) -> dict[str, tuple[tuple[float, ...], ...]]:
    """Returns the k and v scales of each layer's quantized pages. Layers have them from the checkpoint, or 1.

    Each is one value, or one for each head. They cover the heads of all ranks, so that they do not depend on
    the number of ranks. All ranks call this at the same time.
    """
    layers = [layer_module(vllm_config, name) for name in layer_names]
    own = [_scales(layer) for layer in layers]
    ranks = vllm_config.parallel_config.tensor_parallel_size
    everyones: list[Any] = [own] * ranks
    if ranks > 1 and any(own):
        torch.distributed.all_gather_object(everyones, own, group=get_tp_group().cpu_group)
    return {
        name: tuple(
            _of_all_ranks([value for rank in everyones for value in rank[index][which]], vllm_config)
            for which in range(len(own[index]))
        )
        for index, name in enumerate(layer_names)
    }


def _scales(layer: Any) -> tuple[list[float], ...]:
    if not is_quantized_kv_cache(getattr(layer, "kv_cache_dtype", "auto")):
        return ()  # vLLM does not use the checkpoint's scales then
    found = (getattr(layer, name, None) for name in ("_k_scale", "_v_scale"))
    return tuple(scale.flatten().tolist() for scale in found if scale is not None)


def _of_all_ranks(values: list[float], vllm_config: Any) -> tuple[float, ...]:
    """Returns one value if all are equal, else one for each head. Several ranks may have the same head."""
    if len(set(values)) == 1:
        return (values[0],)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = kv_heads(vllm_config, len(values) // ranks) or len(values)
    return tuple(values[:: max(1, len(values) // heads)])
