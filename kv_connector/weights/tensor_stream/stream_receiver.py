"""StreamReceiver: a rollout worker's side of a stream of weights (stream.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import torch

from kv_connector.control.sockets import MessageSockets
from kv_connector.engine import TransferError
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import clip
from kv_connector.weights.tensor_stream.buckets import Merging, StreamError
from kv_connector.weights.tensor_stream.stream import (
    BUFFERS,
    Arrivals,
    Bucket,
    Buffers,
    Control,
    Declined,
    Hello,
    StreamEnd,
    Taken,
    Welcome,
    reason_of,
)

logger = logging.getLogger("kv_connector")


class StreamReceiver(StreamEnd):
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
            counters = [self._engine.alloc_counters(1, [peer]) for _ in range(BUFFERS)]
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
            problem = reason_of(error)
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

    async def _landed(self, arrivals: Arrivals, number: int) -> tuple[Bucket, torch.Tensor]:
        """Waits for a bucket. Returns its message and its bytes."""
        counters = self._counters[number % BUFFERS]
        self._engine.expect(counters, [number // BUFFERS + 1])

        def late() -> str:
            return f"{self._sender} did not send bucket {number}"

        await arrivals.until(lambda: number in arrivals.buckets and counters in arrivals.reached, late)
        arrivals.reached.discard(counters)
        bucket = arrivals.buckets.pop(number)
        if not bucket.list_offset <= bucket.nbytes <= self._half:
            raise StreamError(f"{self._sender} sent an invalid message: {bucket}")
        return bucket, self._memory(number)[: bucket.nbytes]
