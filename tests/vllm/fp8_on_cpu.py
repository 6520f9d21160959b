"""Checkpoints in block fp8 on any CPU: vLLM's own kernels for them need AMX.

A worker extension (--worker-extension-cls fp8_on_cpu.Worker): its import gives vLLM kernels, dense and of
experts, which compute with what the weights stand for. As kernels on GPUs do, one keeps the scales of some
layers in another form.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum
from vllm.utils.deep_gemm import per_block_cast_to_fp8

BLOCK = 128


class Worker:
    """Nothing to call."""


class Kernel(Fp8BlockScaledMMLinearKernel):
    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @property
    def _transposes(self) -> bool:
        rows, columns = self.config.weight_shape
        return bool(rows > columns)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        if self._transposes:
            replace_parameter(layer, "weight_scale_inv", layer.weight_scale_inv.data.t().contiguous())

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        return torch.nn.functional.linear(A.float(), values(B, Bs.t() if self._transposes else Bs))


def values(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    every = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * every[: weight.shape[0], : weight.shape[1]]


class Experts:
    """vLLM asks the class before there is a kernel, and the kernel from then on."""

    prepare_finalize = SimpleNamespace(topk_indices_dtype=lambda: None)
    fused_experts = SimpleNamespace(consumes_expert_mask=False)
    can_overlap_shared_experts = False

    def __init__(self, scales: SimpleNamespace) -> None:
        self._scales = scales
        self.is_monolithic = False  # type: ignore[assignment, method-assign]

    @staticmethod
    def is_monolithic() -> bool:
        return False

    def output_is_reduced(self) -> bool:
        return False

    def apply(
        self,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **_: object,
    ) -> torch.Tensor:
        found = torch.zeros_like(x, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
            both = x[tokens].float() @ values(w13[expert], self._scales.w13[expert]).t()
            gate, up = both.chunk(2, -1)
            of_this = (torch.nn.functional.silu(gate) * up) @ values(w2[expert], self._scales.w2[expert]).t()
            found.index_add_(0, tokens, of_this * topk_weights[tokens, place, None].float())
        return found.to(x.dtype)


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Kernel]
fp8.select_fp8_moe_backend = lambda **_: (None, Experts)
fp8.convert_to_fp8_moe_kernel_format = lambda w13, w2, w13_scale, w2_scale, **_: (
    w13,
    w2,
    w13_scale,
    w2_scale,
)
fp8.make_fp8_moe_quant_config = lambda w1_scale, w2_scale, **_: SimpleNamespace(w13=w1_scale, w2=w2_scale)
fp8.make_fp8_moe_kernel = lambda moe_quant_config, **_: Experts(moe_quant_config)


def in_bfloat16(directory: Path) -> Path:
    """The checkpoint, changed."""
    _change(directory, {"torch_dtype": "bfloat16"}, {
        name: value.bfloat16() for name, value in load_file(directory / "model.safetensors").items()
    })  # fmt: skip
    return directory


def quantised(directory: Path, to: Path) -> Path:
    """A copy, with its projections in block fp8 as vLLM makes them."""
    shutil.copytree(directory, to)
    weights: dict[str, torch.Tensor] = {}
    with torch.compiler.set_stance("force_eager"):  # to compile it takes 40 s
        for name, value in load_file(directory / "model.safetensors").items():
            if "_proj." in name:
                weights[name], weights[f"{name}_scale_inv"] = per_block_cast_to_fp8(value)
            else:
                weights[name] = value
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [
            name.removesuffix(".weight") for name in weights if "_proj." not in name and "norm" not in name
        ],
    }
    _change(to, {"quantization_config": config}, weights)
    return to


def _change(directory: Path, config: Mapping[str, object], weights: dict[str, torch.Tensor]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
