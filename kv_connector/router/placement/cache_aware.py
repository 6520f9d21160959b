"""CacheAware: a policy that weighs the tokens which an engine has cached against the work that it has.

A prefill engine costs the tokens that it would compute, and those that it has still to compute for others. A
decode engine costs the tokens that would move to it, and a part of the tokens that its streams read in each
step. The cheapest engine of each side gets the request. Both sides also count the work of the last minute,
so that new conversations spread over idle engines.

The rule of sglang-router and vllm-router decides by thresholds instead. The longest match wins if it is at
least 0.3 (or 0.5) of the prompt. If the engines' requests differ by more than 64 (or 32), the fewest requests
win.
docs/decisions/012-cache-aware-placement.md compares both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.prompt import Prompt, TokenSizes
from kv_connector.router.engines.recent_work import RecentWork
from kv_connector.router.placement.lender import Lenders, Prefix
from kv_connector.router.placement.policy import (
    NO_PREFILL,
    Placement,
    PlacementRequest,
    choices,
    forecast_tokens,
    shared_weights,
)
from kv_connector.router.placement.sessions import Sessions

# Weight of a queued token against a token of the prompt, at a prefill engine. The engine computes both at the
# same speed, one after the other, so both delay the first token alike.
_QUEUED = 1.0
# Weight of a token that a prefill engine would load from another engine, against a token that it computes. A
# token of an 8B model has 128 KiB. At 2/3 of 400 Gb/s it moves in 4 us; if eight GPUs share such a NIC, in 31
# us. An H200 computes it in 23 us. The geometric mean of 4 / 23 and 31 / 23 is about 1/2.
_BORROWED = 1 / 2
# Weight of a token in the contexts of a decode engine's streams against a token that moves to the engine. An
# answer of 300 tokens (the chat preset of `bench conversations`) reads each context token 300 times more, at
# 4,800 GB/s of an H200. A token moves at 4 GB/s where eight GPUs share a NIC of 400 Gb/s, at 2/3 of its rate.
# 300 * 4 / 4,800 = 1/4. A faster network makes moves cheaper than this; the weight then spares the network.
_CONTEXT = 1 / 4
# Weight of a token of the last minute's work beyond that of the engine with the least. An engine with a hit
# of H tokens is preferred until it has had H / _RECENT tokens more. See the sweep of
# integration/benchmarks/conversation_simulation.py in docs/decisions/012-cache-aware-placement.md.
_RECENT = 1 / 8
# Work of the last minute is even up to this factor. Sides are to differ by a factor of 1.5 at most.
_EVEN = 1.25
# A decode engine with _TIMES as many streams as another, and _MORE more, is not chosen by its cache. It
# is stricter than the rule by which running streams move (balance.py), so a placement causes no move.
_TIMES = 1.5
_MORE = 4
# Costs that differ by less are equal: a prefix has about as many tokens, and an H200 computes them in 6 ms.
_TIE = 256


class CacheAware:
    """Lets a prefill engine compute every prompt; chooses the engine with the lowest cost on each side."""

    def __init__(
        self,
        pools: Mapping[Side, Pool],
        index: PrefixIndex,
        sizes: TokenSizes | None = None,
        sessions: Sessions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._index = index
        self._sizes = sizes or TokenSizes()
        self._sessions = Sessions() if sessions is None else sessions
        self._clock = clock

    def place(self, request: PlacementRequest) -> Placement:
        prefills, decodes = choices(self._pools, request)
        shared = shared_weights(prefills, decodes)
        wanted = self._look(request, decodes)
        if not shared:
            return self._local(wanted, decodes, "other_weights")
        decode = self._decode(wanted, [one for one in decodes if one.weights in shared])
        lenders = Lenders(wanted.matches, (*prefills, *decodes))
        alike = [one for one in prefills if one.weights == decode.weights]
        prefill, prefix = self._prefill(wanted, alike, lenders)
        if decode.endpoint == prefill.endpoint:
            others = [one for one in decodes if one.weights == prefill.weights and one is not decode]
            if not others:
                return self._local(wanted, [decode], "one_engine")
            decode = self._decode(wanted, others)
        at_decode = wanted.cached(decode)
        work = wanted.work(prefill, reported=True, prefix=prefix)
        reason = "cached" if work.cached or at_decode else "least_work"
        return Placement(
            prefill.endpoint,
            decode.endpoint,
            reason,
            work,
            prompt=wanted.prompt,
            tokens=wanted.tokens,
            decode_cached=at_decode,
            session=wanted.session,
            prefix=prefix,
        )

    def alone(self, request: PlacementRequest) -> Placement:
        decodes = self._pools[Side.DECODE].choices(request.avoid, model=request.model)
        return self._local(self._look(request, decodes), decodes, NO_PREFILL)

    def _look(self, request: PlacementRequest, decodes: Sequence[Member]) -> _Wanted:
        completion = request.completion
        prompt = completion.prompt(request.path)
        tokens = forecast_tokens(self._sizes, prompt, decodes)
        matches = self._index.matches(prompt)
        return _Wanted(prompt, tokens, matches, request.session, completion.streamed)

    def _prefill(
        self, wanted: _Wanted, engines: Sequence[Member], lenders: Lenders
    ) -> tuple[Member, Prefix | None]:
        """Returns the cheapest prefill engine, and the prefix that it may load from another engine."""
        hinted, _ = self._sessions.engines(wanted.session)
        recent = excess(engines, self._clock())
        hits = [wanted.cached(one) for one in engines]
        costs = [
            wanted.tokens - cached + _QUEUED * one.workload.queued() + _RECENT * more
            for one, cached, more in zip(engines, hits, recent, strict=True)
        ]
        prefixes = {}
        # A search for a lender takes longer than the rest. So it is left out for engines that would still be
        # too expensive if they could load all that any engine has.
        most = wanted.matches[0][1] if wanted.matches else 0
        limit = min(costs) + _TIE
        for number, (one, cached) in enumerate(zip(engines, hits, strict=True)):
            if costs[number] - (1 - _BORROWED) * (most - cached) > limit:
                continue
            if (prefix := lenders.propose(one, cached)) is not None:
                prefixes[one] = prefix
                costs[number] -= (1 - _BORROWED) * (prefix.tokens - cached)
        chosen = _cheapest(engines, costs, hinted)
        return chosen, prefixes.get(chosen)

    def _decode(self, wanted: _Wanted, engines: Sequence[Member], *, computes: bool = False) -> Member:
        """Returns the cheapest decode engine. ``computes``: the engine computes the prompt itself."""
        _, hinted = self._sessions.engines(wanted.session)
        streams = [_streams(one) for one in engines]
        fewest = min(streams)
        most = max(_TIMES * fewest, fewest + _MORE)
        near = [(one, count) for one, count in zip(engines, streams, strict=True) if count <= most]
        recent = excess([one for one, _ in near], self._clock())
        costs = []
        for (one, count), more in zip(near, recent, strict=True):
            context = one.context + (count - one.outstanding) * self._sizes.typical
            cost = wanted.tokens - wanted.cached(one) + _CONTEXT * context + _RECENT * more
            costs.append(cost + _QUEUED * one.workload.queued() if computes else cost)
        return _cheapest([one for one, _ in near], costs, hinted)

    def _local(self, wanted: _Wanted, engines: Sequence[Member], reason: str) -> Placement:
        """Places a prompt that a decode engine computes itself."""
        decode = self._decode(wanted, engines, computes=True)
        return Placement(
            None,
            decode.endpoint,
            reason,
            wanted.work(decode, reported=wanted.streamed),
            prompt=wanted.prompt,
            tokens=wanted.tokens,
            session=wanted.session,
        )


class _Wanted:
    """A request, as far as it decides its place."""

    def __init__(
        self,
        prompt: Prompt,
        tokens: int,
        matches: Sequence[tuple[int, int]],
        session: int | None,
        streamed: bool,
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.session = session
        self.streamed = streamed
        self.matches = [(mask, prompt.tokens_of(nbytes, tokens)) for mask, nbytes in matches]
        """(mask of engines, tokens that each of them has), the most tokens first."""

    def cached(self, engine: Member) -> int:
        """Returns the tokens of the prompt that the engine has cached."""
        workload = engine.workload
        bit = workload.cache.bit
        for mask, tokens in self.matches:
            if mask & bit:
                return workload.hit(tokens)
        return 0

    def work(self, engine: Member, *, reported: bool, prefix: Prefix | None = None) -> Work:
        """Returns the work of the prompt, for the backlog of the engine that computes it.

        ``prefix``: the engine loads these tokens.
        """
        cached = self.cached(engine) if prefix is None else prefix.tokens
        cached = min(cached, self.tokens - 1)  # an engine always computes the last token
        cost, load, rest = engine.workload.cost, engine.workload.load, self.tokens - cached
        seconds = 0.0
        if cost is not None and load is not None:
            seconds = cost.seconds(rest, cached, load.prompt_tokens)
        return Work(rest, seconds, cached, reported)


def excess(engines: Sequence[Member], now: float) -> list[float]:
    """Returns the recent tokens of each engine beyond _EVEN times those of the engine with the least.

    An engine that has come, or has come back, begins as the engine with the least. It has worked less, and
    should still get no more than its part.
    """
    found = [None if one.recent is None else one.recent.tokens(now) for one in engines]
    least = min((tokens for tokens in found if tokens is not None), default=0.0)
    for engine in engines:
        if engine.recent is None:
            engine.recent = RecentWork(least, now)
    even = _EVEN * least
    return [0.0 if tokens is None else max(0.0, tokens - even) for tokens in found]


def _streams(engine: Member) -> int:
    """Returns the streams of a decode engine, with those of other routers."""
    load = engine.workload.load
    return engine.outstanding if load is None else max(engine.outstanding, load.running)


def _cheapest(engines: Sequence[Member], costs: Sequence[float], hinted: Endpoint | None) -> Member:
    """Returns the engine with the lowest cost. ``hinted``: the engine to take if its cost is about equal."""
    lowest = min(costs)
    if hinted is not None:
        for engine, cost in zip(engines, costs, strict=True):
            if cost <= lowest + _TIE and engine.endpoint == hinted:
                return engine
    equal = [engine for engine, cost in zip(engines, costs, strict=True) if cost == lowest]
    return min(equal, key=lambda engine: engine.outstanding)
