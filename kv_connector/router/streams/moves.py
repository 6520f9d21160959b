"""Moves: running streams continue on another decode engine, while the client sees one stream.

A move is a request that the old and the new decode engine share: the old engine is its prefill engine, the
new engine its decode engine. Its prompt is the original prompt and the answer so far, whose KV the old engine
has in its prefix cache. The old engine's events are held back until the new engine's first event comes. After
that event, the old engine's stream is closed. If it does not come, the client gets the held events, and
nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.models import longest
from kv_connector.router.engines.pool import NoEngine, Pool
from kv_connector.router.failure import UNREADABLE, Failure, failure
from kv_connector.router.forever import forever
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.placement.balance import Balance
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.continuation import (
    PATHS,
    Continuation,
    Tail,
    stay_reason,
    tokens_left,
)
from kv_connector.router.streams.calls import Call, Calls, EngineFailure
from kv_connector.router.streams.running import Running

logger = logging.getLogger(__name__)

# Most streams that leave one engine at a time. Each costs a step of both engines and some requests, 50 ms on
# a GPU, and after that the lane, which one transfer fills. With eight at a time, 256 streams take 2 s in
# addition to their transfers, and each waits for at most seven other transfers.
_MAX_CONCURRENT_MOVES = 8
# Longest pause of a stream for a move: 32,000 tokens of an 8B model are 4 GiB, which take 3.4 s at 10 Gb/s.
_MAX_PAUSE_S = 5.0
# Pause between two checks of how many streams each engine has. In that time a move has ended, or its engines
# are left out. At most one of an engine's streams pauses for a move each second.
_REBALANCE_INTERVAL_S = 1.0
# If several engines refuse a stream, the stream is the cause: the router stops trying.
_MAX_ATTEMPTS = 3
# A tokenizer's decoder returns this character if some of a character's bytes are missing.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Pair = Callable[[Completion, Call, Endpoint, Endpoint], Awaitable[tuple[AsyncExitStack, Answer]]]
"""Sends a request to two engines, to the first one for the prompt's pages. Waits until the second one's
answer begins.
"""


class Request:
    """A client's request in flight."""

    def __init__(self, completion: Completion, call: Call) -> None:
        self.completion = completion
        self.stays = stay_reason(call.path, completion)
        """Reason why it must end on the engine where it began; None: it may move."""
        self.running = self.new_running()
        self.call = replace(call, running=self.running)
        self.failed = 0
        """Number of failed moves from its current engine."""
        self.to: Endpoint | None = None
        """Target that balancing has chosen for it."""
        self.moving = False
        self.looked_at = False  # whether the prompt has been looked at

    def new_running(self) -> Running:
        shows_ids = self.completion.body.get("return_token_ids") is True
        return Running(may_move=self.stays is None, shows_ids=shows_ids)


@dataclass
class _Emptying:
    """The progress of a drain that moves the engine's streams."""

    began: float
    moved: int = 0
    over: bool = False


