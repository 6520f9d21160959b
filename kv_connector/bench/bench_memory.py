"""The memory from which and to which pages are written."""

import hashlib
import mmap
import os

import numpy as np

from kv_connector.bench.workloads import Memory, Slots

# The kernel's page: one touch in each faults the pool in.
_KERNEL_PAGE = mmap.PAGESIZE


class BenchMemory:
    """`size` bytes of this process's memory, faulted in.

    Private anonymous memory, as a KV cache is by default. Or, if `shared`, a memfd that another process can
    map.
    """

    def __init__(self, size: int, *, shared: bool) -> None:
        self.size = size
        self.memfd = -1
        if shared:
            # The host lane seals a memfd against shrinking before it maps it.
            self.memfd = os.memfd_create("kv-connector-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.memfd, size)
            mapping = mmap.mmap(self.memfd, size)
        else:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Transparent huge pages would make private memory faster than shared memory on some machines only. So
        # every contestant gets small pages.
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory: Memory = np.frombuffer(mapping, dtype=np.uint8)
        self.memory[::_KERNEL_PAGE] = 1

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def fill(self, seed: int) -> None:
        """Fills the pool with random bytes."""
        words = np.random.default_rng(seed).integers(0, 1 << 63, self.size // 8, dtype=np.int64)
        self.memory[:] = words.view(np.uint8)

    def zero(self) -> None:
        self.memory[:] = 0

    def digest(self, slots: Slots, page_bytes: int) -> str:
        """Returns a digest of these pages, in this order."""
        pages = self.memory.reshape(-1, page_bytes)
        state = hashlib.blake2b(digest_size=16)
        for slot in slots:
            state.update(pages[slot].data)
        return state.hexdigest()

    def zero_outside(self, slots: Slots, page_bytes: int) -> bool:
        """Returns whether every byte outside these pages is zero."""
        pages = self.memory.reshape(-1, page_bytes)
        outside = np.ones(len(pages), dtype=np.bool_)
        outside[slots] = False
        # Compares 8 bytes at a time, and page by page so that nothing is copied.
        words = pages.view(np.int64)
        return not any(words[page].any() for page in np.flatnonzero(outside))
