"""Sources: the boxes of the checkpoint's tensors that a sender's rank holds, as its parallelism shards them.

Nothing is gathered, also of a module under FSDP2 or HSDP: each rank sends the rows that it has. So does each
worker of an engine that seeds another one, and each rank of Megatron (``megatron``).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from kv_connector.weights.mapping.geometry import Geometry, Tensor
from kv_connector.weights.mapping.plan import Box, TensorShard
from kv_connector.weights.memory.arena import Arena


class SourceError(ValueError):
    """These weights cannot be sent. The message names the tensor and what to do."""


@dataclass(frozen=True)
class Held:
    """A part of a tensor on this rank. ``local()`` returns it, with the extent of its box.

    If it is ``resident``, the memory is the same each time. Otherwise it is read anew.
    """

    shard: TensorShard
    local: Callable[[], torch.Tensor]
    resident: bool = True


@dataclass(frozen=True)
class Engines:
    """The answers of the engines."""

    engines: list[tuple[str, int]]  # addresses of the controllers
    workers: list[list[tuple[str, int]]]  # addresses of each engine's workers
    geometries: list[bytes]  # of all workers, as MessagePack


@dataclass(frozen=True)
class Agreed:
    """The facts on which all ranks agree."""

    run: str
    engines: Engines | str  # or the reason why there are none
    held: list[list[TensorShard]]  # by rank
    content: str = ""
    """The name of the weights' values, if these do not change. Empty: each version has other values."""


class WeightSource(Protocol):
    """The weights of one rank of a trainer, or of an engine that seeds another one."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""

    def tensors(self) -> Sequence[Tensor]:
        """Returns the tensors of the whole checkpoint, in the same order on all ranks."""

    def held(self) -> Sequence[Held]:
        """Returns what this rank can send.

        All ranks together hold each tensor whole, once or several times.
        """

    def agree(self, ask: Callable[[], Engines | str]) -> Agreed:
        """Agrees with the other ranks. A collective: all ranks call it.

        ``ask``: queries the engines, and returns a string if that failed. One rank queries for all, or each
        rank does.
        """

    def refresh(self) -> None:
        """Makes anew what was derived from the weights.

        Called before each version, by all ranks of a trainer.
        """


def agree(
    source: WeightSource, exchange: Callable[[object], list[object]], ask: Callable[[], Engines | str]
) -> Agreed:
    """Agrees with the other ranks: the first rank queries the engines and names the run.

    ``exchange``: returns the values of all ranks, by rank.
    """
    first = cast(
        "tuple[str, Engines | str]", exchange((uuid.uuid4().hex, ask()) if source.rank == 0 else None)[0]
    )
    run, engines = first
    if isinstance(engines, str):
        return Agreed(run, engines, [])
    held = exchange([one.shard for one in source.held()])
    return Agreed(run, engines, cast("list[list[TensorShard]]", held))


class ShardSource:
    """Parts of a checkpoint's tensors in this rank's memory, and the group of all ranks of a trainer."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        held: Sequence[Held],
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """``tensors``: the whole checkpoint, in the same order on all ranks. ``held``: this rank's parts.

        ``group``: all ranks of the trainer. Default: the group of torch.distributed, if it is initialised.
        """
        self._tensors, self._held = tuple(tensors), list(held)
        self._group = group
        self._distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank(group) if self._distributed else 0
        here = [one.local() for one in held]
        self.device = here[0].device if here else torch.device("cpu")

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def agree(self, ask: Callable[[], Engines | str]) -> Agreed:
        return agree(self, self.exchange, ask)

    def refresh(self) -> None:
        """Does nothing: the tensors are sent as they lie."""

    def maximum(self, values: torch.Tensor) -> None:
        """Sets each value to its maximum over all ranks, in place. A collective: all ranks call it."""
        if self._distributed:
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._group)

    def exchange(self, value: object) -> list[object]:
        """Returns the values of all ranks, by rank. A collective: all ranks call it."""
        return exchange(value, self._group) if self._distributed else [value]


def exchange(value: object, group: torch.distributed.ProcessGroup | None) -> list[object]:
    """Returns the values of all ranks, by rank. A collective if torch.distributed is initialised."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[object] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


class TensorSource(ShardSource):
    """Named tensors or DTensors: a module's parameters, or any others with the checkpoint's names."""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """``group``: all ranks of the trainer. Default: the group of torch.distributed, if it is
        initialised."""
        all_named = list(named)
        super().__init__(
            tuple(Tensor(name, dtype_name(value), tuple(value.shape)) for name, value in all_named),
            [_held(number, name, value) for number, (name, value) in enumerate(all_named)],
            group,
        )


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns the dtype as a checkpoint's tensor has it."""
    return str(tensor.dtype).removeprefix("torch.")


