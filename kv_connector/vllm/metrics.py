"""Metrics of the workers' agents, sent through vLLM's stats to its /metrics and its log.

vLLM takes a stats object from each worker at the end of each step and adds them up. It sends the sum with the
step's output to an API server, if there are several (``--api-server-count``) to any of them.

An idle engine takes no steps, so the last step must have the final values. vLLM keeps every prefill request
until its agent has reported it sent, and every decode request until its pages have ended. An agent forgets a
request before it reports the request. The step that carries a report therefore has the zeros, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from prometheus_client import REGISTRY

from kv_connector.agent.exposition import NAMES, Exposition
from kv_connector.agent.metrics import Interval
from kv_connector.vllm.internals import KVConnectorPromMetrics, KVConnectorStats


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The stats of an Interval. ``data``, which vLLM sends between processes, has its fields."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, interval: Interval) -> TransferStats:
        return cls(msgspec.to_builtins(interval))

    @property
    def interval(self) -> Interval:
        """A copy of the interval."""
        return msgspec.convert(self.data, Interval)

    def reset(self) -> None:
        self.data = msgspec.to_builtins(Interval())

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Adds another rank's interval, or a later one of the same rank."""
        total = self.interval
        total.add(other.interval)
        self.data = msgspec.to_builtins(total)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's periodic log line, without the zeros."""
        happened = {**self.data["counters"], **self.data["transfers"]}
        return {name: round(value, 3) for name, value in happened.items() if value}


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The API server's side: makes Prometheus metrics from TransferStats, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister(NAMES)
        self._exposition = Exposition(metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exposition.observe(TransferStats(transfer_stats_data).interval, engine_idx)


def unregister(names: Collection[str]) -> None:
    """Removes metrics of an earlier engine, as vLLM does with its own metrics.

    An API server that is made anew in the same process registers the same names again.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in names:
            REGISTRY.unregister(collector)
