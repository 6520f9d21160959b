"""Deadline: the time limits of one request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kv_connector.router.failure import failure
from kv_connector.router.settings import RequestTimeouts


class Deadline:
    """Ends what waits for an engine's answer. Used from the event loop's thread only."""

    def __init__(self, timeouts: RequestTimeouts, *, streamed: bool) -> None:
        """``streamed``: the answer is a stream, else it arrives as a whole."""
        self._timeouts = timeouts
        self._streamed = streamed
        self._scope = asyncio.timeout(None)
        # What the client reads if the time passes now: event, seconds, option.
        self._passed = self._whole = (
            "the answer was not complete",
            timeouts.request or 0.0,
            "--request-timeout",
        )
        self._end = math.inf  # when the whole request must be over
        self._limited = True  # whether another limit counts than that of the whole request

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Guards the request's block, which begins now. Failure 504 if it takes too long. Enter it once."""
        now = asyncio.get_running_loop().time()
        if self._timeouts.request is not None:
            self._end = now + self._timeouts.request
        try:
            async with self._scope:
                self._limit(self._timeouts.first_token, "no token arrived", "--first-token-timeout")
                yield
        except TimeoutError:
            if not self._scope.expired():
                raise
            what, seconds, option = self._passed
            raise failure(504, "api_error", f"{what} within {seconds:g} s ({option})") from None

    def received(self) -> None:
        """Notes that events have arrived. Until waiting(), only the limit of the whole request counts."""
        if self._limited:
            self._limited = False
            self._limit(None)

    def waiting(self) -> None:
        """Notes that the next events are awaited."""
        if self._timeouts.idle is not None:
            self._limited = True
            self._limit(self._timeouts.idle, "the next token did not arrive", "--idle-timeout")

    def complete(self) -> None:
        """Notes that the client has the whole answer. The rest of the block has no limit."""
        self._end = math.inf
        self._limit(None)

    def _limit(self, seconds: float | None, what: str = "", option: str = "") -> None:
        """Sets the time until which the block may take: so many seconds, or the end of the request."""
        due, self._passed = self._end, self._whole
        if seconds is not None and self._streamed:
            soon = asyncio.get_running_loop().time() + seconds
            if soon < due:
                due, self._passed = soon, (what, seconds, option)
        when = None if due == math.inf else due
        if when != self._scope.when():
            self._scope.reschedule(when)