class Moves:
    """Chooses the streams that move, and their targets. Used from the event loop's thread only."""

    def __init__(
        self, pools: Mapping[Side, Pool], members: Members, calls: Calls, metrics: Metrics, pair: Pair
    ) -> None:
        self._pools = pools
        self._members = members
        self._calls = calls
        self._metrics = metrics
        self._pair = pair
        self._requests: dict[Request, None] = {}
        self._leaving: Counter[str] = Counter()  # by URL
        self._emptying: dict[str, _Emptying] = {}  # by URL

    @contextmanager
    def follow(self, completion: Completion, call: Call) -> Iterator[Request]:
        """Registers the request for the length of a block, in which it is in flight."""
        request = Request(completion, call)
        self._requests[request] = None
        try:
            yield request
        finally:
            del self._requests[request]
            if (engine := request.running.engine) is not None:
                self._report_end(engine.url)

    def empty(self, url: str) -> None:
        """Moves the streams of this API server's engines to other engines, until keep()."""
        self._emptying[url] = _Emptying(time.monotonic())
        for reason, count in self.report(url)[1].items():
            self._metrics.moves.labels(reason).inc(count)
        self._report_end(url)

    def keep(self, url: str) -> None:
        """Leaves the streams of this API server's engines there, because the drain has ended."""
        self._emptying.pop(url, None)

    async def balance(self, balance: Balance) -> None:
        """Moves one stream at a time between two engines, until it is cancelled."""

        async def turn() -> None:
            await asyncio.sleep(_REBALANCE_INTERVAL_S)
            self.balance_once(balance)

        await forever("rebalancing", turn, _REBALANCE_INTERVAL_S)

    def balance_once(self, balance: Balance) -> None:
        busy: set[Endpoint | None] = set()
        at: dict[Endpoint | None, list[Request]] = {}
        for request in self._requests:
            engine = request.running.engine
            at.setdefault(engine, []).append(request)
            if request.moving:
                busy |= {engine, request.to}
            else:
                request.to = None  # it has sent no event since the last check
        with contextlib.suppress(NoEngine):
            alike: dict[tuple[str, frozenset[str] | None], dict[Endpoint, int]] = {}
            for member in self._pools[Side.DECODE].choices():
                if (engine := member.endpoint) not in busy:
                    group = alike.setdefault((member.weights, member.models), {})
                    group[engine] = len(at.get(engine, ()))
            for streams in alike.values():
                for most, fewest in balance.pairs(streams):
                    # The youngest stream has the fewest pages, as a rule.
                    may = (one for one in reversed(at[most]) if self._stay_reason(one) is None)
                    if (youngest := next(may, None)) is not None:
                        youngest.to = fewest

    def report(self, url: str) -> tuple[int, dict[str, int]]:
        """Returns, for a drain that moves, the number of streams that have moved, and the remaining requests
        by reason."""
        emptying = self._emptying.get(url)
        staying = Counter(filter(None, (self._stay_reason(request) for request in self._at(url))))
        return 0 if emptying is None else emptying.moved, dict(staying)

    def where(self, request: Request) -> Endpoint | None:
        """Returns where this stream, which has just sent an event, is to go; None: it stays for now."""
        if request.to is None and not self._emptying:
            return None
        engine = request.running.engine
        if engine is None or not (request.running.whole or request.running.several):
            return None
        if request.to is not None:
            return request.to if self._pools[Side.DECODE].takes(request.to) else None
        if not self._members.emptied(engine) or self._leaving[engine.url] >= _MAX_CONCURRENT_MOVES:
            return None  # its next event checks again
        return None if self._stay_reason(request) else self._other(engine, request.call.model)

    async def complete(self, request: Request) -> bool:
        """Returns whether the client has the text of all tokens of its engine. Called after ``where`` has
        chosen a target."""
        running, engine = request.running, request.running.engine
        if running.whole or engine is None:
            return running.whole
        # An event has several tokens with speculative decoding or `--stream-interval`. The engine knows their
        # text.
        question = b'{"model":%s,"tokens":[%s]}'
        model = msgspec.json.encode(request.completion.body.get("model"))
        call = replace(request.call, path="/detokenize")
        try:
            with self._pools[Side.DECODE].lease(engine) as lease:
                body = question % (model, running.several)
                reply = await self._calls.whole(Side.DECODE, lease, "POST", body, call)
            text = msgspec.json.decode(reply.body, type=_Text).prompt
        except (Failure, NoEngine, *UNREADABLE) as error:
            self.failed(request, engine, "no_text", error)
            request.failed += 1
            return False
        return _INCOMPLETE not in text

    @contextmanager
    def leaving(self, request: Request) -> Iterator[None]:
        """Counts the request as moving, for the length of a block."""
        engine = request.running.engine
        assert engine is not None
        self._leaving[engine.url] += 1
        request.moving = True
        try:
            yield
        finally:
            request.moving, request.to = False, None
            self._leaving[engine.url] -= 1
            self._report_end(engine.url)

    async def ask(
        self, request: Request, running: Running, ids: bytes, said: int, to: Endpoint
    ) -> tuple[AsyncExitStack, Answer]:
        """Returns the rest of the answer, from the engine ``to``; Failure if there is none.

        ``ids``: token ids of prompt and answer, of which the last ``said`` are the answer's.
        """
        call, engine = request.call, request.running.engine
        assert engine is not None
        # The engine already has a request with the original id.
        name = f"{call.request_id}-moved"
        call = Call(PATHS[0], {**call.headers, "x-request-id": name}, name, call.model, running)
        left = tokens_left(request.call.path, request.completion, said)
        if left is None:
            left = await self._model_length(call, to)
        continuation = Continuation.of(request.completion, ids, said, left)
        return await self._pair(continuation, call, engine, to)

    def moved(self, request: Request, source: Endpoint, pause: float) -> None:
        """Counts a move. ``pause``: seconds without an event."""
        self._metrics.moves.labels("moved").inc()
        self._metrics.move_pause.observe(pause)
        if (emptying := self._emptying.get(source.url)) is not None:
            emptying.moved += 1
        logger.debug("request %s: moved from %s in %.3f s", request.call.request_id, source, pause)

    def failed(self, request: Request, to: Endpoint, outcome: str, why: object) -> None:
        self._metrics.moves.labels(outcome).inc()
        source = request.running.engine
        words = "request %s: not moved from %s to %s: %s"
        logger.warning(words, request.call.request_id, source, to, why)

    def _at(self, url: str) -> list[Request]:
        return [one for one in self._requests if (at := one.running.engine) is not None and at.url == url]

    def _stay_reason(self, request: Request) -> str | None:
        """Returns why the request stays on its engine; None: it is moved, now or after its next event."""
        engine = request.running.engine
        if request.stays is None and not request.looked_at:
            request.looked_at = True
            request.stays = None if request.completion.only_text() else "more_than_text"
        if request.stays is not None:
            return request.stays
        if engine is None or not self._members.of_both_sides(engine):
            return "engine"
        if request.failed >= _MAX_ATTEMPTS:
            return "failed"
        return None if self._other(engine, request.call.model) else "no_other_engine"

    def _other(self, engine: Endpoint, model: str | None) -> Endpoint | None:
        pool = self._pools[Side.DECODE]
        with contextlib.suppress(NoEngine):
            # If only an engine of other weights is left, that engine computes prompt and answer anew.
            other = pool.partner(pool, engine, (), pool.known(model))
            return None if other == engine else other
        return None

    async def _model_length(self, call: Call, engine: Endpoint) -> int:
        """Returns the length of the engine's model, in tokens.

        A completion must have a limit. vLLM subtracts the prompt's tokens from it.
        """
        with self._pools[Side.DECODE].lease(engine) as lease:
            reply = await self._calls.whole(Side.DECODE, lease, "GET", b"", replace(call, path="/v1/models"))
        if (length := longest(reply)) is not None:
            return length
        raise failure(502, "api_error", f"decode engine {engine} lists no max_model_len at /v1/models")

    def _report_end(self, url: str) -> None:
        """Logs the end of a drain, once. Called when the drain has one stream or one move less."""
        emptying = self._emptying.get(url)
        if emptying is None or emptying.over:
            return
        reasons = [self._stay_reason(request) for request in self._at(url)]
        if self._leaving[url] or None in reasons:
            return
        emptying.over = True
        stay = ", ".join(f"{count} {why}" for why, count in Counter(filter(None, reasons)).items())
        seconds = time.monotonic() - emptying.began
        logger.info(
            "drain of %s: %d streams moved in %.1f s, %d requests stay until they end%s",
            url,
            emptying.moved,
            seconds,
            len(reasons),
            f" ({stay})" if stay else "",
        )


