"""Where weights land: one buffer with room for each parameter that a worker's loader writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kv_connector.weights.buffer import Buffer, aligned, settle
from kv_connector.weights.geometry import Constant, Geometry, Write
from kv_connector.weights.plan import ITEM_BYTES


class Arena:
    """In the memory of ``device``. The geometry's constants are in it from the start; writes go around them.

    ``nbytes``: as large as the parameters. ``loaded_bytes``: of them, those that senders write.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError, or OSError."""
        self.geometry = geometry
        offsets, end = [], 0
        for parameter in geometry.parameters:
            offsets.append(end)
            nbytes = parameter.elements * ITEM_BYTES[parameter.dtype]
            end += aligned(nbytes)
        self.offsets = tuple(offsets)
        self.nbytes = end
        self.loaded_bytes = sum(
            write.elements * ITEM_BYTES[geometry.parameters[write.parameter].dtype]
            for write in geometry.writes
        )
        self._buffer = Buffer("weights", end, device)
        self.range = self._buffer.range
        for constant in geometry.constants:
            self._fill(constant)
        settle(device)  # what is cleared late would take what has landed with it

    def contents(self) -> Mapping[str, torch.Tensor]:
        """Of each parameter by its name, flat: views."""
        return {
            parameter.name: self._flat(number) for number, parameter in enumerate(self.geometry.parameters)
        }

    def box(self, write: Write) -> torch.Tensor:
        """What lies where the write writes: a view."""
        flat = self._flat(write.parameter)
        return flat.as_strided(write.extent, write.strides, flat.storage_offset() + write.offset)

    def _flat(self, number: int) -> torch.Tensor:
        parameter, offset = self.geometry.parameters[number], self.offsets[number]
        nbytes = parameter.elements * ITEM_BYTES[parameter.dtype]
        return self._buffer.bytes[offset : offset + nbytes].view(getattr(torch, parameter.dtype))

    def _fill(self, constant: Constant) -> None:
        flat = self._flat(constant.parameter)
        flat.as_strided(constant.extent, constant.strides, flat.storage_offset() + constant.offset).fill_(
            constant.value
        )
