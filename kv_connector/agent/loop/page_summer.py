"""The thread that sums pages of this worker's KV cache, so that the agent's thread never waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kv_connector.agent.config import PageMemory
from kv_connector.engine import ErrorCode, TransferError
from kv_connector.engine.transfer_engine import PageSummer as NativeSummer
from kv_connector.protocol.actions import SummedPages

logger = logging.getLogger("kv_connector")

Summed = Callable[[bytes, str], None]
"""Called with the sums, or with the reason why there are none."""

NOT_WANTED = "its transfer has ended"


def _always() -> bool:
    return True


def _hangs(timeout: float) -> TransferError:
    text = f"pages are still being summed after {timeout:g} s, the GPU may hang: restart this engine"
    return TransferError(ErrorCode.TIMEOUT, "", "", "sum_pages", text)


class PageSummer:
    """Sums pages one job after the other. The thread starts with the first job."""

    def __init__(self, memory: Sequence[PageMemory], *, on_gpu: bool) -> None:
        """``on_gpu``: the memory is that of the GPU whose context is current on this thread. Raises
        TransferError."""
        self._memory = tuple(memory)
        self._native = NativeSummer(on_gpu)
        self._jobs: SimpleQueue[tuple[Sequence[SummedPages], Summed, Callable[[], bool]] | None] = (
            SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._closing = False

    def sum(self, pages: Sequence[SummedPages], summed: Summed, wanted: Callable[[], bool] = _always) -> None:
        """Sums these pages. ``summed`` is called on the summer's thread.

        ``wanted`` is called there before. If it returns False, the pages are not summed. Otherwise a queue
        that is longer than the timeout `check` would never become shorter: each of its jobs would be late.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="kv-page-summer", daemon=True)
            self._thread.start()
        self._jobs.put((pages, summed, wanted))

    def drain(self, timeout: float) -> None:
        """BLOCKS until all jobs before this call are done, so that nothing reads the memory for them.

        Raises TransferError after ``timeout`` seconds: a GPU may hang.
        """
        if self._thread is None:
            return
        done = threading.Event()
        self.sum((), lambda sums, problem: done.set())
        if not done.wait(timeout):
            raise _hangs(timeout)

    def close(self, timeout: float) -> None:
        """Ends the thread after the job that it works on. The other jobs are dropped. BLOCKS.

        Raises TransferError after ``timeout`` seconds. The thread ends with its job, or with the process.
        """
        if self._thread is not None:
            self._closing = True
            self._jobs.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise _hangs(timeout)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            pages, summed, wanted = job
            try:
                sums, problem = (b"".join(map(self._sum, pages)), "") if wanted() else (b"", NOT_WANTED)
            except TransferError as error:
                sums, problem = b"", str(error)
            except Exception as error:
                logger.exception("pages were not summed")
                sums, problem = b"", f"{type(error).__name__}: {error}"
            summed(sums, problem)

    def _sum(self, pages: SummedPages) -> bytes:
        """Sums pages of all their regions in one call. After each call this thread waits for Python's lock,
        up to 5 ms while the engine's thread runs."""
        if not (pages.layers and pages.blocks and pages.runs):
            return b""
        reach = max(pages.blocks) * pages.stride + max(pages.runs) + pages.run_bytes
        layers, end = list[int](), 0
        for region, offset in pages.layers:
            part = self._memory[region]
            if offset + reach > part.nbytes:
                text = f"a page lies outside memory region {region}"
                raise TransferError(ErrorCode.OUT_OF_RANGE, "", "", "sum_pages", text)
            layers.append(part.address + offset)
            end = max(end, part.address + part.nbytes)
        begin = min(layers)
        offsets = [layer - begin for layer in layers]
        return self._native.sum(
            begin, end - begin, offsets, pages.blocks, pages.stride, pages.runs, pages.run_bytes
        )
