"""CacheAware: a policy that weighs the tokens which an engine has cached against the work that it has.

A prefill engine costs the tokens that it would compute, and those that it has still to compute for others. A
decode engine costs the tokens that would move to it, and a part of the tokens that its streams read in each
step. The cheapest engine of each side gets the request. Both sides also count the work of the last minute,
so that new conversations spread over idle engines. If a decode engine computes the prompt, its queue counts,
too.

The rule of sglang-router and vllm-router decides by thresholds instead. The longest match wins if it is at
least 0.3 (or 0.5) of the prompt. If the engines' requests differ by more than 64 (or 32), the fewest requests
win.
docs/decisions/012-cache-aware-placement.md compares both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from kv_connector.router.bodies.prompt import Prompt, TokenSizes
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.columns import (
    BLOCK,
    BORROWS,
    CONTEXT,
    LENDS,
    OUTSTANDING,
    RECENT,
    RECENT_AT,
    RUNNING,
    USED,
    Rows,
    Vector,
    flags_of,
)
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.recent_work import HALF_LIFE_S, RecentWork
from kv_connector.router.placement.lender import Lenders, Prefix
from kv_connector.router.placement.policy import (
    NO_PREFILL,
    Placement,
    PlacementRequest,
    forecast_tokens,
)
from kv_connector.router.placement.session_engines import SessionEngines
from kv_connector.router.requests.completion import Completion

# Weight of a queued token against a token of the prompt, at a prefill engine. The engine computes both at the
# same speed, one after the other, so both delay the first token alike.
_QUEUED = 1.0
# Weight of a token that an engine would load from another engine, against a token that it computes. A
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
# integration/benchmarks/conversation_simulation.py in docs/benchmarks/2026-11-29-placement.md.
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
        sessions: SessionEngines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._index = index
        self._sizes = sizes or TokenSizes()
        self._sessions = SessionEngines() if sessions is None else sessions
        self._clock = clock

    def place(self, request: PlacementRequest) -> Placement:
        avoid, model = request.avoid, request.model
        prefills = self._pools[Side.PREFILL].rows(avoid, model)
        decodes = self._pools[Side.DECODE].rows(avoid, model)
        # An engine cannot use pages that were computed with other weights.
        receivers = decodes.fitting(prefills.weights)
        wanted = self._look(request, decodes)
        sides = prefills, decodes
        if not len(receivers):
            return self._local(wanted, decodes, sides, "other_weights")
        decode = self._decode(wanted, receivers)
        lenders = Lenders(wanted.matches, partial(_lending, sides))
        prefill, prefix = self._prefill(wanted, prefills.fitting({decode.weights}), lenders)
        if decode.endpoint == prefill.endpoint:
            alike = decodes.fitting({prefill.weights})
            others = alike.where(np.array([one is not decode for one in alike]))
            if not len(others):
                return self._local(wanted, alike, sides, "one_engine")
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
        decodes = self._pools[Side.DECODE].rows(request.avoid, request.model)
        return self._local(self._look(request, decodes), decodes, (decodes,), NO_PREFILL)

    def _look(self, request: PlacementRequest, decodes: Rows) -> _Wanted:
        completion = request.completion
        prompt = completion.prompt(request.path)
        tokens = forecast_tokens(self._sizes, prompt, decodes)
        matches = self._index.matches(prompt)
        return _Wanted(prompt, tokens, matches, request.session, completion)

    def _prefill(self, wanted: _Wanted, engines: Rows, lenders: Lenders) -> tuple[Member, Prefix | None]:
        """Returns the cheapest prefill engine, and the prefix that it may load from another engine."""
        now = self._clock()
        if (only := _only(engines, now)) is not None:
            return only, lenders.propose(only, wanted.cached(only))
        hits = wanted.hits(engines)
        costs = wanted.tokens - hits + _QUEUED * engines.queued(now) + _RECENT * excess(engines, now)
        hinted = self._hinted(Side.PREFILL, wanted, engines)
        return _cheapest(engines, costs, _Loans(engines, hits, costs, lenders, wanted.most), hinted)

    def _decode(self, wanted: _Wanted, engines: Rows) -> Member:
        """Returns the cheapest decode engine for a prompt that a prefill engine computes."""
        now = self._clock()
        if (only := _only(engines, now)) is not None:
            return only
        engines, _, costs = self._decode_costs(wanted, engines, now)
        chosen, at = engines.first(costs), self._hinted(Side.DECODE, wanted, engines)
        return engines[chosen if at is None or costs[at] > costs[chosen] + _TIE else at]

    def _alone(self, wanted: _Wanted, engines: Rows, lenders: Lenders) -> tuple[Member, Prefix | None]:
        """Returns the cheapest decode engine for a prompt that it computes itself, and the prefix that it may
        load from another engine."""
        now = self._clock()
        if (only := _only(engines, now)) is not None:
            return only, lenders.propose(only, wanted.cached(only))
        engines, hits, costs = self._decode_costs(wanted, engines, now)
        costs += _QUEUED * engines.queued(now)
        hinted = self._hinted(Side.DECODE, wanted, engines)
        return _cheapest(engines, costs, _Loans(engines, hits, costs, lenders, wanted.most), hinted)

    def _decode_costs(self, wanted: _Wanted, engines: Rows, now: float) -> tuple[Rows, Vector, Vector]:
        """Returns the decode engines that do not have far more streams than others, the tokens of the prompt
        that each has cached, and its costs."""
        # With the streams of other routers, as the engine reports them.
        streams = np.maximum(engines.column(OUTSTANDING), engines.column(RUNNING))
        fewest = streams.min()
        near = streams <= max(_TIMES * fewest, fewest + _MORE)
        engines, streams = engines.where(near), streams[near]
        context = engines.column(CONTEXT) + (streams - engines.column(OUTSTANDING)) * self._sizes.typical
        hits = wanted.hits(engines)
        return engines, hits, wanted.tokens - hits + _CONTEXT * context + _RECENT * excess(engines, now)

    def _hinted(self, side: Side, wanted: _Wanted, engines: Rows) -> int | None:
        """Returns the place of the conversation's engine of this side; None: it is not one of these."""
        prefill, decode = self._sessions.engines(wanted.session)
        hinted = prefill if side is Side.PREFILL else decode
        return None if hinted is None else engines.find(self._pools[side].member(hinted))

    def _local(self, wanted: _Wanted, engines: Rows, sides: Sequence[Rows], reason: str) -> Placement:
        """Places a prompt that a decode engine computes itself. ``sides``: engines that may lend."""
        matches = wanted.matches if wanted.completion.one_answer() else ()
        decode, prefix = self._alone(wanted, engines, Lenders(matches, partial(_lending, sides)))
        return Placement(
            None,
            decode.endpoint,
            reason,
            wanted.work(decode, reported=wanted.completion.streamed, prefix=prefix),
            prompt=wanted.prompt,
            tokens=wanted.tokens,
            session=wanted.session,
            prefix=prefix,
        )


