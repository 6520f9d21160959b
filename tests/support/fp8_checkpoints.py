"""Checkpoints in block fp8, quantised as vLLM does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from vllm.utils.deep_gemm import per_block_cast_to_fp8

BLOCK = 128
WEIGHTS = "model.safetensors"


def in_bfloat16(directory: Path) -> Path:
    """Converts the checkpoint to bfloat16 in place."""
    weights = load_file(directory / WEIGHTS)
    change(
        directory, {name: value.bfloat16() for name, value in weights.items()}, {"torch_dtype": "bfloat16"}
    )
    return directory


def quantised(directory: Path, to: Path, device: str = "cpu") -> Path:
    """Copies a checkpoint, with its projections in block fp8 as vLLM quantises them on the device."""
    shutil.copytree(directory, to)
    weights: dict[str, torch.Tensor] = {}
    kept = []
    with torch.compiler.set_stance("force_eager"):  # compiling takes 40 s
        for name, value in load_file(directory / WEIGHTS, device).items():
            if value.dim() == 2 and "_proj" in name:
                weights[name], weights[f"{name}_scale_inv"] = per_block_cast_to_fp8(value)
                continue
            weights[name] = value
            if value.dim() == 2:
                kept.append(name.removesuffix(".weight"))
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
    change(to, weights, {"quantization_config": config})
    return to


def change(
    directory: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Replaces the weights of a checkpoint and some of its configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(config)))
    save_file({name: value.cpu() for name, value in weights.items()}, directory / WEIGHTS, {"format": "pt"})
