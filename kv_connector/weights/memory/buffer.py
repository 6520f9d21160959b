"""Buffers in the memory of a CPU or GPU that a transfer engine reads or writes."""

from __future__ import annotations

import torch

from kv_connector.engine import MemoryRange
from kv_connector.engine.rank_placement import Device
from kv_connector.engine.transfer_engine import SharedMemory

# Alignment of each part of a buffer, in bytes. CUDA aligns its own allocations so, and every kernel accepts
# it.
ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """Returns ``nbytes``, rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def device_of(device: torch.device) -> Device:
    """The device for the choice of NICs."""
    if device.type != "cuda":
        return Device("cpu")
    return Device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def settle(device: torch.device) -> None:
    """Blocks until the device has finished the work of this thread's stream.

    A transfer engine does not follow the stream: it copies on another stream.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Buffer:
    """A zeroed buffer of ``nbytes`` bytes, at least one alignment long.

    An empty range cannot be registered. On CPUs it is a memfd, which a peer on this machine can map. The
    constructor raises torch.OutOfMemoryError or OSError. It blocks until the stream has written the zeros.
    """

    def __init__(self, name: str, nbytes: int, device: torch.device) -> None:
        nbytes = max(nbytes, ALIGNMENT)
        if device.type == "cpu":
            self._memory = SharedMemory(name, nbytes)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.range = MemoryRange(self._memory.address, nbytes, self._memory.fd)
        else:
            self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            # A peer's write does not follow the stream: zeros that come later would overwrite it.
            settle(device)
            self.range = MemoryRange(self.bytes.data_ptr(), nbytes)
