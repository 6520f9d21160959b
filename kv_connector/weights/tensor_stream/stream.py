"""A stream of named tensors from one trainer's rank to receivers, bucket by bucket, for one update.

The sender fills one of its two buffers while the other is in flight. Each bucket is one counted write into
the same buffer of each receiver, and a message with its size. A receiver yields the tensors as views of its
buffer, and reports the bucket as taken once the consumer is done with it. Only then is the buffer written
again.

    sender                                  receiver
      | <-------------- Hello: offer --------- |      over an authenticated control socket
      | -- Welcome: answer ------------------> |
      | <----- Buffers: region, counters ----- |
      | == bucket n, one write ==============> |      over the transfer engine from here on
      | -- Bucket(n) ------------------------> |
      | <--------------------------- Taken(n)  |

Each update has its own transfer engine, links and buffers. So a failed update leaves nothing behind, and the
receivers may differ from update to update.

This module has the messages and the common part of both sides, which are stream_sender and stream_receiver.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch

from kv_connector.agent.settings import DEFAULT_PROVIDERS
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import MessageSockets, codec_of
from kv_connector.engine import EngineConfig, EventKind, TransferError
from kv_connector.engine.rank_placement import domains_of, place_nics
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Natural, Text, WireMessage, clip
from kv_connector.weights.memory.buffer import Buffer, aligned, device_of
from kv_connector.weights.tensor_stream.buckets import StreamError

logger = logging.getLogger("kv_connector")

BUFFERS = 2
"""Buffers of each side: a bucket is filled or consumed while the next one is in flight."""
# Seconds that a failing side waits until its peer has the reason. A live peer's transfer engine takes a
# message within milliseconds.
_REPORT_S = 5.0
# A message of the transfer engine has 4,091 bytes, and a character has up to 4.
_REASON_CHARACTERS = 900

_Bytes = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class Hello(WireMessage, frozen=True, tag="hello"):
    rank: Natural
    offer: _Bytes


class Welcome(WireMessage, frozen=True, tag="welcome"):
    answer: _Bytes


class Buffers(WireMessage, frozen=True, tag="buffers"):
    region: _Bytes
    nbytes: Natural  # of one buffer
    immediates: Annotated[tuple[Natural, ...], msgspec.Meta(min_length=BUFFERS, max_length=BUFFERS)]


class Declined(WireMessage, frozen=True, tag="declined"):
    reason: Text


Control = Hello | Welcome | Buffers | Declined
"""Messages before the first bucket."""

_CODEC = codec_of(Control, 4 << 20)


class Bucket(WireMessage, frozen=True, tag="bucket"):
    """A bucket is written, or will be."""

    number: Natural
    list_offset: Natural
    nbytes: Natural  # with the list
    last: bool


class Taken(WireMessage, frozen=True, tag="taken"):
    number: Natural


class Failed(WireMessage, frozen=True, tag="failed"):
    reason: Text


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Bucket | Taken | Failed)


@dataclass(frozen=True)
class StreamConfig:
    """The configuration of one end of a stream."""

    name: str
    """Name of this end in the peer's errors, such as ``trainer rank 0``."""
    host: str
    """This machine's address, at which the peers reach it."""
    device: torch.device
    bucket_bytes: int
    """Size of one of the two buffers. Senders and receivers must have the same size."""
    timeout: float
    """Seconds that each step of a live peer may take. A killed peer that was connected is noticed at once."""
    providers: tuple[str, ...] = ()
    """Lanes in order of preference. Empty: nvlink for a GPU, host and tcp for a CPU."""


def sockets_of(key: ClusterKey) -> MessageSockets[Control]:
    """The control sockets of one end, which the caller closes."""
    return MessageSockets(_CODEC, key)


def listen(host: str, key: ClusterKey) -> tuple[MessageSockets[Control], Address]:
    """Opens the control socket of a sender, at a free port. Raises zmq.ZMQError."""
    sockets = sockets_of(key)
    try:
        return sockets, sockets.bind(Address(host, 0))
    except BaseException:
        sockets.close()
        raise


