"""Facts of a model's layers of experts, as vLLM has placed them on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.vllm.internals import get_forward_context


@dataclass(frozen=True)
class ExpertLayer:
    """Facts of one layer of experts on this rank."""

    hidden: int
    """Elements of a row."""
    results: int
    """Elements of a row's result. Some kernels leave out the elements by which vLLM padded the rows."""
    experts: int
    """Physical experts of all ranks."""
    top_k: int
    dtype: torch.dtype
    """Element type of the results."""
    local: tuple[int, ...] | None
    """Physical experts on this rank, in the order of its weights. None: a slice of every expert."""
    rank: int
    """This rank's number among the ranks that divide the experts."""
    ranks: int
    scales_whole_tensor: bool
    """Whether the kernel computes one scale for all rows that it receives."""


def expert_layers() -> list[ExpertLayer]:
    """Returns the layers of experts of the model, and of its drafter, that this rank runs at present."""
    layers = []
    for layer in get_forward_context().no_compile_layers.values():
        routed = getattr(layer, "routed_experts", None)
        if routed is None:
            continue
        config, manager = routed.moe_config, routed.expert_map_manager
        places = manager.expert_map
        layers.append(
            ExpertLayer(
                hidden=int(config.hidden_dim),
                results=int(
                    config.hidden_dim_unpadded
                    if routed.quant_method.has_unpadded_output
                    else config.hidden_dim
                ),
                experts=int(config.num_experts) if places is None else len(places),
                top_k=int(config.experts_per_token),
                dtype=config.in_dtype,
                local=None if places is None else _in_order(places.tolist()),
                rank=int(manager.ep_rank),
                ranks=int(manager.ep_size),
                scales_whole_tensor=_scales_whole_tensor(routed),
            )
        )
    return layers


def _in_order(places: list[int]) -> tuple[int, ...]:
    return tuple(sorted((e for e, place in enumerate(places) if place >= 0), key=places.__getitem__))


def _scales_whole_tensor(routed: Any) -> bool:
    method = routed.quant_method
    # vLLM makes the configuration at a layer's first call. Later layers have had none yet.
    quant = method.moe_quant_config or method.get_fused_moe_quant_config(routed)
    return bool(
        quant is not None and quant.quant_dtype is not None and quant.is_per_tensor and quant.a1_scale is None
    )
