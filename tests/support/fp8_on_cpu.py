"""Block fp8 on any CPU. vLLM's own kernels for it need AMX.

A worker extension (--worker-extension-cls fp8_on_cpu.Worker). Its import installs kernels in vLLM, for dense
layers and experts, which compute with the dequantised weights. One of them stores the scales of some layers
in another form, as kernels on GPUs do.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from fp8_checkpoints import BLOCK
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum


class Worker:
    """The extension class. It has no methods to call."""


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
    """Kernel of the experts. vLLM queries the class before a kernel exists, and the kernel from then on."""

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
