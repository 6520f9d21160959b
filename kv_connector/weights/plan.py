"""Who writes what where: the boxes that a trainer's ranks hold, cut by what the engines' loaders take.

A pure function of its arguments: every rank makes the same plan by itself, and its digest tells whether that
is so. Each element of each receiver is written once, by one of those who hold it.

Extents, offsets and strides count elements. Equal shapes are cut once: a model of 37,000 tensors has a few
dozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kv_connector.weights.geometry import Geometry, Index, Tensor, Write, digest, is_float8, item_bytes


class PlanError(ValueError):
    """What the trainer holds and what the engines load do not fit; the message names the tensor."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: ``extent`` elements from ``start`` on, one number a dimension."""

    start: Index
    extent: Index


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that a sender holds."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class Piece:
    """What one sender writes to one receiver in one go: ``extent`` elements of its shard from ``start``
    on, to ``offset + sum(i * strides)`` of the parameter."""

    shard: int  # of the sender's
    parameter: int  # of the receiver's
    start: Index
    extent: Index
    offset: int
    strides: Index

    @property
    def elements(self) -> int:
        return math.prod(self.extent)


@dataclass
class Plan:
    """Of one sender."""

    digest: bytes
    pieces: list[list[Piece]]
    """By receiver, in the order in which they are to be written."""
    nbytes: list[list[int]]
    """As they travel, by sender, everybody's, and receiver. 0: it writes nothing there."""


def make_plan(
    tensors: Sequence[Tensor],
    senders: Sequence[Sequence[Shard]],
    receivers: Sequence[Geometry],
    sender: int,
) -> Plan:
    """``sender``: whose pieces are told. Raises PlanError where a tensor is not held whole, or not at all
    while it is loaded; ValueError for a dtype that cannot be sent."""
    cutter = _Cutter(tensors, senders)
    plan = Plan(
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
            piece = Piece(shard, write.parameter, cut.start, cut.extent, place, write.strides)
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
    # The longest first, each to who has the least to write: of what all hold, nobody has more than the mean
    # and one piece.
    load = [sum(by_receiver) for by_receiver in plan.nbytes]
    for nbytes, _, number, write, cut, several in sorted(shared, key=lambda one: (-one[0], one[1])):
        holder = min(several, key=lambda holder: (load[holder[0]], holder))
        load[holder[0]] += nbytes
        assign(holder, nbytes, number, write, cut)
    for pieces in plan.pieces:
        pieces.sort(key=lambda piece: (piece.parameter, piece.offset))
    return plan


def _check(write: Write, tensors: Sequence[Tensor], geometry: Geometry) -> None:
    """What an engine says that it loads has to be there, and to have room."""
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
            "than a conversion: push a checkpoint quantised like the engine's, or BlockFp8 of a source"
        )


_Holder = tuple[int, int]
"""A sender, and which of its shards."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a box has of a write."""

    box: int
    start: Index  # within the box
    extent: Index
    offset: int  # behind the write's
    elements: int


class _Cutter:
    def __init__(self, tensors: Sequence[Tensor], senders: Sequence[Sequence[Shard]]) -> None:
        self._tensors = tensors
        self._boxes: list[dict[Box, list[_Holder]]] = [{} for _ in tensors]
        for sender, shards in enumerate(senders):
            for number, shard in enumerate(shards):
                # A rank that holds nothing of a tensor may say so.
                if math.prod(shard.box.extent):
                    self._boxes[shard.tensor].setdefault(shard.box, []).append((sender, number))
        self._whole: dict[tuple[Index, tuple[Box, ...]], str | None] = {}
        self._cuts: dict[tuple[Index, Index, Index, tuple[Box, ...]], list[_Cut]] = {}

    def cut(self, write: Write) -> tuple[list[_Cut], list[list[_Holder]]]:
        """The write by boxes, and of each box all who hold it."""
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
    """Why these boxes are not each element once, in words."""
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
    """A piece as the engine writes it: runs of ``elements`` each, the i-th from ``source[i]`` to
    ``target[i]``, in elements. ``packed``: the source lies at no places that serve, and is to be laid out
    row by row in ``order`` first, where the i-th run then begins at ``i * elements``."""

    elements: int
    source: np.ndarray
    target: np.ndarray
    packed: bool
    order: tuple[int, ...]


def runs(piece: Piece, strides: Sequence[int], *, least: int, pack: bool = False) -> Runs:
    """``strides``: of the shard, as it lies in memory. ``least``: elements of a run that is worth being sent
    as it lies, where a longer one could be had. ``pack``: in any case, for a conversion."""
    # What is far apart at the receiver is the outer loop, so that its memory is written in order.
    order = tuple(
        sorted(
            (d for d, n in enumerate(piece.extent) if n > 1),
            key=lambda d: (-piece.strides[d], d),
        )
    )
    # Dimensions from the innermost on that make one run at the receiver, and at the source as well.
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
    """Where each element of a strided grid lies, row by row."""
    places = np.zeros(1, dtype=np.int64)
    for size, stride in dimensions:
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places
