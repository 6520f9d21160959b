"""PlainPlacement: the rules of CacheAware as loops over engines, to which tests compare its vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kv_connector.router.bodies.prompt import TokenSizes
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.recent_work import RecentWork
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.cache_aware import (
    _BORROWED,
    _CONTEXT,
    _EVEN,
    _MORE,
    _QUEUED,
    _RECENT,
    _TIE,
    _TIMES,
)
from kv_connector.router.placement.lender import Lenders, Prefix, lending
from kv_connector.router.placement.policy import PlacementRequest, choices, forecast_tokens
from kv_connector.router.placement.session_engines import SessionEngines

Choice = tuple[Endpoint | None, Endpoint, Prefix | None]
"""The prefill engine, the decode engine, and the prefix to load."""


class PlainPlacement:
    def __init__(
        self,
        pools: Mapping[Side, Pool],
        index: PrefixIndex,
        sizes: TokenSizes,
        sessions: SessionEngines,
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._index, self._sizes = pools, index, sizes
        self._sessions, self._clock = sessions, clock

    def place(self, request: PlacementRequest) -> Choice:
        prefills, decodes = choices(self._pools, request)
        receivers = [one for one in decodes if any(one.weights.fits(other.weights) for other in prefills)]
        lenders = self._look(request, decodes, (*prefills, *decodes))
        if not receivers:
            return self._local(request, decodes, lenders)
        decode = self._decode(receivers)
        senders = [one for one in prefills if one.weights.fits(decode.weights)]
        prefill, prefix = self._prefill(senders, lenders)
        if decode.endpoint == prefill.endpoint:
            others = [one for one in decodes if one.weights.fits(prefill.weights) and one is not decode]
            if not others:
                return self._local(request, [decode], lenders)
            decode = self._decode(others)
        return prefill.endpoint, decode.endpoint, prefix

    def alone(self, request: PlacementRequest) -> Choice:
        decodes = self._pools[Side.DECODE].choices(request.avoid, model=request.model)
        return self._local(request, decodes, self._look(request, decodes, decodes))

    def _look(
        self, request: PlacementRequest, decodes: Sequence[Member], lending_engines: Sequence[Member]
    ) -> Lenders:
        prompt = request.completion.prompt(request.path)
        self._tokens = forecast_tokens(self._sizes, prompt, decodes)
        matches = self._index.matches(prompt)
        self._matches = [(mask, prompt.tokens_of(nbytes, self._tokens)) for mask, nbytes in matches]
        self._hinted = self._sessions.engines(request.session)
        return Lenders(self._matches, partial(lending, lending_engines))

    def _local(self, request: PlacementRequest, engines: Sequence[Member], lenders: Lenders) -> Choice:
        near, costs = self._decode_costs(engines)
        costs = [cost + _QUEUED * queued(one.workload) for one, cost in zip(near, costs, strict=True)]
        prefixes = self._borrow(near, costs, lenders) if request.completion.one_answer() else {}
        decode = _cheapest(near, costs, self._hinted[1])
        return None, decode.endpoint, prefixes.get(decode)

    def _prefill(self, engines: Sequence[Member], lenders: Lenders) -> tuple[Member, Prefix | None]:
        costs = [
            self._tokens - self._cached(one) + _QUEUED * queued(one.workload) + _RECENT * more
            for one, more in zip(engines, plain_excess(engines, self._clock()), strict=True)
        ]
        prefixes = self._borrow(engines, costs, lenders)
        chosen = _cheapest(engines, costs, self._hinted[0])
        return chosen, prefixes.get(chosen)

    def _borrow(
        self, engines: Sequence[Member], costs: list[float], lenders: Lenders
    ) -> dict[Member, Prefix]:
        """Returns the prefixes that engines may load, and lowers the costs of these engines."""
        prefixes = {}
        for number, one in enumerate(engines):
            cached = self._cached(one)
            if (prefix := lenders.propose(one, cached)) is not None:
                prefixes[one] = prefix
                costs[number] -= (1 - _BORROWED) * (prefix.tokens - cached)
        return prefixes

    def _decode(self, engines: Sequence[Member]) -> Member:
        return _cheapest(*self._decode_costs(engines), self._hinted[1])

    def _decode_costs(self, engines: Sequence[Member]) -> tuple[list[Member], list[float]]:
        streams = {one: _streams(one) for one in engines}
        fewest = min(streams.values())
        near = [one for one in engines if streams[one] <= max(_TIMES * fewest, fewest + _MORE)]
        costs = []
        for one, more in zip(near, plain_excess(near, self._clock()), strict=True):
            context = one.context + (streams[one] - one.outstanding) * self._sizes.typical
            costs.append(self._tokens - self._cached(one) + _CONTEXT * context + _RECENT * more)
        return near, costs

    def _cached(self, engine: Member) -> int:
        bit, hit = engine.workload.cache.bit, engine.workload.hit
        return next((hit(tokens) for mask, tokens in self._matches if mask & bit), 0)


def queued(workload: Workload) -> int:
    """Returns the tokens that the engine has still to compute."""
    own, others, cost = workload.backlog.uncached, workload.others, workload.cost
    if not others or cost is None or not cost.token:
        return own + others
    return own + round(max(0.0, others * cost.token - (workload.clock() - workload.said_at)) / cost.token)


def plain_excess(engines: Sequence[Member], now: float) -> list[float]:
    found = [None if one.recent is None else one.recent.tokens(now) for one in engines]
    least = min((tokens for tokens in found if tokens is not None), default=0.0)
    for engine in engines:
        if engine.recent is None:
            engine.recent = RecentWork(least, now)
            engine.workload.changed()
    return [0.0 if tokens is None else max(0.0, tokens - _EVEN * least) for tokens in found]


def _streams(engine: Member) -> int:
    load = engine.workload.load
    return engine.outstanding if load is None else max(engine.outstanding, load.running)


def _cheapest(engines: Sequence[Member], costs: Sequence[float], hinted: Endpoint | None) -> Member:
    lowest = min(costs)
    if hinted is not None:
        for engine, cost in zip(engines, costs, strict=True):
            if cost <= lowest + _TIE and engine.endpoint == hinted:
                return engine
    equal = [engine for engine, cost in zip(engines, costs, strict=True) if cost == lowest]
    return min(equal, key=lambda engine: engine.outstanding)
