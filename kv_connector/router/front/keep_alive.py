"""KeepAlive: comment lines in a stream, which clients ignore, so that no proxy ends its idle connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from starlette.types import Send

COMMENT = b": keep-alive\n\n"


async def _nothing() -> None:
    pass


class KeepAlive:
    """Sends a comment into a stream of events whenever the stream has been idle for some time.

    Used from the event loop's thread only, as an asynchronous context manager.
    """

    def __init__(self, interval: float | None, begin: Callable[[], Awaitable[None]], send: Send) -> None:
        """``interval``: seconds without an event; None: no comments. ``begin``: begins the answer, unless it
        has begun."""
        self._interval = interval
        self._begin, self._send = begin, send
        self._sent = 0.0  # when the client got the last bytes
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._interval is not None:
            self.sent()
            self._task = asyncio.create_task(self._run(self._interval))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        self._begin = _nothing  # its owner has this object: no collector has to find the two

    def sent(self) -> None:
        """Notes that the client got whole events."""
        if self._interval is not None:
            self._sent = asyncio.get_running_loop().time()

    def end(self) -> None:
        """Notes that the stream ends: no comment follows."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, interval: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._sent + interval - loop.time())
            if loop.time() >= self._sent + interval:
                await self._begin()
                await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
                self.sent()
