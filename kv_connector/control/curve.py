"""CURVE on ZMQ sockets: both ends hold the cluster key. A peer without the key is rejected after the
greeting.

libzmq encrypts and authenticates. It asks a ZAP handler, over an inproc socket of the same context, whether a
client's public key is allowed. The answer is one comparison, so the thread that owns the sockets gives it.
"""

from __future__ import annotations

import contextlib
import hmac

import zmq
from zmq.utils import z85

from kv_connector.control.cluster_key import ClusterKey

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 7  # version, request id, domain, address, identity, mechanism, credentials
_DOMAIN = b"kv-connector"

# Before this release a client without the key could block the messages of clients with the key
# (CVE-2020-15166).
_LEAST_LIBZMQ = (4, 3, 3)


class CurveMissing(RuntimeError):
    """This libzmq cannot protect a socket."""


class Gate:
    """Protects the sockets of one context with the cluster key. Used by the thread that owns them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> None:
        if not zmq.has("curve") or zmq.zmq_version_info() < _LEAST_LIBZMQ:
            raise CurveMissing(
                f"libzmq {zmq.zmq_version()} of this pyzmq cannot do CURVE safely: install pyzmq from a wheel"
            )
        self._key = key
        self._allowed = z85.decode(key.public)
        self.socket = context.socket(zmq.REP)
        """Readable when a ZAP request is waiting."""
        # A handshake that ends before its answer leaves no receiver for it.
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Accepts only clients with the key. Call it before bind()."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without an answer of this handler no client is accepted.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Connects only to a server with the key. Call it before connect()."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)

    def answer(self) -> None:
        """Answers all ZAP requests that arrived since the last call. Does not block."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
                number = frames[1] if len(frames) > 1 else b""
                status = [b"200", b"OK"] if self._knows_key(frames) else [b"400", b"not of this cluster"]
                self.socket.send_multipart([b"1.0", number, *status, b"", b""], zmq.DONTWAIT)

    def close(self) -> None:
        self.socket.close()

    def _knows_key(self, frames: list[bytes]) -> bool:
        return (
            len(frames) == _ZAP_FRAMES
            and frames[2] == _DOMAIN
            and frames[5] == b"CURVE"
            and hmac.compare_digest(frames[6], self._allowed)
        )
