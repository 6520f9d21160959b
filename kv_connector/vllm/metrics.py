"""What the workers' agents count, on its way through vLLM's stats into its /metrics and its log.

vLLM takes a stats object from each worker at the end of each step, adds the workers' up, and sends the sum
with that step's output to the API server, of several (``--api-server-count``) to any one. An idle engine
takes no steps, so the last step must tell the truth: every prefill request stays in vLLM's books until its
agent has reported it sent, every decode request until its pages have ended, and an agent forgets a request
before it reports it. The step that carries a report therefore carries its zeros too.
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import REGISTRY

from kv_connector.agent.exposition import NAMES, Exposition
from kv_connector.agent.metrics import Interval
from kv_connector.vllm.internals import KVConnectorPromMetrics, KVConnectorStats


class TransferStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """An Interval. ``data``, which vLLM sends between processes, has its fields."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, interval: Interval) -> TransferStats:
        return cls(msgspec.to_builtins(interval))

    @property
    def interval(self) -> Interval:
        """A copy."""
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
        """For vLLM's periodic log line: what happened in the interval, without the zeros."""
        happened = {**self.data["counters"], **self.data["transfers"]}
        return {name: round(value, 3) for name, value in happened.items() if value}


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
        self._exposition = Exposition(metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exposition.observe(TransferStats(transfer_stats_data).interval, engine_idx)


def _unregister_ours() -> None:
    """vLLM does so with its own: an API server that is made anew in one process registers the same names
    again.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in NAMES:
            REGISTRY.unregister(collector)
