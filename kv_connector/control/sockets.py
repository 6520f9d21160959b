"""The control plane's sockets: one ROUTER that peers connect to, one DEALER for each peer that this side
dials.

Owned by one thread, because ZMQ sockets are not thread-safe. Nothing here depends on the meaning of messages.
Everything that is received is a valid message. A connection that sends an invalid frame, or too many frames
at once, is distrusted: its later frames are dropped unread. With a cluster key, a peer without the key cannot
send any frame.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.curve import Gate
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import (
    MAX_MESSAGE_BYTES,
    UNREADABLE,
    AnyMessage,
    MalformedMessage,
    decode,
    encode,
)

logger = logging.getLogger("kv_connector")

# Messages queued for one peer before its queue counts as full: several times the requests that one engine
# runs at once (vLLM's default is 1,024).
_QUEUE = 4096
# Time for which a closed connection may still send queued messages, so that a BYE is sent.
_LINGER_MS = 200
# Messages taken from one socket before the other sockets and the timers have their turn.
_BATCH = 256
# Distrusted connections, and hosts whose malformed messages were logged, that are remembered.
_REMEMBERED = 4096
_LOG_INTERVAL_S = 60.0
_LONGEST_WAIT_S = 3600.0
# A connection whose ZMQ handshake has not finished by then is closed. A handshake with a key needs an answer
# of the thread that owns the sockets. An agent's thread was seen to stall for 5 s on a machine at load 20.
_HANDSHAKE_MS = 10_000
# A connection whose host vanished without closing it is closed by then, and nothing is kept of it. The time
# is longer than any silence after which the protocol gives up a peer, so it never decides that a peer is
# dead.
_HEARTBEAT_MS, _VANISHED_MS = 15_000, 90_000
# Interval between two attempts to connect: short after a brief failure, long for a peer that stays away (or
# has another key).
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 100, 1000

# Limits of one connection. A message costs one unit, and one more for each 16 KiB. An engine runs 1,024
# requests at once, each with at most four messages here. A burst of all of them is a fifth of _BURST. A
# thousand requests a second, more than a vLLM engine starts, stay under _UNITS_PER_S.
_UNIT_BYTES = 16 << 10
_UNITS_PER_S = 5000.0
_BURST = 20_000.0


_M = TypeVar("_M")


@dataclass(frozen=True)
class Codec(Generic[_M]):
    """The encoding of one kind of messages."""

    max_bytes: int
    encode: Callable[[_M], bytes]
    decode: Callable[[bytes | memoryview], _M]
    """Raises MalformedMessage for all invalid bytes."""


def codec_of(messages: Any, max_bytes: int) -> Codec[Any]:
    """The codec of a union of msgspec structs, in MessagePack."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(messages)

    def decode(frame: bytes | memoryview) -> Any:
        try:
            return decoder.decode(frame)
        except UNREADABLE as error:
            raise MalformedMessage(str(error)) from error

    return Codec(max_bytes, encoder.encode, decode)


@dataclass(frozen=True)
class Received(Generic[_M]):
    """A message that arrived over a connection. ``message`` is None if the connection was just distrusted."""

    source: Source
    message: _M | None