class Stream:
    """A request's answer, from whichever engine."""

    def __init__(self, moves: Moves, request: Request, stack: AsyncExitStack, answer: Answer) -> None:
        """``stack`` ends with the answer."""
        self._moves = moves
        self._request = request
        self._stack = stack
        self._prompt: int | None = None  # tokens of the prompt, for a stream that has moved
        self._cached: int | None = None
        self._source = _Source(answer.chunks)
        self._chunks: AsyncGenerator[bytes] | None = None
        if request.stays is None and answer.streaming:
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

    async def _read(self) -> AsyncGenerator[bytes]:
        while events := await self._source.next():
            yield events
            if self._source.current and (to := self._moves.where(self._request)) is not None:
                with self._moves.leaving(self._request):
                    if await self._moves.complete(self._request):
                        self._source = await self._move(self._source, events, to)

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
            tail = Tail(last, prompt=self._prompt, said=said, cached=self._cached)
            self._moves.moved(request, engine, time.perf_counter() - began)
            request.call.exchange.decoding(to)
            request.running, request.failed = new, 0
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


class _Text(msgspec.Struct):
    """vLLM's answer at /detokenize."""

    prompt: str


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


async def _translated(chunks: AsyncIterator[bytes], tail: Tail) -> AsyncIterator[bytes]:
    async for events in chunks:
        yield tail.of(events)


async def _drop(asking: asyncio.Future[tuple[AsyncExitStack, Answer]], kept: AsyncExitStack) -> None:
    """Ends a request that still waits, or an answer that is not kept."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if not asking.cancelled() and asking.exception() is None and asking.result()[0] is not kept:
        await asking.result()[0].aclose()
