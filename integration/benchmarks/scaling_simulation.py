"""Autoscaling without a cluster: the router's forecasts as the metrics of a HorizontalPodAutoscaler.

The engines are those of goodput_simulation.py, for a model that is ten times slower. The router's own policy
places each request. An autoscaler for each side reads what the router exports, and adds and removes engines
by the rules of Kubernetes and the values of integration/helm. The arrivals change from phase to phase. The
table shows whether the number of engines settles, and what clients wait meanwhile.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from goodput_load import WORKLOADS, trace
from goodput_simulation import LANDING_S, Clock, SimulatedEngine, SimulatedRequest

from kv_connector.bench.records import percentile
from kv_connector.control.membership import PromptCost
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.engines.pool import Lease, Pool
from kv_connector.router.engines.prefix_cache import PrefixIndex
from kv_connector.router.engines.workload import Workload
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.policy import PlacementRequest
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.requests.answers import Computed
from kv_connector.router.requests.completion import Completion

COST = PromptCost(step_ns=49_000_000, token_ns=225_000, pair_ps=7000)
STREAM_S = 200e-6
CACHE_TOKENS = 40_000
# Engines that the metric asks for are this busy, so that a burst finds room.
TARGET = 0.7
# Seconds until a started engine takes requests.
START_S = 120.0
# Kubernetes' interval and tolerance, and the chart's rules for fewer engines.
SYNC_S, TOLERANCE = 15.0, 0.1
STABLE_S, REMOVAL_S = 300.0, 60.0
# Time over which the metrics are averaged: rate(...[2m]) and avg_over_time(...[2m]).
WINDOW_S = 120.0
_HEARTBEAT_S = 1.0
_PATH = "/v1/completions"


class Autoscaler:
    """A HorizontalPodAutoscaler with an external metric and a target of the type AverageValue."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[tuple[float, int]] = deque()
        self._removed = -math.inf

    def wanted(self, now: float, demand: float, current: int) -> int:
        """Returns the number of engines that it sets. ``demand``: busy engines, of all together."""
        found = current
        if abs(demand / (current * TARGET) - 1) > TOLERANCE:
            found = min(self._most, max(1, math.ceil(demand / TARGET)))
        self._recent.append((now, found))
        while now - self._recent[0][0] > STABLE_S:
            self._recent.popleft()
        if found > current:
            return found
        if max(one for _, one in self._recent) < current and now - self._removed >= REMOVAL_S:
            self._removed = now
            return current - 1
        return current


class SideFleet:
    """The engines of one side."""

    def __init__(self, side: Side, clock: Clock, pool: Pool, index: PrefixIndex) -> None:
        self._side, self._clock, self._pool, self._index = side, clock, pool, index
        self._numbers = itertools.count(1)
        self.engines: dict[Endpoint, SimulatedEngine] = {}
        self.starting = 0
        self._join()

    @property
    def size(self) -> int:
        return len(self.engines) + self.starting

    def scale(self, wanted: int) -> None:
        while self.size < wanted:
            self.starting += 1
            self._clock.after(START_S, self._started)
        while self.size > wanted and len(self.engines) > 1:
            endpoint = next(reversed(self.engines))
            del self.engines[endpoint]  # its requests continue
            self._index.remove(self.workload(endpoint).cache)
            self._pool.remove(endpoint, lost=False)

    def report(self) -> None:
        """Sends the heartbeats of all engines."""
        for endpoint, engine in self.engines.items():
            self.workload(endpoint).hear(engine.load)

    def workload(self, endpoint: Endpoint) -> Workload:
        found = self._pool.workload(endpoint)
        assert found is not None
        return found

    def _started(self) -> None:
        self.starting -= 1
        self._join()

    def _join(self) -> None:
        endpoint = Endpoint.parse(f"http://{self._side.value}{next(self._numbers)}:1")
        engine = SimulatedEngine(self._clock, cost=COST, stream_s=STREAM_S, cache_tokens=CACHE_TOKENS)
        self.engines[endpoint] = engine
        workload = Workload(self._clock)
        self._index.add(workload.cache)
        self._pool.set_usable(endpoint, True, workload)
        workload.hear(engine.load)


@dataclass
class Minute:
    """The events of one minute."""

    arrivals: int = 0
    waits: list[float] = field(default_factory=list)
    """Seconds to the first token, of requests that arrived in it."""
    demand: dict[Side, float] = field(default_factory=dict)
    size: dict[Side, int] = field(default_factory=dict)
    """Engines at its end, with those that start."""


