"""Moves: running streams that go on at another decode engine, while the client sees one stream.

A move is a P/D request whose P is the old decode engine, whose D is the new one, and whose prompt is the
prompt and all that has been said since: the old engine has the KV of that in its prefix cache. Until the new
one's first event comes, the old one's are held back; then its stream is closed, or else what was held goes to
the client, and nothing is lost.
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
    only_text,
    stay_reason,
    tokens_left,
)
from kv_connector.router.streams.calls import Call, Calls, EngineFailure
from kv_connector.router.streams.running import Running

logger = logging.getLogger(__name__)

# Streams that leave one engine at a time. Each costs a step of both engines and some requests, 50 ms on a
# GPU, and then the lane, which one transfer fills: of 256 streams eight at a time take 2 s beside their
# transfers, and each waits for seven others' transfers at most.
_MAX_CONCURRENT_MOVES = 8
# How long a stream may stand still for a move: 32,000 tokens of an 8B model are 4 GiB, which take 3.4 s at 10
# Gb/s.
_MAX_PAUSE_S = 5.0
# Between two looks at how many streams each engine has. By then a move has come to its end, or its engines
# are left out; and of an engine's streams one a second stands still for a move.
_REBALANCE_INTERVAL_S = 1.0
# What two or three engines did not take is no matter of the engine.
_MAX_ATTEMPTS = 3
# What a tokenizer's decoder gives where a character's bytes are not all there.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Pair = Callable[[Completion, Call, Endpoint, Endpoint], Awaitable[tuple[AsyncExitStack, Answer]]]
"""Asks two engines, the first one for the prompt's pages, and waits until the second one's answer begins."""


class Request:
    """A client's request under way."""

    def __init__(self, completion: Completion, call: Call) -> None:
        self.completion = completion
        self.stays = stay_reason(call.path, completion)
        """Why it has to end where it began."""
        self.running = self.new_running()
        self.call = replace(call, running=self.running)
        self.failed = 0
        """Moves from the engine where it is."""
        self.to: Endpoint | None = None
        """For balance."""
        self.moving = False
        self.looked_at = False  # only_text()

    def new_running(self) -> Running:
        shows_ids = self.completion.body.get("return_token_ids") is True
        return Running(may_move=self.stays is None, shows_ids=shows_ids)


@dataclass
class _Emptying:
    """A drain that moves what the engine has."""

    began: float
    moved: int = 0
    over: bool = False


