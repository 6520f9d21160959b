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
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import torch

from kv_connector.agent.settings import DEFAULT_PROVIDERS
from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import MessageSockets, codec_of
from kv_connector.engine import EngineConfig, EventKind, TransferError
from kv_connector.engine.placement import domains_of, place_nics
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.messages import Message, Natural, Text, clip
from kv_connector.weights.buckets import Filling, Merging, StreamError
from kv_connector.weights.buffer import Buffer, aligned, device_of, settle

logger = logging.getLogger("kv_connector")

_BUFFERS = 2
# Seconds that a failing side waits until its peer has the reason. A live peer's transfer engine takes a
# message within milliseconds.
_REPORT_S = 5.0
# A message of the transfer engine has 4,091 bytes, and a character has up to 4.
_REASON_CHARACTERS = 900

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
"""Names and tensors."""

_Bytes = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class Hello(Message, frozen=True, tag="hello"):
    rank: Natural
    offer: _Bytes


class Welcome(Message, frozen=True, tag="welcome"):
    answer: _Bytes


class Buffers(Message, frozen=True, tag="buffers"):
    region: _Bytes
    nbytes: Natural  # of one buffer
    immediates: Annotated[tuple[Natural, ...], msgspec.Meta(min_length=_BUFFERS, max_length=_BUFFERS)]


class Declined(Message, frozen=True, tag="declined"):
    reason: Text


Control = Hello | Welcome | Buffers | Declined
"""Messages before the first bucket."""

_CODEC = codec_of(Control, 4 << 20)


class Bucket(Message, frozen=True, tag="bucket"):
    """A bucket is written, or will be."""

    number: Natural
    list_offset: Natural
    nbytes: Natural  # with the list
    last: bool


class Taken(Message, frozen=True, tag="taken"):
    number: Natural


class Failed(Message, frozen=True, tag="failed"):
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
    """Seconds that each step of a live peer may take. A killed peer is noticed at once."""
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


class _End:
    """A sender or a receiver: a transfer engine with two registered buffers."""

    def __init__(self, config: StreamConfig) -> None:
        """Raises TransferError, and torch.OutOfMemoryError or OSError if the buffers have no room."""
        self._config = config
        self._half = max(aligned(config.bucket_bytes), 1)
        self._names: dict[int, str] = {}  # of the peers
        self._watched: _Arrivals | None = None
        providers = config.providers or DEFAULT_PROVIDERS[config.device.type]
        placed = place_nics(device_of(config.device), providers=providers, nics=())
        self._buffer = Buffer("bucket", _BUFFERS * self._half, config.device)
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

    def _watch(self) -> _Arrivals:
        """Watches the transfer engine in the running event loop, until close()."""
        self._watched = _Arrivals(self._engine, self._names, self._config.timeout)
        return self._watched

    def _memory(self, number: int) -> torch.Tensor:
        """The buffer of a bucket."""
        begin = self._begin(number)
        return self._buffer.bytes[begin : begin + self._half]

    def _begin(self, number: int) -> int:
        return number % _BUFFERS * self._half

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


class _Arrivals:
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
            case Bucket() if len(self.buckets) < _BUFFERS:
                self.buckets[message.number] = message
            case Taken() if peer in self.taken:
                self.taken[peer] = max(self.taken[peer], message.number + 1)
            case _:
                self._fail(f"{name} sent an unexpected message: {message}")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem


@dataclass
class _Receiver:
    """A receiver as its sender knows it."""

    peer: int
    region: int = -1
    immediates: tuple[int, ...] = ()
    writes: dict[int, int] = field(default_factory=dict)


