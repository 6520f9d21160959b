"""The way of an agent's counts through vLLM: stats between its processes, its log line, and its /metrics."""

from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig

from kv_connector.agent.metrics import Interval
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.metrics import PromMetrics, TransferStats


def build() -> PromMetrics:
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return WriteImmConnector.build_prom_metrics(
        VllmConfig(), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"kv_connector_{name}", {"model_name": "m", "engine": "1", **labels})


def over_the_wire(stats: TransferStats) -> dict[str, Any]:
    """Encodes the stats as vLLM does: it sends ``to_dict()`` to the API server as MessagePack."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    return decoded


def stats(rank: int, pages: int) -> TransferStats:
    return TransferStats.of(
        Interval(
            counters={"pages_pushed": pages, "send_seconds": 0.12345},
            transfers={"prefill completed": 1},
            gauges={str(rank): {"live_transfers": pages}},
            lanes={str(rank): {"tcp": 1}},
            phases={str(rank): {"decode staged": 1}},
            timings=[("send_duration_seconds", "tcp", 0.5)],
        )
    )


def test_counts_of_the_workers_are_shown() -> None:
    metrics = build()
    both = stats(0, 3).aggregate(stats(1, 4))
    metrics.observe(over_the_wire(both), engine_idx=1)
    assert sample("pages_pushed_total") == 7
    assert sample("transfers_total", role="prefill", outcome="completed") == 2
    assert [sample("live_transfers", rank=rank) for rank in "01"] == [3, 4]
    assert [sample("peers", rank=rank, lane="tcp") for rank in "01"] == [1, 1]
    assert [sample("transfers_under_way", rank=rank, role="decode", phase="staged") for rank in "01"] == [
        1,
        1,
    ]
    assert sample("send_duration_seconds_count", lane="tcp") == 2


def test_each_step_takes_what_the_agent_counted() -> None:
    intervals = [Interval(counters={"pages_pushed": 3}), None]
    connector: WriteImmConnector = object.__new__(WriteImmConnector)
    connector._running = connector._step_costs = None
    assert connector.get_kv_connector_stats() is None, "before the KV caches are registered"
    asked: list[bool] = []

    def take(*, later: bool) -> Interval | None:
        asked.append(later)
        return intervals.pop(0)

    connector._running = SimpleNamespace(reporter=SimpleNamespace(take=take))  # type: ignore[assignment]
    connector.worker = SimpleNamespace(pushes=True)  # type: ignore[assignment]
    taken = connector.get_kv_connector_stats()
    assert taken is not None
    assert taken.interval == Interval(counters={"pages_pushed": 3})
    assert connector.worker is not None
    connector.worker.pushes = False
    assert connector.get_kv_connector_stats() is None, "nothing has changed"
    assert asked == [True, False]


def test_the_log_line_has_what_happened() -> None:
    interval = WriteImmConnector.build_kv_connector_stats(over_the_wire(stats(0, 3)))
    interval.aggregate(WriteImmConnector.build_kv_connector_stats(over_the_wire(stats(0, 2))))
    assert interval.reduce() == {"pages_pushed": 5, "send_seconds": 0.247, "prefill completed": 2}


def test_an_empty_interval_is_empty() -> None:
    assert TransferStats().is_empty()
    assert WriteImmConnector.build_kv_connector_stats().is_empty()
    full = stats(0, 3)
    assert not full.is_empty()
    full.reset()
    assert full.is_empty()


def test_metrics_can_be_made_anew_in_one_process() -> None:
    build().observe(over_the_wire(stats(0, 3)), engine_idx=1)
    build().observe(TransferStats().to_dict())
    assert sample("pages_pushed_total") == 0
