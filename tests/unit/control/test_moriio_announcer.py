"""Announcements for vllm-router's moriio mode, as that router reads them: over a plain ROUTER socket."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq
from agent_setup import until

from kv_connector.agent.settings import AgentSettings, SettingsError, parse_settings
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import BeginDrain, MembershipSockets, Register
from kv_connector.control.moriio_announcer import Announcement, AnnouncementError, MoriioAnnouncer
from kv_connector.control.registrar import Registrar
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

PATIENCE_MS = 30_000
QUIET_MS = 400
"""Eight heartbeats of these tests."""

REGISTRATION = Register("engine", "1", Role.PREFILL, "http://10.0.0.1:8100", "10.0.0.1", 5600)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.control.registrar.HEARTBEAT_S", 0.05)


class Discovery:
    """The discovery socket of vllm-router."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self.address = Address("127.0.0.1", self._socket.bind_to_random_port("tcp://127.0.0.1"))

    def hears(self) -> dict[str, Any]:
        assert self._socket.poll(PATIENCE_MS), "no announcement came"
        _, frame = self._socket.recv_multipart()
        heard: dict[str, Any] = msgpack.unpackb(frame)
        return heard

    def falls_quiet(self) -> None:
        """After the messages in flight, nothing more arrives."""
        for _ in range(100):
            if not self._socket.poll(QUIET_MS):
                return
            self._socket.recv_multipart()
        raise AssertionError("announcements go on")


@pytest.fixture
def discovery() -> Iterator[Discovery]:
    context: zmq.Context[Any] = zmq.Context()
    yield Discovery(context)
    context.destroy(linger=0)


@pytest.fixture
def announced() -> Iterator[Callable[..., Registrar]]:
    with contextlib.ExitStack() as stack:

        def start(
            discovery: Discovery, routers: tuple[Address, ...] = (), key: ClusterKey | None = None
        ) -> Registrar:
            announcer = MoriioAnnouncer(Announcement.of(REGISTRATION), [discovery.address])
            registrar = Registrar(REGISTRATION, routers, key, announcer=announcer)
            stack.callback(registrar.close)
            return registrar

        yield start


def test_an_engine_is_announced_again_and_again_in_the_routers_words(
    discovery: Discovery, announced: Callable[..., Registrar]
) -> None:
    announced(discovery)
    for _ in range(3):
        assert discovery.hears() == {
            "type": "P",
            "http_address": "10.0.0.1:8100",
            "zmq_address": "host:10.0.0.1,handshake:5600,notify:5600",
            "dp_size": 1,
            "tp_size": 1,
            "transfer_mode": "WRITE",
        }


def test_a_router_that_is_away_is_not_waited_for(
    discovery: Discovery, announced: Callable[..., Registrar]
) -> None:
    with contextlib.closing(
        MoriioAnnouncer(Announcement.of(REGISTRATION), [Address("127.0.0.1", 1)])
    ) as lonely:
        for _ in range(1000):
            lonely.announce()
    announced(discovery)
    discovery.hears()


def test_sleep_and_the_end_fall_silent(discovery: Discovery, announced: Callable[..., Registrar]) -> None:
    registrar = announced(discovery)
    discovery.hears()
    registrar.set_asleep(True)
    discovery.falls_quiet()
    registrar.set_asleep(False)
    discovery.hears()
    registrar.close()
    discovery.falls_quiet()


def test_a_drain_falls_silent(discovery: Discovery, announced: Callable[..., Registrar]) -> None:
    """A kv-connector router passes the drain on."""
    router = MembershipSockets(None)
    with contextlib.closing(router):
        announced(discovery, (router.bind(Address("127.0.0.1", 0)),))
        discovery.hears()
        got: list[Any] = []

        def got_more() -> bool:
            router.wait(0.05)
            received = router.receive()
            got.extend(received)
            return bool(received)

        until(got_more)
        assert router.send(got[0].source, BeginDrain())
        until(lambda: got_more() and isinstance(got[-1].message, Register) and got[-1].message.draining)
        discovery.falls_quiet()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"role": Role.BOTH}, "both roles"),
        ({"rank": 1}, "supports no data-parallel ranks"),
        ({"url": "https://10.0.0.1:8100"}, "api_url with http"),
    ],
)
def test_announcement_that_the_router_would_misread_is_refused(change: dict[str, Any], problem: str) -> None:
    fields = {name: getattr(REGISTRATION, name) for name in REGISTRATION.__struct_fields__}
    with pytest.raises(AnnouncementError, match=problem):
        Announcement.of(Register(**{**fields, **change}))


def test_settings() -> None:
    assert AgentSettings().announce == ()
    told = {"announce": ["10.0.0.9:30001"], "api_url": "http://10.0.0.1:8100"}
    assert parse_settings(told).announce_addresses() == (Address("10.0.0.9", 30001),)
    with pytest.raises(SettingsError, match="announce needs api_url"):
        parse_settings({"announce": ["10.0.0.9:30001"]})
    with pytest.raises(SettingsError, match=r"announce: '10.0.0.9' must be host:port"):
        parse_settings({**told, "announce": ["10.0.0.9"]})
