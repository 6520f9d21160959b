"""Counters of the expert exchange, for Prometheus: beside a framework's own, in each worker."""

from __future__ import annotations

from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from kv_connector.moe.fault import CODES

NAMES = tuple(f"kv_connector_moe_{name}" for name in ("taken", "passed", "faults"))


class MoeMetrics:
    """The counters of one process. A second object replaces the first in the registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        for name in NAMES:
            if (before := registry._names_to_collectors.get(name)) is not None:
                registry.unregister(before)
        self._taken = Counter(
            NAMES[0],
            "Dispatches of a layer that kv-connector served. Replays of a CUDA graph are not counted",
            registry=registry,
        )
        self._passed = Counter(
            NAMES[1],
            "Dispatches of a layer that the framework's own exchange served, by reason. Replays of a CUDA "
            "graph are not counted",
            ["reason"],
            registry=registry,
        )
        self._faults = Counter(
            NAMES[2],
            "Groups that ended early, by reason (LOST: a process ended. TIMEOUT_DISPATCH, TIMEOUT_COMBINE: a "
            "rank did not send in time. EVICTED: another rank reported that)",
            ["code"],
            registry=registry,
        )
        for code in CODES:
            self._faults.labels(code)

    def taken(self) -> None:
        self._taken.inc()

    def passed(self, reason: str) -> None:
        self._passed.labels(reason).inc()

    def fault(self, code: str) -> None:
        self._faults.labels(code).inc()


@cache
def _of_process() -> MoeMetrics:
    # Created at the first event, so that a process without row exchange exports no counters.
    return MoeMetrics()


def taken() -> None:
    """Counts a dispatch that kv-connector served."""
    _of_process().taken()


def passed(reason: str) -> None:
    """Counts a dispatch that the framework served, with the reason."""
    _of_process().passed(reason)


def fault(code: str) -> None:
    """Counts a group's end, with the code of its fault."""
    _of_process().fault(code)
