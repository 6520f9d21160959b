"""Goodput: a policy that serves as many requests as it can within objectives for the time to the first token
and the time between tokens (DistServe, arXiv 2401.09670).

A prompt is computed where its first token comes soonest: by one of the prefill engines, or by a decode engine
in chunks, as long as no step with a chunk keeps the streams there waiting for longer than the objective
between tokens, and each step has tokens left for streams that come. Where a prefill engine would be sooner
and yet too late, a decode engine computes the prompt: what is late anyway does not make those behind it late,
too.

What it goes by: how many tokens the prompt has and how many of them each engine has cached (prompt.py,
prefix_cache.py), what each engine has still to compute (backlog.py, and for other routers' prompts what the
engine says), and what its steps have cost so far (control.membership.WorkloadReport).
"""

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Member, Pool
from kv_connector.router.engines.prompt import Prompt, TokenSizes
from kv_connector.router.engines.settings import Objectives
from kv_connector.router.engines.workload import Cost, Workload
from kv_connector.router.placement.policy import Placement, shared_weights, split
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion

# A prompt that is late anyway is computed by a decode engine where that takes at most so many times as long.
# By integration/benchmarks/goodput_simulation.py (objectives 400 and 25 ms, steps 256/1024, eight seeds), of
# 7 and 11 requests a second 96.9 and 93.9 % have their first token in time with 2, 96.9 and 94.0 % with 1.5,
# and 96.7 and 93.4 % without it.
_LATE_STRETCH = 2.0


class _Forecast(NamedTuple):
    engine: Member
    tokens: int
    """Of the prompt, that it has not cached."""
    cached: int
    computing: float
    """Seconds for these tokens."""
    seconds: float
    """Until the first token."""
    between: float
    """Between two tokens of a stream that is there, or comes, at most, while the prompt is computed."""


class Goodput:
    """Where nothing is known of the engines' speeds, it does as FewestOutstanding."""

    def __init__(self, objectives: Objectives, pools: Mapping[Side, Pool]) -> None:
        self._objectives = objectives
        self._pools = pools
        self._sizes = TokenSizes()

    def place(
        self, completion: Completion, path: str, avoid: Collection[Endpoint], model: str | None = None
    ) -> Placement:
        prompt = completion.prompt(path)
        if prompt.pictures:
            return replace(split(self._pools, avoid, "pictures", model), prompt=prompt)
        prefills, decodes = (
            self._pools[side].choices(avoid, model=model) for side in (Side.PREFILL, Side.DECODE)
        )
        shared = shared_weights(self._pools, avoid, model)
        if not shared:
            return replace(split(self._pools, avoid, "", model), prompt=prompt)
        prefills = [one for one in prefills if one.weights in shared]
        typical = next((one.workload.cost for one in prefills if one.workload.cost), None)
        if typical is None:
            return replace(split(self._pools, avoid, "unmeasured", model), prompt=prompt)
        tokens = self._sizes.tokens(prompt)
        prefill = min((self._prefill(one, typical, prompt, tokens) for one in prefills), key=_seconds)
        computing = [self._decode(one, typical, prompt, tokens) for one in decodes]
        calm = [one for one in computing if one.between <= self._objectives.tbt]
        decode = min(calm or computing, key=_seconds)
        local, reason = self._compare(prefill, decode)
        receiver = decode.engine.endpoint
        if not local:
            engine = prefill.engine
            receiver = self._pools[Side.DECODE].fewest({*avoid, engine.endpoint}, engine.weights, model)
            if receiver == engine.endpoint:
                local, reason, receiver = True, "one_engine", decode.engine.endpoint
        chosen = decode if local else prefill
        # Only a stream's beginning tells that its prompt is computed.
        reported = not local or completion.streamed
        work = Work(chosen.tokens, chosen.computing, chosen.cached, reported)
        late = chosen.seconds > self._objectives.ttft
        return Placement(None if local else prefill.engine.endpoint, receiver, reason, work, prompt, late)

    def sent(self, placement: Placement) -> None:
        assert placement.prompt is not None
        where = (Side.PREFILL, placement.prefill), (Side.DECODE, placement.decode)
        for workload in {self._workload(*one) for one in where}:
            if workload is not None:
                room = None if workload.load is None else workload.load.cache_tokens
                workload.cache.prompt_computed(placement.prompt, room)

    def prompt_computed(self, placement: Placement, report: Computed) -> None:
        workload = self._workload(Side.PREFILL, placement.prefill)
        if placement.prompt is None or placement.prompt.pictures or workload is None or report.tokens is None:
            return
        self._sizes.learn(placement.prompt, report.tokens)
        if report.cached is not None:
            workload.cache.corrected(placement.prompt, report.cached, report.tokens)

    def _compare(self, prefill: _Forecast, decode: _Forecast) -> tuple[bool, str]:
        """Whether the decode engine computes the prompt, and why."""
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
        # Each stream has a token in every step, prompts have the rest.
        streams = max(engine.outstanding, load.running)
        room = max(1, load.step_tokens - streams)
        rest = tokens - cached
        # A decode engine's own cost has its streams in it; one that is borrowed has not.
        decoding = (load.decode_ns or 0) * 1e-9
        slower = 0.0 if workload.cost else max(0.0, decoding - cost.step)
        chunk = min(room, load.prompt_tokens)
        steps = -(-rest // chunk)
        computing = max(cost.seconds(rest, cached, chunk) + steps * slower, steps * decoding)
        wait, between = workload.wait(cost), 0.0
        if streams:
            # What is believed to be cached need not be: the objective is kept if it is not.
            most = load.prompt_tokens
            together = (most if cached else min(rest, most)) + workload.in_a_step(cost, most)
            each = cost.token + tokens * cost.pair
            between = max(decoding, slower + cost.step + min(room, together) * each)
            if together >= load.step_tokens - load.running:
                # vLLM gives a step's tokens in the order in which requests came: a stream whose pages come
                # behind prompts that leave none has its next token when they are computed.
                between = max(between, wait + cost.seconds(tokens, 0, chunk))
        return _Forecast(engine, rest, cached, computing, wait + computing, between)

    def _workload(self, side: Side, endpoint: Endpoint | None) -> Workload | None:
        return None if endpoint is None else self._pools[side].workload(endpoint)


def _cached(workload: Workload, prompt: Prompt, tokens: int) -> int:
    """Tokens of the prompt that the engine need not compute; the last is computed always."""
    known = workload.cache.cached(prompt)
    return min(tokens - 1, tokens * known // prompt.size) if known else 0


_seconds = operator.attrgetter("seconds")