def module_source(
    module: torch.nn.Module,
    group: torch.distributed.ProcessGroup | None = None,
    rename: Callable[[str], str] = str,
) -> TensorSource:
    """Returns a source of a module's parameters and persistent buffers, as its checkpoints have them.

    ``rename`` maps their names to those of the checkpoint that the engine was started from.

    Change buffers in place: refresh() raises SourceError if a buffer was replaced by another tensor.

    The call reshards a module under FSDP2. A forward pass without a backward pass leaves whole copies of
    parameters in their place, and FSDP2 frees these later.
    """
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return _ModuleSource(module, group, rename)


class _ModuleSource(TensorSource):
    def __init__(
        self,
        module: torch.nn.Module,
        group: torch.distributed.ProcessGroup | None,
        rename: Callable[[str], str],
    ) -> None:
        self._module, self._buffers = module, dict(persistent_buffers(module))
        named = chain(module.named_parameters(), self._buffers.items())
        super().__init__(((rename(name), value) for name, value in named), group)

    def refresh(self) -> None:
        for name, buffer in self._buffers.items():
            if self._module.get_buffer(name) is not buffer:
                raise SourceError(
                    f"the buffer {name} is another tensor than when this source was made, and the source "
                    "would send the old tensor. Change buffers in place (copy_, add_)"
                )


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _held(number: int, name: str, value: torch.Tensor) -> Held:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(value, DTensor):
        box = Box((0,) * value.dim(), tuple(value.shape))
        return Held(TensorShard(number, box), lambda: with_memory(name, value.detach()))
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise SourceError(f"{name} is a partial sum over ranks ({value.placements}): reduce it first")
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    box = Box(tuple(map(int, offset)), tuple(map(int, shape)))
    # This runs for each tensor of each version. to_local() would make a view, in 4 us, or in 20 us for
    # autograd.
    return Held(TensorShard(number, box), lambda: with_memory(name, value._local_tensor.detach()))


def with_memory(name: str, local: torch.Tensor) -> torch.Tensor:
    """Returns the tensor. Raises SourceError if its storage was freed: a read would end the process."""
    if not local.data_ptr() and local.numel():
        raise SourceError(
            f"{name} has no memory: its storage was freed or offloaded. Load the weights before you push "
            "them, and make the source of an FSDP2 module with module_source()"
        )
    return local


class CheckpointSource:
    """The safetensors files of a directory, read while they are sent."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, directory: Path) -> None:
        """Opens the files. Raises SourceError."""
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise SourceError(f"no .safetensors files are in {directory}")
        self._tensors: list[Tensor] = []
        self._held: list[Held] = []
        self._directory = directory
        for path in files:
            try:
                self._read(path)
            except (SafetensorError, OSError) as error:
                raise SourceError(f"{path} is not readable as safetensors: {error}") from error

    def _read(self, path: Path) -> None:
        # The file stays open as long as the source. Parsing a header of 3,000 tensors takes 5.4 ms, too long
        # for each read.
        file: Any = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                raise SourceError(f"{path}: {name} is of dtype {part.get_dtype()}, which cannot be sent")
            shard = TensorShard(len(self._tensors), Box((0,) * len(shape), shape))
            self._tensors.append(Tensor(name, dtype, shape))
            self._held.append(Held(shard, partial(file.get_tensor, name), resident=False))

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def agree(self, ask: Callable[[], Engines | str]) -> Agreed:
        return replace(agree(self, lambda value: [value], ask), content=self._content())

    def _content(self) -> str:
        """Returns names, sizes and times of the files.

        A hash of their content would read the whole checkpoint.
        """
        files = sorted(self._directory.glob("*.safetensors"))
        return repr([(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in files])

    def refresh(self) -> None:
        """Does nothing: the files are read while they are sent."""


class ArenaSource:
    """The landed weights of one worker of an engine, in the dtypes of its model.

    The workers are the ranks. They do not wait for each other: each queries the engines by itself.
    """

    def __init__(
        self, arena: Arena, tensors: Sequence[Tensor], rank: int, run: str, others: Sequence[Geometry]
    ) -> None:
        """``others``: what all workers load of ``tensors``, by rank, with this one's."""
        self.rank, self.device = rank, arena.device
        self._tensors, self._run, self._others = tensors, run, others
        self._held = [
            Held(shard, partial(arena.box, write))
            for shard, write in zip(_shards(arena.geometry), arena.geometry.writes, strict=True)
        ]

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def agree(self, ask: Callable[[], Engines | str]) -> Agreed:
        return Agreed(self._run, ask(), [_shards(geometry) for geometry in self._others])

    def refresh(self) -> None:
        """Does nothing: the arena is sent as it lies."""


def _shards(geometry: Geometry) -> list[TensorShard]:
    return [TensorShard(write.tensor, Box(write.start, write.extent)) for write in geometry.writes]


# Names of torch's dtypes, by the names of safetensors.
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
