"""The events that end the wait of a scheduler without work."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from kv_connector.sglang import bell
from kv_connector.sglang.bell import Bell

HOUR_MS = 3_600_000


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an announced event ends a wait."""
    monkeypatch.setattr(bell, "_PATIENCE_MS", HOUR_MS)
    monkeypatch.setattr(bell, "_AWAKE_S", 0.0)


class Waiting:
    def __init__(self, ours: Bell, requests: object = None) -> None:
        self._thread = threading.Thread(target=ours.wait, args=(requests,), daemon=True)
        self._thread.start()

    def ends(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A tokenizer's socket, and its scheduler's."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://requests")
        push.connect("inproc://requests")
        yield push, pull


@pytest.mark.usefixtures("endless")
def test_it_is_rung_before_the_wait_or_during_it() -> None:
    ours = Bell()
    for _ in range(2):
        ours.ring()
        ours.ring()
        Waiting(ours).ends()
    waiting = Waiting(ours)
    ours.ring()
    waiting.ends()


def test_received_ring_does_not_end_the_next_wait() -> None:
    ours = Bell()
    ours.ring()
    Waiting(ours).ends()
    assert not ours._poller.poll(0)


@pytest.mark.usefixtures("endless")
def test_a_request_ends_the_wait_and_is_left_to_sglang(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    ours, (tokenizer, requests) = Bell(), sockets
    for number in range(2):
        tokenizer.send(b"%d" % number)
        Waiting(ours, requests).ends()
        assert requests.recv(zmq.NOBLOCK) == b"%d" % number


def test_immediate_ring_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "_PATIENCE_MS", HOUR_MS)
    monkeypatch.setattr(bell, "_AWAKE_S", HOUR_MS)
    ours = Bell()
    ours.ring()
    for _ in range(3):
        Waiting(ours).ends()


@pytest.mark.parametrize("requests", [None, object()])
def test_without_news_it_ends_by_itself(requests: object) -> None:
    Waiting(Bell(), requests).ends()
