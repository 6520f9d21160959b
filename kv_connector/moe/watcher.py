"""Notices within milliseconds that another rank's process has ended, on this node or on another one."""

from __future__ import annotations

import logging
import os
import queue
import select
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from kv_connector.engine import TransferError
from kv_connector.moe.descriptors import EVICT, LEAVE, LOSE, Connection
from kv_connector.moe.lanes import Lanes

logger = logging.getLogger("kv_connector")

# Ending takes microseconds, because the thread only has to wake up. So does a request to it.
_JOIN_SECONDS = 2.0


class WatcherReports(Protocol):
    """Receives the reports of a Watcher, on its thread."""

    def lost(self, rank: int, left: bool, reason: str = "") -> None:
        """The process of ``rank`` has ended. ``left``: it left the group in good order before.

        ``reason``: why all links to the rank broke. Its process may live.
        """

    def ended(self, rank: int) -> None:
        """The process of ``rank`` has ended as a whole, some time after lost(). Nothing that it, or a GPU for
        it, stores can land any more."""

    def evicted(self, rank: int, by: int) -> None:
        """Rank ``by`` waited for ``rank`` until the deadline. ``rank`` may be the rank of this process."""

    def unreachable(self, rank: int, by: int) -> None:
        """Rank ``by`` lost ``rank``, which may be the rank of this process."""