class Moves:
    """Which streams are to move, and where to. Used from the event loop's thread only."""

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
        """For the length of a block in which the request is under way."""
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
        """Leaves the streams of this API server's engines there: the drain has ended."""
        self._emptying.pop(url, None)

    async def balance(self, balance: Balance) -> None:
        """Until it is cancelled: one stream at a time between two engines."""

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
                request.to = None  # it has said nothing since the last look
        with contextlib.suppress(NoEngine):
            alike: dict[tuple[str, frozenset[str] | None], dict[Endpoint, int]] = {}
            for member in self._pools[Side.DECODE].choices():
                if (engine := member.endpoint) not in busy:
                    group = alike.setdefault((member.weights, member.models), {})
                    group[engine] = len(at.get(engine, ()))
            for streams in alike.values():
                for most, fewest in balance.pairs(streams):
                    # The youngest has the fewest pages, as a rule.
                    may = (one for one in reversed(at[most]) if self._stay_reason(one) is None)
                    if (youngest := next(may, None)) is not None:
                        youngest.to = fewest

    def report(self, url: str) -> tuple[int, dict[str, int]]:
        """Of a drain that moves: streams that are gone, and requests that will not go, by why."""
        emptying = self._emptying.get(url)
        staying = Counter(filter(None, (self._stay_reason(request) for request in self._at(url))))
        return 0 if emptying is None else emptying.moved, dict(staying)

    def where(self, request: Request) -> Endpoint | None:
        """Where this stream is to go, which has just said something; None: it stays for now."""
        if request.to is None and not self._emptying:
            return None
        engine = request.running.engine
        if engine is None or not (request.running.whole or request.running.several):
            return None
        if request.to is not None:
            return request.to if self._pools[Side.DECODE].takes(request.to) else None
        if not self._members.emptied(engine) or self._leaving[engine.url] >= _MAX_CONCURRENT_MOVES:
            return None  # its next event asks again
        return None if self._stay_reason(request) else self._other(engine, request.call.model)

    async def complete(self, request: Request) -> bool:
        """Whether the client has had the text of all that its engine has said: ``where`` says that it may."""
        running, engine = request.running, request.running.engine
        if running.whole or engine is None:
            return running.whole
        # Several tokens, as of speculative decoding or `--stream-interval`: the engine knows their text.
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
        """For the length of a block that moves it."""
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
        """The rest of its answer, from there. ``ids``: of prompt and answer, of which ``said`` are the
        answer's. Failure if there is none."""
        call, engine = request.call, request.running.engine
        assert engine is not None
        # Its engine has one of that name.
        name = f"{call.request_id}-moved"
        call = Call(PATHS[0], {**call.headers, "x-request-id": name}, name, call.model, running)
        left = tokens_left(request.call.path, request.completion, said)
        if left is None:
            left = await self._model_length(call, to)
        continuation = Continuation.of(request.completion, ids, said, left)
        return await self._pair(continuation, call, engine, to)

    def moved(self, request: Request, source: Endpoint, pause: float) -> None:
        """``pause``: seconds without an event."""
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
        """None: it is moved, now or when it has said something."""
        engine = request.running.engine
        if request.stays is None and not request.looked_at:
            request.looked_at = True
            request.stays = None if only_text(request.completion) else "more_than_text"
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
            # Where only one of other weights is left, that computes anew what was said.
            other = pool.partner(pool, engine, (), pool.known(model))
            return None if other == engine else other
        return None

    async def _model_length(self, call: Call, engine: Endpoint) -> int:
        """In tokens. A completion has to have a limit; vLLM takes off what the prompt has of it."""
        with self._pools[Side.DECODE].lease(engine) as lease:
            reply = await self._calls.whole(Side.DECODE, lease, "GET", b"", replace(call, path="/v1/models"))
        try:
            models = msgspec.json.decode(reply.body, type=_Models).data
        except UNREADABLE:
            models = []
        # Adapters are listed, too, without a length of their own.
        for model in models:
            if model.max_model_len is not None:
                return model.max_model_len
        raise failure(502, "api_error", f"decode engine {engine} lists no max_model_len at /v1/models")

    def _report_end(self, url: str) -> None:
        """Of a drain, once: it has one stream less, or a move less."""
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
    """A request's answer, whichever engine it comes from."""

    def __init__(self, moves: Moves, request: Request, stack: AsyncExitStack, answer: Answer) -> None:
        """``stack`` ends with the answer."""
        self._moves = moves
        self._request = request
        self._stack = stack
        self._prompt: int | None = None  # tokens, of a stream that has moved
        self._cached: int | None = None
        self._source = _Source(answer.chunks)
        self._chunks: AsyncGenerator[bytes] | None = None
        if request.stays is None and answer.streaming:
            self._chunks = self._read()
            answer = replace(answer, chunks=self._chunks)
        self.answer = answer

    async def end(self, *why: Any) -> None:
        """``why``: as of ``__aexit__``."""
        try:
            # Before its connection is closed, which would be the engine's failure to who still reads.
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
        """What is to be read from now on. ``last``: what the client has had last."""
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
    """An engine's events, which may be read before the client gets them."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._ahead: asyncio.Task[bytes] | None = None
        self._held: deque[asyncio.Task[bytes]] = deque()
        self.ended = False
        """The end is among what is held, or how the stream broke off."""

    @property
    def current(self) -> bool:
        """Nothing was read that the client has not got."""
        return self._ahead is None and not self._held

    async def next(self) -> bytes:
        """b"" at the end; what the stream raises."""
        if self._held:
            return self._held.popleft().result()
        if self._ahead is None:
            return await anext(self._chunks, b"")
        ahead, self._ahead = self._ahead, None
        return await ahead

    def ahead(self) -> asyncio.Task[bytes]:
        """The next events, to be waited for beside something else. They are kept if they are not held."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(_next(self._chunks))
        return self._ahead

    def hold(self) -> None:
        """The ones ahead, which have come."""
        if self._ahead is not None and self._ahead.done():
            ahead, self._ahead = self._ahead, None
            self._held.append(ahead)
            self.ended = ahead.exception() is not None or not ahead.result()

    async def close(self) -> None:
        """Nobody wants the rest."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)


class _Text(msgspec.Struct):
    """vLLM's answer at /detokenize."""

    prompt: str


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


async def _translated(chunks: AsyncIterator[bytes], tail: Tail) -> AsyncIterator[bytes]:
    async for events in chunks:
        yield tail.of(events)


async def _drop(asking: asyncio.Future[tuple[AsyncExitStack, Answer]], kept: AsyncExitStack) -> None:
    """Ends what still asks, or what was answered and is not kept."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if not asking.cancelled() and asking.exception() is None and asking.result()[0] is not kept:
        await asking.result()[0].aclose()
