"""StreamSender: a trainer rank's side of a stream of weights (stream.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from kv_connector.control.sockets import MessageSockets
from kv_connector.engine import TransferError
from kv_connector.protocol.actions import Source
from kv_connector.protocol.wire.messages import clip
from kv_connector.weights.memory.buffer import settle
from kv_connector.weights.tensor_stream.buckets import Filling, StreamError
from kv_connector.weights.tensor_stream.stream import (
    BUFFERS,
    Bucket,
    Buffers,
    Control,
    Declined,
    Hello,
    StreamEnd,
    Welcome,
    reason_of,
)

logger = logging.getLogger("kv_connector")

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]
"""Names and tensors."""


@dataclass
class _Receiver:
    """A receiver as its sender knows it."""

    peer: int
    region: int = -1
    immediates: tuple[int, ...] = ()
    writes: dict[int, int] = field(default_factory=dict)


class StreamSender(StreamEnd):
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
                    self._report(reason_of(error))
            if failure is None:
                await self._post(last=True)
                await self._settled(self._number)
        except BaseException as error:
            self._report(reason_of(error))
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
            immediate = to.immediates[number % BUFFERS]
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
            await self._settled(self._number - BUFFERS + 1)
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


async def drawn(weights: Weights) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yields what a generator of either kind yields."""
    if isinstance(weights, AsyncIterable):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one
