"""Announcer: tells vllm-router, in its moriio mode, of an engine: where its API server is, and where its P.

The protocol is that router's own: plain MessagePack over plain ZMQ, one way, said again and again, forgotten
after five seconds of silence. It has no key and no goodbye. What P says of itself comes back to D in a
request's id (vllm/dialects.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import zmq

from kv_connector.control.membership import Register
from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Role

# Of a router that is away, announcements are dropped: the next one says the same.
_QUEUE = 1


class AnnouncementError(ValueError):
    """Such an engine cannot be announced; the message says what to change."""


class Announcement(msgspec.Struct, frozen=True):
    """As vllm-router 0.1.17 reads it: a map with these names."""

    type: Literal["P", "D"]
    http_address: str
    zmq_address: str
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: Literal["WRITE"] = "WRITE"
    """P and D get a request at once."""

    @classmethod
    def of(cls, registration: Register) -> Announcement:
        """What our own routers are told, in vllm-router's words. Raises AnnouncementError."""
        server = urlsplit(registration.url)
        if registration.role is Role.BOTH:
            raise AnnouncementError(
                "vllm-router accepts prefill engines and decode engines, but no engine with both roles"
            )
        if registration.rank:
            raise AnnouncementError(
                "vllm-router's moriio mode supports no data-parallel ranks. Give each rank its own API server"
            )
        if server.scheme != "http":
            raise AnnouncementError(f"vllm-router needs an api_url with http, not {registration.url}")
        port = registration.control_port
        return cls(
            type="P" if registration.role is Role.PREFILL else "D",
            http_address=server.netloc,
            zmq_address=f"host:{registration.control_host},handshake:{port},notify:{port}",
        )


class Announcer:
    """Not for several threads at a time."""

    def __init__(self, announcement: Announcement, routers: Sequence[Address]) -> None:
        self._frame = msgspec.msgpack.encode(announcement)
        self._context = zmq.Context(io_threads=1)
        self._links = [self._dial(router) for router in routers]

    def announce(self) -> None:
        """Once, to each router. Never blocks."""
        for link in self._links:
            try:
                link.send(self._frame, zmq.DONTWAIT)
            except zmq.Again:
                continue

    def close(self) -> None:
        """The routers notice by the silence."""
        self._context.destroy(linger=0)

    def _dial(self, router: Address) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.SNDHWM, _QUEUE)
        link.setsockopt(zmq.IPV6, ":" in router.host)
        link.setsockopt(zmq.IMMEDIATE, 1)
        link.connect(f"tcp://{router}")
        return link
