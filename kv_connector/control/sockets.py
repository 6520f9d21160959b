"""The control plane's sockets: one ROUTER that peers dial, one DEALER for each peer that we dial.

Owned by one thread (ZMQ sockets are not thread-safe). Nothing here knows what messages mean; everything
that comes out of it is a valid message. A frame that is not one, or too many of them at once, cost their
connection the standing: what follows on it is dropped unread. With a cluster key nobody without it gets as
far as sending a frame.
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
from kv_connector.protocol.messages import MAX_MESSAGE_BYTES, AnyMessage, MalformedMessage, decode, encode

logger = logging.getLogger("kv_connector")

# Messages queued for one peer before it counts as not taking any: several times the requests that one
# engine runs at once (vLLM's default is 1,024).
_QUEUE = 4096
# How long a closed connection may still send what is queued, so that a BYE gets out.
_LINGER_MS = 200
# Messages taken from one socket before the others, and the timers, have their turn.
_BATCH = 256
# Connections without standing, and hosts whose malformed messages were logged, that are remembered.
_REMEMBERED = 4096
_LOG_INTERVAL_S = 60.0
_LONGEST_WAIT_S = 3600.0
# Who has not finished ZMQ's handshake by then is thrown out. A handshake with a key needs an answer of the
# thread that owns the sockets, and an agent's was seen to stand still for 5 s on a machine at load 20.
_HANDSHAKE_MS = 10_000
# A connection whose host vanished without a word is closed by then: nothing is kept of it. Longer than any
# silence after which the protocol gives up a peer, so that this never decides who is dead.
_HEARTBEAT_MS, _VANISHED_MS = 15_000, 90_000
# Between two attempts to connect: at once after a hiccup, seldom to who stays away (or has another key).
_RECONNECT_MS, _LONGEST_RECONNECT_MS = 100, 1000

# What one connection may send: a message costs one unit, and one more for each 16 KiB. vLLM runs 1,024
# requests at once, each of at most four messages here, so a burst of all of them is a fifth of _BURST; a
# thousand requests a second, more than a vLLM engine starts, are under _UNITS_PER_S.
_UNIT_BYTES = 16 << 10
_UNITS_PER_S = 5000.0
_BURST = 20_000.0


_M = TypeVar("_M")


@dataclass(frozen=True)
class Codec(Generic[_M]):
    """One kind of messages on the wire."""

    max_bytes: int
    encode: Callable[[_M], bytes]
    decode: Callable[[bytes | memoryview], _M]
    """Raises MalformedMessage, whatever the bytes are."""


def codec_of(messages: Any, max_bytes: int) -> Codec[Any]:
    """Of a union of msgspec's structs, in MessagePack."""
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(messages)

    def decode(frame: bytes | memoryview) -> Any:
        try:
            return decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(str(error)) from error

    return Codec(max_bytes, encoder.encode, decode)


@dataclass(frozen=True)
class Received(Generic[_M]):
    """What came over one connection; ``message`` is None where the connection just lost its standing."""

    source: Source
    message: _M | None


class MessageSockets(Generic[_M]):
    """Sockets in, messages out. No method blocks but wait() and close()."""

    def __init__(self, codec: Codec[_M], key: ClusterKey | None) -> None:
        """``key``: only who has it too is listened and spoken to. None: everybody."""
        self.malformed = 0  # frames that were no message, or one too many
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
        """Listens on the one address (port 0: a free one) and returns it; raises zmq.ZMQError."""
        router = self._open(zmq.ROUTER, address)
        try:
            # An unknown or full connection is an error to see, not a message to lose silently.
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
        """A connection to ``address``; made in the background, again and again until it is there.

        Patient: what is sent before, or while it is broken, waits for it. Else send() is False meanwhile.
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
        """Closes a connection that we dialled."""
        dealer = self._dealers.pop(source, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close(linger=_LINGER_MS)

    def send(self, source: Source, message: _M) -> bool:
        """False: the connection is gone, or its queue is full; nothing was sent."""
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
        """Drops unread whatever still comes over this connection."""
        _remember(self._distrusted, source, None)

    def watch(self, fd: int) -> None:
        """wait() returns when this descriptor is readable, too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout: float | None) -> set[int]:
        """Blocks until something came in, at most ``timeout`` seconds. Returns the watched descriptors that
        are readable."""
        # Rounded up, or a deadline that is 0.4 ms away would be polled for in a busy loop. Capped, because
        # ZMQ counts in 32 bits.
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
        """Closes all sockets; blocks until the last messages are out, at most a fraction of a second."""
        for source in list(self._dealers):
            self.hang_up(source)
        if self._router is not None:
            self._router.close(linger=_LINGER_MS)
            self._router = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        self._context.term()

    def _open(self, kind: int, address: Address) -> zmq.Socket[bytes]:
        """Every socket comes from here, so limits and keys are set in one place."""
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
        # The reason may quote what was sent.
        text = f"{error!s:.200}"
        logger.warning("malformed message from %s, its connection is ignored from now on: %s", host, text)


class ControlPlane(MessageSockets[AnyMessage]):
    """The sockets between agents."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        super().__init__(Codec(MAX_MESSAGE_BYTES, encode, decode), key)


@dataclass
class _Allowance:
    """What one connection may still send."""

    units: float
    since: float

    def spend(self, now: float, units: int) -> bool:
        self.units = min(_BURST, self.units + (now - self.since) * _UNITS_PER_S) - units
        self.since = now
        return self.units >= 0


# In front of what the ROUTER calls a connection, so that it can never be taken for one that we dialled.
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
