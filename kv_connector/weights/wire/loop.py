"""Loop: one thread that owns control sockets and a transfer engine, for senders, workers and controllers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Codec, MessageSockets, Received
from kv_connector.weights.wire.messages import CODEC

logger = logging.getLogger("kv_connector")

T = TypeVar("T")


class Handler(Protocol):
    """The handler of a loop's events. All methods are called on the loop's thread."""

    def received(self, now: float, received: Received[Any]) -> None: ...

    def readable(self, now: float) -> None:
        """A watched descriptor may be readable."""

    def tick(self, now: float) -> float | None:
        """Does what is due. Returns the seconds until the next call is due. None: no call is due."""


class Loop:
    """A thread with control sockets. Call start() once and stop() once.

    Other threads may call only call() and stop().
    """

    def __init__(self, name: str, key: ClusterKey | None, codec: Codec[Any] = CODEC) -> None:
        self.sockets: MessageSockets[Any] = MessageSockets(codec, key)
        self._name = name
        self._handler: Handler
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # of _stopped, and of the lifetime of _wake
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.sockets.watch(self._wake)

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._thread.start()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Runs the command on the loop's thread. If the loop has stopped, the future is cancelled."""
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                future.cancel()
            else:
                self._commands.append((future, command))
                os.eventfd_write(self._wake, 1)
        return future

    def stop(self) -> None:
        """Blocks until the thread has ended and its sockets are closed. Idempotent."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
            if not stopped:
                os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not stopped:
            self.sockets.close()
            os.close(self._wake)

    def _run(self) -> None:
        pause: float | None = None
        while not self._stopped:
            try:
                if self._wake in self.sockets.wait(pause):
                    os.eventfd_read(self._wake)
                for received in self.sockets.receive():
                    self._handler.received(time.monotonic(), received)
                self._handler.readable(time.monotonic())
                while self._commands:
                    _carry_out(*self._commands.popleft())
                pause = self._handler.tick(time.monotonic())
            except Exception:
                logger.exception(
                    "%s: the control thread goes on after an error that it did not expect", self._name
                )
                pause = 0.01  # the error may repeat at once
        for future, _ in self._commands:
            future.cancel()


def _carry_out(future: Future[T], command: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command())
    except Exception as error:
        future.set_exception(error)
