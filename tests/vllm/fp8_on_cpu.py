"""Checkpoints in block fp8 on any CPU: vLLM's own kernels for them need AMX.

A worker extension (--worker-extension-cls fp8_on_cpu.Worker): its import offers vLLM one more kernel, which
computes with what the weights stand for. As kernels on GPUs do, it keeps the scales of some layers in another
form.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
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
        scales = Bs.t() if self._transposes else Bs
        every = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = B.float() * every[: B.shape[0], : B.shape[1]]
        return torch.nn.functional.linear(A.float(), weight)


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Kernel]


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
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    _change(to, {"quantization_config": config}, weights)
    return to


def _change(directory: Path, config: Mapping[str, object], weights: dict[str, torch.Tensor]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