class Watcher:
    """A daemon thread that reports once for each rank that ends or leaves, and each rank that is evicted.

    Owns the connections: close() closes them. The lanes to other nodes stay the caller's.
    """

    def __init__(
        self, connections: Iterable[Connection], reports: WatcherReports, lanes: Lanes | None = None
    ) -> None:
        self.connections = tuple(connections)
        """To the other ranks of the node. Only replace() changes them."""
        self._lanes = lanes
        self._reports = reports
        self._reported = False
        """The other ranks know of a rank that is lost or evicted."""
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the thread. None ends it."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Here and not on the thread: the lanes may be closed before it runs.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for connection in self.connections:
            self._register(connection)
        if lanes is not None:
            for descriptor in (lanes.native.departure_fd(), lanes.native.message_fd()):
                self._selector.register(descriptor, selectors.EVENT_READ, lanes)
        self._thread = threading.Thread(target=self._run, name="kvc-moe-watcher", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Reports to the other ranks of the node that this rank leaves in good order. Does not block."""
        for connection in self.connections:
            connection.send(LEAVE)

    def flush(self) -> bool:
        """Reports what other ranks sent before this call. Not from the thread.

        Returns False where the thread did not do it within two seconds.
        """
        return self._call(lambda: self._read_ready(0.0))

    def replace(self, connection: Connection) -> None:
        """Watches the connection in place of the earlier one to its rank, and closes that one.

        Its reports begin before the call returns, or once the thread is out of a report that takes seconds.
        """
        (before,) = (one for one in self.connections if one.rank == connection.rank)
        self.connections = (*(one for one in self.connections if one is not before), connection)

        def replaced() -> None:
            for key in list(self._selector.get_map().values()):
                if key.data is before or key.data == before.rank:
                    self._selector.unregister(key.fd)
            before.close()
            self._register(connection)

        self._call(replaced)

    def evict(self, rank: int) -> None:
        """Reports to all other ranks that this rank no longer waits for ``rank``. Does not block."""
        self._send(EVICT + bytes([rank]))

    def _send(self, message: bytes) -> None:
        for connection in self.connections:
            connection.send(message)
        if self._lanes is not None:
            self._lanes.send(message)

    def close(self) -> None:
        """Ends the thread and closes the connections. Not from the thread."""
        self._requests.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():  # within a report: its sockets stay open
            return
        os.close(self._wake)
        for connection in self.connections:
            connection.close()

    def _call(self, function: Callable[[], None]) -> bool:
        """Calls the function on the thread. Returns whether it has ended within two seconds."""
        ended = threading.Event()

        def call() -> None:
            function()
            ended.set()

        self._requests.put(call)
        os.eventfd_write(self._wake, 1)
        return ended.wait(_JOIN_SECONDS)

    def _register(self, connection: Connection) -> None:
        for descriptor in (connection.socket.fileno(), *connection.pidfds):
            self._selector.register(descriptor, selectors.EVENT_READ, connection)

    def _run(self) -> None:
        with self._selector:
            while True:
                self._read_ready(None)
                while not self._requests.empty():
                    if (request := self._requests.get()) is None:
                        return
                    request()

    def _read_ready(self, timeout: float | None) -> None:
        """Reports what has come. Waits for something first, up to ``timeout`` seconds."""
        selector = self._selector
        for key, _ in selector.select(timeout):
            if selector.get_map().get(key.fd) != key:
                continue  # an event of the same batch has reported the rank
            connection = key.data
            if connection is None:
                os.eventfd_read(self._wake)
            elif isinstance(connection, Lanes):
                if self._read_lanes(connection):
                    selector.unregister(key.fd)
            elif isinstance(connection, int):
                selector.unregister(key.fd)
                self._reports.ended(connection)
            elif self._read(connection):
                for descriptor in (connection.socket.fileno(), *connection.pidfds):
                    selector.unregister(descriptor)
                if connection.process is not None:
                    selector.register(connection.process, selectors.EVENT_READ, connection.rank)

    def _read(self, connection: Connection) -> bool:
        """Reports what has come over the connection. Returns whether its rank has ended or left."""
        while True:
            # Before the socket is read: a rank that leaves sends LEAVE before its sentinels end.
            ended = _ended(connection)
            try:
                message = connection.socket.recv(max(len(EVICT), len(LOSE)) + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not ended:
                    return False
                message = b""
            except ConnectionResetError:
                # Reported once, before the messages that came earlier: the rank closed without reading this
                # rank's last message.
                continue
            except OSError:
                message = b""
            if self._read_report(message, connection.rank):
                continue
            left = message == LEAVE
            # Before the log: a step may be waiting.
            self._lose(connection.rank, left)
            self._log(connection, left)
            return True

    def _read_lanes(self, lanes: Lanes) -> bool:
        """Reports what has come over the lanes. Returns whether they are closed."""
        # A rank may have evicted another rank, and ended after that. So departures are taken first, when all
        # messages of those ranks are there, and are reported last.
        try:
            departures = lanes.native.departures()
            messages = lanes.native.receive()
        except TransferError:
            return True
        for rank, message in messages:
            self._read_report(message, rank)
        for rank, left, reason in departures:
            self._lose(rank, left, reason)
            if left:
                logger.info("moe: rank %d of another node left the group", rank)
            else:
                logger.warning("moe: rank %d of another node cannot be reached: %s", rank, reason)
        return False

    def _read_report(self, message: bytes, by: int) -> bool:
        """Reports a message of rank ``by`` about another rank. Returns whether it was one."""
        kind, rank = message[:-1], message[-1:]
        if kind not in (EVICT, LOSE):
            return False
        self._reported = True
        if kind == EVICT:
            self._reports.evicted(rank[0], by)
            logger.warning("moe: rank %d evicted rank %d at its deadline", by, rank[0])
        else:
            self._reports.unreachable(rank[0], by)
            logger.warning("moe: rank %d reports that rank %d is lost", by, rank[0])
        return True

    def _lose(self, rank: int, left: bool, reason: str = "") -> None:
        """Reports that a rank is gone, and passes the first loss on to ranks that may not notice it."""
        if self._lanes is not None and not left and not self._reported:
            self._reported = True
            self._send(LOSE + bytes([rank]))  # first, because a step that ends may close the group
        self._reports.lost(rank, left, reason)

    def _log(self, connection: Connection, left: bool) -> None:
        who = connection.rank, connection.pid
        if left:
            logger.info("moe: rank %d (process %d) left the group", *who)
        else:
            logger.warning("moe: rank %d (process %d) ended without leaving the group", *who)


def _ended(connection: Connection) -> bool:
    poll = select.poll()
    for pidfd in connection.pidfds:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
