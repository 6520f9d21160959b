"""From an agent's counts through vLLM's stats to /metrics."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client.values
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.config import VllmConfig

from kv_connector.agent.ledger import AgentStats, LiveState, Timing
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.messages import Role
from kv_connector.protocol.peers import PeerInfo, PeerState
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.metrics import AgentReporter, PromMetrics, TransferStats

NO_STATS = AgentStats(
    pages_pushed=0,
    bytes_pushed=0,
    layers_pushed=0,
    pages_before_prefill_end=0,
    bytes_before_prefill_end=0,
    layers_before_prefill_end=0,
    sent={},
    received={},
    sent_seconds=0.0,
    received_seconds=0.0,
    received_pages=0,
    malformed_messages=0,
    peers=(),
)
IDLE = LiveState(
    prefill_requests=0,
    decode_requests=0,
    engine_transfers=0,
    counter_sets=0,
    fences=0,
    commands=0,
    acting=False,
    peers=0,
)


def peer(name: str, lane: str) -> PeerInfo:
    return PeerInfo(peer=1, name=name, role=Role.DECODE, state=PeerState.UP, lane=lane)


class CountingAgent:
    def __init__(self) -> None:
        self.counted = NO_STATS
        self.alive = IDLE
        self.in_phases: dict[str, int] = {}
        self.phases_counted = 0
        self.timings: list[Timing] = []

    def stats(self) -> AgentStats:
        return self.counted

    def live(self) -> LiveState:
        return self.alive

    def phases(self) -> dict[str, int]:
        self.phases_counted += 1
        return dict(self.in_phases)

    def take_timings(self) -> list[Timing]:
        timings, self.timings = self.timings, []
        return timings


@pytest.fixture
def agent() -> CountingAgent:
    return CountingAgent()


@pytest.fixture
def reporter(agent: CountingAgent) -> AgentReporter:
    return AgentReporter(agent, rank=0)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> PromMetrics:
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return WriteImmConnector.build_prom_metrics(
        VllmConfig(), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )


class ApiServers:
    """Several API servers in prometheus_client's multiprocess mode: processes, as far as it can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, servers: int) -> None:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
        self._monkeypatch = monkeypatch
        self._values = [
            prometheus_client.values.MultiProcessValue(lambda name=f"server{index}": name)
            for index in range(servers)
        ]
        types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
        self._metrics = []
        for index in range(servers):
            self._become(index)
            self._metrics.append(
                WriteImmConnector.build_prom_metrics(
                    VllmConfig(), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
                )
            )

    def observe(self, server: int, stats: TransferStats | None, engine: int = 0) -> None:
        self._become(server)
        self._metrics[server].observe(over_the_wire(stats), engine)

    def scrape(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return registry

    def _become(self, server: int) -> None:
        self._monkeypatch.setattr(prometheus_client.values, "ValueClass", self._values[server])


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ApiServers:
    return ApiServers(monkeypatch, tmp_path, 2)


def sample(name: str, engine: int = 0, registry: CollectorRegistry = REGISTRY, **labels: str) -> float | None:
    return registry.get_sample_value(
        f"kv_connector_{name}", {"model_name": "m", "engine": str(engine), **labels}
    )


def over_the_wire(stats: TransferStats | None) -> dict[str, Any]:
    """vLLM sends ``to_dict()`` to the API server as MessagePack."""
    assert stats is not None
    decoded: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    return decoded


def test_counters_travel_as_increments(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics
) -> None:
    before = sample("pages_pushed_total") or 0.0
    agent.counted = replace(NO_STATS, pages_pushed=3, sent={Outcome.COMPLETED: 1})
    metrics.observe(over_the_wire(reporter.take()))
    agent.counted = replace(NO_STATS, pages_pushed=10, sent={Outcome.COMPLETED: 1, Outcome.FAILED: 2})
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("pages_pushed_total") == before + 10
    assert sample("transfers_total", role="prefill", outcome="completed") == 1
    assert sample("transfers_total", role="prefill", outcome="failed") == 2
    assert sample("transfers_total", role="decode", outcome="failed") == 0
    assert sample("pages_pushed_total", engine=1) == 0


def test_every_counter_is_there_from_the_start(metrics: PromMetrics) -> None:
    for name in (
        "bytes_pushed",
        "layers_pushed",
        "bytes_pushed_before_prefill_end",
        "layers_pushed_before_prefill_end",
    ):
        assert sample(f"{name}_total") == 0


def test_nothing_is_sent_while_nothing_changes(agent: CountingAgent, reporter: AgentReporter) -> None:
    assert reporter.take() is not None, "the first state"
    assert reporter.take() is None
    agent.alive = replace(IDLE, decode_requests=1)
    assert reporter.take() is not None
    assert reporter.take() is None


def test_gauges_show_the_latest_state_and_return_to_zero(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics
) -> None:
    agent.alive = replace(
        IDLE, prefill_requests=1, decode_requests=2, engine_transfers=3, counter_sets=4, commands=5
    )
    metrics.observe(over_the_wire(reporter.take()))
    names = ("live_prefill_requests", "live_decode_requests", "live_transfers", "live_counter_sets")
    assert [sample(name, rank="0") for name in names] == [1, 2, 3, 4]
    agent.alive = IDLE
    metrics.observe(over_the_wire(reporter.take()))
    assert [sample(name, rank="0") for name in names] == [0, 0, 0, 0]


def test_counters_of_ranks_add_up_and_gauges_stand_side_by_side(
    agent: CountingAgent, metrics: PromMetrics
) -> None:
    first, second = AgentReporter(agent, 0), AgentReporter(agent, 1)  # type: ignore[arg-type]
    agent.counted = replace(NO_STATS, bytes_pushed=100)
    agent.alive = replace(IDLE, decode_requests=1)
    both = first.take()
    other = second.take()
    assert both is not None
    assert other is not None
    metrics.observe(over_the_wire(both.aggregate(other)))
    assert sample("bytes_pushed_total") == 200
    assert [sample("live_decode_requests", rank=rank) for rank in "01"] == [1, 1]
    agent.alive = IDLE
    metrics.observe(over_the_wire(first.take()))
    assert [sample("live_decode_requests", rank=rank) for rank in "01"] == [0, 1]


def test_gauges_are_right_whichever_api_server_hears_of_them(
    agent: CountingAgent, servers: ApiServers
) -> None:
    first, second = AgentReporter(agent, 0), AgentReporter(agent, 1)  # type: ignore[arg-type]
    agent.alive = replace(IDLE, decode_requests=2)
    agent.counted = replace(NO_STATS, peers=(peer("p1/0", "tcp"), peer("p2/0", "tcp")))
    agent.in_phases = {"decode staged": 2}
    servers.observe(0, first.take())
    servers.observe(1, second.take())
    agent.counted = replace(agent.counted, pages_pushed=5)
    servers.observe(1, first.take())  # this one was never told of rank 0's gauges
    found = servers.scrape()
    for rank in "01":
        assert sample("live_decode_requests", registry=found, rank=rank) == 2
        assert sample("peers", registry=found, rank=rank, lane="tcp") == 2
        assert sample("transfers_under_way", registry=found, rank=rank, role="decode", phase="staged") == 2
    assert sample("pages_pushed_total", registry=found) == 5
    assert sample("live_decode_requests", engine=1, registry=found, rank="0") is None
    agent.alive, agent.counted, agent.in_phases = IDLE, replace(agent.counted, peers=()), {}
    servers.observe(1, first.take())  # what the other one has shown is over
    found = servers.scrape()
    assert sample("live_decode_requests", registry=found, rank="0") == 0
    assert sample("peers", registry=found, rank="0", lane="tcp") == 0
    assert sample("transfers_under_way", registry=found, rank="0", role="decode", phase="staged") == 0
    assert sample("live_decode_requests", registry=found, rank="1") == 2


def test_peers_that_restart_add_no_series(agent: CountingAgent, servers: ApiServers) -> None:
    reporter = AgentReporter(agent, 0)  # type: ignore[arg-type]

    def restart(generation: int) -> int:
        agent.counted = replace(
            NO_STATS, malformed_messages=generation, peers=(peer(f"d{generation}", "tcp"),)
        )
        servers.observe(generation % 2, reporter.take())
        return sum(len(metric.samples) for metric in servers.scrape().collect())

    restart(0)
    assert len({restart(generation) for generation in range(1, 6)}) == 1


def test_peers_are_counted_by_lane(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics
) -> None:
    agent.counted = replace(NO_STATS, peers=(peer("d1/0", "tcp"), peer("d2/0", "host"), peer("d3/0", "")))
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("peers", rank="0", lane="tcp") == 1
    assert sample("peers", rank="0", lane="host") == 1
    assert sample("peers", rank="0", lane="") is None, "not connected yet"
    agent.counted = replace(NO_STATS, peers=(peer("d2/0", "host"), peer("d4/0", "host")))
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("peers", rank="0", lane="tcp") == 0
    assert sample("peers", rank="0", lane="host") == 2


def test_each_completed_transfer_is_timed_by_lane(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics
) -> None:
    agent.timings = [
        Timing(Role.PREFILL, "tcp", 0.3, 0.2, 1 << 20),
        Timing(Role.PREFILL, "host", 0.02, 0.0, 100),
        Timing(Role.DECODE, "tcp", 0.4),
    ]
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("send_duration_seconds_sum", lane="tcp") == 0.3
    assert sample("send_duration_seconds_bucket", lane="host", le="0.025") == 1
    assert sample("send_duration_seconds_bucket", lane="host", le="0.01") == 0
    assert sample("send_first_push_seconds_sum", lane="tcp") == 0.2
    assert sample("send_size_bytes_sum", lane="tcp") == 1 << 20
    assert sample("receive_duration_seconds_count", lane="tcp") == 1
    assert reporter.take() is None, "each once"


def test_phases_show_where_requests_wait(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics
) -> None:
    agent.alive, agent.in_phases = (
        replace(IDLE, decode_requests=3),
        {"decode staged": 1, "decode reserved": 2},
    )
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("transfers_under_way", rank="0", role="decode", phase="reserved") == 2
    assert sample("transfers_under_way", rank="0", role="decode", phase="staged") == 1
    agent.alive, agent.in_phases = IDLE, {}
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("transfers_under_way", rank="0", role="decode", phase="reserved") == 0


def test_a_step_does_not_look_at_each_of_many_transfers(
    agent: CountingAgent, reporter: AgentReporter, metrics: PromMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kv_connector.vllm.metrics.time.monotonic", lambda: now)
    agent.alive, agent.in_phases = replace(IDLE, prefill_requests=1000), {"prefill active": 1000}
    metrics.observe(over_the_wire(reporter.take()))
    for _ in range(100):
        assert reporter.take() is None
    assert agent.phases_counted == 1
    agent.in_phases = {"prefill active": 600, "prefill draining": 400}
    now += 1
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("transfers_under_way", rank="0", role="prefill", phase="draining") == 400
    # The last step tells the truth at once.
    agent.alive, agent.in_phases = IDLE, {}
    metrics.observe(over_the_wire(reporter.take()))
    assert sample("transfers_under_way", rank="0", role="prefill", phase="draining") == 0
    assert sample("transfers_under_way", rank="0", role="prefill", phase="active") == 0


def test_the_log_line_has_what_happened(agent: CountingAgent, reporter: AgentReporter) -> None:
    agent.counted = replace(NO_STATS, pages_pushed=3, sent_seconds=0.12345, sent={Outcome.COMPLETED: 1})
    interval = WriteImmConnector.build_kv_connector_stats(over_the_wire(reporter.take()))
    agent.counted = replace(agent.counted, pages_pushed=5)
    interval.aggregate(WriteImmConnector.build_kv_connector_stats(over_the_wire(reporter.take())))
    assert interval.reduce() == {"pages_pushed": 5, "send_seconds": 0.123, "prefill completed": 1}


def test_an_empty_interval_is_empty() -> None:
    assert TransferStats().is_empty()
    assert WriteImmConnector.build_kv_connector_stats().is_empty()


def test_metrics_can_be_made_anew_in_one_process(metrics: PromMetrics) -> None:
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    again = WriteImmConnector.build_prom_metrics(
        VllmConfig(), types, ["model_name", "engine"], {0: ["m", "0"]}
    )
    again.observe(TransferStats().to_dict())
    assert sample("pages_pushed_total") == 0
