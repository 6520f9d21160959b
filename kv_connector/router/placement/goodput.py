"""Goodput: a policy that serves as many requests as it can within objectives for the time to the first token
and the time between tokens (DistServe, arXiv 2401.09670).

A prompt is computed where its first token comes soonest: by a prefill engine, or by a decode engine in
chunks. A decode engine is chosen under two conditions. No step with a chunk may delay the engine's streams
for longer than the objective between tokens. And each step must have tokens left for new streams. If a
prefill engine would be sooner and yet too late, a decode engine computes the prompt: a prompt that is late
anyway should not delay the prompts behind it.

The policy uses these facts:

- how many tokens the prompt has, and how many of them each engine has cached (prompt.py, prefix_cache.py);
- what each engine has still to compute (backlog.py, and the engine's report for other routers' prompts);
- what each engine's steps have cost so far (control.membership.WorkloadReport).
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kv_connector.router.bodies.prompt import Prompt, TokenSizes
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool, least
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Cost, Workload
from kv_connector.router.placement.lender import Lenders, lending
from kv_connector.router.placement.policy import (
    NO_PREFILL,
    Placement,
    PlacementRequest,
    choices,
    fitting,
    forecast_tokens,
    split,
)
from kv_connector.router.settings import Objectives

# A prompt that is late anyway is computed by a decode engine if that takes at most _LATE_STRETCH times as
# long. Measured by integration/benchmarks/goodput_simulation.py (objectives 400 and 25 ms, steps 256/1024,
# eight seeds), at 7 and 11 requests a second. The first token is in time for 96.9 and 93.9 % of the requests
# with 2, 96.9 and 94.0 % with 1.5, and 96.7 and 93.4 % without this rule.
_LATE_STRETCH = 2.0


class _Forecast(NamedTuple):
    engine: Member
    tokens: int
    """Tokens of the prompt that the engine has not cached."""
    cached: int
    computing: float
    """Seconds to compute these tokens."""
    seconds: float
    """Seconds until the first token."""
    between: float
    """Longest time between two tokens of a current or new stream while the prompt is computed, in seconds."""


class Goodput:
    """Places prompts by forecast. If no engine's speed is known, places them as FewestOutstanding does."""

    def __init__(
        self,
        objectives: Objectives,
        pools: Mapping[Side, Pool],
        index: PrefixIndex,
        sizes: TokenSizes | None = None,
    ) -> None:
        self._objectives = objectives
        self._pools = pools
        self._index = index
        self._sizes = sizes or TokenSizes()

    def alone(self, request: PlacementRequest) -> Placement:
        decodes = self._pools[Side.DECODE].choices(request.avoid, model=request.model)
        decode, prompt = least(decodes), request.completion.prompt(request.path)
        tokens = forecast_tokens(self._sizes, prompt, decodes)
        prefix = None
        if request.completion.one_answer():
            own = _cached(decode.workload, prompt, tokens)
            prefix = self._lenders(prompt, tokens, decodes).propose(decode, own)
        return Placement(None, decode.endpoint, NO_PREFILL, prompt=prompt, prefix=prefix)

    def _lenders(self, prompt: Prompt, tokens: int, engines: Sequence[Member]) -> Lenders:
        # Without the last token, as in _cached(). An engine with the whole prompt would else lack a block.
        known = self._index.matches(prompt)
        matches = [(mask, min(tokens - 1, prompt.tokens_of(size, tokens))) for mask, size in known]
        return Lenders(matches, partial(lending, engines))

    def place(self, request: PlacementRequest) -> Placement:
        completion = request.completion
        prompt = completion.prompt(request.path)
        if prompt.pictures:
            return replace(split(self._pools, request, "pictures"), prompt=prompt)
        prefills, decodes = choices(self._pools, request)
        prefills = fitting(prefills, decodes)
        if not prefills:
            return replace(split(self._pools, request, ""), prompt=prompt)
        typical = next((one.workload.cost for one in prefills if one.workload.cost), None)
        if typical is None:
            return replace(split(self._pools, request, "unmeasured"), prompt=prompt)
        tokens = forecast_tokens(self._sizes, prompt, decodes)
        prefill = min((self._prefill(one, typical, prompt, tokens) for one in prefills), key=_seconds)
        computing = [self._decode(one, typical, prompt, tokens) for one in decodes]
        calm = [one for one in computing if one.between <= self._objectives.tbt]
        decode = min(calm or computing, key=_seconds)
        local, reason = self._compare(prefill, decode)
        receiver = decode.engine.endpoint
        if not local:
            engine = prefill.engine
            receiver = self._pools[Side.DECODE].fewest(
                {*request.avoid, engine.endpoint}, engine.weights, request.model
            )
            if receiver == engine.endpoint:
                local, reason, receiver = True, "one_engine", decode.engine.endpoint
        chosen = decode if local else prefill
        # Only the beginning of a stream shows that its prompt is computed.
        reported = not local or completion.streamed
        work = Work(chosen.tokens, chosen.computing, chosen.cached, reported)
        late = chosen.seconds > self._objectives.ttft
        place = None if local else prefill.engine.endpoint
        prefix = None
        if not local or completion.one_answer():
            lenders = self._lenders(prompt, tokens, (*prefills, *decodes))
            prefix = lenders.propose(chosen.engine, chosen.cached)
        return Placement(
            place, receiver, reason, work, prompt=prompt, tokens=tokens, prefix=prefix, late=late
        )

    def _compare(self, prefill: _Forecast, decode: _Forecast) -> tuple[bool, str]:
        """Returns whether the decode engine computes the prompt, and the reason."""
        sooner = decode.seconds < prefill.seconds
        if decode.between > self._objectives.tbt:
            return False, "streams_first" if sooner else "prefill_sooner"
        if sooner:
            return True, "decode_sooner"
        if self._objectives.ttft < prefill.seconds and decode.seconds <= _LATE_STRETCH * prefill.seconds:
            return True, "late_anyway"
        return False, "prefill_sooner"

    def _prefill(self, engine: Member, typical: Cost, prompt: Prompt, tokens: int) -> _Forecast:
        workload = engine.workload
        cost, cached = workload.cost or typical, _cached(workload, prompt, tokens)
        chunk = tokens if workload.load is None else workload.load.prompt_tokens
        computing = cost.seconds(tokens - cached, cached, chunk)
        return _Forecast(engine, tokens - cached, cached, computing, workload.wait(cost) + computing, 0.0)

    def _decode(self, engine: Member, typical: Cost, prompt: Prompt, tokens: int) -> _Forecast:
        workload, load = engine.workload, engine.workload.load
        if load is None:
            return _Forecast(engine, tokens, 0, math.inf, math.inf, math.inf)
        cost, cached = workload.cost or typical, _cached(workload, prompt, tokens)
        # Each stream has a token in every step; prompts have the rest.
        streams = max(engine.outstanding, load.running)
        room = max(1, load.step_tokens - streams)
        rest = tokens - cached
        # A decode engine's own cost includes its streams; a cost that was measured at another engine does
        # not.
        decoding = (load.decode_ns or 0) * 1e-9
        slower = 0.0 if workload.cost else max(0.0, decoding - cost.step)
        chunk = min(room, load.prompt_tokens)
        steps = -(-rest // chunk)
        computing = max(cost.seconds(rest, cached, chunk) + steps * slower, steps * decoding)
        wait, between = workload.wait(cost), 0.0
        if streams:
            # The forecast of cached tokens may be wrong. The objective must be kept even then.
            most = load.prompt_tokens
            together = (most if cached else min(rest, most)) + workload.in_a_step(cost, most)
            each = cost.token + tokens * cost.pair
            between = max(decoding, slower + cost.step + min(room, together) * each)
            if together >= load.step_tokens - load.running:
                # vLLM gives a step's tokens to requests in the order of their arrival. If earlier prompts
                # leave no tokens, a stream whose pages arrive later gets its next token only when these
                # prompts are computed.
                between = max(between, wait + cost.seconds(tokens, 0, chunk))
        return _Forecast(engine, rest, cached, computing, wait + computing, between)


def _cached(workload: Workload, prompt: Prompt, tokens: int) -> int:
    """Returns the prompt's tokens that the engine need not compute. It always computes the last token."""
    known = workload.cache.cached(prompt)
    return workload.hit(min(tokens - 1, prompt.tokens_of(known, tokens)))


_seconds = operator.attrgetter("seconds")
