"""Goodput without GPUs: the router's own policy over a model of vLLM's steps, beside two plain engines.

The arrivals are those of gpu_goodput.py, and the tables have its columns. A step takes the time of COST, for
a model with 8 billion weights on an H200. Its tokens are distributed as by vLLM's scheduler: to the running
requests in the order in which they came, then to waiting ones. A prompt gets at most the threshold if there
is another request. Use it to choose a policy and the decode engine's settings, for any number of arrivals.
docs/benchmarks/2026-11-27-goodput.md has its figures beside measured ones.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from goodput_load import WORKLOADS, AnswerTimes, LoadObjectives, report, summary, trace

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Lease, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Cost, Workload
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import Placement, PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion
from kv_connector.router.settings import Objectives as RouterObjectives

# Cost of one engine's prompts of 512 to 32,000 tokens (docs/benchmarks/2026-11-27-first-token.md, run F).
COST = PromptCost(step_ns=4_900_000, token_ns=22_500, pair_ps=700)
# Seconds of a decode step, and of each stream in it.
DECODE_S, STREAM_S = 4.9e-3, 20e-6
# Seconds between the client and the first step, and back; and from P's last step until D can continue.
REST_S, LANDING_S = 4e-3, 3e-3
# vLLM's default for an API server on an H200.
STEP_TOKENS = 8192
_SAY_S = 1.0  # the interval of heartbeats
_PATH = "/v1/completions"


@dataclass(eq=False)
class SimulatedRequest:
    tokens: int
    answer: int
    arrives: float
    computed: int = 0
    times: list[float] = field(default_factory=list)
    """Times of its tokens."""
    begins: Callable[[], bool] = lambda: True
    """Called before its first step. False: it waits, and with it the requests behind it."""
    on_first: Callable[[], None] = lambda: None
    on_end: Callable[[], None] = lambda: None

    @property
    def left(self) -> int:
        return self.tokens - self.computed

    def told(self) -> AnswerTimes:
        gaps = [(later - sooner) * 1e3 for sooner, later in itertools.pairwise(self.times)]
        return AnswerTimes((self.times[0] - self.arrives + REST_S) * 1e3, gaps, len(self.times))


class SimulatedEngine:
    """Steps with at most ``step_tokens`` in total and at most ``threshold`` of one prompt (0: no limit)."""

    def __init__(
        self,
        clock: Clock,
        step_tokens: int = STEP_TOKENS,
        threshold: int = 0,
        *,
        cost: PromptCost = COST,
        stream_s: float = STREAM_S,
        cache_tokens: int = 1 << 20,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._stream_s = stream_s
        self._cache_tokens = cache_tokens
        self._step_tokens = step_tokens
        self._threshold = threshold
        self._busy = False
        self.running: list[SimulatedRequest] = []
        self.waiting: list[SimulatedRequest] = []

    @property
    def load(self) -> WorkloadReport:
        requests = [*self.running, *self.waiting]
        return WorkloadReport(
            self._step_tokens,
            min(self._step_tokens, self._threshold or self._step_tokens),
            self._cache_tokens,
            waiting=sum(request.left for request in requests),
            running=sum(not request.left for request in self.running),
            decode_ns=round(DECODE_S * 1e9),
            prompt=self._cost,
        )

    def add(self, request: SimulatedRequest) -> None:
        self.waiting.append(request)
        self.step()

    def step(self) -> None:
        if self._busy:
            return
        alone = len(self.running) + len(self.waiting) == 1
        most = self._step_tokens if alone or not self._threshold else self._threshold
        room, step = self._step_tokens, list[tuple[SimulatedRequest, int]]()
        requests, admitted = [*self.running, *self.waiting], len(self.running)
        for number, request in enumerate(requests):
            if not room or (number >= admitted and not request.begins()):
                break
            chunk = min(request.left or 1, most, room)
            room -= chunk
            step.append((request, chunk))
        admitted = max(admitted, len(step))
        self.running, self.waiting = requests[:admitted], requests[admitted:]
        if not step:
            return
        cost = Cost.of(self._cost)
        prompts = [(request.computed, chunk) for request, chunk in step if request.left]
        pairs = sum(chunk * (computed + chunk / 2) for computed, chunk in prompts)
        seconds = cost.step + sum(chunk for _, chunk in prompts) * cost.token + pairs * cost.pair
        self._busy = True
        self._clock.after(seconds + self._stream_s * len(step), lambda: self._over(step))

    def _over(self, step: Sequence[tuple[SimulatedRequest, int]]) -> None:
        self._busy = False
        for request, chunk in step:
            if request.left:
                request.computed += chunk
                if request.left:
                    continue
            self._say(request)
        self.step()

    def _say(self, request: SimulatedRequest) -> None:
        request.times.append(self._clock.now)
        if len(request.times) == 1:
            request.on_first()
        if len(request.times) == request.answer:
            self.leave(request)
            request.on_end()

    def leave(self, request: SimulatedRequest) -> None:
        if request in self.running:
            self.running.remove(request)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._number = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._number), call))

    def run(self) -> None:
        while self._agenda:
            self.now, _, call = heapq.heappop(self._agenda)
            call()


class Plain:
    """Two engines that take turns."""

    name = "plain"

    def __init__(self, clock: Clock) -> None:
        self._engines = itertools.cycle([SimulatedEngine(clock), SimulatedEngine(clock)])

    def send(self, request: SimulatedRequest) -> None:
        next(self._engines).add(request)


class SimulatedPair:
    """A prefill and a decode engine with these steps, behind the router's policy.

    P samples the first token.
    """

    def __init__(self, clock: Clock, objectives: LoadObjectives, threshold: int, step_tokens: int) -> None:
        self.name = f"{objectives} {threshold}/{step_tokens}"
        self.reasons: Counter[str] = Counter()
        self._clock = clock
        self.pools = {side: Pool() for side in TEXT_SIDES}
        self._caches = CacheRecords()
        self._policy = Goodput(
            RouterObjectives(objectives.ttft * 1e-3, objectives.between * 1e-3),
            self.pools,
            PrefixIndex(),
            self._caches.sizes,
        )
        self.engines = {
            Side.PREFILL: SimulatedEngine(clock),
            Side.DECODE: SimulatedEngine(clock, step_tokens, threshold),
        }
        self._places = {side: Endpoint.parse(f"http://{side.value}:1") for side in TEXT_SIDES}
        self._numbers = itertools.count(1)
        self._told_at = -_SAY_S
        for side in TEXT_SIDES:
            self.pools[side].set_usable(self._places[side], True, Workload(clock))

    def send(self, request: SimulatedRequest) -> None:
        if self._clock.now >= self._told_at + _SAY_S:
            self._told_at = self._clock.now
            for side, engine in self.engines.items():
                self._workload(side).hear(engine.load)
        ids = [next(self._numbers), *([7] * (request.tokens - 1))]
        raw = json.dumps({"model": "m", "prompt": ids, "stream": True}).encode()
        placement = self._policy.place(PlacementRequest(Completion.decode(raw), _PATH))
        self.reasons[placement.reason] += 1
        (self._at_decode if placement.prefill is None else self._at_both)(request, placement)

    def _at_decode(self, request: SimulatedRequest, placement: Placement) -> None:
        lease = self.pools[Side.DECODE].acquire(placement.decode, placement.work, prompt=placement.prompt)
        request.on_first = lambda: self._caches.began(lease, placement)
        request.on_end = lease.release
        self.engines[Side.DECODE].add(request)

    def _at_both(self, request: SimulatedRequest, placement: Placement) -> None:
        assert placement.prefill is not None
        prompt = placement.prompt
        prefill = self.pools[Side.PREFILL].acquire(placement.prefill, placement.work, prompt=prompt)
        decode = self.pools[Side.DECODE].acquire(placement.decode, prompt=prompt)
        request.on_first = lambda: self._handed_over(request, prefill)
        request.on_end = decode.release
        self.engines[Side.PREFILL].add(request)

    def _handed_over(self, request: SimulatedRequest, lease: Lease) -> None:
        self.engines[Side.PREFILL].leave(request)
        self._caches.prefilled(lease, Computed())
        lease.release()
        if request.answer > 1:
            self._clock.after(LANDING_S, lambda: self.engines[Side.DECODE].add(request))

    def _workload(self, side: Side) -> Workload:
        workload = self.pools[side].workload(self._places[side])
        assert workload is not None
        return workload


def simulate(
    rows: Sequence[dict[str, Any]], clock: Clock, system: Plain | SimulatedPair
) -> list[AnswerTimes]:
    """Simulates the rows of a timed_trace, all of which are answered."""
    requests = [SimulatedRequest(row["input_length"], row["output_length"], row["timestamp"]) for row in rows]
    for request in requests:
        clock.after(request.arrives, lambda request=request: system.send(request))  # type: ignore[misc]
    clock.run()
    return [request.told() for request in requests]


def lines(plan: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for rate in plan.rates:
        pairs = [
            functools.partial(
                SimulatedPair, objectives=plan.objectives, threshold=threshold, step_tokens=step
            )
            for threshold, step in plan.steps
        ]
        makes: list[Callable[[Clock], Plain | SimulatedPair]] = [Plain, *pairs]
        for make in makes:
            said: list[AnswerTimes] = []
            reasons: Counter[str] = Counter()
            for seed in plan.seeds:
                clock = Clock()
                system = make(clock)
                rows = trace(WORKLOADS["random"], rate, plan.seconds, seed, seed)
                said += simulate(rows, clock, system)
                reasons += system.reasons if isinstance(system, SimulatedPair) else Counter()
            seconds = plan.seconds * len(plan.seeds)
            line = {"workload": "random", "system": system.name, "rate": rate, "at once": False}
            print(rate, system.name, dict(reasons), flush=True)
            yield {**line, **summary(said, len(said), seconds, [plan.objectives])}


def steps(text: str) -> tuple[int, int]:
    threshold, step = map(int, text.split("/"))
    return threshold, step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", type=float, default=[4, 7, 9, 11], help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=25.0, help="seconds of arrivals")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1], help="seeds of the arrivals; 1 is gpu_goodput.py's"
    )
    parser.add_argument(
        "--objectives",
        type=LoadObjectives.parse,
        default=LoadObjectives(1000, 25),
        metavar="TTFT:BETWEEN",
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        type=steps,
        default=[(256, 1024), (512, 2048)],
        metavar="THRESHOLD/STEP",
        help="--long-prefill-token-threshold and --max-num-batched-tokens of the decode engine",
    )
    print(report(list(lines(parser.parse_args()))))


if __name__ == "__main__":
    main()
