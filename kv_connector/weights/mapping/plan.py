"""SenderPlan: which rank writes what where.

It cuts the boxes that a trainer's ranks hold by what the engines' loaders take. Planning is a pure function:
every rank makes the same plan by itself, and the plan's digest proves it. One of the ranks that hold an
element writes it to each receiver, once.

Extents, offsets and strides count elements. Equal shapes are cut only once: a model of 37,000 tensors has a
few dozen shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kv_connector.weights.mapping.geometry import (
    Geometry,
    Index,
    Tensor,
    Write,
    digest,
    is_float8,
    item_bytes,
)


class PlanError(ValueError):
    """The trainer's tensors and the engines' loaders do not fit. The message names the tensor."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: ``extent`` elements from ``start`` on, with one number for each dimension."""

    start: Index
    extent: Index


@dataclass(frozen=True)
class TensorShard:
    """A part of a tensor that a sender holds."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class ShardPiece:
    """A part of a shard that one sender writes to one receiver at once.

    ``extent`` elements of the shard from ``start`` on go to ``offset + sum(i * strides)`` of the parameter.
    """

    shard: int  # among the sender's
    parameter: int  # among the receiver's
    start: Index
    extent: Index
    offset: int
    strides: Index

    @property
    def elements(self) -> int:
        return math.prod(self.extent)


@dataclass
class SenderPlan:
    """The plan of one sender."""

    digest: bytes
    pieces: list[list[ShardPiece]]
    """This sender's pieces by receiver, in the order of writing."""
    nbytes: list[list[int]]
    """Bytes to transfer, of every sender to every receiver. 0: the sender writes nothing there."""


def make_plan(
    tensors: Sequence[Tensor],
    senders: Sequence[Sequence[TensorShard]],
    receivers: Sequence[Geometry],
    sender: int,
) -> SenderPlan:
    """Makes the plan of the rank ``sender``.

    Raises PlanError if the senders hold a tensor only in part, or do not hold a tensor that is loaded. Raises
    ValueError for a dtype that cannot be sent.
    """
    cutter = _Cutter(tensors, senders)
    plan = SenderPlan(
        digest([list(tensors), [[(s.tensor, s.box.start, s.box.extent) for s in held] for held in senders]])
        + digest([geometry.digest() for geometry in receivers]),
        [[] for _ in receivers],
        [[0] * len(receivers) for _ in senders],
    )

    def assign(holder: _Holder, nbytes: int, receiver: int, write: Write, cut: _Cut) -> None:
        number, shard = holder
        plan.nbytes[number][receiver] += nbytes
        if number == sender:
            place = write.offset + cut.offset
            piece = ShardPiece(shard, write.parameter, cut.start, cut.extent, place, write.strides)
            plan.pieces[receiver].append(piece)

    shared: list[tuple[int, int, int, Write, _Cut, Sequence[_Holder]]] = []
    for number, geometry in enumerate(receivers):
        for write in geometry.writes:
            _check(write, tensors, geometry)
            item = item_bytes(geometry.parameters[write.parameter].dtype)
            cuts, everybody = cutter.cut(write)
            for cut in cuts:
                holders, nbytes = everybody[cut.box], cut.elements * item
                if len(holders) == 1:
                    assign(holders[0], nbytes, number, write, cut)
                else:
                    shared.append((nbytes, len(shared), number, write, cut, holders))
    # The longest pieces come first. Each goes to the holder that has the least to write. For pieces that all
    # ranks hold, no rank then writes more than the mean and one piece.
    load = [sum(by_receiver) for by_receiver in plan.nbytes]
    for nbytes, _, number, write, cut, several in sorted(shared, key=lambda one: (-one[0], one[1])):
        holder = min(several, key=lambda holder: (load[holder[0]], holder))
        load[holder[0]] += nbytes
        assign(holder, nbytes, number, write, cut)
    for pieces in plan.pieces:
        pieces.sort(key=lambda piece: (piece.parameter, piece.offset))
    return plan


def check(tensors: Sequence[Tensor], geometry: Geometry) -> None:
    """Raises PlanError if these tensors cannot be sent to a receiver."""
    for write in geometry.writes:
        _check(write, tensors, geometry)


def _check(write: Write, tensors: Sequence[Tensor], geometry: Geometry) -> None:
    """Raises PlanError if a reported write lies outside its tensor or its parameter."""
    if write.tensor >= len(tensors) or write.parameter >= len(geometry.parameters):
        raise PlanError(
            f"the engine reports a write of tensor {write.tensor} to parameter {write.parameter}, of "
            f"{len(tensors)} tensors and {len(geometry.parameters)} parameters"
        )
    tensor, parameter = tensors[write.tensor], geometry.parameters[write.parameter]
    if not len(write.start) == len(write.extent) == len(write.strides) == len(tensor.shape) or any(
        start + extent > size
        for start, extent, size in zip(write.start, write.extent, tensor.shape, strict=True)
    ):
        raise PlanError(f"the engine's loader reads outside {tensor.name} of shape {list(tensor.shape)}")
    last = write.offset + sum((n - 1) * s for n, s in zip(write.extent, write.strides, strict=True))
    if write.elements and last >= parameter.elements:
        raise PlanError(f"the engine's loader writes {tensor.name} beyond the end of {parameter.name}")
    if tensor.dtype != parameter.dtype and (is_float8(tensor.dtype) or is_float8(parameter.dtype)):
        raise PlanError(
            f"{tensor.name} is {tensor.dtype} here and {parameter.dtype} at the engine, which takes more "
            "than a conversion. Push a checkpoint quantised like the engine's, or BlockFp8 of a source"
        )


_Holder = tuple[int, int]
"""A sender, and the number of its shard."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a write that lies in one box."""

    box: int
    start: Index  # within the box
    extent: Index
    offset: int  # behind the write's offset
    elements: int


