"""What the workers' agents count, on its way through vLLM's stats into its /metrics and its log.

vLLM takes a stats object from each worker at the end of each step, adds the workers' up, and sends the sum
with that step's output to the API server. An idle engine takes no steps, so the last step must tell the
truth: every prefill request stays in vLLM's books until its agent has reported it sent, every decode request
until its pages have ended, and an agent forgets a request before it reports it. The step that carries a
report therefore carries its zeros too.

Of several API servers (``--api-server-count``) any one gets a step's sum, and their gauges are merged by the
latest value of each series: a series has one rank as its source, and who is not told of it leaves it alone.
No series can be removed there, so no label names what comes and goes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY

from kv_connector.agent.agent import Agent
from kv_connector.agent.ledger import AgentStats, LiveState, Timing
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.messages import Role
from kv_connector.vllm.internals import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

# Key in the stats: what grows. The metric's name is kv_connector_<key>_total.
COUNTERS = {
    "pages_pushed": "KV pages written into decode engines",
    "bytes_pushed": "Bytes of KV pages written into decode engines",
    "layers_pushed": "Layers of prompts written into decode engines",
    "pages_pushed_before_prefill_end": "Pages that had arrived before the prompt's last layer was computed",
    "bytes_pushed_before_prefill_end": "Bytes that had arrived before the prompt's last layer was computed",
    "layers_pushed_before_prefill_end": "Layers that had arrived before the prompt's last layer was computed",
    "pages_received": "KV pages that arrived from prefill engines",
    "send_seconds": "Time from a reservation to the end of its transfer, summed over those that completed",
    "receive_seconds": "Time from a reservation to its last page, summed over those that completed",
    "malformed_messages": "Control messages that were refused",
}

# What rises and falls. The metric's name is kv_connector_<key>.
GAUGES = {
    "live_prefill_requests": "Prompts that are being computed, or held, for a decode engine",
    "live_decode_requests": "Requests whose pages are under way to this engine",
    "live_transfers": "Transfers that are open in the transfer engine",
    "live_counter_sets": "Sets of immediate counters in use",
}

# Of each completed transfer, by lane. The metric's name is kv_connector_<key>.
HISTOGRAMS = {
    "send_duration_seconds": "From a reservation to the end of its writes",
    "send_first_push_seconds": "From a reservation until its first pages could be written",
    "send_size_bytes": "Bytes written for one reservation",
    "receive_duration_seconds": "From a reservation to its last page",
}
# From a cached prompt over NVLink to one of 100,000 tokens behind a queue.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# From one page of a small model to 128 GiB.
_BYTES = tuple(float(1 << exponent) for exponent in range(14, 38, 2))

_NAMES = {*COUNTERS, *GAUGES, *HISTOGRAMS, "transfers", "transfers_under_way", "peers"}

# Phases are counted on the forward thread, some 2 us a transfer: in each step up to this many,
_FEW_TRANSFERS = 16
# and every so often beyond.
_COUNT_S = 1.0


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """One interval: increments of the counters, and the latest state of each rank.

    ``data`` is what vLLM sends between processes:
        counters   {key of COUNTERS: increment}
        transfers  {"prefill completed": increment, ...}: transfers that ended, by role and outcome
        gauges     {rank: {key of GAUGES: value}}
        lanes      {rank: {lane: peers that are connected over it}}
        phases     {rank: {"decode reserved": transfers that are in it}}
        timings    [[key of HISTOGRAMS, lane, value], ...]
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {
            "counters": {},
            "transfers": {},
            "gauges": {},
            "lanes": {},
            "phases": {},
            "timings": [],
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Adds another rank's interval, or a later one of the same rank."""
        for key in ("counters", "transfers"):
            ours = self.data[key]
            for name, increment in other.data[key].items():
                ours[name] = ours.get(name, 0) + increment
        for key in ("gauges", "lanes", "phases"):
            self.data[key].update(other.data[key])
        self.data["timings"] += other.data["timings"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line: what happened in the interval, without the zeros."""
        happened = {**self.data["counters"], **self.data["transfers"]}
        return {name: round(value, 3) for name, value in happened.items() if value}


class AgentReporter:
    """Takes one agent's numbers, once per engine step."""

    def __init__(self, agent: Agent, rank: int) -> None:
        self._agent = agent
        self._rank = str(rank)
        self._counted: dict[str, dict[str, int | float]] = {"counters": {}, "transfers": {}}
        self._shown: dict[str, dict[str, int]] = {"gauges": {}, "lanes": {}, "phases": {}}
        self._phases: dict[str, int] = {}
        self._next_count = 0.0

    def take(self) -> TransferStats | None:
        """What has changed since the last call, or None."""
        # In this order: a transfer that ends in between is counted now or next time, but never shown as live
        # for good.
        live, stats = self._agent.live(), self._agent.stats()
        result = TransferStats()
        for key, values in (("counters", _counters(stats)), ("transfers", _transfers(stats))):
            known = self._counted[key]
            result.data[key] = {
                name: value - known.get(name, 0)
                for name, value in values.items()
                if value != known.get(name, 0)
            }
            self._counted[key] = values
        lanes = Counter(peer.lane for peer in stats.peers if peer.lane)
        for key, now in (("gauges", _gauges(live)), ("lanes", lanes), ("phases", self._count_phases(live))):
            # Whoever gets this does not know what was shown before: what is gone is told as 0.
            state = dict.fromkeys(self._shown[key], 0) | now
            if state != self._shown[key]:
                result.data[key] = {self._rank: state}
                self._shown[key] = state
        result.data["timings"] = [
            [name, timing.lane, value]
            for timing in self._agent.take_timings()
            for name, value in _values(timing)
        ]
        return None if result.is_empty() else result

    def _count_phases(self, live: LiveState) -> dict[str, int]:
        now = time.monotonic()
        if live.prefill_requests + live.decode_requests <= _FEW_TRANSFERS or now >= self._next_count:
            self._phases, self._next_count = self._agent.phases(), now + _COUNT_S
        return self._phases


def _counters(stats: AgentStats) -> dict[str, int | float]:
    return {
        "pages_pushed": stats.pages_pushed,
        "bytes_pushed": stats.bytes_pushed,
        "layers_pushed": stats.layers_pushed,
        "pages_pushed_before_prefill_end": stats.pages_before_prefill_end,
        "bytes_pushed_before_prefill_end": stats.bytes_before_prefill_end,
        "layers_pushed_before_prefill_end": stats.layers_before_prefill_end,
        "pages_received": stats.received_pages,
        "send_seconds": stats.sent_seconds,
        "receive_seconds": stats.received_seconds,
        "malformed_messages": stats.malformed_messages,
    }


def _transfers(stats: AgentStats) -> dict[str, int | float]:
    return {
        f"{role} {outcome.value}": count
        for role, outcomes in (("prefill", stats.sent), ("decode", stats.received))
        for outcome, count in outcomes.items()
    }


def _values(timing: Timing) -> Iterator[tuple[str, float]]:
    """By key of HISTOGRAMS."""
    if timing.side is Role.DECODE:
        yield "receive_duration_seconds", timing.seconds
        return
    yield "send_duration_seconds", timing.seconds
    yield "send_first_push_seconds", timing.first_push_seconds
    yield "send_size_bytes", timing.nbytes


def _gauges(live: LiveState) -> dict[str, int]:
    return {
        "live_prefill_requests": live.prefill_requests,
        "live_decode_requests": live.decode_requests,
        "live_transfers": live.engine_transfers,
        "live_counter_sets": live.counter_sets,
    }


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The API server's side: from TransferStats into Prometheus metrics, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_ours()
        self._counters = {
            key: self._per_engine(self._counter_cls(f"kv_connector_{key}", text, labelnames))
            for key, text in COUNTERS.items()
        }
        self._gauges = {key: self._gauge(key, text) for key, text in GAUGES.items()}
        self._lanes = self._gauge(
            "peers", "Peers that are connected, by the lane that their pages take", "lane"
        )
        self._under_way = self._gauge(
            "transfers_under_way",
            "Transfers that are not over, by this engine's role and what they wait for",
            "role",
            "phase",
        )
        self._transfers = self._counter_cls(
            "kv_connector_transfers",
            "Transfers that ended, by this engine's role",
            [*labelnames, "role", "outcome"],
        )
        self._histograms = {
            key: self._histogram_cls(
                f"kv_connector_{key}",
                text,
                [*labelnames, "lane"],
                buckets=_BYTES if key.endswith("bytes") else _SECONDS,
            )
            for key, text in HISTOGRAMS.items()
        }
        for labels in per_engine_labelvalues.values():
            for role in ("prefill", "decode"):
                for outcome in Outcome:
                    self._transfers.labels(*labels, role, outcome.value)

    def _gauge(self, key: str, text: str, *labels: str) -> Any:
        """One of which each series belongs to one rank."""
        names = [*self._labelnames, "rank", *labels]
        return self._gauge_cls(f"kv_connector_{key}", text, names, multiprocess_mode="mostrecent")

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        children: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return children

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        for key, increment in data["counters"].items():
            self._counters[key][engine_idx].inc(increment)
        labels = self.per_engine_labelvalues[engine_idx]
        for name, increment in data["transfers"].items():
            self._transfers.labels(*labels, *name.split(" ")).inc(increment)
        for rank, state in data["gauges"].items():
            for key, value in state.items():
                self._gauges[key].labels(*labels, rank).set(value)
        for rank, state in data["lanes"].items():
            for lane, peers in state.items():
                self._lanes.labels(*labels, rank, lane).set(peers)
        for rank, state in data["phases"].items():
            for phase, transfers in state.items():
                self._under_way.labels(*labels, rank, *phase.split(" ")).set(transfers)
        for key, lane, value in data["timings"]:
            self._histograms[key].labels(*labels, lane).observe(value)


def _unregister_ours() -> None:
    """vLLM does so with its own: an API server that is made anew in one process registers the same names
    again.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").removeprefix("kv_connector_") in _NAMES:
            REGISTRY.unregister(collector)