class _Wanted:
    """A request, as far as it decides its place."""

    def __init__(
        self,
        prompt: Prompt,
        tokens: int,
        matches: Sequence[tuple[int, int]],
        session: int | None,
        completion: Completion,
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.session = session
        self.completion = completion
        self.matches = [(mask, prompt.tokens_of(nbytes, tokens)) for mask, nbytes in matches]
        """(mask of engines, tokens that each of them has), the most tokens first."""
        self.most = self.matches[0][1] if self.matches else 0
        """Tokens of the prompt that any engine has."""
        self._flags = [(flags_of(mask), tokens) for mask, tokens in self.matches]

    def cached(self, engine: Member) -> int:
        """Returns the tokens of the prompt that the engine has cached."""
        workload = engine.workload
        bit = workload.cache.bit
        for mask, tokens in self.matches:
            if mask & bit:
                return workload.hit(tokens)
        return 0

    def hits(self, engines: Rows) -> Vector:
        """Returns the same as cached() for each of these engines."""
        found = np.zeros(len(engines))
        if not self.matches:
            return found
        for flags, tokens in reversed(self._flags):
            np.putmask(found, engines.holding(flags), tokens)
        block = engines.column(BLOCK)
        whole: Vector = np.floor(found / block) * block
        return whole

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


class _Loans:
    """Prefixes that engines may load in place of computing them. They lower the costs of these engines.

    A search for a lender takes longer than all else. So it is left out for engines that would not be chosen
    if they could load all that any engine may lend.
    """

    def __init__(self, engines: Rows, hits: Vector, costs: Vector, lenders: Lenders, most: int) -> None:
        """``most``: tokens that any engine has."""
        self._engines, self._hits, self._costs, self._lenders = engines, hits, costs, lenders
        self.found: dict[int, Prefix] = {}
        """Prefixes by the place of the engine that may load them."""
        self._reach = costs - (1 - _BORROWED) * np.maximum(0.0, most - hits) * engines.column(BORROWS)
        """The lowest costs that are possible."""
        self.cheapest = engines.first(costs)
        """The place of the engine with the lowest costs."""
        (likely,) = ((self._reach < costs) & (self._reach <= costs[self.cheapest])).nonzero()
        if not len(likely) or not lenders.able():
            return
        # The order of Rows.first(): the cheapest, of equals the least busy, of these the longest unused.
        orders = engines.column(OUTSTANDING), engines.column(USED)

        def key(costs: Vector, at: int) -> tuple[float, ...]:
            return costs[at], *(column[at] for column in orders)

        best = key(costs, self.cheapest)
        for at in likely[np.lexsort([column[likely] for column in (*orders[::-1], self._reach)])]:
            if key(self._reach, at) > best:
                break
            self._propose(int(at))
            if key(costs, at) < best:
                best, self.cheapest = key(costs, at), int(at)

    def consider(self, at: int, limit: float) -> None:
        """Looks for a lender of this engine too, if its costs can be that low."""
        if at not in self.found and self._reach[at] < self._costs[at] and self._reach[at] <= limit:
            self._propose(at)

    def _propose(self, at: int) -> None:
        cached = int(self._hits[at])
        if (prefix := self._lenders.propose(self._engines[at], cached)) is not None:
            self.found[at] = prefix
            self._costs[at] -= (1 - _BORROWED) * (prefix.tokens - cached)


def _cheapest(
    engines: Rows, costs: Vector, loans: _Loans, hinted: int | None
) -> tuple[Member, Prefix | None]:
    """Returns the engine with the lowest costs, and the prefix that it may load.

    ``hinted``: place of an engine that is chosen if its costs are about as low.
    """
    chosen = loans.cheapest
    if hinted is not None:
        loans.consider(hinted, costs[chosen] + _TIE)
        if costs[hinted] <= costs[chosen] + _TIE:
            chosen = hinted
    return engines[chosen], loans.found.get(chosen)


def _lending(sides: Iterable[Rows], mask: int) -> list[Member]:
    """Returns the engines of this mask that lend prefixes, the longest unused of each side first."""
    found, flags = [], flags_of(mask)
    for engines in sides:
        (able,) = (engines.holding(flags) & (engines.column(LENDS) > 0)).nonzero()
        found += [engines[at] for at in able[np.argsort(engines.column(USED)[able])]]
    return found


def _only(engines: Rows, now: float) -> Member | None:
    """Returns the only engine, for which nothing is compared; None: there are several."""
    if len(engines) > 1:
        return None
    engine = engines[0]
    if engine.recent is None:
        engine.recent = RecentWork(0.0, now)
        engine.workload.changed()
    return engine


def excess(engines: Rows, now: float) -> Vector:
    """Returns the recent tokens of each engine beyond _EVEN times those of the engine with the least.

    An engine that has come, or has come back, begins as the engine with the least. It has worked less, and
    should still get no more than its part.
    """
    found = engines.column(RECENT) * np.exp2((engines.column(RECENT_AT) - now) / HALF_LIFE_S)
    least = float(found.min())
    if math.isnan(least):
        known = ~np.isnan(found)
        least = float(found[known].min()) if known.any() else 0.0
        for at in (~known).nonzero()[0]:
            engine = engines[at]
            engine.recent = RecentWork(least, now)
            engine.workload.changed()
        found[~known] = 0.0
    more: Vector = np.maximum(0.0, found - _EVEN * least)
    return more
