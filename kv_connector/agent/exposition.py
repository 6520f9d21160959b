"""Shows Intervals as Prometheus metrics, in the process that serves the metrics.

Several processes may show the metrics of one engine. Their gauges are merged by the latest value of each
series. So each series has one rank as its source, and a process that got no new value leaves the series
alone. No series can be removed there, so no label may name an object that comes and goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kv_connector.agent.metrics import COUNTERS, GAUGES, HISTOGRAMS, Interval
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.wire.messages import LendOutcome

NAMES = {
    f"kv_connector_{key}"
    for key in (
        *COUNTERS,
        *GAUGES,
        *HISTOGRAMS,
        "transfers",
        "transfers_under_way",
        "peers",
        "prefix_requests",
    )
}

# Outcomes that the borrower knows by itself.
BORROWERS = (LendOutcome.UNREACHABLE, LendOutcome.SILENT, LendOutcome.SKIPPED)

# From a cached prompt over NVLink to a prompt of 100,000 tokens that waited in a queue.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# From one page of a small model to 128 GiB.
_BYTES = tuple(float(1 << exponent) for exponent in range(14, 38, 2))


class Exposition:
    """The metrics of some engines. Creating the object registers them."""

    def __init__(
        self, types: Mapping[Any, Any], labels: Sequence[str], engines: Mapping[int, Sequence[object]]
    ) -> None:
        """``types``: constructors of metrics, by prometheus_client's Counter, Gauge and Histogram.
        ``labels``: label names that identify an engine. ``engines``: the values of these labels, by engine
        number."""
        self._types, self._labels, self._engines = types, labels, engines
        self._counters = {
            key: types[Counter](f"kv_connector_{key}", text, labels) for key, text in COUNTERS.items()
        }
        self._gauges = {key: self._gauge(key, text) for key, text in GAUGES.items()}
        self._lanes = self._gauge("peers", "Connected peers, by the lane that their pages take", "lane")
        self._under_way = self._gauge(
            "transfers_under_way",
            "Transfers that are not over, by this engine's role and by phase",
            "role",
            "phase",
        )
        self._transfers = types[Counter](
            "kv_connector_transfers",
            "Ended transfers, by this engine's role and by outcome (cancelled: an engine aborted the request "
            "because its client left)",
            [*labels, "role", "outcome"],
        )
        self._prefixes = types[Counter](
            "kv_connector_prefix_requests",
            "Answered requests for prefixes, by side (borrow: of this engine, lend: of other engines) and by "
            "outcome (lent, or why not)",
            [*labels, "side", "outcome"],
        )
        self._histograms = {
            key: types[Histogram](
                f"kv_connector_{key}",
                text,
                [*labels, "lane"],
                buckets=_BYTES if key.endswith("bytes") else _SECONDS,
            )
            for key, text in HISTOGRAMS.items()
        }
        for values in engines.values():  # counters are shown from the start
            for counter in self._counters.values():
                counter.labels(*values)
            for role in ("prefill", "decode"):
                for outcome in Outcome:
                    self._transfers.labels(*values, role, outcome.value)
            for lent in LendOutcome:
                self._prefixes.labels(*values, "borrow", lent.value)
                if lent not in BORROWERS:
                    self._prefixes.labels(*values, "lend", lent.value)

    def _gauge(self, key: str, text: str, *labels: str) -> Any:
        """A gauge of which each series belongs to one rank."""
        names = [*self._labels, "rank", *labels]
        return self._types[Gauge](f"kv_connector_{key}", text, names, multiprocess_mode="mostrecent")

    def observe(self, interval: Interval, engine: int = 0) -> None:
        """Adds an interval to the metrics of an engine. ``engine``: key of ``engines``."""
        labels = self._engines[engine]
        for key, increment in interval.counters.items():
            self._counters[key].labels(*labels).inc(increment)
        for name, increment in interval.transfers.items():
            self._transfers.labels(*labels, *name.split(" ")).inc(increment)
        for name, increment in interval.prefixes.items():
            self._prefixes.labels(*labels, *name.split(" ")).inc(increment)
        for rank, state in interval.gauges.items():
            for key, value in state.items():
                self._gauges[key].labels(*labels, rank).set(value)
        for rank, state in interval.lanes.items():
            for lane, peers in state.items():
                self._lanes.labels(*labels, rank, lane).set(peers)
        for rank, state in interval.phases.items():
            for phase, transfers in state.items():
                self._under_way.labels(*labels, rank, *phase.split(" ")).set(transfers)
        for key, lane, measured in interval.timings:
            self._histograms[key].labels(*labels, lane).observe(measured)
