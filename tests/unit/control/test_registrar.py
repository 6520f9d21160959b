"""The log of a registrar whose routers cannot be reached."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import MembershipSockets, Register
from kv_connector.control.registrar import Registrar
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

PATIENCE = 60


class _Lines(logging.Handler):
    """The lines of the connector's log, for threads that wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.lines.append(record.getMessage())
            self._more.notify_all()

    def of(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    def until(self, text: str) -> str:
        with self._more:
            assert self._more.wait_for(lambda: self.of(text), PATIENCE), self.lines
        return self.of(text)[0]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Lines]:
    monkeypatch.setattr("kv_connector.control.registrar.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("kv_connector.control.registrar._UNREACHED_S", 0.2)
    handler, logger = _Lines(), logging.getLogger("kv_connector")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def registrar(router: Address, key: ClusterKey | None) -> Registrar:
    return Registrar(Register("x", "1", Role.PREFILL, "http://h:1", "h", 1), [router], key)


def test_registrar_reports_a_router_that_is_away_once_and_its_return(log: _Lines) -> None:
    address = Address("127.0.0.1", free_ports(1)[0])
    engine = registrar(address, None)
    router = MembershipSockets(None)
    try:
        assert f"no connection to {address} for" in log.until("NO ROUTER")
        router.bind(address)
        assert str(address) in log.until("ROUTER BACK")
        assert len(log.of("NO ROUTER")) == 1
    finally:
        engine.close()
        router.close()


@pytest.mark.parametrize("key", [ClusterKey.generate(), None], ids=["another key", "no key"])
def test_registrar_reports_a_router_with_a_different_key(log: _Lines, key: ClusterKey | None) -> None:
    router = MembershipSockets(ClusterKey.generate())
    address = router.bind(Address("127.0.0.1", 0))
    engine = registrar(address, key)
    deadline = time.monotonic() + PATIENCE
    try:
        while not log.of("NO ROUTER"):
            assert time.monotonic() < deadline, log.lines
            router.wait(0.05)  # answers ZMQ's questions about keys
        assert "same cluster key" in log.of("NO ROUTER")[0]
    finally:
        engine.close()
        router.close()
