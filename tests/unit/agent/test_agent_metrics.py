"""From an agent's counts to /metrics."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import prometheus_client.values
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from kv_connector.agent.exposition import NAMES, Exposition
from kv_connector.agent.metrics import AgentReporter, Interval, activity
from kv_connector.agent.reports.ledger import AgentStats, CheckStats, LiveState, PrefixStats, Timing
from kv_connector.control.membership import Activity
from kv_connector.protocol.actions import Outcome
from kv_connector.protocol.session.sessions import PeerInfo, PeerState
from kv_connector.protocol.wire.messages import LendOutcome, Role

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
    checks=CheckStats(pages=0, corrupt=0, unverified=0),
    malformed_messages=0,
    links_lost=0,
    links_restored=0,
    peers=(),
    prefixes=PrefixStats(
        borrow={}, lend={}, tokens_borrowed=0, tokens_lent=0, answer_seconds=0.0, load_seconds=0.0
    ),
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
    links_out=0,
    remembered=0,
)


def peer(name: str, lane: str) -> PeerInfo:
    return PeerInfo(peer=1, name=name, role=Role.DECODE, state=PeerState.UP, lane=lane)


class CountingAgent:
    authenticated = True

    def __init__(self) -> None:
        self.counted = NO_STATS
        self.alive = IDLE
        self.in_phases: dict[str, int] = {}
        self.phases_counted = 0
        self.timings: list[Timing] = []
        self.rests = False
        self.acts = False
        self._turns = 0

    @property
    def turns(self) -> int | None:
        self._turns += not self.rests
        return None if self.acts else self._turns

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


def exposition(registry: CollectorRegistry) -> Exposition:
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return Exposition(types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


class Metrics:
    """The metrics that one process shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._exposition = exposition(self.registry)

    def observe(self, interval: Interval | None, engine: int = 0) -> None:
        self._exposition.observe(over_the_wire(interval), engine)

    def sample(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return sample(self.registry, name, engine, **labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


class ApiServers:
    """Several API servers in prometheus_client's multiprocess mode. For the library each is a separate
    process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, servers: int) -> None:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
        self._monkeypatch = monkeypatch
        self._values = [
            prometheus_client.values.MultiProcessValue(lambda name=f"server{index}": name)
            for index in range(servers)
        ]
        self._metrics = []
        for index in range(servers):
            self._become(index)
            self._metrics.append(Metrics())

    def observe(self, server: int, interval: Interval | None) -> None:
        self._become(server)
        self._metrics[server].observe(interval)

    def scrape(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return registry

    def _become(self, server: int) -> None:
        self._monkeypatch.setattr(prometheus_client.values, "ValueClass", self._values[server])


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ApiServers:
    return ApiServers(monkeypatch, tmp_path, 2)


def sample(registry: CollectorRegistry, name: str, engine: int = 0, **labels: str) -> float | None:
    return registry.get_sample_value(
        f"kv_connector_{name}", {"model_name": "m", "engine": str(engine), **labels}
    )


def over_the_wire(interval: Interval | None) -> Interval:
    """The metrics from the worker to the process that shows them."""
    assert interval is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(interval), type=Interval)


def test_names_and_labels_are_an_interface(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    agent.counted = replace(NO_STATS, peers=(peer("d1/0", "tcp"),))
    agent.in_phases = {"decode staged": 1}
    agent.timings = [Timing(Role.PREFILL, "tcp", 0.3, 0.2, 1 << 20), Timing(Role.DECODE, "tcp", 0.4)]
    metrics.observe(reporter.take())
    shown = {
        f"{family.name} {family.type}": sorted({*family.samples[0].labels} - {"model_name", "engine", "le"})
        for family in metrics.registry.collect()
    }
    assert shown == {
        "kv_connector_pages_pushed counter": [],
        "kv_connector_bytes_pushed counter": [],
        "kv_connector_layers_pushed counter": [],
        "kv_connector_pages_pushed_before_prefill_end counter": [],
        "kv_connector_bytes_pushed_before_prefill_end counter": [],
        "kv_connector_layers_pushed_before_prefill_end counter": [],
        "kv_connector_pages_received counter": [],
        "kv_connector_pages_verified counter": [],
        "kv_connector_pages_corrupt counter": [],
        "kv_connector_transfers_unverified counter": [],
        "kv_connector_send_seconds counter": [],
        "kv_connector_receive_seconds counter": [],
        "kv_connector_malformed_messages counter": [],
        "kv_connector_links_lost counter": [],
        "kv_connector_links_restored counter": [],
        "kv_connector_prefix_tokens_borrowed counter": [],
        "kv_connector_prefix_tokens_lent counter": [],
        "kv_connector_prefix_answer_seconds counter": [],
        "kv_connector_prefix_load_seconds counter": [],
        "kv_connector_prefix_requests counter": ["outcome", "side"],
        "kv_connector_live_prefill_requests gauge": ["rank"],
        "kv_connector_live_decode_requests gauge": ["rank"],
        "kv_connector_live_transfers gauge": ["rank"],
        "kv_connector_live_counter_sets gauge": ["rank"],
        "kv_connector_remembered_transfers gauge": ["rank"],
        "kv_connector_links_out gauge": ["rank"],
        "kv_connector_authenticated gauge": ["rank"],
        "kv_connector_peers gauge": ["lane", "rank"],
        "kv_connector_transfers_under_way gauge": ["phase", "rank", "role"],
        "kv_connector_transfers counter": ["outcome", "role"],
        "kv_connector_send_duration_seconds histogram": ["lane"],
        "kv_connector_send_first_push_seconds histogram": ["lane"],
        "kv_connector_send_size_bytes histogram": ["lane"],
        "kv_connector_receive_duration_seconds histogram": ["lane"],
    }
    assert {name.split()[0] for name in shown} == NAMES


def test_counters_travel_as_increments(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    agent.counted = replace(NO_STATS, pages_pushed=3, sent={Outcome.COMPLETED: 1})
    metrics.observe(reporter.take())
    agent.counted = replace(NO_STATS, pages_pushed=10, sent={Outcome.COMPLETED: 1, Outcome.FAILED: 2})
    metrics.observe(reporter.take())
    assert metrics.sample("pages_pushed_total") == 10
    assert metrics.sample("transfers_total", role="prefill", outcome="completed") == 1
    assert metrics.sample("transfers_total", role="prefill", outcome="failed") == 2
    assert metrics.sample("transfers_total", role="decode", outcome="failed") == 0
    assert metrics.sample("pages_pushed_total", engine=1) == 0


def test_verified_pages_are_counted(agent: CountingAgent, reporter: AgentReporter, metrics: Metrics) -> None:
    agent.counted = replace(NO_STATS, checks=CheckStats(pages=6, corrupt=1, unverified=2))
    metrics.observe(reporter.take())
    assert metrics.sample("pages_verified_total") == 6
    assert metrics.sample("pages_corrupt_total") == 1
    assert metrics.sample("transfers_unverified_total") == 2


def test_requests_for_prefixes_are_counted_by_side_and_outcome(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    lent, silent = LendOutcome.LENT, LendOutcome.SILENT
    for asked in (1, 3):
        counted = PrefixStats({lent: asked, silent: 1}, {lent: 2 * asked}, 64 * asked, 32, 0.5, 0.25)
        agent.counted = replace(NO_STATS, prefixes=counted)
        metrics.observe(reporter.take())
    assert metrics.sample("prefix_requests_total", side="borrow", outcome="lent") == 3
    assert metrics.sample("prefix_requests_total", side="borrow", outcome="silent") == 1
    assert metrics.sample("prefix_requests_total", side="lend", outcome="lent") == 6
    assert metrics.sample("prefix_requests_total", side="lend", outcome="paused") == 0
    assert metrics.sample("prefix_requests_total", side="lend", outcome="silent") is None
    assert metrics.sample("prefix_tokens_borrowed_total") == 192
    assert metrics.sample("prefix_tokens_lent_total") == 32
    assert metrics.sample("prefix_answer_seconds_total") == 0.5
    assert metrics.sample("prefix_load_seconds_total") == 0.25


def test_every_counter_is_there_from_the_start(metrics: Metrics) -> None:
    for name in (
        "bytes_pushed",
        "layers_pushed",
        "bytes_pushed_before_prefill_end",
        "layers_pushed_before_prefill_end",
    ):
        assert metrics.sample(f"{name}_total") == 0


def test_nothing_is_sent_while_nothing_changes(agent: CountingAgent, reporter: AgentReporter) -> None:
    assert reporter.take() is not None, "the first state"
    assert reporter.take() is None
    agent.alive = replace(IDLE, decode_requests=1)
    assert reporter.take() is not None
    assert reporter.take() is None


def test_phases_of_an_agent_at_rest_are_not_counted_again(
    agent: CountingAgent, reporter: AgentReporter
) -> None:
    reporter.take()
    agent.rests = True
    reporter.take()
    looked = agent.phases_counted
    reporter.take()
    assert agent.phases_counted == looked
    agent.acts = True
    for more in (1, 2):
        reporter.take()
        assert agent.phases_counted == looked + more
    agent.acts = agent.rests = False
    reporter.take()
    assert agent.phases_counted == looked + 3


def test_steps_that_are_waited_for_leave_it_to_a_later_one_but_not_for_good(
    agent: CountingAgent, reporter: AgentReporter
) -> None:
    agent.timings = [Timing(Role.DECODE, "tcp", 1.0)]
    assert reporter.take(later=True) is None
    taken = reporter.take()
    assert taken is not None
    assert taken.timings == [("receive_duration_seconds", "tcp", 1.0)]
    agent.timings = [Timing(Role.DECODE, "tcp", 2.0)]
    assert [step for step in range(40) if reporter.take(later=True)] == [15]


def test_gauges_show_the_latest_state_and_return_to_zero(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    agent.alive = replace(
        IDLE,
        prefill_requests=1,
        decode_requests=2,
        engine_transfers=3,
        counter_sets=4,
        commands=5,
        remembered=6,
    )
    metrics.observe(reporter.take())
    names = (
        "live_prefill_requests",
        "live_decode_requests",
        "live_transfers",
        "live_counter_sets",
        "remembered_transfers",
    )
    assert [metrics.sample(name, rank="0") for name in names] == [1, 2, 3, 4, 6]
    agent.alive = IDLE
    metrics.observe(reporter.take())
    assert [metrics.sample(name, rank="0") for name in names] == [0, 0, 0, 0, 0]


def test_activity_reports_lanes_transfers_and_bytes_to_routers(agent: CountingAgent) -> None:
    agent.counted = replace(
        NO_STATS, bytes_pushed=1 << 40, peers=(peer("a", "tcp"), peer("b", "tcp"), peer("c", ""))
    )
    agent.alive = replace(IDLE, prefill_requests=2, decode_requests=1, engine_transfers=9)
    told = activity(agent)  # type: ignore[arg-type]
    assert told == Activity(lanes={"tcp": 2}, transfers=3, bytes_pushed=1 << 40)


def test_counters_of_ranks_add_up_and_gauges_stand_side_by_side(
    agent: CountingAgent, metrics: Metrics
) -> None:
    first, second = AgentReporter(agent, 0), AgentReporter(agent, 1)  # type: ignore[arg-type]
    agent.counted = replace(NO_STATS, bytes_pushed=100)
    agent.alive = replace(IDLE, decode_requests=1)
    both = first.take()
    other = second.take()
    assert both is not None
    assert other is not None
    both.add(other)
    metrics.observe(both)
    assert metrics.sample("bytes_pushed_total") == 200
    assert [metrics.sample("live_decode_requests", rank=rank) for rank in "01"] == [1, 1]
    agent.alive = IDLE
    metrics.observe(first.take())
    assert [metrics.sample("live_decode_requests", rank=rank) for rank in "01"] == [0, 1]


def test_gauges_are_right_whichever_api_server_receives_them(
    agent: CountingAgent, servers: ApiServers
) -> None:
    first, second = AgentReporter(agent, 0), AgentReporter(agent, 1)  # type: ignore[arg-type]
    agent.alive = replace(IDLE, decode_requests=2)
    agent.counted = replace(NO_STATS, peers=(peer("p1/0", "tcp"), peer("p2/0", "tcp")))
    agent.in_phases = {"decode staged": 2}
    servers.observe(0, first.take())
    servers.observe(1, second.take())
    agent.counted = replace(agent.counted, pages_pushed=5)
    servers.observe(1, first.take())  # this process never received rank 0's gauges
    found = servers.scrape()
    for rank in "01":
        assert sample(found, "live_decode_requests", rank=rank) == 2
        assert sample(found, "peers", rank=rank, lane="tcp") == 2
        assert sample(found, "transfers_under_way", rank=rank, role="decode", phase="staged") == 2
    assert sample(found, "pages_pushed_total") == 5
    assert sample(found, "live_decode_requests", engine=1, rank="0") is None
    agent.alive, agent.counted, agent.in_phases = IDLE, replace(agent.counted, peers=()), {}
    servers.observe(1, first.take())  # the gauges that the other process has shown go to 0
    found = servers.scrape()
    assert sample(found, "live_decode_requests", rank="0") == 0
    assert sample(found, "peers", rank="0", lane="tcp") == 0
    assert sample(found, "transfers_under_way", rank="0", role="decode", phase="staged") == 0
    assert sample(found, "live_decode_requests", rank="1") == 2


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


def test_peers_are_counted_by_lane(agent: CountingAgent, reporter: AgentReporter, metrics: Metrics) -> None:
    agent.counted = replace(NO_STATS, peers=(peer("d1/0", "tcp"), peer("d2/0", "host"), peer("d3/0", "")))
    metrics.observe(reporter.take())
    assert metrics.sample("peers", rank="0", lane="tcp") == 1
    assert metrics.sample("peers", rank="0", lane="host") == 1
    assert metrics.sample("peers", rank="0", lane="") is None, "not connected yet"
    agent.counted = replace(NO_STATS, peers=(peer("d2/0", "host"), peer("d4/0", "host")))
    metrics.observe(reporter.take())
    assert metrics.sample("peers", rank="0", lane="tcp") == 0
    assert metrics.sample("peers", rank="0", lane="host") == 2


def test_each_completed_transfer_is_timed_by_lane(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    agent.timings = [
        Timing(Role.PREFILL, "tcp", 0.3, 0.2, 1 << 20),
        Timing(Role.PREFILL, "host", 0.02, 0.0, 100),
        Timing(Role.DECODE, "tcp", 0.4),
    ]
    metrics.observe(reporter.take())
    assert metrics.sample("send_duration_seconds_sum", lane="tcp") == 0.3
    assert metrics.sample("send_duration_seconds_bucket", lane="host", le="0.025") == 1
    assert metrics.sample("send_duration_seconds_bucket", lane="host", le="0.01") == 0
    assert metrics.sample("send_first_push_seconds_sum", lane="tcp") == 0.2
    assert metrics.sample("send_size_bytes_sum", lane="tcp") == 1 << 20
    assert metrics.sample("receive_duration_seconds_count", lane="tcp") == 1
    assert reporter.take() is None, "each once"


def test_phases_show_where_requests_wait(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics
) -> None:
    agent.alive, agent.in_phases = (
        replace(IDLE, decode_requests=3),
        {"decode staged": 1, "decode reserved": 2},
    )
    metrics.observe(reporter.take())
    assert metrics.sample("transfers_under_way", rank="0", role="decode", phase="reserved") == 2
    assert metrics.sample("transfers_under_way", rank="0", role="decode", phase="staged") == 1
    agent.alive, agent.in_phases = IDLE, {}
    metrics.observe(reporter.take())
    assert metrics.sample("transfers_under_way", rank="0", role="decode", phase="reserved") == 0


def test_a_step_does_not_look_at_each_of_many_transfers(
    agent: CountingAgent, reporter: AgentReporter, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kv_connector.agent.metrics.time.monotonic", lambda: now)
    agent.alive, agent.in_phases = replace(IDLE, prefill_requests=1000), {"prefill active": 1000}
    metrics.observe(reporter.take())
    for _ in range(100):
        assert reporter.take() is None
    assert agent.phases_counted == 1
    agent.in_phases = {"prefill active": 600, "prefill draining": 400}
    now += 1
    metrics.observe(reporter.take())
    assert metrics.sample("transfers_under_way", rank="0", role="prefill", phase="draining") == 400
    # The last step shows the true numbers at once.
    agent.alive, agent.in_phases = IDLE, {}
    metrics.observe(reporter.take())
    assert metrics.sample("transfers_under_way", rank="0", role="prefill", phase="draining") == 0
    assert metrics.sample("transfers_under_way", rank="0", role="prefill", phase="active") == 0
