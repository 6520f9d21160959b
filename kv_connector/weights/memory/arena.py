"""Arena: the buffer in which new weights land. It holds a whole version, or two rounds of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kv_connector.weights.mapping.geometry import Constant, Geometry, Write, item_bytes
from kv_connector.weights.memory.buffer import Buffer, aligned, settle

# While the model takes one round, the next round lands. A third round would only wait for the second.
SLOTS = 2


class Arena:
    """The buffer for a worker's new weights, in the memory of ``device``.

    A round uses the room of the round that is SLOTS before it.

    ``offsets``: the place of each parameter, in bytes. ``loaded_bytes``: the bytes that senders write for a
    version.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Allocates the buffer. Raises torch.OutOfMemoryError or OSError."""
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
        """Prepares the room of a round: writes the round's constants into it.

        The senders write around the constants. The contents of the previous round in this room end. Call it
        before the room's counter opens: a later call would overwrite new pages. Blocks for a moment.
        """
        for constant in self.geometry.constants:
            if self.geometry.parameters[constant.parameter].round == round:
                self.box(constant).fill_(constant.value)
        settle(self.device)

    def contents(self, round: int) -> Mapping[str, torch.Tensor]:
        """Returns the contents of the round's parameters by name, as flat views."""
        return {
            parameter.name: self._flat(number)
            for number, parameter in enumerate(self.geometry.parameters)
            if parameter.round == round
        }

    def box(self, one: Write | Constant) -> torch.Tensor:
        """Returns a view of the place that a write or a constant fills."""
        flat = self._flat(one.parameter)
        return flat.as_strided(one.extent, one.strides, flat.storage_offset() + one.offset)

    def _flat(self, number: int) -> torch.Tensor:
        parameter, offset = self.geometry.parameters[number], self.offsets[number]
        flat = self._buffer.bytes[offset : offset + parameter.nbytes]
        return flat.view(getattr(torch, parameter.dtype))
