"""The connector's metrics in SGLang's /metrics.

SGLang's schedulers write Prometheus metrics into files, which its server reads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from kv_connector.agent.metrics import AgentReporter

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


def show_metrics(reporter: AgentReporter, labels: Mapping[str, str]) -> None:
    """Updates the metrics from now on, on a separate thread. prometheus_client is imported here, after SGLang
    has set the directory of its files."""
    from prometheus_client import Counter, Gauge, Histogram

    from kv_connector.agent.exposition import Exposition

    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    exposition = Exposition(types, list(labels), {0: list(labels.values())})

    def show() -> None:
        while True:
            try:
                interval = reporter.take()
                if interval is not None:
                    exposition.observe(interval)
            except Exception:
                logger.exception("write_imm: cannot update its metrics")
            pause.wait(_INTERVAL_S)

    pause = threading.Event()
    threading.Thread(target=show, name="kv-metrics", daemon=True).start()
