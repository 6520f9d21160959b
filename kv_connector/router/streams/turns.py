"""Turns: broken streams begin anew in order of arrival, a few at a time, as their engine had many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from prometheus_client import Gauge

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import NoEngine, Pool

# Most streams that begin anew at a time, for each engine of the side that has fewer engines. A prefill engine
# computes one or two prompts in a step, and one transfer fills the lane: eight streams keep both busy. A new
# request then waits for eight streams, and not for all streams of the dead engine. Moves have the same bound.
MOST_AT_ENGINE = 8

_Place = tuple[Side, Endpoint]


class _Turn:
    """A broken stream that waits, or begins anew."""

    def __init__(self, engine: Endpoint, model: str | None) -> None:
        self.kind = engine, model
        """The engine that has failed, and the model."""
        self.granted = asyncio.Event()
        self.places: list[_Place] = []


class Turns:
    """Counts the streams that begin anew. Used from the event loop's thread only."""

    def __init__(self, pools: Mapping[Side, Pool], waiting: Gauge) -> None:
        """``waiting``: gets the number of streams that wait."""
        self._pools = pools
        self._gauge = waiting
        self._taken: Counter[_Place] = Counter()
        self._waiting: dict[_Turn, None] = {}  # in order of arrival

    @asynccontextmanager
    async def turn(self, engine: Endpoint, model: str | None) -> AsyncIterator[None]:
        """Waits until a stream of this failed engine may begin anew, which it does within the block.

        A turn takes a place at an engine of each side. Placement may choose other engines, so the bound holds
        for the average of the engines.
        """
        turn = _Turn(engine, model)
        self._waiting[turn] = None
        try:
            self._grant()
            await turn.granted.wait()
            yield
        finally:
            self._waiting.pop(turn, None)
            self._taken.subtract(turn.places)
            self._grant()

    def _grant(self) -> None:
        """Gives free places to the streams that wait. It looks once for all streams of a kind."""
        full: set[tuple[Endpoint, str | None]] = set()
        for turn in list(self._waiting):
            if turn.kind in full:
                continue
            places = self._free(*turn.kind)
            if places is None:
                full.add(turn.kind)
                continue
            del self._waiting[turn]
            turn.places = places
            self._taken.update(places)
            turn.granted.set()
        self._gauge.set(len(self._waiting))

    def _free(self, engine: Endpoint, model: str | None) -> list[_Place] | None:
        """Returns a free place of each side that has engines; None: a side is full."""
        places = []
        known = self._pools[Side.DECODE].known(model)
        for side, pool in self._pools.items():
            try:
                members = pool.choices((engine,), model=known)
            except NoEngine:
                continue  # decode engines compute the prompt; without decode engines the stream ends at once
            place = min(((side, one.endpoint) for one in members), key=self._taken.__getitem__)
            if self._taken[place] >= MOST_AT_ENGINE:
                return None
            places.append(place)
        return places