class MessageSockets(Generic[_M]):
    """Sockets that send and receive messages. Only wait() and close() block."""

    def __init__(self, codec: Codec[_M], key: ClusterKey | None) -> None:
        """``key``: only peers with the same key are connected. None: any peer is."""
        self.malformed = 0  # frames that were no message, or exceeded the limits
        self._codec = codec
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._gate = None if key is None else Gate(self._context, key)
        if self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[Source, zmq.Socket[bytes]] = {}
        self._ready: list[tuple[zmq.Socket[bytes], Source | None]] = []
        self._distrusted: OrderedDict[Source, None] = OrderedDict()
        self._allowances: OrderedDict[Source, _Allowance] = OrderedDict()
        self._logged: OrderedDict[str, float] = OrderedDict()
        self._dialled = 0

    def bind(self, address: Address) -> Address:
        """Listens on this one address and returns it. Port 0 takes a free port. Raises zmq.ZMQError."""
        router = self._open(zmq.ROUTER, address)
        try:
            # Sending to an unknown or full connection raises an error instead of losing the message silently.
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.bind(_endpoint(address))
        except zmq.ZMQError:
            router.close(linger=0)
            raise
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return Address(address.host, int(endpoint.rpartition(":")[2]))

    def dial(self, address: Address, *, patient: bool = True) -> Source:
        """Opens a connection to ``address``, in the background and repeatedly until it succeeds.

        ``patient``: messages sent before, or while the connection is broken, wait for it. Otherwise send()
        returns False meanwhile.
        """
        dealer = self._open(zmq.DEALER, address)
        try:
            dealer.setsockopt(zmq.IMMEDIATE, not patient)
            dealer.connect(_endpoint(address))
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        self._dialled += 1
        source = Source(b"dialled %d" % self._dialled)
        self._dealers[source] = dealer
        self._poller.register(dealer, zmq.POLLIN)
        return source

    def hang_up(self, source: Source) -> None:
        """Closes a connection that this side dialled."""
        dealer = self._dealers.pop(source, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close()

    def send(self, source: Source, message: _M) -> bool:
        """Sends a message. Returns False if the connection is gone or its queue is full. Nothing was sent
        then."""
        frame = self._codec.encode(message)
        try:
            if source in self._dealers:
                self._dealers[source].send(frame, zmq.DONTWAIT)
            elif self._router is not None and source.startswith(_ROUTER):
                self._router.send_multipart([source[len(_ROUTER) :], frame], zmq.DONTWAIT)
            else:
                return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def distrust(self, source: Source) -> None:
        """Drops all later frames of this connection unread."""
        _remember(self._distrusted, source, None)

    def watch(self, fd: int) -> None:
        """Lets wait() also return when this descriptor is readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout: float | None) -> set[int]:
        """Blocks until a message arrives, at most ``timeout`` seconds. Returns the watched descriptors that
        are readable."""
        # Rounded up, because a deadline 0.4 ms away would otherwise be polled for in a busy loop. Capped,
        # because ZMQ counts in 32 bits.
        milliseconds = (
            None if timeout is None else int(min(max(timeout, 0.0), _LONGEST_WAIT_S) * 1000 + 0.999)
        )
        ready = dict(self._poller.poll(milliseconds))
        if self._gate is not None and self._gate.socket in ready:
            self._gate.answer()
        self._ready = [(dealer, source) for source, dealer in self._dealers.items() if dealer in ready]
        if self._router is not None and self._router in ready:
            self._ready.append((self._router, None))
        return {fd for fd in ready if isinstance(fd, int)}

    def receive(self) -> list[Received[_M]]:
        """The messages that the last wait() found."""
        now = time.monotonic()
        received: list[Received[_M]] = []
        for socket, source in self._ready:
            for _ in range(_BATCH):
                if socket.closed:
                    break
                try:
                    frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
                except zmq.ZMQError as error:
                    if error.errno == zmq.EAGAIN:
                        break
                    raise
                item = self._accept(now, frames, source)
                if item is not None:
                    received.append(item)
        self._ready = []
        return received

    def close(self) -> None:
        """Closes all sockets. Blocks until the last messages are sent, for a fraction of a second at most."""
        for source in list(self._dealers):
            self.hang_up(source)
        if self._router is not None:
            self._router.close()
            self._router = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._context.term()

    def _open(self, kind: int, address: Address) -> zmq.Socket[bytes]:
        """Creates every socket, so that limits and keys are set in one place."""
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.MAXMSGSIZE, self._codec.max_bytes),
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.IPV6, ":" in address.host),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _VANISHED_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS),
            # Before bind(): a listener's connections keep the linger that the socket has then. Without a
            # limit, a peer that leaves during close() with messages unsent to it makes close() endless.
            (zmq.LINGER, _LINGER_MS),
        ):
            socket.setsockopt(option, value)
        if self._gate is not None:
            protect = self._gate.protect_server if kind == zmq.ROUTER else self._gate.protect_client
            protect(socket)
        return socket

    def _accept(self, now: float, frames: list[zmq.Frame], source: Source | None) -> Received[_M] | None:
        if source is None:
            source = Source(_ROUTER + frames.pop(0).bytes)
        if source in self._distrusted:
            return None
        try:
            if not self._affordable(now, source, frames):
                raise MalformedMessage(
                    f"more than {_BURST:g} messages at once, or more than {_UNITS_PER_S:g} a second"
                )
            if len(frames) != 1:
                raise MalformedMessage(f"{len(frames)} frames instead of one")
            return Received(source, self._codec.decode(frames[0].buffer))
        except MalformedMessage as error:
            self.malformed += 1
            self.distrust(source)
            self._log_malformed(frames, error)
            return Received(source, None)

    def _affordable(self, now: float, source: Source, frames: list[zmq.Frame]) -> bool:
        allowance = self._allowances.get(source)
        if allowance is None:
            allowance = _Allowance(_BURST, now)
            _remember(self._allowances, source, allowance)
        return allowance.spend(now, 1 + sum(len(frame) for frame in frames) // _UNIT_BYTES)

    def _log_malformed(self, frames: list[zmq.Frame], error: MalformedMessage) -> None:
        try:
            host = str(frames[0].get("Peer-Address")) if frames else "an unknown host"
        except zmq.ZMQError:
            host = "an unknown host"
        now = time.monotonic()
        if now - self._logged.get(host, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            return
        _remember(self._logged, host, now)
        # The reason may quote the received bytes.
        text = f"{error!s:.200}"
        logger.warning("malformed message from %s, its connection is ignored from now on: %s", host, text)


class ControlPlane(MessageSockets[AnyMessage]):
    """The sockets between agents."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        super().__init__(Codec(MAX_MESSAGE_BYTES, encode, decode), key)


@dataclass
class _Allowance:
    """The remaining allowance of one connection."""

    units: float
    since: float

    def spend(self, now: float, units: int) -> bool:
        self.units = min(_BURST, self.units + (now - self.since) * _UNITS_PER_S) - units
        self.since = now
        return self.units >= 0


# Prefix of the ROUTER's connection names, so that none of them equals the name of a dialled connection.
_ROUTER = b"router "


def _endpoint(address: Address) -> str:
    return f"tcp://{address}"


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _remember(memory: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
