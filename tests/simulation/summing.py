"""Sums of pages in virtual time, with the interface Summer of kv_connector.agent.interfaces.

They are sums of the content of cells, in place of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kv_connector.protocol.actions import SummedPages
from kv_connector.protocol.page_sums import SUM_BYTES

from .pool import Content
from .shape import CELL

if TYPE_CHECKING:
    from .process import Process


class SimSummer:
    """Reads the pages some time after the call, as a thread with other jobs does."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def sum(
        self,
        pages: Sequence[SummedPages],
        summed: Callable[[bytes, str], None],
        wanted: Callable[[], bool],
    ) -> None:
        process = self._process

        def read() -> None:
            if process.dead:
                return
            if process.stopped:
                process.engine.when_thawed(read)
                return
            if wanted():
                summed(b"".join(self._sums(pages)), "")
            else:
                summed(b"", "its transfer has ended")

        process.world.clock.after(process.rng.expovariate(20.0), read)

    def _sums(self, pages: Sequence[SummedPages]) -> Iterator[bytes]:
        for one in pages:
            for _, offset in one.layers:
                for block in one.blocks:
                    page = offset + block * one.stride
                    runs = [self._content(page + run, one.run_bytes) for run in one.runs]
                    yield hashlib.blake2b(repr(runs).encode(), digest_size=SUM_BYTES).digest()

    def _content(self, offset: int, nbytes: int) -> list[Content]:
        block_of, content = self._process.worker.block_of, self._process.pool.content
        cells = range(offset // CELL, (offset + nbytes) // CELL)
        return [content.get(block_of.get(cell, -1), {}).get(cell) for cell in cells]
