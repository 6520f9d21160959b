"""Restarts: requests of a failed engine begin anew in order of arrival, a few at a time, as it had many."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from prometheus_client import Gauge

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import NoEngine, Pool

# Most requests that begin anew at a time, for each engine of the side that has fewer engines. A prefill
# engine computes one or two prompts in a step, and one transfer fills the lane: eight requests keep both
# busy. A new request then waits for eight requests, and not for all of the dead engine. Moves have the same
# bound.
MOST_AT_ENGINE = 8

_Place = tuple[Side, Endpoint]
_Kind = tuple[Endpoint, str | None]
"""The engine that has failed, and the model; None: any model, or a model that no engine serves."""


class _Turn:
    """A request that waits, or begins anew."""

    def __init__(self, kind: _Kind, number: int) -> None:
        self.kind = kind
        self.number = number
        """Its place in the order of arrival."""
        self.granted = asyncio.Event()
        self.places: list[_Place] = []


class Restarts:
    """Counts the requests that begin anew. Used from the event loop's thread only."""

    def __init__(self, pools: Mapping[Side, Pool], waiting: Gauge) -> None:
        """``waiting``: gets the number of requests that wait."""
        self._pools = pools
        self._gauge = waiting
        self._taken: Counter[_Place] = Counter()
        self._numbers = itertools.count()
        # In order of arrival. Hosts with many engines die with thousands of requests: no change looks at all.
        self._waiting: dict[_Kind, OrderedDict[int, _Turn]] = {}
        for pool in pools.values():
            pool.watch(self._grant)  # an engine that joins has free places

    @asynccontextmanager
    async def turn(self, engine: Endpoint, model: str | None) -> AsyncIterator[Callable[[], None]]:
        """Waits until a request of this failed engine may begin anew, which it does within the block.

        A turn takes a place at an engine of each side. Placement may choose other engines, so the bound holds
        for the average of the engines. The yielded function ends the turn before the end of the block. A
        second call does nothing.
        """
        # Clients may name any number of models that do not exist.
        known = self._pools[Side.DECODE].known(model)
        turn = _Turn((engine, known), next(self._numbers))
        self._waiting.setdefault(turn.kind, OrderedDict())[turn.number] = turn
        try:
            self._grant()
            await turn.granted.wait()
            yield lambda: self._end(turn)
        finally:
            if not turn.granted.is_set():
                self._remove(turn)
            self._end(turn)

    def _end(self, turn: _Turn) -> None:
        self._taken -= Counter(turn.places)  # keeps no engine without requests
        turn.places = []
        self._grant()

    def _remove(self, turn: _Turn) -> None:
        """Removes a request that waits no longer."""
        queue = self._waiting[turn.kind]
        del queue[turn.number]
        if not queue:
            del self._waiting[turn.kind]

    def _grant(self) -> None:
        """Gives free places to the requests that wait, in order of arrival. Requests of a kind without a free
        place are passed over."""
        heads = [(next(iter(queue)), kind) for kind, queue in self._waiting.items()]
        heapq.heapify(heads)
        while heads:
            number, kind = heapq.heappop(heads)
            places = self._free(*kind)
            if places is None:
                continue
            turn = self._waiting[kind][number]
            self._remove(turn)
            turn.places = places
            self._taken.update(places)
            turn.granted.set()
            if kind in self._waiting:
                heapq.heappush(heads, (next(iter(self._waiting[kind])), kind))
        self._gauge.set(sum(map(len, self._waiting.values())))

    def _free(self, engine: Endpoint, model: str | None) -> list[_Place] | None:
        """Returns a free place of each side that has engines; None: a side is full."""
        places = []
        known = self._pools[Side.DECODE].known(model)
        for side in TEXT_SIDES:  # a stream with pictures does not begin anew
            try:
                members = self._pools[side].choices((engine,), model=known)
            except NoEngine:
                continue  # decode engines compute the prompt; without decode engines the stream ends at once
            place = min(((side, one.endpoint) for one in members), key=self._taken.__getitem__)
            if self._taken[place] >= MOST_AT_ENGINE:
                return None
            places.append(place)
        return places
