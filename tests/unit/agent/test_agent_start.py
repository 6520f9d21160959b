"""From the operator's settings to an agent that listens, counts and is registered, and to its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from agent_setup import until
from protocol_setup import layout, pairs, region_bytes

from kv_connector.agent.config import AgentError, PageMemory
from kv_connector.agent.settings import AgentSettings, SettingsError
from kv_connector.agent.start import RunningAgent, WorkerInfo, start
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import Activity, Leave, MembershipSockets, Register, WorkloadReport
from kv_connector.engine.rank_placement import CoreClaim, Device, RankPlacement
from kv_connector.protocol.actions import Address
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Role

PAGES = layout()
ANY_PORT = AgentSettings(control_port=0, providers=("tcp",), worker_cpu="none")

Starts = Callable[..., RunningAgent]


@pytest.fixture
def starts() -> Iterator[Starts]:
    """Starts a worker. The arguments replace the values of its framework."""
    with ExitStack() as stack:

        def call(settings: AgentSettings, **changes: Any) -> RunningAgent:
            memory = np.zeros(region_bytes(PAGES), np.uint8)
            stack.callback(lambda: memory)  # outlives the agent
            fields: dict[str, Any] = {
                "engine_id": "started",
                "role": Role.PREFILL,
                "rank": 0,
                "ranks": 1,
                "stage": 0,
                "data_parallel_index": 0,
                "data_parallel_rank": 0,
                "host": "127.0.0.1",
                "device": Device("cpu"),
                "compute_threads": 1,
                "layout": PAGES,
                "memory": [PageMemory(memory.ctypes.data, memory.nbytes)],
                "fingerprint": pairs(),
                "advice": {},
            }
            running = start(settings, WorkerInfo(**(fields | changes)))
            stack.callback(running.close)
            return running

        yield call


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[CoreClaim]:
    """The cores claimed by started workers. Each claims the same core, and keeps it until it ends."""
    made: list[CoreClaim] = []

    def place(*_: Any, **__: Any) -> RankPlacement:
        claim = CoreClaim.first_free([200_001])
        assert claim is not None, "another worker still has it"
        made.append(claim)
        return RankPlacement({}, claim, None)

    monkeypatch.setattr("kv_connector.agent.start.place", place)
    return made


def running_agents() -> int:
    return sum(thread.name == "kv-agent-started" for thread in threading.enumerate())


def free_again() -> bool:
    claim = CoreClaim.first_free([200_001])
    if claim is not None:
        claim.release()
    return claim is not None


def test_agent_listens_at_the_address_of_its_settings_and_closes_everything(
    starts: Starts, claims: list[CoreClaim]
) -> None:
    running = starts(ANY_PORT)
    assert running.address.host == "127.0.0.1"
    with socket.create_connection((running.address.host, running.address.port)):
        assert running_agents() == 1
    interval = running.reporter.take()
    assert interval is not None
    assert interval.gauges["0"]["live_prefill_requests"] == 0
    assert not free_again()
    for _ in range(2):
        running.close()
        assert running_agents() == 0
        assert free_again()


def test_each_rank_has_its_port(starts: Starts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    settings = AgentSettings(control_port=port - 7, providers=("tcp",), worker_cpu="none")
    running = starts(settings, rank=1, ranks=2, data_parallel_index=3)
    assert running.address == Address("127.0.0.1", port)


@pytest.mark.parametrize("protected", [True, False])
def test_engine_warns_and_counts_when_it_has_no_cluster_key(
    starts: Starts, protected: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ClusterKey.generate().write(tmp_path / "key")
    key_file = str(tmp_path / "key") if protected else None
    running = starts(
        AgentSettings(control_port=0, providers=("tcp",), worker_cpu="none", control_key_file=key_file)
    )
    assert ("NO CLUSTER KEY" in caplog.text) is not protected
    interval = running.reporter.take()
    assert interval is not None
    assert interval.gauges["0"]["authenticated"] == protected


def test_settings_that_do_not_fit_the_worker_are_refused(starts: Starts) -> None:
    with pytest.raises(SettingsError, match="nvlink cannot move"):
        starts(AgentSettings(providers=("nvlink",)))
    with pytest.raises(SettingsError, match="nics has 1 entries"):
        starts(AgentSettings(nics=(("mlx5_0",),)), ranks=2)


def test_a_start_that_fails_leaves_nothing_open(
    starts: Starts, claims: list[CoreClaim], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AgentError):
        starts(ANY_PORT, memory=[])
    assert free_again()
    first = starts(ANY_PORT)
    first_claim = claims[-1]
    first_claim.release()
    in_use = AgentSettings(control_port=first.address.port, providers=("tcp",), worker_cpu="none")
    with pytest.raises(AgentError, match="port is in use"):
        starts(in_use)
    assert free_again()
    first.close()

    def no_sockets(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("kv_connector.agent.start.Registrar", no_sockets)
    with pytest.raises(OSError, match="too many"):
        starts(registered(Address("127.0.0.1", 1)))
    assert running_agents() == 0
    assert free_again()


# --- Routers


def registered(router: Address) -> AgentSettings:
    return AgentSettings(
        control_port=0,
        providers=("tcp",),
        worker_cpu="none",
        routers=(str(router),),
        api_url="http://10.0.0.5:8100",
    )


class Router:
    """Accepts registrations, and keeps the received messages."""

    def __init__(self) -> None:
        self._sockets = MembershipSockets(None)
        self.address = self._sockets.bind(Address("127.0.0.1", 0))
        self.heard: list[object] = []

    def hears(self, what: Callable[[Any], bool]) -> Any:
        def listen() -> bool:
            self._sockets.wait(0.05)
            self.heard += [received.message for received in self._sockets.receive()]
            return any(what(message) for message in self.heard)

        until(listen, f"more than {self.heard}")
        return next(message for message in self.heard if what(message))

    def close(self) -> None:
        self._sockets.close()


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def test_routers_receive_rank_0_its_sleep_and_its_end(starts: Starts, router: Router) -> None:
    load = WorkloadReport(8192, 512, 100_000)
    running = starts(
        registered(router.address),
        role=Role.DECODE,
        data_parallel_rank=3,
        load=load,
        prefixes="key",
        borrows=True,
        prefetches=True,
        keeps_answers=False,
    )
    told = router.hears(lambda message: isinstance(message, Register))
    assert (told.engine_id, told.role, told.url, told.rank) == (
        "started",
        Role.DECODE,
        "http://10.0.0.5:8100",
        3,
    )
    assert Address(told.control_host, told.control_port) == running.address
    assert told.activity == Activity(), "it has no peer yet, and says so"
    assert (told.load, told.prefixes, told.borrows, told.prefetches) == (load, "key", True, True)
    assert not told.keeps_answers
    running.sleep()
    router.hears(lambda message: isinstance(message, Register) and message.asleep)
    router.heard.clear()
    running.wake()
    router.hears(lambda message: isinstance(message, Register) and not message.asleep)
    running.close()
    router.hears(lambda message: isinstance(message, Leave))


def test_routers_receive_the_checkpoint_until_other_weights_replace_it(
    starts: Starts, router: Router
) -> None:
    def hears(weights: str, checkpoint: Checkpoint | None) -> None:
        router.heard.clear()
        expected = weights, checkpoint
        router.hears(lambda told: isinstance(told, Register) and (told.weights, told.checkpoint) == expected)

    base = Checkpoint("", "3f2a")
    running = starts(registered(router.address), checkpoint=base)
    hears("", base)
    running.set_weights("default", of_checkpoint=True)
    hears("default", base)
    running.forget_checkpoint()
    hears("default", None)


def test_routers_receive_no_checkpoint_beside_a_pushed_version(starts: Starts, router: Router) -> None:
    running = starts(registered(router.address), checkpoint=Checkpoint("", "3f2a"))
    router.hears(lambda told: isinstance(told, Register) and told.checkpoint is not None)
    running.set_weights("v1")
    told = router.hears(lambda told: isinstance(told, Register) and told.weights == "v1")
    assert told.checkpoint is None


def test_no_other_rank_registers(starts: Starts, router: Router) -> None:
    assert starts(registered(router.address), rank=1, ranks=2).registrar is None


# --- vllm-router


def announced(**more: Any) -> AgentSettings:
    return AgentSettings(
        control_port=0,
        providers=("tcp",),
        worker_cpu="none",
        announce=("127.0.0.1:1",),
        api_url="http://10.0.0.5:8100",
        **more,
    )


def test_engine_that_is_announced_without_a_key_logs_a_warning(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    assert starts(announced(), role=Role.PREFILL).registrar is not None
    assert "ANNOUNCED WITHOUT A KEY to 127.0.0.1:1" in caplog.text


def test_unannounceable_engine_is_refused_and_leaves_nothing_open(starts: Starts) -> None:
    with pytest.raises(SettingsError, match="announce: vllm-router's moriio mode"):
        starts(announced(), role=Role.DECODE, data_parallel_rank=1)
    assert running_agents() == 0
