"""The metadata that SGLang hands over beside the pages: the first token, its log probabilities, and more, by
slot.

SGLang keeps a dozen small buffers for it, in pageable host memory on any machine. They would take a dozen
tiny writes a request, and the lanes of GPUs reach no host memory. So each slot has one row in a separate
table, with its parts of all buffers side by side. The table is in the same kind of memory as the KV cache,
and one write carries a row.

P packs a row when SGLang has filled the slot, before the row is named to the agent. D unpacks it once
everything has landed, before SGLang sees the transfer's end. So SGLang's own check that the slot holds the
room's number remains effective.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

# Copy engines take pieces of 16 bytes. NICs are fastest from a cache line on.
_ALIGNMENT = 64


class MetadataRows:
    """Packs and unpacks rows on one thread, the scheduler's."""

    def __init__(
        self, pointers: Sequence[int], lengths: Sequence[int], widths: Sequence[int], device: str
    ) -> None:
        """SGLang's buffers: their addresses, their lengths and the bytes of a slot. ``device``: of the KV
        cache."""
        self._buffers = list(zip(pointers, widths, strict=True))
        self.widths = tuple(widths)
        self.slots = min(length // width for length, width in zip(lengths, widths, strict=True))
        self.row_bytes = -(-sum(widths) // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros((self.slots, self.row_bytes), dtype=torch.uint8)
        self._table = self._host if device == "cpu" else self._host.to(device)

    @property
    def address(self) -> int:
        return int(self._table.data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self._table.nbytes)

    def pack(self, slot: int) -> None:
        """Packs a row. BLOCKS until it may be sent, on a GPU for one small copy."""
        place = self._place(slot)
        for pointer, width in self._buffers:
            ctypes.memmove(place, pointer + slot * width, width)
            place += width
        if self._table is not self._host:
            self._table[slot].copy_(self._host[slot])
            torch.cuda.current_stream(self._table.device).synchronize()

    def unpack(self, slot: int) -> None:
        """Unpacks a row. BLOCKS until SGLang may read the slot."""
        if self._table is not self._host:
            self._host[slot].copy_(self._table[slot])
        place = self._place(slot)
        for pointer, width in self._buffers:
            ctypes.memmove(pointer + slot * width, place, width)
            place += width

    def _place(self, slot: int) -> int:
        return int(self._host.data_ptr()) + slot * self.row_bytes
