"""`kv-connector drain --move` from within a process: how many streams move, and how long that takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kv_connector.control.membership import Drain, Draining, MembershipSockets
from kv_connector.protocol.actions import Address

# Between two questions: the router's word is as old as this, and to answer costs it some microseconds.
_ASK_SECONDS = 0.02


@dataclass(frozen=True)
class Moved:
    streams: int
    staying: int
    """Requests that will not move."""
    seconds: float
    """Until nothing more was to move."""


def move_away(registration: Address, url: str, seconds: float) -> Moved:
    """Drains the engine at ``url``, and waits until nothing more of what it has will move. BLOCKS.

    ``registration``: where its router takes them. TimeoutError if that takes longer than ``seconds``;
    ValueError if the router knows no such engine."""
    began, sockets = time.monotonic(), MembershipSockets(None)
    try:
        link = sockets.dial(registration)
        while (elapsed := time.monotonic() - began) < seconds:
            sockets.send(link, Drain(url, move=True))
            sockets.wait(_ASK_SECONDS)
            for received in sockets.receive():
                told = received.message
                if not isinstance(told, Draining):
                    continue
                if told.outstanding is None:
                    raise ValueError(f"the router at {registration} knows no engine {url}")
                if told.outstanding == (staying := sum(told.staying.values())):
                    return Moved(told.moved, staying, time.monotonic() - began)
            time.sleep(_ASK_SECONDS)
    finally:
        sockets.close()
    raise TimeoutError(f"{url} still has streams to move after {elapsed:.1f} s")
