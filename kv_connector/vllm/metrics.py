"""What the workers' agents count, on its way through vLLM's stats into its /metrics and its log.

vLLM takes a stats object from each worker at the end of each step, adds the workers' up, and sends the sum
with that step's output to the API server. An idle engine takes no steps, so the last step must tell the
truth: every prefill request stays in vLLM's books until its agent has reported it sent, every decode request
until its pages have ended, and an agent forgets a request before it reports it. The step that carries a
report therefore carries its zeros too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY

from kv_connector.agent import Agent
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.messages import Role
from kv_connector.reports import AgentStats, LiveState, Timing
from kv_connector.vllm.compat import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

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

_NAMES = {*COUNTERS, *GAUGES, *HISTOGRAMS, "transfers", "transfers_under_way", "lane_info"}


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """One interval: increments of the counters, and the latest state of each rank.

    ``data`` is what vLLM sends between processes:
        counters   {key of COUNTERS: increment}
        transfers  {"prefill completed": increment, ...}: transfers that ended, by role and outcome
        gauges     {rank: {key of GAUGES: value}}
        lanes      {rank: [[provider, peer], ...]}
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
        self._shown: tuple[dict[str, int], list[list[str]], dict[str, int]] | None = None

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
        lanes = sorted([peer.lane, peer.name] for peer in stats.peers if peer.lane)
        shown = (_gauges(live), lanes, live.phases)
        if shown != self._shown:
            for key, value in zip(("gauges", "lanes", "phases"), shown, strict=True):
                result.data[key] = {self._rank: value}
            self._shown = shown
        result.data["timings"] = [
            [name, timing.lane, value]
            for timing in self._agent.take_timings()
            for name, value in _values(timing)
        ]
        return None if result.is_empty() else result


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
        self._gauges = {
            key: self._per_engine(
                self._gauge_cls(f"kv_connector_{key}", text, labelnames, multiprocess_mode="mostrecent")
            )
            for key, text in GAUGES.items()
        }
        self._transfers = self._counter_cls(
            "kv_connector_transfers",
            "Transfers that ended, by this engine's role",
            [*labelnames, "role", "outcome"],
        )
        self._lanes = self._gauge_cls(
            "kv_connector_lane_info",
            "1 for each peer that is connected, and the provider that its pages take",
            [*labelnames, "provider", "peer"],
            multiprocess_mode="mostrecent",
        )
        self._under_way = self._gauge_cls(
            "kv_connector_transfers_under_way",
            "Transfers that are not over, by this engine's role and what they wait for",
            [*labelnames, "role", "phase"],
            multiprocess_mode="mostrecent",
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
        # Per engine and rank: the latest state.
        self._ranks: dict[int, dict[str, dict[str, int]]] = {}
        self._connected: dict[int, dict[str, set[tuple[str, str]]]] = {}
        self._phases: dict[int, dict[str, dict[str, int]]] = {}
        self._shown_phases: set[str] = set()

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
        ranks = self._ranks.setdefault(engine_idx, {})
        ranks.update(data["gauges"])
        for key, gauge in self._gauges.items():
            gauge[engine_idx].set(sum(state[key] for state in ranks.values()))
        self._show_lanes(engine_idx, data["lanes"])
        self._show_phases(engine_idx, data["phases"])
        for key, lane, value in data["timings"]:
            self._histograms[key].labels(*labels, lane).observe(value)

    def _show_phases(self, engine_idx: int, phases: dict[str, dict[str, int]]) -> None:
        ranks = self._phases.setdefault(engine_idx, {})
        ranks.update(phases)
        counts: Counter[str] = Counter()
        for rank in ranks.values():
            counts.update(rank)
        self._shown_phases |= counts.keys()
        labels = self.per_engine_labelvalues[engine_idx]
        for phase in self._shown_phases:  # one that was there before falls to 0
            self._under_way.labels(*labels, *phase.split(" ")).set(counts[phase])

    def _show_lanes(self, engine_idx: int, lanes: dict[str, Iterable[Iterable[str]]]) -> None:
        ranks = self._connected.setdefault(engine_idx, {})
        before = set(_all(ranks.values()))
        ranks.update({rank: {(provider, peer) for provider, peer in peers} for rank, peers in lanes.items()})
        now = set(_all(ranks.values()))
        labels = self.per_engine_labelvalues[engine_idx]
        for provider, peer in before - now:
            self._lanes.remove(*labels, provider, peer)
        for provider, peer in now - before:
            self._lanes.labels(*labels, provider, peer).set(1)


def _unregister_ours() -> None:
    """vLLM does so with its own: an API server that is made anew in one process registers the same names
    again.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").removeprefix("kv_connector_") in _NAMES:
            REGISTRY.unregister(collector)


def _all(sets: Iterable[set[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    for members in sets:
        yield from members
