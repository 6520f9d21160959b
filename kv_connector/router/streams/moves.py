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
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.pool import Member, NoEngine, Pool
from kv_connector.router.forever import forever
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.placement.balance import Balance
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.transcript import Budget
from kv_connector.router.streams.calls import Call
from kv_connector.router.streams.continuing import INCOMPLETE, Continuing, ContinuingError
from kv_connector.router.streams.request import Request
from kv_connector.router.streams.running import MOST_IDS, Running

logger = logging.getLogger(__name__)

# Most streams that leave one engine at a time. Each costs a step of both engines and some requests, 50 ms on
# a GPU, and after that the lane, which one transfer fills. With eight at a time, 256 streams take 2 s in
# addition to their transfers, and each waits for at most seven other transfers.
_MAX_CONCURRENT_MOVES = 8
# Pause between two checks of how many streams each engine has. In that time a move has ended, or its engines
# are left out. At most one of an engine's streams pauses for a move each second.
_REBALANCE_INTERVAL_S = 1.0
# If several engines refuse a stream, the stream is the cause: the router stops trying.
_MAX_ATTEMPTS = 3

Pair = Callable[[Completion, Call, Endpoint, Endpoint], Awaitable[tuple[AsyncExitStack, Answer]]]
"""Sends a request to two engines, to the first one for the prompt's pages if the second one can use them.
Waits until the second one's answer begins.
"""


@dataclass
class _Emptying:
    """The progress of a drain that moves the engine's streams."""

    began: float
    moved: int = 0
    over: bool = False


class Moves:
    """Chooses the streams that move, and their targets. Used from the event loop's thread only."""

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        members: Members,
        continuing: Continuing,
        metrics: Metrics,
        pair: Pair,
    ) -> None:
        self._pools = pools
        self._members = members
        self._continuing = continuing
        self._metrics = metrics
        self._pair = pair
        self.ids = Budget(MOST_IDS)
        """Bytes that the token ids of all streams may still take."""
        self._requests: dict[Request, None] = {}
        self._leaving: Counter[str] = Counter()  # by URL
        self._emptying: dict[str, _Emptying] = {}  # by URL

    @contextmanager
    def follow(self, completion: Completion, call: Call, *, prefetches: bool = False) -> Iterator[Request]:
        """Registers the request for the length of a block, in which it is in flight. ``prefetches``: as of
        Request."""
        request = Request(completion, call, self.ids, prefetches=prefetches)
        self._requests[request] = None
        try:
            yield request
        finally:
            del self._requests[request]
            request.running.close()
            if (engine := request.running.engine) is not None:
                self.report_end(engine.url)

    def empty(self, url: str) -> None:
        """Moves the streams of this API server's engines to other engines, until keep()."""
        self._emptying[url] = _Emptying(time.monotonic())
        for reason, count in self.report(url)[1].items():
            self._metrics.moves.labels(reason).inc(count)
        self.report_end(url)

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
            members = [one for one in self._pools[Side.DECODE].choices() if one.endpoint not in busy]
            for group in _alike(members):
                streams = {one.endpoint: len(at.get(one.endpoint, ())) for one in group}
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
        return None if self._stay_reason(request) else self._continuing.other(request, engine)

    async def complete(self, request: Request) -> bool:
        """Returns whether the client has the text of all tokens of its engine. Called after ``where`` has
        chosen a target."""
        running, engine = request.running, request.running.engine
        if running.whole or engine is None:
            return running.whole and not await self._continuing.held(request)
        # An event has several tokens with speculative decoding or `--stream-interval`. Engines know their
        # text.
        try:
            text = await self._continuing.text(request, running.several)
        except ContinuingError as error:
            self.failed(request, engine, "no_text", error)
            request.failed += 1
            return False
        return INCOMPLETE not in text

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
            self.report_end(engine.url)

    async def ask(
        self, request: Request, running: Running, ids: bytes, said: int, to: Endpoint
    ) -> tuple[AsyncExitStack, Answer]:
        """Returns the rest of the answer, from the engine ``to``; Failure if there is none.

        ``ids``: token ids of prompt and answer, of which the last ``said`` are the answer's.
        """
        engine = request.running.engine
        assert engine is not None
        continuation, call = await self._continuing.of(request, running, ids, said, why="moved")
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
        if request.stays is not None:
            return request.stays
        if engine is None or not self._members.of_both_sides(engine):
            return "engine"
        if request.failed >= _MAX_ATTEMPTS:
            return "failed"
        return None if self._continuing.other(request, engine) else "no_other_engine"

    def report_end(self, url: str) -> None:
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


def _alike(members: Iterable[Member]) -> list[list[Member]]:
    """Returns groups of engines. Streams may move between any two engines of a group."""
    found: defaultdict[object, list[Member]] = defaultdict(list)
    for member in members:
        found[member.weights.version, member.models].append(member)
    groups = []
    for group in found.values():
        if all(one.fits(other) for one, other in combinations({one.weights for one in group}, 2)):
            groups.append(group)
            continue
        # An unknown checkpoint fits two that differ, so it would join them.
        apart: defaultdict[object, list[Member]] = defaultdict(list)
        for member in group:
            apart[member.weights].append(member)
        groups += apart.values()
    return groups
