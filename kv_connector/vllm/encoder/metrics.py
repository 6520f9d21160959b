"""Metrics of an encoder connector, sent through vLLM's stats to its /metrics and its log.

vLLM takes a stats object from the scheduler's side at the end of each step. What happens after the last step,
such as a write to a prefill engine, is shown with the next step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kv_connector.vllm.encoder.arena import EmbeddingArena
from kv_connector.vllm.encoder.exposition import EMBEDDING_GAUGES, EMBEDDING_NAMES, EmbeddingExposition
from kv_connector.vllm.encoder.internals import ECConnectorPromMetrics, ECConnectorStats
from kv_connector.vllm.metrics import unregister


class EmbeddingStats(ECConnectorStats):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Increments of counters and values of gauges by name, which vLLM sends between processes as ``data``."""

    def __init__(self, data: dict[str, int] | None = None) -> None:
        self.data: dict[str, int] = {} if data is None else data

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: EmbeddingStats) -> EmbeddingStats:
        """Adds a later interval of the same engine."""
        for name, number in other.data.items():
            self.data[name] = number if name in EMBEDDING_GAUGES else self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's periodic log line, without the zeros."""
        return {name: number for name, number in self.data.items() if number}


class EmbeddingReporter:
    """Takes the numbers of one scheduler side, once per step."""

    def __init__(self, arena: EmbeddingArena, counts: Counter[str]) -> None:
        """``counts``: numbers since the start, which another thread raises."""
        self._arena = arena
        self._counts = counts
        self._shown: dict[str, int] = {}

    def take(self) -> EmbeddingStats | None:
        """Returns the changes since the last call; None if there are none."""
        gauges = {"embeddings_stored": len(self._arena), "embeddings_in_use": self._arena.pinned}
        found = {}
        for name, number in {**self._counts, **gauges}.items():
            shown = self._shown.get(name, 0)
            if number != shown:
                found[name] = number if name in EMBEDDING_GAUGES else number - shown
                self._shown[name] = number
        return EmbeddingStats(found) if found else None


class EmbeddingMetrics(ECConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The API server's side: makes Prometheus metrics from EmbeddingStats, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister(EMBEDDING_NAMES)
        self._exposition = EmbeddingExposition(metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exposition.observe(transfer_stats_data, engine_idx)
