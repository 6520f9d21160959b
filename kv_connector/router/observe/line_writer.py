"""LineWriter: writes lines on its own thread, so that a slow reader or disk delays no request."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

# Lines that wait for the thread. At 1,000 requests a second they are 10 s of a stalled disk, and some 5 MB.
MOST_LINES = 10_000
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
"""Descriptors of a process."""

# Time for the last lines at the end of the process. A reader that takes nothing must not keep the process.
CLOSE_S = 5.0


class LineWriter:
    """A bounded queue of lines, and the daemon thread that writes them in order."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """``write``: called with each line on the thread. It may block, and handles its own errors."""
        self._write = write
        # Its put() may be interrupted by a destructor that logs, such as that of a failed task. The lock of
        # queue.Queue would then block the thread for good.
        self._lines: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> bool:
        """Queues a line and never blocks. Returns False if the queue is full: the line is dropped.

        Called by one thread at a time.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvc-lines", daemon=True)
            self._thread.start()
        if self._lines.qsize() >= MOST_LINES:
            return False
        self._lines.put(line)
        return True

    def flush(self) -> bool:
        """Blocks until the lines so far are written, for at most CLOSE_S. Returns whether they are."""
        if self._thread is None or not self._thread.is_alive():
            return True
        written = threading.Event()
        self._lines.put(written)
        return written.wait(CLOSE_S)

    def close(self) -> bool:
        """Writes the lines that wait, as flush(), and ends the thread if it has written them."""
        written = self.flush()
        if written:
            self._lines.put(None)
        return written

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write(line)


class Descriptor:
    """A file descriptor that takes text.

    Python's own streams hold a lock while a write blocks, and the interpreter's end waits for that lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> None:
        """Writes the whole text. Blocks until the reader takes it. Raises OSError."""
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        """Does nothing: the descriptor belongs to the process."""


class LogFile(Descriptor):
    """A file that is opened again once it was moved away, as logrotate does."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path = Path(path)
        super().__init__(self._open())

    def write(self, text: str) -> None:
        try:
            moved = not os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            moved = True
        if moved:
            before, self._descriptor = self._descriptor, self._open()
            # Also if this fails, the number may soon be another file's.
            os.close(before)
        super().write(text)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


class QueuedHandler(logging.Handler):
    """The handler of the process's own log, which never blocks its caller.

    The line after dropped lines has their number.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._stream = Descriptor(descriptor)
        self._writer = LineWriter(self._write)
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # as every handler of logging: a faulty log call must not end a request
            self.handleError(record)
            return
        lost = f"log: {self._dropped} lines before this one were dropped: the reader is too slow\n"
        if self._writer.put((lost if self._dropped else "") + text + "\n"):
            self._dropped = 0
        else:
            self._dropped += 1

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader has gone: no place is left for a line about it
            self._stream.write(text)
