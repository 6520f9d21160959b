"""Threads and descriptors that show the end of a process, before its memory is freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading

# The number is the same on all processors but Alpha.
_SYSCALL = 434
# PIDFD_THREAD, which has the value of O_EXCL.
_OF_THREAD = os.O_EXCL


class Sentinels:
    """Two idle daemon threads, and a pidfd of each for the other ranks.

    After SIGKILL the last thread frees the memory of the process. Only then do the pidfd of the process and
    its connections report the end, which takes long where the memory is large (docs/moe.md). All other
    threads end at once, and one of two threads at most is the last. Linux has pidfds of threads from 6.9 on.
    """

    def __init__(self) -> None:
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._threads: list[threading.Thread] = []
        self.pidfds: list[int] = []
        """Readable once a thread has ended. Passed to the other ranks. Empty before Linux 6.9."""
        try:
            for _ in range(2):
                self._start()
            self.pidfds = self.open()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        thread = threading.Thread(target=self._idle, name="kvc-moe-sentinel", daemon=True)
        thread.start()
        self._threads.append(thread)

    def open(self) -> list[int]:
        """Opens a pidfd of each thread, for a rank that comes later. The caller closes them."""
        pidfds = []
        for thread in self._threads:
            assert thread.native_id is not None
            with contextlib.suppress(OSError):
                pidfds.append(open_pidfd(thread.native_id, _OF_THREAD))
        return pidfds

    def _idle(self) -> None:
        # A handled signal would end the thread, and so the group.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with contextlib.suppress(InterruptedError):
                os.eventfd_read(self._end)
                return

    def close(self) -> None:
        """Ends the threads. The other ranks take this for the end of the process, unless they know better."""
        os.eventfd_write(self._end, len(self._threads))
        for thread in self._threads:
            thread.join()
        os.close(self._end)
        self.release()

    def release(self) -> None:
        """Closes the own pidfds, once the other ranks have theirs."""
        while self.pidfds:
            os.close(self.pidfds.pop())


def open_pidfd(pid: int, flags: int = 0) -> int:
    """Opens a pidfd of a process, or of a thread. Raises OSError.

    os.pidfd_open() is missing if Python was compiled with headers of a kernel before Linux 5.3.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid, flags)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(_SYSCALL, pid, flags)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
