"""Steps of an idle engine: a worker has news for its scheduler, and vLLM waits for a client's request.

Only a step carries a worker's news. A prefix that another engine requests is such news. The worker and the
scheduler are two processes of one machine, or one process.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import uuid
from collections.abc import Callable

logger = logging.getLogger(__name__)


class StepRequests:
    """The scheduler's end: a thread that takes the workers' requests for a step.

    It does so once the engine's loop has called start(). An engine without such a loop takes its steps when
    its caller wants them.
    """

    def __init__(self) -> None:
        self.name = f"kv-connector {uuid.uuid4().hex}"
        """Name of the socket to which workers send their requests. It is in no file system."""
        self.pending = False
        """Whether a step has been requested since the last one began."""
        self.wake: Callable[[], None] = lambda: None
        """Ends the wait of vLLM's loop."""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    @property
    def started(self) -> bool:
        return self._socket is not None

    def start(self) -> None:
        """Begins to take requests. A second call does nothing."""
        if self._thread is not None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.name}")
        self._thread = threading.Thread(
            target=self._serve, args=(self._socket,), name="kv-step-requests", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. A second call does nothing."""
        if self._socket is None or self._thread is None:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._socket = None

    def _serve(self, taking: socket.socket) -> None:
        while True:
            try:
                request = taking.recv(1)
            except OSError:
                return
            if self._closing:
                return
            if not request:
                continue  # any process of this machine may send an empty one
            self.pending = True
            try:
                self.wake()
            except Exception:
                logger.exception("cannot wake the idle engine: it answers with its next step")


def request_step(name: str) -> None:
    """Requests a step of the engine whose scheduler has the socket ``name``. Does not block.

    A request that is lost for lack of room follows others, which have the same effect.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(b"s", f"\0{name}")
