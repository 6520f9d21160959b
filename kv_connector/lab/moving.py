"""`kv-connector drain --move` from within a process: the number of moved streams, and the time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kv_connector.control.membership import Drain, Draining, MembershipSockets
from kv_connector.protocol.actions import Address

# Interval of the queries: the router's answer is as old as this. An answer costs the router some
# microseconds.
_ASK_SECONDS = 0.02


@dataclass(frozen=True)
class Moved:
    streams: int
    staying: int
    """Requests that will not move."""
    seconds: float
    """Seconds until no more requests were to move."""


def move_away(registration: Address, url: str, seconds: float) -> Moved:
    """Drains the engine at ``url``, and waits until none of its streams is left to move. BLOCKS.

    ``registration``: the address at which its router takes registrations. TimeoutError: it takes longer than
    ``seconds``. ValueError: the router does not know the engine.
    """
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
