"""The control plane's sockets: messages arrive, and garbage costs only its sender the connection."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from protocol_setup import reserve

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import ControlPlane, Received
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import MAX_MESSAGE_BYTES, Bye, Ping, Pong, Release, encode

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture
def make() -> Iterator[Callable[..., ControlPlane]]:
    made = []

    def build(key: ClusterKey | None = None) -> ControlPlane:
        made.append(ControlPlane(key))
        return made[-1]

    yield build
    for plane in made:
        plane.close()


@pytest.fixture
def server(make: Callable[[], ControlPlane]) -> tuple[ControlPlane, Address]:
    plane = make()
    return plane, plane.bind(LOCAL)


@pytest.fixture
def stranger(server: tuple[ControlPlane, Address]) -> Iterator[zmq.Socket[bytes]]:
    """A client that uses ZMQ, but not this protocol."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{server[1]}")
    yield dealer
    dealer.close()
    context.term()


def receive(plane: ControlPlane, count: int = 1, seconds: float = 60.0) -> list[Received]:
    """Waits until this number of messages has arrived."""
    found: list[Received] = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found}"
        plane.wait(deadline - time.monotonic())
        found += plane.receive()
    return found


def test_messages_go_both_ways(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address]
) -> None:
    plane, address = server
    client = make()
    link = client.dial(address)
    assert client.send(link, Ping(1))
    assert client.send(link, reserve())
    first, second = receive(plane, 2)
    assert (first.message, second.message) == (Ping(1), reserve())
    assert first.source == second.source
    assert plane.send(first.source, Pong(1))
    assert receive(client) == [Received(link, Pong(1))]


def test_connections_are_distinguished(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address]
) -> None:
    plane, address = server
    client = make()
    links = [client.dial(address) for _ in range(3)]
    for number, link in enumerate(links):
        client.send(link, Ping(number))
    seen = {item.message: item.source for item in receive(plane, 3)}
    assert len(set(seen.values())) == 3
    for message, source in seen.items():
        assert isinstance(message, Ping)
        plane.send(source, Pong(message.sequence))
    answers = {item.source: item.message for item in receive(client, 3)}
    assert answers == {link: Pong(number) for number, link in enumerate(links)}


def test_dialled_address_that_listens_later_is_reached(make: Callable[[], ControlPlane]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
    client = make()
    client.send(client.dial(address), Ping(1))
    late = make()
    late.bind(address)
    assert receive(late)[0].message == Ping(1)


def test_a_connection_that_is_gone_takes_nothing(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address]
) -> None:
    plane, address = server
    assert not plane.send(Source(b"router \x00none"), Ping(1))
    assert not plane.send(Source(b"dialled 1"), Ping(1))
    client = make()
    link = client.dial(address)
    client.hang_up(link)
    client.hang_up(link)
    assert not client.send(link, Ping(1))


def test_bye_before_hanging_up_arrives(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address]
) -> None:
    plane, address = server
    client = make()
    link = client.dial(address)
    client.send(link, Ping(1))
    receive(plane)
    client.send(link, Bye("going"))
    client.hang_up(link)
    assert receive(plane)[0].message == Bye("going")


@pytest.mark.parametrize(
    "frames",
    [[b"garbage"], [b""], [encode(Ping(1)), b"and more"], [b"", encode(Ping(1))], [b"\xdd\xff\xff\xff\xff"]],
    ids=["garbage", "empty", "two frames", "request envelope", "huge array"],
)
def test_malformed_message_costs_only_its_sender_the_standing(
    make: Callable[[], ControlPlane],
    server: tuple[ControlPlane, Address],
    stranger: zmq.Socket[bytes],
    frames: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plane, address = server
    stranger.send_multipart(frames)
    (bad,) = receive(plane)
    assert bad.message is None
    assert plane.malformed == 1
    assert "malformed message from 127.0.0.1" in caplog.text
    # Its later messages are dropped unread. Those of other clients are not.
    stranger.send(encode(Release("t")))
    stranger.send_multipart(frames)
    client = make()
    link = client.dial(address)
    client.send(link, Ping(7))
    assert [item.message for item in receive(plane)] == [Ping(7)]
    stranger.send(encode(Release("t")))
    client.send(link, Ping(8))
    assert [item.message for item in receive(plane)] == [Ping(8)]
    assert plane.malformed == 1


def test_a_message_above_the_limit_never_arrives(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address], stranger: zmq.Socket[bytes]
) -> None:
    plane, address = server
    stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
    client = make()
    client.send(client.dial(address), Ping(1))
    assert [item.message for item in receive(plane)] == [Ping(1)]
    assert plane.malformed == 0  # libzmq closed the connection by itself


def test_malformed_messages_of_one_host_are_logged_once_a_minute(
    server: tuple[ControlPlane, Address], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, address = server
    now = 100.0
    monkeypatch.setattr("kv_connector.control.sockets.time.monotonic", lambda: now)
    context = zmq.Context()
    for moment in (100.0, 130.0, 161.0):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{address}")
        dealer.send(b"garbage")
        now = moment
        assert receive(plane)[0].message is None
        dealer.close(linger=0)
    context.term()
    assert plane.malformed == 3
    assert caplog.text.count("malformed message") == 2


def test_other_descriptors_end_the_wait(server: tuple[ControlPlane, Address]) -> None:
    plane, _ = server
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        plane.watch(wake)
        assert plane.wait(0.0) == set()
        os.eventfd_write(wake, 1)
        assert plane.wait(10.0) == {wake}
    finally:
        plane.close()
        os.close(wake)


def test_a_port_in_use_is_an_error(
    make: Callable[[], ControlPlane], server: tuple[ControlPlane, Address]
) -> None:
    with pytest.raises(zmq.ZMQError):
        make().bind(server[1])


def test_ipv6_addresses(make: Callable[[], ControlPlane]) -> None:
    plane = make()
    try:
        address = plane.bind(Address("::1", 0))
    except zmq.ZMQError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert str(address) == f"[::1]:{address.port}"
    client = make()
    client.send(client.dial(address), Ping(1))
    assert receive(plane)[0].message == Ping(1)


def test_closing_frees_the_port(make: Callable[[], ControlPlane]) -> None:
    plane = make()
    address = plane.bind(LOCAL)
    plane.close()
    assert make().bind(address) == address


def test_close_ends_while_peers_leave() -> None:
    """Messages to each of them are unsent."""

    def send_and_close(plane: ControlPlane, sources: list[Source]) -> None:
        for source in sources * 5:
            plane.send(source, Ping(2))
        plane.close()

    for _ in range(60):  # without a finite linger about one in twelve never ended
        plane, peers = ControlPlane(), ControlPlane()
        address = plane.bind(LOCAL)
        for _ in range(40):
            peers.send(peers.dial(address), Ping(1))
        sources = [received.source for received in receive(plane, 40)]
        leaving = threading.Thread(target=peers.close, daemon=True)
        closing = threading.Thread(target=send_and_close, args=(plane, sources), daemon=True)
        for thread in (leaving, closing):
            thread.start()
        for thread in (leaving, closing):
            thread.join(60)
            assert not thread.is_alive()


def test_nothing_of_a_stranger_is_logged_at_length(
    server: tuple[ControlPlane, Address], stranger: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    plane, _ = server
    stranger.send(b"\x81\xa1t\xdb" + (100_000).to_bytes(4) + b"x" * 100_000)
    with caplog.at_level(logging.WARNING):
        assert receive(plane)[0].message is None
    assert len(caplog.text) < 1000