class _Cutter:
    def __init__(self, tensors: Sequence[Tensor], senders: Sequence[Sequence[TensorShard]]) -> None:
        self._tensors = tensors
        self._boxes: list[dict[Box, list[_Holder]]] = [{} for _ in tensors]
        for sender, shards in enumerate(senders):
            for number, shard in enumerate(shards):
                # A rank may report an empty shard of a tensor.
                if math.prod(shard.box.extent):
                    self._boxes[shard.tensor].setdefault(shard.box, []).append((sender, number))
        self._whole: dict[tuple[Index, tuple[Box, ...]], str | None] = {}
        self._cuts: dict[tuple[Index, Index, Index, tuple[Box, ...]], list[_Cut]] = {}

    def cut(self, write: Write) -> tuple[list[_Cut], list[list[_Holder]]]:
        """Returns the write cut by boxes, and all holders of each box."""
        tensor = self._tensors[write.tensor]
        held = self._boxes[write.tensor]
        boxes = tuple(held)
        self._check(tensor, boxes)
        key = (write.start, write.extent, write.strides, boxes)
        cuts = self._cuts.get(key)
        if cuts is None:
            cuts = self._cuts[key] = list(_intersections(write, boxes))
        return cuts, list(held.values())

    def _check(self, tensor: Tensor, boxes: tuple[Box, ...]) -> None:
        key = (tensor.shape, boxes)
        if key not in self._whole:
            self._whole[key] = _not_tiled(tensor.shape, boxes)
        if problem := self._whole[key]:
            raise PlanError(f"{tensor.name} of shape {list(tensor.shape)}: {problem}")


def _intersections(write: Write, boxes: Sequence[Box]) -> Iterator[_Cut]:
    for number, box in enumerate(boxes):
        first = [max(a, b) for a, b in zip(write.start, box.start, strict=True)]
        last = [
            min(a + m, b + n)
            for a, m, b, n in zip(write.start, write.extent, box.start, box.extent, strict=True)
        ]
        if any(a >= b for a, b in zip(first, last, strict=True)):
            continue
        extent = tuple(b - a for a, b in zip(first, last, strict=True))
        yield _Cut(
            number,
            tuple(a - b for a, b in zip(first, box.start, strict=True)),
            extent,
            sum((a - b) * s for a, b, s in zip(first, write.start, write.strides, strict=True)),
            math.prod(extent),
        )


def _not_tiled(shape: Index, boxes: Sequence[Box]) -> str | None:
    """Returns the reason why the boxes do not cover each element exactly once, or None."""
    if not boxes:
        return "no rank holds it"
    edges: list[list[int]] = []
    for dimension, size in enumerate(shape):
        cut = {0, size}
        for box in boxes:
            if len(box.start) != len(shape):
                return f"a rank holds a part of it in {len(box.start)} dimensions"
            end = box.start[dimension] + box.extent[dimension]
            if end > size:
                return f"a rank holds elements up to {end} of dimension {dimension}"
            cut |= {box.start[dimension], end}
        edges.append(sorted(cut))
    cells = np.zeros([len(cut) - 1 for cut in edges], dtype=np.int64)
    for box in boxes:
        span = tuple(
            slice(cut.index(start), cut.index(start + extent))
            for cut, start, extent in zip(edges, box.start, box.extent, strict=True)
        )
        cells[span] += 1
    if (cells == 0).any():
        return "some of its elements are held by no rank"
    if (cells > 1).any():
        return "parts of it that different ranks hold overlap"
    return None


@dataclass(frozen=True)
class Runs:
    """A piece as the transfer engine writes it: runs of ``elements`` elements each.

    Run i goes from ``source[i]`` to ``target[i]``, both in elements. ``packed``: the source does not lie in
    runs that can be sent. It is laid out row by row in ``order`` first, and run i then begins at ``i *
    elements``.
    """

    elements: int
    source: np.ndarray
    target: np.ndarray
    packed: bool
    order: tuple[int, ...]


def runs(piece: ShardPiece, strides: Sequence[int], *, least: int, pack: bool = False) -> Runs:
    """Returns the runs of a piece.

    ``strides``: the strides of the shard in memory. ``least``: shorter runs, in elements, are not sent as
    they lie if packing makes them longer. ``pack``: always pack, for a conversion.
    """
    # Elements that are far apart at the receiver form the outer loop, so that its memory is written in order.
    order = tuple(
        sorted(
            (d for d, n in enumerate(piece.extent) if n > 1),
            key=lambda d: (-piece.strides[d], d),
        )
    )
    # The innermost dimensions that form one run at the receiver, and those that form one at the source as
    # well.
    run = as_it_lies = 1
    inner = lying = len(order)
    together = True
    for position in range(len(order) - 1, -1, -1):
        dimension = order[position]
        if piece.strides[dimension] != run:
            break
        together = together and strides[dimension] == run
        run *= piece.extent[dimension]
        inner = position
        if together:
            as_it_lies, lying = run, position
    packed = pack or as_it_lies < min(run, least)
    outer = order[: inner if packed else lying]
    elements = run if packed else as_it_lies
    target = _grid([(piece.extent[d], piece.strides[d]) for d in outer]) + piece.offset
    begin = sum(a * s for a, s in zip(piece.start, strides, strict=True))
    source = (
        np.arange(len(target), dtype=np.int64) * elements
        if packed
        else _grid([(piece.extent[d], strides[d]) for d in outer]) + begin
    )
    return Runs(elements, source, target, packed, order)


def _grid(dimensions: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the places of the elements of a strided grid, row by row."""
    places = np.zeros(1, dtype=np.int64)
    for size, stride in dimensions:
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places
