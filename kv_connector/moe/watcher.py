"""Notices within milliseconds that another rank's process has ended."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

from kv_connector.moe.descriptors import LEAVE, Connection

logger = logging.getLogger("kv_connector")

# Ending takes microseconds, because the thread only has to wake up.
_JOIN_SECONDS = 2.0


class Watcher:
    """A daemon thread that calls ``lost(rank, left)`` once for each rank that ends or leaves.

    Owns the connections: close() closes them.
    """

    def __init__(self, connections: Iterable[Connection], lost: Callable[[int, bool], None]) -> None:
        self._connections = tuple(connections)
        self._lost = lost
        self._leaving = False
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvc-moe-watcher", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Reports to the other ranks that this rank leaves in good order. Does not block."""
        self._leaving = True
        for connection in self._connections:
            connection.leave()

    def close(self) -> None:
        """Ends the thread and closes the connections. Not from the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():  # within lost(): its sockets stay open
            return
        os.close(self._stop)
        for connection in self._connections:
            connection.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
                if connection.pidfd is not None:
                    selector.register(connection.pidfd, selectors.EVENT_READ, connection)
            gone: set[int] = set()
            while True:
                for key, _ in selector.select():
                    connection = key.data
                    if connection is None:
                        return
                    if connection.rank in gone:
                        continue
                    gone.add(connection.rank)
                    selector.unregister(connection.socket)
                    if connection.pidfd is not None:
                        selector.unregister(connection.pidfd)
                    # If a rank closes before it reads this rank's LEAVE, it resets the connection, and its
                    # own LEAVE is lost.
                    left = _left(connection.socket) or self._leaving
                    # Before the log: a step may be waiting.
                    self._lost(connection.rank, left)
                    self._log(connection, left)

    def _log(self, connection: Connection, left: bool) -> None:
        who = connection.rank, connection.pid
        if left:
            logger.info("moe: rank %d (process %d) left the group", *who)
        else:
            logger.warning("moe: rank %d (process %d) ended without leaving the group", *who)


def _left(connection: socket.socket) -> bool:
    try:
        return connection.recv(len(LEAVE), socket.MSG_DONTWAIT) == LEAVE
    except OSError:
        return False
