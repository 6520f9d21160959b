"""Calls Python callbacks for events and messages of the transfer engine, on separate threads.

The engine's native threads never take the GIL: they only put events and messages into queues.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kv_connector import _native
from kv_connector.engine import Event, Message
from kv_connector.engine.convert import event_of

if TYPE_CHECKING:
    from kv_connector.engine.transfer_engine import TransferEngine

EventCallback = Callable[[Event], object]
"""Called on the callback thread with the one event. Its exceptions are logged and stop nothing."""

MessageCallback = Callable[[Message], object]

logger = logging.getLogger("kv_connector")

T = TypeVar("T")


class MessageReader:
    """A thread that takes messages one by one. It takes the next one after the callback returns, so the
    engine's bound holds."""

    def __init__(self, engine: TransferEngine, callback: MessageCallback) -> None:
        self._engine = engine
        self._callback = callback
        self._stopped = os.eventfd(0, os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._stopped, select.POLLIN)
        self._poller.register(engine.message_fd(), select.POLLIN)
        # A daemon, so that a process that ends without close() does not wait for it.
        self._thread = threading.Thread(target=self._run, name="kvc-messages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._stopped, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._stopped not in dict(self._poller.poll()):
            for message in self._engine.receive(1):
                try:
                    self._callback(message)
                except BaseException:  # whatever it is, the next message still has to be read
                    logger.exception("a message callback failed: %s", self._callback)
        os.close(self._stopped)


class EventCallbacks:
    """Runs Python callbacks on one separate thread, which is started with the first callback.

    The transfer thread only puts the event into a native queue. A slow callback delays other callbacks,
    nothing else.
    """

    def __init__(self, engine: _native.TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._waiting: dict[int, EventCallback] = {}  # for one event
        self._kept: dict[int, EventCallback] = {}  # for any number of events
        self._last_token = 0
        self._thread: threading.Thread | None = None

    def give(self, callback: EventCallback | None, call: Callable[[int], T]) -> T:
        """Calls `call` with the token under which the native side reports the event. Token 0: no callback."""
        if callback is None:
            return call(0)
        with self._lock:
            self._last_token += 1
            token = self._last_token
            self._waiting[token] = callback
            self._start()
        try:
            return call(token)
        except BaseException:
            with self._lock:
                del self._waiting[token]
            raise

    def keep(self, callback: EventCallback | None) -> int:
        """The token under which the native side reports any number of events until drop()."""
        if callback is None:
            return 0
        with self._lock:
            self._last_token += 1
            self._kept[self._last_token] = callback
            self._start()
            return self._last_token

    def drop(self, token: int) -> None:
        with self._lock:
            self._kept.pop(token, None)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a process that ends without close() does not wait for it.
            self._thread = threading.Thread(target=self._run, name="kvc-callbacks", daemon=True)
            self._thread.start()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (reported := self._engine.next_callback()) is not None:
            token, event = reported
            with self._lock:
                callback = self._waiting.pop(token, None) or self._kept.get(token)
            if callback is None:
                continue  # the event of a released scatter
            try:
                callback(event_of(event))
            except BaseException:  # whatever it is, the other callbacks still have to run
                logger.exception("an event callback failed: %s", callback)
