"""The measured workloads: the same pages, in the same memory, for every contestant."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POOL_BYTES = 256 << 20
"""Each side's memory.

It is larger than any cache, so that pages come from and go to DRAM as a KV cache's do.
"""

Slots = NDArray[np.int64]
Memory = NDArray[np.uint8]


@dataclass(frozen=True)
class PageWorkload:
    """One batch of `pages` pages of `page_bytes`, scattered over the pool on both sides."""

    name: str
    pages: int
    page_bytes: int

    @property
    def bytes(self) -> int:
        return self.pages * self.page_bytes

    def slots(self, seed: int, pool_bytes: int = POOL_BYTES) -> Slots:
        """Returns different slots of a pool in random order: page i lies at slots[i] * page_bytes."""
        order = np.random.default_rng(seed).permutation(pool_bytes // self.page_bytes)
        return order[: self.pages].astype(np.int64)


WORKLOADS = (
    PageWorkload("1024x64K", 1024, 64 << 10),
    PageWorkload("4096x16K", 4096, 16 << 10),
    PageWorkload("256x256K", 256, 256 << 10),
    PageWorkload("1x256M", 1, 256 << 20),
    PageWorkload("4096x4K", 4096, 4 << 10),
)

LATENCY_BYTES = 4 << 10

LATENCY = "latency"
"""One-way latency of a 4 KiB write to its counter: half of a round trip."""
IDLE = "idle"
"""CPU that both sides use while connected and idle."""

CASES = (*(workload.name for workload in WORKLOADS), LATENCY, IDLE)
