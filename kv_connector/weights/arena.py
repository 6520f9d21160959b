"""Where weights land: one buffer with room for each parameter that a worker's loader writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kv_connector.engine import MemoryRange
from kv_connector.engine.transfer_engine import SharedMemory
from kv_connector.weights.geometry import Constant, Geometry
from kv_connector.weights.plan import ITEM_BYTES
from kv_connector.weights.staging import settle

# Of a parameter's first byte: what CUDA's own allocations are aligned to, so that no kernel minds.
_ALIGNMENT = 256


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
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.offsets = tuple(offsets)
        self.nbytes = end
        self.loaded_bytes = sum(
            write.elements * ITEM_BYTES[geometry.parameters[write.parameter].dtype]
            for write in geometry.writes
        )
        room = max(end, _ALIGNMENT)  # nothing of nothing cannot be registered
        if device.type == "cpu":
            # A memfd, which a sender of this machine can map.
            self._memory = SharedMemory("weights", room)
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.range = MemoryRange(self._memory.address, room, self._memory.fd)
        else:
            self._bytes = torch.zeros(room, dtype=torch.uint8, device=device)
            self.range = MemoryRange(self._bytes.data_ptr(), room)
        for constant in geometry.constants:
            self._fill(constant)
        settle(device)  # what is cleared late would take what has landed with it

    def contents(self) -> Mapping[str, torch.Tensor]:
        """Of each parameter by its name, flat: views."""
        return {
            parameter.name: self._flat(number) for number, parameter in enumerate(self.geometry.parameters)
        }

    def _flat(self, number: int) -> torch.Tensor:
        parameter, offset = self.geometry.parameters[number], self.offsets[number]
        nbytes = parameter.elements * ITEM_BYTES[parameter.dtype]
        return self._bytes[offset : offset + nbytes].view(getattr(torch, parameter.dtype))

    def _fill(self, constant: Constant) -> None:
        flat = self._flat(constant.parameter)
        flat.as_strided(constant.extent, constant.strides, flat.storage_offset() + constant.offset).fill_(
            constant.value
        )
