"""MoriioAnnouncer: announces an engine to vllm-router in its moriio mode, with the addresses of its API
server and of P.

The protocol is that router's: plain MessagePack over plain ZMQ, in one direction, repeated, and forgotten
after five seconds of silence. It has no key and no goodbye. P's announced address comes back to D in a
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
from kv_connector.protocol.wire.messages import Role

# If a router is away, announcements are dropped, because the next one has the same content.
_QUEUE = 1


class AnnouncementError(ValueError):
    """The engine cannot be announced. The message says what to change."""


class Announcement(msgspec.Struct, frozen=True):
    """An announcement as vllm-router 0.1.17 reads it: a map with these names."""

    type: Literal["P", "D"]
    http_address: str
    zmq_address: str
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: Literal["WRITE"] = "WRITE"
    """The router sends a request to P and D at once."""

    @classmethod
    def of(cls, registration: Register) -> Announcement:
        """The announcement with the content of a registration. Raises AnnouncementError."""
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


class MoriioAnnouncer:
    """Sends an engine's announcement to routers. Not thread-safe."""

    def __init__(self, announcement: Announcement, routers: Sequence[Address]) -> None:
        self._frame = msgspec.msgpack.encode(announcement)
        self._context = zmq.Context(io_threads=1)
        self._links = [self._dial(router) for router in routers]

    def announce(self) -> None:
        """Sends one announcement to each router. Never blocks."""
        for link in self._links:
            try:
                link.send(self._frame, zmq.DONTWAIT)
            except zmq.Again:
                continue

    def close(self) -> None:
        """Closes the sockets. The routers notice the end by the silence."""
        self._context.destroy(linger=0)

    def _dial(self, router: Address) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        link.setsockopt(zmq.SNDHWM, _QUEUE)
        link.setsockopt(zmq.IPV6, ":" in router.host)
        link.setsockopt(zmq.IMMEDIATE, 1)
        link.connect(f"tcp://{router}")
        return link