class ScaledSystem:
    """Engines of both sides behind the router's policy, and their autoscalers."""

    def __init__(self, clock: Clock, minutes: int, most: int) -> None:
        self._clock = clock
        self._pools = {side: Pool() for side in TEXT_SIDES}
        index = PrefixIndex()
        self._caches = CacheRecords()
        self._policy = CacheAware(self._pools, index, self._caches.sizes, clock=clock)
        self.fleets = {side: SideFleet(side, clock, self._pools[side], index) for side in TEXT_SIDES}
        self._scalers = {side: Autoscaler(most) for side in TEXT_SIDES}
        self._numbers = itertools.count(1)
        self._work = 0.0  # kv_connector_router_prompt_work_seconds_total{side="prefill"}
        self._scrapes: deque[tuple[float, float, float]] = deque()
        self.minutes = [Minute() for _ in range(minutes)]
        self._end = minutes * 60.0
        clock.after(0, self._beat)
        clock.after(SYNC_S, self._sync)

    def send(self, request: SimulatedRequest) -> None:
        self.minutes[int(request.arrives // 60)].arrivals += 1
        ids = [next(self._numbers), *([7] * (request.tokens - 1))]
        raw = json.dumps({"model": "m", "prompt": ids, "stream": True}).encode()
        placement = self._policy.place(PlacementRequest(Completion.decode(raw), _PATH))
        assert placement.prefill is not None
        assert placement.work is not None
        self._work += placement.work.seconds
        prefill = self._pools[Side.PREFILL].acquire(
            placement.prefill, placement.work, prompt=placement.prompt
        )
        decode = self._pools[Side.DECODE].acquire(placement.decode, context=placement.tokens)
        first = self.fleets[Side.PREFILL].engines[placement.prefill]
        second = self.fleets[Side.DECODE].engines[placement.decode]
        request.on_first = functools.partial(self._handed_over, request, prefill, decode, first, second)
        request.on_end = decode.release
        first.add(request)

    def _handed_over(
        self,
        request: SimulatedRequest,
        prefill: Lease,
        decode: Lease,
        first: SimulatedEngine,
        second: SimulatedEngine,
    ) -> None:
        self.minutes[int(request.arrives // 60)].waits.append(self._clock.now - request.arrives)
        first.leave(request)
        self._caches.prefilled(prefill, Computed())
        prefill.release()
        decode.prompt_computed()
        if request.answer > 1:
            self._clock.after(LANDING_S, lambda: second.add(request))

    def _beat(self) -> None:
        for fleet in self.fleets.values():
            fleet.report()
        now = self._clock.now
        self._scrapes.append((now, self._work, self._pools[Side.DECODE].caches_filled()))
        while now - self._scrapes[0][0] > WINDOW_S:
            self._scrapes.popleft()
        if now < self._end:
            self._clock.after(_HEARTBEAT_S, self._beat)

    def demand(self) -> dict[Side, float]:
        """Returns the busy engines of each side, as the router's metrics give them."""
        (began, before, _), (now, work, _) = self._scrapes[0], self._scrapes[-1]
        caches = sum(filled for _, _, filled in self._scrapes) / len(self._scrapes)
        return {Side.PREFILL: (work - before) / max(1.0, now - began), Side.DECODE: caches}

    def _sync(self) -> None:
        now, demand = self._clock.now, self.demand()
        for side, fleet in self.fleets.items():
            fleet.scale(self._scalers[side].wanted(now, demand[side], fleet.size))
        minute = self.minutes[min(int(now // 60), len(self.minutes) - 1)]
        minute.demand, minute.size = demand, {side: fleet.size for side, fleet in self.fleets.items()}
        if now + SYNC_S < self._end:
            self._clock.after(SYNC_S, self._sync)


def simulate(rates: Sequence[float], phase_minutes: int, seed: int, most: int) -> list[Minute]:
    """Simulates phases of so many minutes with these arrivals a second."""
    clock = Clock()
    system = ScaledSystem(clock, phase_minutes * len(rates), most)
    for number, rate in enumerate(rates):
        for row in trace(WORKLOADS["random"], rate, phase_minutes * 60.0, seed + number, seed):
            at = row["timestamp"] + number * phase_minutes * 60.0
            request = SimulatedRequest(row["input_length"], row["output_length"], at)
            clock.after(at, functools.partial(system.send, request))
    clock.run()
    return system.minutes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1, 4, 2], help="arrivals a second by phase"
    )
    parser.add_argument("--minutes", type=int, default=25, help="minutes of a phase")
    parser.add_argument("--most", type=int, default=16, help="most engines of a side")
    parser.add_argument("--seed", type=int, default=1)
    plan = parser.parse_args()
    print(
        "| minute | requests a second | busy prefill engines | engines | decode caches filled | engines | "
        "first token, s, p50 / p99 |"
    )
    print("|---|---|---|---|---|---|---|")
    for number, minute in enumerate(simulate(plan.rates, plan.minutes, plan.seed, plan.most), 1):
        waits = " / ".join(f"{percentile(minute.waits, percent):.1f}" for percent in (50, 99))
        busy, filled = minute.demand[Side.PREFILL], minute.demand[Side.DECODE]
        print(
            f"| {number} | {minute.arrivals / 60:.1f} | {busy:.2f} | {minute.size[Side.PREFILL]} | "
            f"{filled:.2f} | {minute.size[Side.DECODE]} | {waits} |"
        )


if __name__ == "__main__":
    main()
