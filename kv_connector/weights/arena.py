"""Where weights land: one buffer with room for what a worker's loader writes, all of it or two rounds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kv_connector.weights.buffer import Buffer, aligned, settle
from kv_connector.weights.geometry import Constant, Geometry, Write, item_bytes

# While one round is taken the next lands; a third would wait for the second to be taken, too.
SLOTS = 2


class Arena:
    """In the memory of ``device``. A round has the room of the one that is SLOTS before it.

    ``offsets``: in bytes, of each parameter. ``loaded_bytes``: those that senders write for a version.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError, or OSError."""
        self.geometry = geometry
        self.device = device
        ends = [0] * geometry.rounds
        within = []
        for parameter in geometry.parameters:
            within.append(ends[parameter.round])
            ends[parameter.round] += aligned(parameter.nbytes)
        slots = [max(ends[slot::SLOTS], default=0) for slot in range(SLOTS)]
        begins = [sum(slots[:slot]) for slot in range(SLOTS)]
        self.offsets = tuple(
            begins[parameter.round % SLOTS] + offset
            for parameter, offset in zip(geometry.parameters, within, strict=True)
        )
        self.nbytes = sum(slots)
        self.loaded_bytes = sum(
            write.elements * item_bytes(geometry.parameters[write.parameter].dtype)
            for write in geometry.writes
        )
        self._buffer = Buffer("weights", self.nbytes, device)
        self.range = self._buffer.range

    def clear(self, round: int) -> None:
        """The room of this round has its constants, around which it is written, and no other round's contents
        any more. Blocks for a moment: what is cleared late would take what has landed with it."""
        for constant in self.geometry.constants:
            if self.geometry.parameters[constant.parameter].round == round:
                self.box(constant).fill_(constant.value)
        settle(self.device)

    def contents(self, round: int) -> Mapping[str, torch.Tensor]:
        """Of each of the round's parameters by its name, flat: views."""
        return {
            parameter.name: self._flat(number)
            for number, parameter in enumerate(self.geometry.parameters)
            if parameter.round == round
        }

    def box(self, one: Write | Constant) -> torch.Tensor:
        """What lies where it is written: a view."""
        flat = self._flat(one.parameter)
        return flat.as_strided(one.extent, one.strides, flat.storage_offset() + one.offset)

    def _flat(self, number: int) -> torch.Tensor:
        parameter, offset = self.geometry.parameters[number], self.offsets[number]
        flat = self._buffer.bytes[offset : offset + parameter.nbytes]
        return flat.view(getattr(torch, parameter.dtype))
