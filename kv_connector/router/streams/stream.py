"""Stream: a request's answer, from whichever engine, as one stream for the client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import NoEngine
from kv_connector.router.failure import Failure
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.continuation import ContinuationTail
from kv_connector.router.streams.calls import EngineFailure
from kv_connector.router.streams.moves import Moves
from kv_connector.router.streams.request import Request
from kv_connector.router.streams.resumption import NotResumedError, Resumption
from kv_connector.router.streams.running import Running

# Longest pause of a stream for a move: 32,000 tokens of an 8B model are 4 GiB, which take 3.4 s at 10 Gb/s.
_MAX_PAUSE_S = 5.0


class Stream:
    """A request's answer, from whichever engine."""

    def __init__(
        self,
        moves: Moves,
        resumption: Resumption,
        request: Request,
        stack: AsyncExitStack,
        answer: Answer,
    ) -> None:
        """``stack`` ends with the answer."""
        self._moves = moves
        self._resumption = resumption
        self._request = request
        self._stack = stack
        self._prompt: int | None = None  # tokens of the prompt, for a stream that has left its first engine
        self._cached: int | None = None
        self._source = _Source(answer.chunks)
        self._chunks: AsyncGenerator[bytes] | None = None
        self._why: NotResumedError | None = None  # why it ends with the failure of its engine
        if request.may_move and answer.streaming:
            self._chunks = self._read()
            answer = replace(answer, chunks=self._chunks)
        self.answer = answer

    async def end(self, *why: Any) -> None:
        """Ends the answer. ``why``: the arguments of ``__aexit__``."""
        try:
            # This comes before the connection is closed: a pending read would see that as the engine's
            # failure.
            await self._source.close()
            if self._chunks is not None:
                await self._chunks.aclose()
        finally:
            await self._stack.__aexit__(*why)

    def failure(self, error: EngineFailure) -> Failure:
        """Returns the failure with which the client's stream ends, after that of its engine."""
        return self._resumption.failure(self._request, error, self._why) if self.answer.streaming else error

    async def _read(self) -> AsyncGenerator[bytes]:
        last = b""
        while True:
            try:
                events = await self._source.next()
            except EngineFailure as error:
                self._source = await self._resume(error, last)
                continue
            if not events:
                return
            last = events
            yield events
            if self._source.current and (to := self._moves.where(self._request)) is not None:
                with self._moves.leaving(self._request):
                    if await self._moves.complete(self._request):
                        self._source = await self._move(self._source, events, to)

    async def _resume(self, error: EngineFailure, last: bytes) -> _Source:
        """Continues the stream on other engines, after the failure of its engine; raises the failure if that
        is impossible. ``last``: the events that the client got last."""
        request, running = self._request, self._request.running
        await self._source.close()
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.__aexit__(type(error), error, error.__traceback__)
        if self._prompt is None:
            self._prompt, self._cached = running.prompt, running.cached
        try:
            resumed = await self._resumption.resume(request, error, last, self._prompt, self._cached)
        except NotResumedError as why:
            self._why = why
            raise error from why
        self._stack = resumed.stack
        self._continues(resumed.running)
        return _Source(_translated(resumed.answer.chunks, resumed.tail))

    def _continues(self, running: Running) -> None:
        """Notes that the stream is on another decode engine."""
        engine = self._request.running.engine
        self._request.goes_on(running)
        exchange, placement = self._request.call.exchange, running.placement
        if placement is not None and placement.prefill is not None:
            exchange.prefilling(placement.prefill)
        if running.engine is not None:
            exchange.decoding(running.engine)
        if engine is not None:
            self._moves.report_end(engine.url)

    async def _move(self, source: _Source, last: bytes, to: Endpoint) -> _Source:
        """Moves the stream; returns the source to read from now on. ``last``: the events that the client got
        last."""
        request, began = self._request, time.perf_counter()
        running, new = request.running, request.new_running()
        engine = running.engine
        assert engine is not None
        if self._prompt is None:
            self._prompt, self._cached = running.prompt, running.cached
        said = running.prompt + running.said - self._prompt
        ask = self._moves.ask(request, new, bytes(running.ids), said, to)
        asking = asyncio.ensure_future(ask)
        try:
            async with asyncio.timeout(_MAX_PAUSE_S):
                while not asking.done() and not source.ended:
                    await asyncio.wait({asking, source.ahead()}, return_when=asyncio.FIRST_COMPLETED)
                    if not asking.done():
                        source.hold()
            if not asking.done():
                self._moves.failed(request, to, "ended", "the answer ended on the old engine first")
                return source
            stack, answer = asking.result()
        except (EngineFailure, NoEngine) as error:
            self._moves.failed(request, to, "engine_failed", error)
        except Failure as error:
            self._moves.failed(request, to, "refused", error)
        except TimeoutError:
            self._moves.failed(request, to, "too_late", f"the new engine sent nothing for {_MAX_PAUSE_S:g} s")
        else:
            tail = ContinuationTail(last, prompt=self._prompt, said=said, cached=self._cached)
            self._moves.moved(request, engine, time.perf_counter() - began)
            self._continues(new)
            old, self._stack = self._stack, stack
            try:
                await source.close()
            finally:
                await old.aclose()
            return _Source(_translated(answer.chunks, tail))
        finally:
            await _drop(asking, self._stack)
        request.failed += 1
        return source


class _Source:
    """An engine's events. They may be read before the client gets them."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._ahead: asyncio.Task[bytes] | None = None
        self._held: deque[asyncio.Task[bytes]] = deque()
        self.ended = False
        """Whether the held events include the stream's end or failure."""

    @property
    def current(self) -> bool:
        """Whether the client has all events that were read."""
        return self._ahead is None and not self._held

    async def next(self) -> bytes:
        """Returns the next events; b"" at the end. Raises what the stream raises."""
        if self._held:
            return self._held.popleft().result()
        if self._ahead is None:
            return await anext(self._chunks, b"")
        ahead, self._ahead = self._ahead, None
        return await ahead

    def ahead(self) -> asyncio.Task[bytes]:
        """Returns a task that reads the next events, to be awaited beside another task. next() returns the
        same events unless hold() takes them."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(_next(self._chunks))
        return self._ahead

    def hold(self) -> None:
        """Holds back the events ahead, if they have come."""
        if self._ahead is not None and self._ahead.done():
            ahead, self._ahead = self._ahead, None
            self._held.append(ahead)
            self.ended = ahead.exception() is not None or not ahead.result()

    async def close(self) -> None:
        """Cancels the read ahead, if there is one: the rest is not needed."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


async def _translated(chunks: AsyncIterator[bytes], tail: ContinuationTail) -> AsyncIterator[bytes]:
    async for events in chunks:
        if more := tail.of(events):
            yield more


async def _drop(asking: asyncio.Future[tuple[AsyncExitStack, Answer]], kept: AsyncExitStack) -> None:
    """Ends a request that still waits, or an answer that is not kept."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if not asking.cancelled() and asking.exception() is None and asking.result()[0] is not kept:
        await asking.result()[0].aclose()
