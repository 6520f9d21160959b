"""Staging: memory in which a sender converts and lays out weights that cannot be sent as they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kv_connector.weights.mapping.plan import ShardPiece
from kv_connector.weights.memory.buffer import ALIGNMENT, Buffer, aligned, settle


class Staging:
    """A buffer of ``nbytes`` in the memory of ``device``, in two halves.

    One half is filled while the other is in flight.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.half_bytes = max(nbytes // 2 // ALIGNMENT, 1) * ALIGNMENT
        self._buffer = Buffer("staging", 2 * self.half_bytes, device)
        self.range = self._buffer.range
        self._device = device
        self._half = 0
        self._used = 0

    def put(self, part: torch.Tensor, dtype: torch.dtype) -> int | None:
        """Copies the part, row by row, and returns its place in bytes. None: this half is full."""
        nbytes = part.numel() * dtype.itemsize
        if self._used + nbytes > self.half_bytes:
            return None
        place = self._half * self.half_bytes + self._used
        room = self._buffer.bytes[place : place + nbytes].view(dtype).view(part.shape)
        room.copy_(part, non_blocking=True)
        self._used += aligned(nbytes)
        return place

    def turn(self, drained: Callable[[], None]) -> None:
        """Switches to the other half. ``drained`` must block until nothing of that half is in flight."""
        drained()
        self._half, self._used = 1 - self._half, 0

    def packed(self) -> None:
        """Blocks until all copies of put() are complete."""
        settle(self._device)


def split(piece: ShardPiece, elements: int) -> Iterator[ShardPiece]:
    """Yields the piece in parts of at most ``elements`` elements each, but at least one."""
    if piece.elements <= elements:
        yield piece
        return
    # Splits along the dimension that is outermost at the receiver, so that runs stay long.
    dimension = max((d for d, n in enumerate(piece.extent) if n > 1), key=lambda d: (piece.strides[d], -d))
    row = piece.elements // piece.extent[dimension]
    step = max(elements // row, 1)
    for first in range(0, piece.extent[dimension], step):
        count = min(step, piece.extent[dimension] - first)
        part = ShardPiece(
            piece.shard,
            piece.parameter,
            _replaced(piece.start, dimension, piece.start[dimension] + first),
            _replaced(piece.extent, dimension, count),
            piece.offset + first * piece.strides[dimension],
            piece.strides,
        )
        yield from split(part, elements)


def _replaced(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def laid_out(local: torch.Tensor, piece: ShardPiece, order: Sequence[int]) -> torch.Tensor:
    """Returns a view of the piece whose row order is the receiver's order."""
    if not local.dim():
        return local
    part = local
    for dimension, (start, extent) in enumerate(zip(piece.start, piece.extent, strict=True)):
        part = part.narrow(dimension, start, extent)
    single = [d for d in range(local.dim()) if d not in order]
    part = part.permute(*single, *order)
    for _ in single:
        part = part[0]
    return part
