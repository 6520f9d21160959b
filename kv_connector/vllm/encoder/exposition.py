"""Shows the numbers of an encoder connector as Prometheus metrics, in the process that serves the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge

# Counters. The metric's name is kv_connector_<key>_total.
EMBEDDING_COUNTERS = {
    "embeddings_sent": "Embeddings of pictures written into prefill engines",
    "embeddings_received": "Embeddings of pictures received from encoder engines",
    "embedding_fetches_failed": "Embeddings of pictures that an encoder engine did not deliver",
}

# Gauges. The metric's name is kv_connector_<key>.
EMBEDDING_GAUGES = {
    "embeddings_stored": "Embeddings of pictures in the arena, with those that are being received",
    "embeddings_in_use": "Of these embeddings, those that a request, a load or a write keeps in the arena",
}

EMBEDDING_NAMES = {f"kv_connector_{key}" for key in (*EMBEDDING_COUNTERS, *EMBEDDING_GAUGES)}


class EmbeddingExposition:
    """The metrics of some engines. Creating the object registers them."""

    def __init__(
        self, types: Mapping[Any, Any], labels: Sequence[str], engines: Mapping[int, Sequence[object]]
    ) -> None:
        """The arguments are those of Exposition in the agent's room."""
        self._engines = engines
        self._metrics = {
            key: types[Counter](f"kv_connector_{key}", text, labels)
            for key, text in EMBEDDING_COUNTERS.items()
        } | {
            key: types[Gauge](f"kv_connector_{key}", text, labels, multiprocess_mode="mostrecent")
            for key, text in EMBEDDING_GAUGES.items()
        }
        for values in engines.values():  # shown from the start
            for metric in self._metrics.values():
                metric.labels(*values)

    def observe(self, numbers: Mapping[str, int], engine: int = 0) -> None:
        """Adds increments of counters, and sets gauges. ``engine``: key of ``engines``."""
        for key, number in numbers.items():
            metric = self._metrics[key].labels(*self._engines[engine])
            if key in EMBEDDING_GAUGES:
                metric.set(number)
            else:
                metric.inc(number)
