"""Metrics of an engine's controller, for Prometheus, beside the API server's own metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

NAMES = tuple(
    f"kv_connector_weights_{name}" for name in ("version", "torn", "updates", "bytes", "pause_seconds")
)
# From a copy of a few GB within HBM, over a copy on a CPU, to a streamed version over a slow network.
_PAUSE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OUTCOMES = ("applied", "refused", "torn")


class WeightMetrics:
    """The weight metrics of a process. A new object replaces the previous one in the registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        for name in NAMES:
            if (before := registry._names_to_collectors.get(name)) is not None:
                registry.unregister(before)
        self._version = Gauge(
            NAMES[0],
            "1 for the weight version that this engine serves. No series exists before the first update",
            ["version"],
            registry=registry,
            multiprocess_mode="mostrecent",  # several API servers share one series
        )
        self._torn = Gauge(
            NAMES[1],
            "1 while the engine stays paused because a version was not applied by all workers, else 0",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._updates = Counter(
            NAMES[2],
            "Weight versions by outcome. applied: the engine serves it. refused: the engine keeps its "
            "previous version. torn: the engine stays paused",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            NAMES[3], "Bytes of the applied weight versions, of all workers", registry=registry
        )
        self._pause = Histogram(
            NAMES[4],
            "Seconds that an engine pauses for a weight version, until it resumes or stays paused",
            buckets=_PAUSE_SECONDS,
            registry=registry,
        )
        self._served: str | None = None
        for outcome in OUTCOMES:
            self._updates.labels(outcome)

    def applied(self, version: str, nbytes: int, pause_s: float) -> None:
        if self._served is not None:
            self._version.labels(self._served).set(0)  # with several API servers no series can be removed
        self._version.clear()
        self._version.labels(version).set(1)
        self._served = version
        self._bytes.inc(nbytes)
        self._ended("applied", pause_s)
        self._torn.set(0)

    def not_applied(self, pause_s: float, *, torn: bool) -> None:
        """Counts a version that was not applied. ``pause_s``: 0 if the engine was not paused."""
        self._ended("torn" if torn else "refused", pause_s)
        if torn:
            self._torn.set(1)

    def _ended(self, outcome: str, pause_s: float) -> None:
        self._updates.labels(outcome).inc()
        if pause_s:
            self._pause.observe(pause_s)
