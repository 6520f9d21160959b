"""The control sockets with a cluster key: clients with the key are served, and clients without it get
nothing."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from test_control import LOCAL, make
from typer.testing import CliRunner

from kv_connector.cli.main import app
from kv_connector.control.addresses import is_loopback, parse_address
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey, KeyFileError, find_key
from kv_connector.control.sockets import ControlPlane, Received
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Ping, Pong, encode

__all__ = ["make"]

Make = Callable[[ClusterKey | None], ControlPlane]


@pytest.fixture(scope="module")
def key() -> ClusterKey:
    return ClusterKey.generate()


def pump(*planes: ControlPlane, until: Callable[[], bool], seconds: float = 60.0) -> None:
    """Runs the control planes until a condition holds."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "the condition did not come true"
        for plane in planes:
            plane.wait(0.01)


def receive(server: ControlPlane, *others: ControlPlane) -> Received:
    """The next message of one plane, while the others run too."""
    found: list[Received] = []

    def look() -> bool:
        found.extend(server.receive())
        return bool(found)

    pump(server, *others, until=look)
    return found[0]


def test_two_sockets_with_the_key_exchange_messages(make: Make, key: ClusterKey) -> None:
    server, client = make(key), make(key)
    link = client.dial(server.bind(LOCAL))
    client.send(link, Ping(1))
    received = receive(server, client)
    assert received.message == Ping(1)
    server.send(received.source, Pong(1))
    assert receive(client, server) == Received(link, Pong(1))


class Stranger:
    """A ZMQ client made by the test."""

    def __init__(self, address: Address, **curve: bytes) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        for option, value in curve.items():
            self.socket.setsockopt(getattr(zmq, option), value)
        self.events = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://{address}")
        self.socket.send(encode(Ping(666)))

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close()
        self.context.term()

    def refused(self) -> bool:
        """Whether one of its handshakes has failed by now."""
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        ) | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        while self.events.poll(0):
            event = int.from_bytes(self.events.recv_multipart()[0][:2], "little")
            if event & failures:
                return True
        return False


def other_pair() -> tuple[bytes, bytes]:
    public, secret = zmq.curve_keypair()
    return public, secret


@pytest.mark.parametrize("who", ["plain", "another key", "knows the public key only"])
def test_stranger_receives_nothing_and_its_messages_are_dropped(
    make: Make, key: ClusterKey, who: str
) -> None:
    server, client = make(key), make(key)
    address = server.bind(LOCAL)
    public, secret = other_pair()
    curve = {
        "plain": {},
        "another key": {"CURVE_SERVERKEY": public, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret},
        "knows the public key only": {
            "CURVE_SERVERKEY": key.public,
            "CURVE_PUBLICKEY": public,
            "CURVE_SECRETKEY": secret,
        },
    }[who]
    stranger = Stranger(address, **curve)
    try:
        heard: list[Received] = []

        def refused() -> bool:
            heard.extend(server.receive())
            return stranger.refused()

        pump(server, until=refused)
        # A client with the key is served meanwhile.
        client.send(client.dial(address), Ping(1))
        assert receive(server, client).message == Ping(1)
        assert heard == []
        assert server.malformed == 0
    finally:
        stranger.close()


def test_client_with_the_key_sends_nothing_to_a_plain_server(make: Make, key: ClusterKey) -> None:
    """An impostor took over the port of a peer's address."""
    impostor, client = make(None), make(key)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.send(client.dial(Address("127.0.0.1", listener.getsockname()[1])), Ping(1))
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            # A ZMTP 3.0 greeting that offers the NULL mechanism.
            connection.sendall(
                b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + b"\x01" + bytes(31)
            )
            said = b""
            while chunk := connection.recv(4096):
                said += chunk
    assert len(said) <= 64, "nothing but its own greeting"
    address = impostor.bind(LOCAL)
    client.send(client.dial(address), Ping(2))
    stranger = make(None)
    stranger.send(stranger.dial(address), Ping(3))
    assert receive(impostor, client, stranger).message == Ping(3), "only who has no key is heard"


def test_silent_stranger_is_disconnected(
    make: Make, key: ClusterKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_connector.control.sockets._HANDSHAKE_MS", 200)
    server = make(key)
    address = server.bind(LOCAL)
    with socket.create_connection((address.host, address.port), timeout=10) as silent:
        while silent.recv(4096):
            pass  # the server's greeting, then the end


def test_flood_costs_only_its_sender_the_standing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.control.sockets._BURST", 100.0)
    monkeypatch.setattr("kv_connector.control.sockets._UNITS_PER_S", 0.001)
    server, client, flood = make(None), make(None), make(None)
    address = server.bind(LOCAL)
    calm, wild = client.dial(address), flood.dial(address)
    for number in range(200):
        assert flood.send(wild, Ping(number))
    found: list[Received] = []

    def lost() -> bool:
        found.extend(server.receive())
        return found[-1:] != [] and found[-1].message is None

    pump(server, until=lost)
    assert len(found) == 101
    client.send(calm, Ping(7))
    assert receive(server, client).message == Ping(7)
    assert server.malformed == 1


# --- The file


def test_a_key_survives_its_file(tmp_path: Path, key: ClusterKey) -> None:
    path = tmp_path / "key"
    key.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterKey.read(path) == key
    assert key.secret.decode() not in repr(key)
    with pytest.raises(FileExistsError):
        ClusterKey.generate().write(path)


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"", 0o600, "64 hex digits"),
        (b"ab" * 31, 0o600, "64 hex digits"),
        (b"\xff\xfe" * 32, 0o600, "64 hex digits"),
        (b"ab" * 32, 0o644, "chmod 600"),
        (b"ab" * 32, 0o620, "chmod 600"),
        (None, 0o600, "Copy the cluster's key there. Make the first one with: kv-connector keygen"),
    ],
)
def test_bad_key_file_is_refused_with_the_reason(
    tmp_path: Path, content: bytes | None, mode: int, problem: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(KeyFileError, match=problem):
        ClusterKey.read(path)


def test_a_group_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"ab" * 32 + b"\n")
    path.chmod(0o640)
    ClusterKey.read(path)


def test_the_setting_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    assert find_key(None) is None
    keys = {}
    for name in ("one", "two"):
        keys[name] = ClusterKey.generate()
        keys[name].write(tmp_path / name)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "one"))
    assert find_key(None) == keys["one"]
    assert find_key(str(tmp_path / "two")) == keys["two"]


def test_keygen(tmp_path: Path) -> None:
    path = tmp_path / "key"
    old = os.umask(0)
    try:
        result = CliRunner().invoke(app, ["keygen", str(path)])
    finally:
        os.umask(old)
    assert result.exit_code == 0
    made = ClusterKey.read(path)
    assert path.read_text().strip() not in result.output
    again = CliRunner().invoke(app, ["keygen", str(path)])
    assert again.exit_code == 2
    assert ClusterKey.read(path) == made
    elsewhere = CliRunner().invoke(app, ["keygen", str(tmp_path / "none" / "key")])
    assert elsewhere.exit_code == 2
    assert "does not exist. Create it" in " ".join(elsewhere.output.replace("│", " ").split())


# --- Addresses


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_addresses_are_read() -> None:
    assert parse_address("h:1") == Address("h", 1)
    assert parse_address("[::1]:2") == Address("::1", 2)
    for wrong in ("h", "h:", "h:0", "h:70000", ":1", "http://h:1", "h:1/x", "u@h:1"):
        with pytest.raises(ValueError, match="must be host:port"):
            parse_address(wrong)
