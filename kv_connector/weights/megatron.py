"""The source of a trainer with Megatron-Core: each rank sends its shards as they lie. Nothing is gathered."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from kv_connector.weights.mapping.coverage import some_of
from kv_connector.weights.mapping.geometry import Tensor
from kv_connector.weights.mapping.megatron import MegatronCheckpoint, MegatronError, MegatronRanks, Region
from kv_connector.weights.mapping.plan import Box, TensorShard
from kv_connector.weights.sources import (
    Held,
    ShardSource,
    SourceError,
    dtype_name,
    exchange,
    persistent_buffers,
    with_memory,
)

# Wrappers of a chunk: DistributedDataParallel and Float16Module.
_WRAPPED = re.compile(r"(?:module\.)*")
_LAYER = re.compile(r"decoder\.layers\.\d+")
# Settings of a TransformerConfig with which weights have other values, or another order, than a checkpoint.
_OTHER_VALUES = ("layernorm_zero_centered_gamma", "rotary_interleaved", "moe_mlp_glu_interleave_size")


def megatron_source(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    config: Mapping[str, Any],
    ranks: MegatronRanks | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> ShardSource:
    """Returns a source of the parameters that Megatron's GPTModel has on this rank.

    A collective of all ranks. ``model``: the model, or its chunks under virtual pipeline parallelism.
    ``config``: the content of config.json of the checkpoint that the engines were started from. ``ranks``:
    this process's. Default: those of ``megatron.core.parallel_state``. ``group``: all ranks of the trainer.

    Raises SourceError, on all ranks, if the config does not explain the parameters of a rank, or if no rank
    holds one of the checkpoint's tensors.
    """
    problem, checkpoint, parts = "", None, list[tuple[Region, str, torch.Tensor]]()
    try:
        checkpoint = MegatronCheckpoint(config)
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        parts = list(_parts(chunks, checkpoint, ranks or _current_ranks()))
        _check_once(parts)
    except (MegatronError, SourceError) as error:
        problem = str(error)
    dtypes: dict[str, str] = {}
    for region, _, value in parts:
        dtypes.setdefault(region.tensor, dtype_name(value))
    # All ranks raise if one does. Otherwise they would wait for it.
    dtypes = _agreed_dtypes(cast("list[tuple[str, dict[str, str]]]", exchange((problem, dtypes), group)))
    assert checkpoint is not None
    if missing := [name for name in checkpoint.shapes if name not in dtypes]:
        raise SourceError(
            f"no rank holds {some_of(missing)}. Pass all chunks of the model of each rank, "
            "and the config of this model"
        )
    numbers = {name: number for number, name in enumerate(checkpoint.shapes)}
    return ShardSource(
        tuple(Tensor(name, dtypes[name], shape) for name, shape in checkpoint.shapes.items()),
        [
            Held(TensorShard(numbers[region.tensor], region.box), partial(_part, name, value, region))
            for region, name, value in parts
        ],
        group,
    )


def _parts(
    chunks: Sequence[torch.nn.Module], checkpoint: MegatronCheckpoint, ranks: MegatronRanks
) -> Iterator[tuple[Region, str, torch.Tensor]]:
    """Yields what this rank holds, with the name and the tensor of its parameter."""
    for chunk in chunks:
        _check_settings(chunk, tied=checkpoint.tied)
        for name, value in chain(chunk.named_parameters(), persistent_buffers(chunk)):
            if type(value.detach()) is not torch.Tensor:
                raise SourceError(
                    f"{name} is a {type(value.detach()).__name__}, and the source of Megatron's shards takes "
                    "plain tensors. Train without Megatron-FSDP and without parameters in fp8"
                )
            own = name[_WRAPPED.match(name).end() :]  # type: ignore[union-attr]  # it matches ""
            layer = _layer_number(chunk, name) if _LAYER.match(own) else None
            for region in checkpoint.regions(own, tuple(value.shape), layer, ranks):
                yield region, name, value


def _layer_number(chunk: torch.nn.Module, name: str) -> int:
    """Returns the number of a parameter's layer in the whole model, from 0 on."""
    prefix = name[: _LAYER.search(name).end()]  # type: ignore[union-attr]  # the caller has matched it
    number = getattr(chunk.get_submodule(prefix), "layer_number", None)
    if not isinstance(number, int):
        raise SourceError(
            f"{prefix} has no layer_number, which Megatron-Core gives each TransformerLayer. Pass chunks of "
            "its GPTModel"
        )
    return number - 1


def _check_settings(chunk: torch.nn.Module, *, tied: bool) -> None:
    """Raises SourceError if the chunk's weights are not those of a checkpoint, though their shapes may be.

    ``tied``: the output layer of the checkpoint is its embedding.
    """
    for part in chunk.modules():
        for setting in _OTHER_VALUES:
            if getattr(getattr(part, "config", None), setting, False):
                raise SourceError(
                    f"the model has {setting}, so its weights have other values or another order than a "
                    "checkpoint's. Gather them by Megatron-Bridge"
                )
        shared = getattr(part, "share_embeddings_and_output_weights", tied)
        if bool(shared) != tied:
            raise SourceError(
                f"the model has share_embeddings_and_output_weights {shared}, and the config has "
                f"tie_word_embeddings {tied}. Give both the same value"
            )


def _check_once(parts: Sequence[tuple[Region, str, torch.Tensor]]) -> None:
    seen: dict[tuple[str, Box], str] = {}
    for region, name, _ in parts:
        if (part := (region.tensor, region.box)) in seen:
            raise SourceError(
                f"{seen[part]} and {name} of one rank are the same part of {region.tensor}. Pass each chunk "
                "once"
            )
        seen[part] = name


def _agreed_dtypes(found: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Returns the dtype of each tensor that a rank holds. Raises SourceError with the problem of a rank."""
    dtypes: dict[str, str] = {}
    for rank, (problem, of_rank) in enumerate(found):
        if problem:
            raise SourceError(f"rank {rank}: {problem}")
        for name, dtype in of_rank.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise SourceError(
                    f"{name} is {dtypes[name]} on one rank and {dtype} on rank {rank}. Give all ranks the "
                    "same params_dtype"
                )
    return dtypes


def _part(name: str, value: torch.Tensor, region: Region) -> torch.Tensor:
    part = with_memory(name, value.detach())
    for dimension, (at, extent) in enumerate(zip(region.at, region.box.extent, strict=True)):
        if extent != part.shape[dimension]:
            part = part.narrow(dimension, at, extent)
    return part


def _current_ranks() -> MegatronRanks:
    try:
        state = importlib.import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise SourceError(
            f"Megatron-Core cannot be imported ({error}). Pass ranks=MegatronRanks(...)"
        ) from error
    return MegatronRanks(
        state.get_tensor_model_parallel_rank(),
        state.get_tensor_model_parallel_world_size(),
        state.get_expert_model_parallel_rank(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_rank(),
        state.get_expert_tensor_parallel_world_size(),
    )