class StreamEnd:
    """A sender or a receiver: a transfer engine with two registered buffers."""

    def __init__(self, config: StreamConfig) -> None:
        """Raises TransferError, and torch.OutOfMemoryError or OSError if the buffers have no room."""
        self._config = config
        self._half = max(aligned(config.bucket_bytes), 1)
        self._names: dict[int, str] = {}  # of the peers
        self._watched: Arrivals | None = None
        providers = config.providers or DEFAULT_PROVIDERS[config.device.type]
        placed = place_nics(device_of(config.device), providers=providers, nics=())
        self._buffer = Buffer("bucket", BUFFERS * self._half, config.device)
        engine_config = EngineConfig(
            f"{config.name} at {config.host}", domains_of(providers, config.host, placed)
        )
        self._engine = TransferEngine(engine_config)
        try:
            (self._region,) = self._engine.register_ranges([self._buffer.range])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all links. Nothing is read from the buffers or written to them afterwards. Idempotent.

        If send() or receive() has not ended, the thread of its event loop calls close().
        """
        if self._watched is not None:
            self._watched.close()
        close_or_log(self._engine, self._engine.config.name)

    def _watch(self) -> Arrivals:
        """Watches the transfer engine in the running event loop, until close()."""
        self._watched = Arrivals(self._engine, self._names, self._config.timeout)
        return self._watched

    def _memory(self, number: int) -> torch.Tensor:
        """The buffer of a bucket."""
        begin = self._begin(number)
        return self._buffer.bytes[begin : begin + self._half]

    def _begin(self, number: int) -> int:
        return number % BUFFERS * self._half

    def _report(self, reason: str) -> None:
        """Sends the reason why this side ends the update to all peers that are connected. Blocks briefly."""
        logger.warning("weights: %s ends the update: %s", self._config.name, reason)
        sent = []
        for peer in self._names:
            try:
                sent.append(
                    self._engine.send(peer, _ENCODER.encode(Failed(clip(reason)[:_REASON_CHARACTERS])))
                )
            except TransferError:
                continue  # it is gone
        deadline = time.monotonic() + _REPORT_S
        for transfer in sent:
            try:
                self._engine.wait_transfer(transfer, max(deadline - time.monotonic(), 0.0))
            except TransferError:
                continue


class Arrivals:
    """The events and messages of a transfer engine, for one task of the running event loop.

    Call close() before the engine's close(). Otherwise the loop watches descriptors that the next engine may
    have.
    """

    def __init__(self, engine: TransferEngine, names: Mapping[int, str], timeout: float) -> None:
        self._engine = engine
        self._names = names
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._problem = ""
        self.open: dict[int, int] = {}
        """The peers of transfers that the task waits for. The task adds them, and their ends remove them."""
        self.reached: set[int] = set()
        """Counter sets that have reached their target. The task removes them."""
        self.buckets: dict[int, Bucket] = {}
        """Announced buckets by number. The task removes them."""
        self.taken: dict[int, int] = dict.fromkeys(names, 0)
        """How many buckets each peer has taken."""
        self.total: int | None = None
        """Number of all buckets, once the last one is posted. A peer that has taken them may leave."""
        self._fds: tuple[int, ...] = (engine.event_fd(), engine.message_fd())
        for fd in self._fds:
            self._loop.add_reader(fd, self._take)

    def close(self) -> None:
        """Ends the watch, once: the descriptors may be another engine's afterwards."""
        fds, self._fds = self._fds, ()
        if fds and not self._loop.is_closed():
            for fd in fds:
                self._loop.remove_reader(fd)
            self._changed.set()

    def post(self, peer: int, call: Callable[[], int]) -> int:
        """Has the transfer engine send or write something to a peer. Returns the transfer.

        Raises StreamError if the peer is lost, with its own reason if it sent one.
        """
        try:
            return call()
        except TransferError as error:
            self._take()
            raise StreamError(self._problem or f"{self._names[peer]} is lost: {error}") from None

    def send(self, peer: int, message: Bucket | Taken) -> int:
        return self.post(peer, lambda: self._engine.send(peer, _ENCODER.encode(message)))

    async def until(self, ready: Callable[[], bool], late: Callable[[], str]) -> None:
        """Waits until ``ready``.

        Raises StreamError if a peer fails first, or, with the text ``late``, after the timeout.
        """
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    self._take()
                    if self._problem:
                        raise StreamError(self._problem)
                    if ready():
                        return
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StreamError(f"{late()} within {self._timeout:g} s") from None

    def _take(self) -> None:
        lost: list[tuple[int, str]] = []
        for event in self._engine.poll_events():
            if event.kind is EventKind.COUNTERS_REACHED:
                self.reached.add(event.id)
            elif event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
                reason = event.error or "it has left"
                lost.append((event.id, str(reason)))
            else:
                peer = self.open.pop(event.id, None)
                if peer is not None and event.kind is not EventKind.TRANSFER_DONE:
                    lost.append((peer, str(event.error or event.kind.name)))
        # A peer sends its reason before its links break. So messages are read after events, and come first.
        for message in self._engine.receive():
            self._message(message.peer, message.data)
        for peer, reason in lost:
            if self.total is None or self.taken.get(peer, 0) < self.total:
                self._fail(f"{self._names.get(peer, 'a peer')} is lost: {reason}")
        self._changed.set()

    def _message(self, peer: int, data: bytes) -> None:
        name = self._names.get(peer, "a peer")
        try:
            message = _DECODER.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self._fail(f"{name} sent a malformed message: {error}")
            return
        match message:
            case Failed():
                self._fail(f"{name} ended the update: {message.reason}")
            case Bucket() if len(self.buckets) < BUFFERS:
                self.buckets[message.number] = message
            case Taken() if peer in self.taken:
                self.taken[peer] = max(self.taken[peer], message.number + 1)
            case _:
                self._fail(f"{name} sent an unexpected message: {message}")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem


def reason_of(error: BaseException) -> str:
    """The reason for the peers."""
    return str(error) if isinstance(error, StreamError) else f"{type(error).__name__}: {error}"
