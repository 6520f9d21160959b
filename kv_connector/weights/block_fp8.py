"""Block fp8 on the sender: each rank quantises the rows that it has.

A block has one scale, even if several ranks have parts of it: these ranks need the largest value of the whole
block. Only these values are exchanged, for all tensors together. No weight is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
import torch

from kv_connector.weights.mapping.geometry import Geometry, Tensor, to_be_quantised
from kv_connector.weights.mapping.plan import Box, PlanError, TensorShard
from kv_connector.weights.sources import Agreed, Engines, Held, ShardSource, agree

# The block size of all block-fp8 checkpoints for which vLLM has GPU kernels (DeepSeek V3, Qwen3-*-FP8).
BLOCK = 128
_DTYPE = torch.float8_e4m3fn
# vLLM's smallest absolute maximum: a block of zeros has a scale, too.
_LEAST = 1e-4
_FROM = ("bfloat16", "float16", "float32")


class BlockFp8:
    """A source that quantises, at each version, the matrices that the engines' loaders take in float8.

    It sends ``X.weight`` in blocks of 128 x 128, and the scales as ``X.weight_scale_inv``. The engines'
    geometries decide which matrices these are.

    It needs additional memory: a byte for each of their elements on this rank, and a scale for each block.
    Quantising a matrix takes up to 9 more bytes for each of its elements meanwhile.
    """

    def __init__(self, source: ShardSource, *, ue8m0: bool = False) -> None:
        """``ue8m0``: scales are powers of two, as in checkpoints with ``"scale_fmt": "ue8m0"``."""
        self.rank, self.device = source.rank, source.device
        self._source = source
        self._ue8m0 = ue8m0
        self._quantised: _Quantised | None = None

    def tensors(self) -> Sequence[Tensor]:
        return (self._quantised or self._source).tensors()

    def held(self) -> Sequence[Held]:
        return (self._quantised or self._source).held()

    def agree(self, ask: Callable[[], Engines | str]) -> Agreed:
        """Agrees as WeightSource does. The first call queries the engines twice.

        The first query is for the source's tensors, and the second for the quantised ones. Raises PlanError
        if the engines need what this source cannot make.
        """
        if self._quantised is None:
            agreed = self._source.agree(ask)
            if isinstance(agreed.engines, str):
                return agreed
            wanted = _wanted(self._source.tensors(), agreed.engines.geometries)
            if not wanted:
                return agreed
            self._quantised = _Quantised(self._source, wanted, agreed.held, self._ue8m0)
        return agree(self, self._source.exchange, ask)

    def refresh(self) -> None:
        self._source.refresh()
        if self._quantised is not None:
            self._quantised.refresh()


def _wanted(tensors: Sequence[Tensor], geometries: Sequence[bytes]) -> frozenset[int]:
    """Returns the numbers of the tensors to quantise."""
    wanted: set[int] = set()
    other: set[int] = set()
    for packed in geometries:
        geometry = msgspec.msgpack.decode(packed, type=Geometry)
        wanted |= (of_this := to_be_quantised(tensors, geometry))
        other |= {write.tensor for write in geometry.writes} - of_this
    for number in sorted(wanted):
        tensor = tensors[number]
        if number in other:
            raise PlanError(
                f"some of the engines load {tensor.name} in float8 and some do not: push to each kind of "
                "engine with its own pusher"
            )
        if len(tensor.shape) != 2 or not tensor.name.endswith(".weight") or tensor.dtype not in _FROM:
            raise PlanError(
                f"{tensor.name} ({tensor.dtype}, {list(tensor.shape)}) is float8 at the engine, and BlockFp8 "
                f"cannot quantise it. It quantises matrices X.weight of {', '.join(_FROM)}: name and split "
                "the tensor as the checkpoint does"
            )
    return frozenset(wanted)


class _Quantised:
    """The tensors that are sent for a source."""

    def __init__(
        self,
        source: ShardSource,
        wanted: Collection[int],
        held: Sequence[Sequence[TensorShard]],
        ue8m0: bool,
    ) -> None:
        """``held``: the source's shards, by rank."""
        self._source, self._ue8m0 = source, ue8m0
        self._tensors: list[Tensor] = []
        places: list[int] = []  # of the source's tensors among these
        for number, tensor in enumerate(source.tensors()):
            places.append(len(self._tensors))
            if number not in wanted:
                self._tensors.append(tensor)
                continue
            grid = tuple(-(-size // BLOCK) for size in tensor.shape)
            self._tensors.append(msgspec.structs.replace(tensor, dtype=str(_DTYPE).removeprefix("torch.")))
            self._tensors.append(Tensor(f"{tensor.name}_scale_inv", "float32", grid))
        self._held: list[Held] = []
        self._parts: list[_MatrixPart] = []
        mine = [one for one in source.held() if one.shard.tensor in wanted]
        # One allocation for all values and one for all scales, so that each is registered once.
        values = torch.empty(sum(_size(one.shard.box) for one in mine), dtype=_DTYPE, device=source.device)
        scales = torch.empty(
            sum(_size(_scales(one.shard.box)) for one in mine), dtype=torch.float32, device=source.device
        )
        for one in source.held():
            place, box = places[one.shard.tensor], one.shard.box
            if one.shard.tensor not in wanted:
                self._held.append(Held(TensorShard(place, box), one.local))
                continue
            part = _MatrixPart(one, values[: _size(box)], scales[: _size(_scales(box))])
            values, scales = values[_size(box) :], scales[_size(_scales(box)) :]
            self._parts.append(part)
            self._held.append(Held(TensorShard(place, box), part.get_values))
            self._held.append(Held(TensorShard(place + 1, _scales(box)), part.get_scales))
        shared = _Shared(source.tensors(), wanted, held)
        self._amax = torch.zeros(sum(part.blocks for part in self._parts), device=source.device)
        self._shared = shared.count
        ours, theirs = shared.places([one.shard for one in mine])
        self._ours, self._theirs = ours.to(source.device), theirs.to(source.device)

    def tensors(self) -> Sequence[Tensor]:
        return self._tensors

    def held(self) -> Sequence[Held]:
        return self._held

    def refresh(self) -> None:
        """Quantises the matrices anew. A collective if ranks share a block."""
        of_parts = self._amax.split([part.blocks for part in self._parts])
        for part, amax in zip(self._parts, of_parts, strict=True):
            amax.copy_(part.amax().flatten())
        if self._shared:
            # The comparison uses integers. Non-negative floats have the same order as integers, and NaN is
            # the largest. Libraries for collectives promise nothing about NaN.
            everybody = torch.zeros(self._shared, dtype=torch.int32, device=self._amax.device)
            # Two boxes of this rank may share a block, as Megatron's fused keys of two small heads do.
            everybody.scatter_reduce_(0, self._theirs, self._amax[self._ours].view(torch.int32), "amax")
            self._source.maximum(everybody)
            self._amax[self._ours] = everybody[self._theirs].view(torch.float32)
        for part, amax in zip(self._parts, of_parts, strict=True):
            part.quantise(amax, self._ue8m0)


class _MatrixPart:
    """A part of a matrix with its quantised values. It has the scales of the blocks that begin in it."""

    def __init__(self, held: Held, values: torch.Tensor, scales: torch.Tensor) -> None:
        box = held.shard.box
        self._local = held.local
        self._extent = rows, columns = box.extent
        # Distances to the bounds of blocks.
        self._before = top, left = box.start[0] % BLOCK, box.start[1] % BLOCK
        self._padding = (left, -(left + columns) % BLOCK, top, -(top + rows) % BLOCK)
        self._grid = _grid(box)
        self.blocks = _size(self._grid)
        owned = _scales(box)
        first = tuple(a - b for a, b in zip(owned.start, self._grid.start, strict=True))
        self._owned = _slices(Box(first, owned.extent))  # of the grid
        self._values, self._scales = values.view(box.extent), scales.view(owned.extent)

    def get_values(self) -> torch.Tensor:
        return self._values

    def get_scales(self) -> torch.Tensor:
        return self._scales

    def amax(self) -> torch.Tensor:
        """Returns the absolute maximum of each block, over this part."""
        if not self.blocks:
            return self._scales.new_empty(0)
        return self._in_blocks().abs().amax(dim=(1, 3)).float()

    def quantise(self, amax: torch.Tensor, ue8m0: bool) -> None:
        """Quantises with the operations of vLLM's per_block_cast_to_fp8, in the same order.

        A constant divisor divides on a CPU and is multiplied by its reciprocal on a GPU, in vLLM as here.
        """
        if not self.blocks:
            return
        scale = amax.view(self._grid.extent).clamp(_LEAST) / torch.finfo(_DTYPE).max
        if ue8m0:
            scale = torch.pow(2.0, torch.ceil(torch.log2(scale.abs())))
        blocks = (self._in_blocks() * (1.0 / scale)[:, None, :, None]).to(_DTYPE)
        (top, left), (rows, columns) = self._before, self._extent
        whole = blocks.view(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
        self._values.copy_(whole[top : top + rows, left : left + columns])
        self._scales.copy_(scale[self._owned])

    def _in_blocks(self) -> torch.Tensor:
        padded = torch.nn.functional.pad(self._local(), self._padding)
        return padded.reshape(self._grid.extent[0], BLOCK, self._grid.extent[1], BLOCK)


class _Shared:
    """The blocks of which several ranks have a part, in an order that all ranks have."""

    def __init__(
        self, tensors: Sequence[Tensor], wanted: Collection[int], held: Sequence[Sequence[TensorShard]]
    ) -> None:
        boxes: dict[int, set[Box]] = {number: set() for number in wanted}
        for shards in held:
            for shard in shards:
                if shard.tensor in boxes:
                    boxes[shard.tensor].add(shard.box)  # replicas have the same box
        known: dict[tuple[tuple[int, ...], frozenset[Box]], np.ndarray] = {}
        self._places: dict[int, np.ndarray] = {}
        """Number of each shared block of a tensor. -1: the block is not shared."""
        self.count = 0
        for number in sorted(wanted):
            shape = tensors[number].shape
            key = shape, frozenset(boxes[number])
            if key not in known:
                parts = np.zeros([-(-size // BLOCK) for size in shape], dtype=np.int64)
                for box in key[1]:
                    parts[_slices(_grid(box))] += 1
                known[key] = parts > 1
            shared = known[key]
            places = np.full(shared.shape, -1, dtype=np.int64)
            places[shared] = np.arange(self.count, self.count + shared.sum())
            self._places[number] = places
            self.count += int(shared.sum())

    def places(self, mine: Sequence[TensorShard]) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds the shared blocks among the blocks of these shards.

        Returns their places here and in the exchange.
        """
        here = [self._places[shard.tensor][_slices(_grid(shard.box))].flatten() for shard in mine]
        theirs = np.concatenate([np.empty(0, dtype=np.int64), *here])
        ours = np.flatnonzero(theirs >= 0)
        return torch.from_numpy(ours), torch.from_numpy(theirs[ours])


def _grid(box: Box) -> Box:
    """Returns the blocks that the box touches."""
    if not _size(box):
        return Box((0,) * len(box.start), (0,) * len(box.start))
    first = tuple(start // BLOCK for start in box.start)
    end = (-(-(start + n) // BLOCK) for start, n in zip(box.start, box.extent, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, end, strict=True)))


def _scales(box: Box) -> Box:
    """Returns the blocks that begin in the box. Each block of a tensor begins in exactly one of its boxes."""
    first = tuple(-(-start // BLOCK) for start in box.start)
    end = (-(-(start + n) // BLOCK) for start, n in zip(box.start, box.extent, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, end, strict=True)))


def _size(box: Box) -> int:
    return math.prod(box.extent)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(box.start, box.extent, strict=True))