class StreamSender(_End):
    """The sender of one update. One thread calls it."""

    def connect(self, sockets: MessageSockets[Control], receivers: Mapping[int, str]) -> None:
        """Waits until all receivers have connected, which are given as names by rank. Blocks.

        Raises StreamError.
        """
        self._receivers: dict[int, _Receiver] = {}
        sources: dict[Source, int] = {}  # rank
        deadline = time.monotonic() + self._config.timeout
        while missing := [rank for rank in receivers if not self._connected(rank)]:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(receivers[rank] for rank in missing)
                raise StreamError(f"{names} did not connect within {self._config.timeout:g} s")
            sockets.wait(left)
            for received in sockets.receive():
                match received.message:
                    case Hello(rank, offer) if rank in receivers and rank not in self._receivers:
                        self._welcome(sockets, received.source, rank, receivers[rank], offer)
                        sources[received.source] = rank
                    case Buffers() as buffers if received.source in sources:
                        self._use(sockets, received.source, sources[received.source], buffers)
                    case Declined(reason) if received.source in sources:
                        raise StreamError(f"{receivers[sources[received.source]]} cannot connect: {reason}")
                    case _:
                        sockets.send(received.source, Declined("it is not awaited in this update"))

    async def send(self, weights: Weights) -> None:
        """Sends all tensors. Returns once all receivers have taken them.

        If a receiver fails or a tensor cannot be sent, the other tensors are drawn all the same. On a trainer
        they are the results of collectives, in which other ranks wait for this rank. Raises the error at the
        end. A receiver's StreamError names the receiver.
        """
        self._arrivals = arrivals = self._watch()
        self._number, self._filling = 0, Filling(self._memory(0))
        self._bytes, began = 0, time.monotonic()
        failure: Exception | None = None
        try:
            async for name, tensor in drawn(weights):
                try:
                    if failure is None:
                        await self._put(name, tensor)
                except Exception as error:
                    failure = error
                    self._report(_reason_of(error))
            if failure is None:
                await self._post(last=True)
                await self._settled(self._number)
        except BaseException as error:
            self._report(_reason_of(error))
            raise
        finally:
            arrivals.close()
        if failure is not None:
            raise failure
        seconds = time.monotonic() - began
        logger.info(
            "weights: %s sent %.2f GB in %d buckets to %s in %.2f s",
            self._config.name,
            self._bytes / 1e9,
            self._number,
            ", ".join(self._names.values()),
            seconds,
        )

    async def _put(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().contiguous()
        offset = 0
        while True:
            end = self._filling.put(name, tensor, offset)
            if end is None:
                await self._post(last=False)
                continue
            offset = end
            if offset == tensor.nbytes:
                return

    async def _post(self, *, last: bool) -> None:
        """Writes the bucket to all receivers. Waits until the next one may be filled."""
        arrivals, number = self._arrivals, self._number
        list_offset, nbytes = self._filling.seal()
        settle(self._config.device)
        begin = self._begin(number)
        bucket = Bucket(number, list_offset, nbytes, last)

        def write_to(to: _Receiver) -> Callable[[], int]:
            immediate = to.immediates[number % _BUFFERS]
            return lambda: self._engine.write_one(
                to.peer, self._region, begin, to.region, begin, nbytes, immediate
            )

        for receiver in self._receivers.values():
            write = arrivals.post(receiver.peer, write_to(receiver))
            receiver.writes[number] = write
            arrivals.open[write] = receiver.peer
            arrivals.send(receiver.peer, bucket)
        self._bytes += nbytes
        self._number += 1
        if last:
            arrivals.total = self._number
        else:
            await self._settled(self._number - _BUFFERS + 1)
            self._filling = Filling(self._memory(self._number))

    async def _settled(self, buckets: int) -> None:
        """Waits until all receivers have taken this many buckets, and until nothing reads their source."""
        arrivals = self._arrivals

        def waits_for(receiver: _Receiver) -> bool:
            writes = [write for number, write in receiver.writes.items() if number < buckets]
            return arrivals.taken[receiver.peer] < buckets or any(write in arrivals.open for write in writes)

        def late() -> str:
            names = [self._names[one.peer] for one in self._receivers.values() if waits_for(one)]
            return f"{', '.join(names)} did not take bucket {buckets - 1}"

        await arrivals.until(lambda: not any(map(waits_for, self._receivers.values())), late)
        for receiver in self._receivers.values():
            receiver.writes = {
                number: write for number, write in receiver.writes.items() if number >= buckets
            }

    def _connected(self, rank: int) -> bool:
        return rank in self._receivers and bool(self._receivers[rank].immediates)

    def _welcome(
        self, sockets: MessageSockets[Control], source: Source, rank: int, name: str, offer: bytes
    ) -> None:
        try:
            shaken = self._engine.accept(name, offer)
        except TransferError as error:
            sockets.send(source, Declined(clip(str(error))))
            raise StreamError(f"{name} cannot be reached: {error}") from None
        self._receivers[rank] = _Receiver(shaken.peer)
        self._names[shaken.peer] = name
        sockets.send(source, Welcome(shaken.data))

    def _use(self, sockets: MessageSockets[Control], source: Source, rank: int, buffers: Buffers) -> None:
        receiver = self._receivers[rank]
        name = self._names[receiver.peer]
        if buffers.nbytes != self._half:
            reason = (
                f"its buckets have {buffers.nbytes} bytes instead of {self._half}. Set the same size for all"
            )
            sockets.send(source, Declined(reason))
            raise StreamError(f"{name}: {reason}")
        try:
            receiver.region = self._engine.import_region(receiver.peer, buffers.region)
        except TransferError as error:
            raise StreamError(f"{name} cannot be written to: {error}") from None
        receiver.immediates = buffers.immediates
        logger.info(
            "weights: %s sends to %s over %s", self._config.name, name, self._engine.lane(receiver.peer)
        )


class StreamReceiver(_End):
    """The receiver of one update. One thread calls it."""

    def connect(self, sockets: MessageSockets[Control], sender: Address, sender_name: str, rank: int) -> None:
        """Connects to the sender. ``sockets``: dials with the sender's key, and is kept. Blocks.

        Raises StreamError.
        """
        self._sender = sender_name
        offered = self._engine.offer(sender_name)
        source = sockets.dial(sender)
        sockets.send(source, Hello(rank, offered.data))
        deadline = time.monotonic() + self._config.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StreamError(
                    f"{sender_name} did not answer at {sender} within {self._config.timeout:g} s"
                )
            sockets.wait(left)
            for received in sockets.receive():
                match received.message:
                    case Welcome(answer):
                        try:
                            self._complete(offered.peer, answer)
                        except StreamError as error:
                            sockets.send(source, Declined(clip(str(error))))
                            raise
                        region = self._engine.region_descriptor(self._region)
                        sockets.send(source, Buffers(region, self._half, self._immediates))
                        return
                    case Declined(reason):
                        raise StreamError(f"{sender_name} refused the connection: {reason}")
                    case _:
                        raise StreamError(f"{sender_name} sent an unexpected message at {sender}")

    def _complete(self, peer: int, answer: bytes) -> None:
        try:
            self._engine.complete(peer, answer)
            counters = [self._engine.alloc_counters(1, [peer]) for _ in range(_BUFFERS)]
        except TransferError as error:
            raise StreamError(f"{self._sender} cannot be reached: {error}") from None
        self._peer, self._names[peer] = peer, self._sender
        self._counters = [one.id for one in counters]
        self._immediates = tuple(one.immediates[0] for one in counters)

    async def receive(self) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        """Yields names and tensors in the sender's order.

        A tensor that is not larger than a bucket is valid until the next one is requested. Raises
        StreamError, which names the sender, if it is killed, fails, or takes longer than the timeout.
        """
        arrivals = self._watch()
        merging, number, total, began = Merging(), 0, 0, time.monotonic()
        problem: str | None = "the consumer ended before all weights had arrived"
        try:
            while True:
                bucket, memory = await self._landed(arrivals, number)
                total += bucket.nbytes
                for name, tensor in merging.take(memory, bucket.list_offset):
                    yield name, tensor
                if bucket.last and merging.missing():
                    raise StreamError(f"{self._sender} did not send all of {merging.missing()}")
                if self._config.device.type == "cuda":
                    # The consumer may have copies in flight, on any stream.
                    torch.cuda.synchronize(self._config.device)
                taken = arrivals.send(self._peer, Taken(number))
                number += 1
                if bucket.last:
                    break
            problem = None
            arrivals.open[taken] = self._peer
            # The sender may leave as soon as it knows that all buckets are taken.
            with suppress(StreamError):
                await arrivals.until(lambda: not arrivals.open, lambda: "the sender did not receive the end")
        except Exception as error:
            problem = _reason_of(error)
            raise
        finally:
            if problem is not None:
                self._report(problem)
            arrivals.close()
        logger.info(
            "weights: %s received %.2f GB in %d buckets from %s in %.2f s",
            self._config.name,
            total / 1e9,
            number,
            self._sender,
            time.monotonic() - began,
        )

    async def _landed(self, arrivals: _Arrivals, number: int) -> tuple[Bucket, torch.Tensor]:
        """Waits for a bucket. Returns its message and its bytes."""
        counters = self._counters[number % _BUFFERS]
        self._engine.expect(counters, [number // _BUFFERS + 1])

        def late() -> str:
            return f"{self._sender} did not send bucket {number}"

        await arrivals.until(lambda: number in arrivals.buckets and counters in arrivals.reached, late)
        arrivals.reached.discard(counters)
        bucket = arrivals.buckets.pop(number)
        if not bucket.list_offset <= bucket.nbytes <= self._half:
            raise StreamError(f"{self._sender} sent an invalid message: {bucket}")
        return bucket, self._memory(number)[: bucket.nbytes]


def _reason_of(error: BaseException) -> str:
    """The reason for the peers."""
    return str(error) if isinstance(error, StreamError) else f"{type(error).__name__}: {error}"


async def drawn(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yields what a generator of either kind yields."""
    if isinstance(weights, AsyncIterable):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one
