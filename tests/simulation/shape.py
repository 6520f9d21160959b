"""The shape of an engine: how it divides the model and places its pages.

The layout of each worker follows from it, and the layout alone decides what lies in each cell of a worker's
memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    Units,
    convolution_state,
    head_major,
    token_major,
    units_of_rank,
)
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout, Part

CELL = 4  # bytes
STEP = 8  # tokens of one head that lie in a cell
# Small on purpose: a freed block soon belongs to another request.
POOL_TOKENS = 2560
# Two KV groups whose layers alternate, as in a model with sliding windows, and a row for each request, which
# is complete once the whole prompt is computed.
GROUPS = ("full", "sliding_window", "state")
GROUP_OF_LAYER = (0, 1, 0, 2)
ROWS = 2  # number of the group of rows
CUTS = (1, 2, 3)  # layers after which the model may be cut into two stages


@dataclass(frozen=True)
class Side:
    """The shape of one engine. Its workers are numbered stage by stage."""

    ranks: int = 1  # ranks of each stage
    first_stage: int = 0  # layers of the first of two stages; 0: a single stage
    block: int = 16  # tokens
    tokens_first: bool = False  # the order of a page; False: its heads come first

    @property
    def workers(self) -> int:
        return self.ranks * (2 if self.first_stage else 1)


class What(NamedTuple):
    """The place in the model of a cell's content."""

    layer: int
    part: str
    unit: int  # a head
    rest: int  # number among several such cells


class Cell(NamedTuple):
    place: int  # position in block 0
    stride: int  # distance to the same cell of the next block
    what: What


class Worker:
    """The part of the model that a worker has, and its places in memory."""

    def __init__(self, side: Side, heads: int, number: int) -> None:
        self.stage, rank = divmod(number, side.ranks)
        cut = side.first_stage
        every = range(len(GROUP_OF_LAYER))
        self.layers = every[cut:] if self.stage or not cut else every[:cut]
        self.block = side.block
        self.blocks = POOL_TOKENS // side.block
        self.layout = self._layout(side, units_of_rank(heads, rank, side.ranks))
        self.block_of: dict[int, int] = {}
        """Block of each memory cell. Cells between pages belong to no block."""
        self.cells: dict[int, list[list[Cell]]] = {}
        """Cells by layer, and by step of a block's tokens."""
        for layer, described in zip(self.layers, self.layout.layers, strict=True):
            size = self.layout.groups[described.group].block_size
            steps: list[list[Cell]] = [[] for _ in range(max(1, size // STEP))]
            self.cells[layer] = steps
            for part in described.parts:
                for step, cell in _cells(layer, part):
                    steps[step].append(cell)
                    self.block_of |= {cell.place + b * cell.stride: b for b in range(self.blocks)}

    def _layout(self, side: Side, units: Units) -> KvLayout:
        place, layers = Place(0, 0, 0), []
        for layer in self.layers:
            row = GROUP_OF_LAYER[layer] == ROWS
            # Two cells each for the model's heads, and for a value that all ranks share.
            page = 2 * (units.count + 1) * CELL if row else units.count * side.block // STEP * CELL
            place = Place(0, place.offset, page + CELL)
            if row:
                pieces = Piece("heads", 1, units), Piece("all", 1, None)
                parts = convolution_state(place, pieces, 2, CELL, dims_first=True)
            else:
                order = token_major if side.tokens_first else head_major
                parts = order(place, units, side.block // STEP, CELL)
            layers.append(LayerLayout(f"layer{layer}", GROUP_OF_LAYER[layer], "", parts))
            place = place.after(self.blocks * place.block_stride)
        groups = tuple(
            GroupLayout(self.blocks, 0 if group == ROWS else side.block, kind)
            for group, kind in enumerate(GROUPS)
        )
        return KvLayout(groups, tuple(layers))


worker = functools.cache(Worker)


def _cells(layer: int, part: Part) -> Iterator[tuple[int, Cell]]:
    """Yields each cell of the part in block 0, and the step of the block's tokens that it belongs to."""
    runs = [(part.offset, 0, part.units.start, 0)]  # where, step, unit, row
    for axis in part.axes:
        runs = [
            (
                offset + i * axis.stride,
                step * axis.count + i if axis.what == "token" else step,
                unit + i if axis.what == "shard" else unit,
                row * axis.count + i if axis.what == "row" else row,
            )
            for offset, step, unit, row in runs
            for i in range(axis.count)
        ]
    each = part.run_bytes // CELL
    for offset, step, unit, row in runs:
        for i in range(each):
            place = offset // CELL + i
            yield step, Cell(place, part.block_stride // CELL, What(layer, part.name, unit, row * each + i))
