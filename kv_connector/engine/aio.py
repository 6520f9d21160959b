"""Awaits a TransferEngine's events and messages in an asyncio loop, woken by the engine's descriptors.

No thread and no callback: the loop watches two descriptors that the native side makes readable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from kv_connector.engine import Event, EventKind, Message
from kv_connector.engine.transfer_engine import TransferEngine

_SUBJECTS = {
    EventKind.TRANSFER_DONE: "transfer",
    EventKind.TRANSFER_FAILED: "transfer",
    EventKind.TRANSFER_CANCELLED: "transfer",
    EventKind.COUNTERS_REACHED: "counters",
    EventKind.PEER_DOWN: "peer",
    EventKind.PEER_LEFT: "peer",
}

_Key = tuple[str, int]


class AsyncEvents:
    """Takes all events of one transfer engine that have no callback. It serves the event loop in which it is
    created.

    An event that arrives before it is awaited is kept, as in the engine's own queue. A cancelled await loses
    nothing: the event stays to be awaited again.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._event_fd = engine.event_fd()
        self._message_fd = engine.message_fd()
        self._arrived: dict[_Key, Event] = {}  # oldest first
        self._waiting: dict[_Key, deque[asyncio.Future[None]]] = {}
        self._readers: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._loop.add_reader(self._event_fd, self._take_events)

    def close(self) -> None:
        """Stops watching. Call it before the engine's close(). Events that arrived and were not awaited are
        lost."""
        self._loop.remove_reader(self._event_fd)
        self._loop.remove_reader(self._message_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def transfer(self, transfer: int) -> Event:
        """The final event of a transfer without a callback (also of a send, scatter or barrier)."""
        return await self._event(("transfer", transfer))

    async def counters(self, counters: int) -> Event:
        """The event of a counter set with targets and without a callback."""
        return await self._event(("counters", counters))

    async def other(self) -> Event:
        """The oldest event that is not awaited by its id: usually a peer that went down or left."""
        while True:
            self._take_events()
            for key in self._arrived:
                if key not in self._waiting:
                    return self._arrived.pop(key)
            await self._wake_up(self._others)

    async def message(self) -> Message:
        """The next message. Messages that are not awaited stay in the engine, which holds its peers back."""
        while not (messages := self._engine.receive(1)):
            # Watched only while a task waits, because the descriptor stays readable as long as a message is
            # there.
            if not self._readers:
                self._loop.add_reader(self._message_fd, self._wake, self._readers)
            try:
                await self._wake_up(self._readers)
            finally:
                if not self._readers:
                    self._loop.remove_reader(self._message_fd)
        return messages[0]

    async def _event(self, key: _Key) -> Event:
        waiting = self._waiting.setdefault(key, deque())
        try:
            while key not in self._arrived:
                await self._wake_up(waiting)
            return self._arrived.pop(key)
        finally:
            if not waiting:
                self._waiting.pop(key, None)
                if key in self._arrived:  # cancelled just after the event arrived
                    self._wake(self._others)

    async def _wake_up(self, waiting: deque[asyncio.Future[None]]) -> None:
        """Returns after the next _wake(waiting)."""
        future = self._loop.create_future()
        waiting.append(future)
        try:
            await future
        finally:
            waiting.remove(future)

    @staticmethod
    def _wake(waiting: deque[asyncio.Future[None]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _take_events(self) -> None:
        for event in self._engine.poll_events():
            key = (_SUBJECTS[event.kind], event.id)
            self._arrived[key] = event
            self._wake(self._waiting.get(key, self._others))
