"""Memory that a transfer engine reads or writes, in a device's."""

from __future__ import annotations

import torch

from kv_connector.engine import MemoryRange
from kv_connector.engine.transfer_engine import SharedMemory

# Of what begins in one: what CUDA's own allocations are aligned to, so that no kernel minds.
ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """As many, or more, up to where the next may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def settle(device: torch.device) -> None:
    """Blocks until the device has done what this thread's stream was told: an engine copies on its own."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Buffer:
    """``nbytes`` zeros, at least one alignment: nothing cannot be registered. On CPUs a memfd, which a peer
    of this machine can map. Raises torch.OutOfMemoryError, or OSError."""

    def __init__(self, name: str, nbytes: int, device: torch.device) -> None:
        nbytes = max(nbytes, ALIGNMENT)
        if device.type == "cpu":
            self._memory = SharedMemory(name, nbytes)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.range = MemoryRange(self._memory.address, nbytes, self._memory.fd)
        else:
            self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.range = MemoryRange(self.bytes.data_ptr(), nbytes)
