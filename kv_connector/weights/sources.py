"""What a trainer's rank holds: boxes of the checkpoint's tensors, sharded as its parallelism has them.

Of a module under FSDP2 or HSDP nothing is gathered: each rank sends the rows that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import safe_open

from kv_connector.weights.geometry import Tensor
from kv_connector.weights.plan import Box, Shard


class SourceError(ValueError):
    """These weights cannot be sent; the message names the tensor, and says what to do."""


@dataclass(frozen=True)
class Held:
    """A part of a tensor that this rank has. ``local()`` is it, with the extent of its box: the same memory
    each time where it is ``resident``, else read anew."""

    shard: Shard
    local: Callable[[], torch.Tensor]
    resident: bool = True


class Source(Protocol):
    """Of one rank of a trainer."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""

    def tensors(self) -> Sequence[Tensor]:
        """The whole checkpoint, in an order that all ranks have."""

    def held(self) -> Sequence[Held]:
        """What this rank can send. All ranks' together are each tensor once, or several times whole."""

    def exchange(self, value: object) -> list[object]:
        """Everybody's, by rank. A collective: all ranks call it."""


class TensorSource:
    """Named tensors, among them DTensors: a module's parameters, or anything else with the checkpoint's
    names."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """``group``: of all ranks of the trainer; default: torch.distributed's, where it is initialised."""
        self._named = list(named)
        self._group = group
        self._distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank(group) if self._distributed else 0
        self._tensors = tuple(
            Tensor(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self._named
        )
        self._held = [_held(number, name, value) for number, (name, value) in enumerate(self._named)]
        self.device = self._held[0].local().device if self._held else torch.device("cpu")

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def exchange(self, value: object) -> list[object]:
        if not self._distributed:
            return [value]
        values: list[object] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values


def module_source(
    module: torch.nn.Module,
    group: torch.distributed.ProcessGroup | None = None,
    rename: Callable[[str], str] = str,
) -> TensorSource:
    """A module's parameters, by their names or what ``rename`` makes of them: those of the checkpoint that
    the engine was started from."""
    return TensorSource(((rename(name), value) for name, value in module.named_parameters()), group)


def _held(number: int, name: str, value: torch.Tensor) -> Held:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(value, DTensor):
        box = Box((0,) * value.dim(), tuple(value.shape))
        return Held(Shard(number, box), value.detach)
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise SourceError(
            f"{name} is a sum that has not been taken yet ({value.placements}): reduce it first"
        )
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    box = Box(tuple(map(int, offset)), tuple(map(int, shape)))
    return Held(Shard(number, box), lambda: cast("torch.Tensor", value.to_local()).detach())


class CheckpointSource:
    """The safetensors of a directory, read as they are sent."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, directory: Path) -> None:
        """Raises SourceError."""
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise SourceError(f"there are no .safetensors in {directory}")
        self._tensors: list[Tensor] = []
        self._held: list[Held] = []
        self._directory = directory
        for path in files:
            self._read(path)

    def _read(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise SourceError(f"{path}: {name} is of dtype {part.get_dtype()}, which cannot be sent")
                shard = Shard(len(self._tensors), Box((0,) * len(shape), shape))
                self._tensors.append(Tensor(name, dtype, shape))
                self._held.append(Held(shard, _Reader(path, name), resident=False))

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def exchange(self, value: object) -> list[object]:
        return [value]


@dataclass(frozen=True)
class _Reader:
    path: Path
    name: str

    def __call__(self) -> torch.Tensor:
        with safe_open(self.path, "pt") as file:
            return cast("torch.Tensor", file.get_tensor(self.name))


# By what safetensors call them.
DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
