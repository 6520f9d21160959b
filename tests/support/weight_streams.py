"""Senders and receivers of streams of weights, in threads of a test or in processes that are killed."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.actions import Address
from kv_connector.weights.tensor_stream.stream import StreamConfig, listen, sockets_of
from kv_connector.weights.tensor_stream.stream_receiver import StreamReceiver
from kv_connector.weights.tensor_stream.stream_sender import StreamSender

HOST = "127.0.0.1"
PATIENCE = 60.0
BUCKET_BYTES = 64 << 10
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
)

Named = tuple[str, torch.Tensor]
_T = TypeVar("_T")


def config(
    name: str, provider: str = "host", timeout: float = PATIENCE, nbytes: int = BUCKET_BYTES
) -> StreamConfig:
    return StreamConfig(name, HOST, torch.device("cpu"), nbytes, timeout, (provider,))


def random_tensor(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bytes, also those that are no number."""
    nbytes = math.prod(shape) * dtype.itemsize
    content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        content &= 1
    return content.view(dtype).view(shape)


def drawn(seed: int, count: int = 40) -> Iterator[Named]:
    """Yields tensors of all dtypes and of sizes from none to five buckets."""
    generator = torch.Generator().manual_seed(seed)
    yield "none", torch.empty(0, 7)
    yield "single", random_tensor(generator, torch.float32)
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        rows = int(torch.randint(1, 200, (1,), generator=generator))
        yield f"layers.{number}.weight", random_tensor(generator, dtype, rows, 37)
    yield "large", random_tensor(generator, torch.bfloat16, 5 * BUCKET_BYTES // 2, 1)
    yield "columns", random_tensor(generator, torch.float32, 30, 20).t()
    yield "another large", random_tensor(generator, torch.int8, 2, BUCKET_BYTES)
    yield "none at the end", torch.empty(3, 0, dtype=torch.bfloat16)


def same(found: Iterable[Named], expected: Iterable[Named]) -> None:
    """Asserts that both are the same, bit by bit."""
    found, expected = list(found), list(expected)
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, one), (_, other) in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert bits(one) == bits(other), name


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class InThread(threading.Thread):
    """Runs a function. result() returns its result, or raises its error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(2 * PATIENCE)
        assert not self.is_alive(), "it still runs"
        if self._error is not None:
            raise self._error
        return self._outcome


class StreamUpdate:
    """One update's sender, which connects once it sends. ``names`` of the receivers by rank."""

    def __init__(self, receivers: int, own: StreamConfig | None = None) -> None:
        self.own = own or config("trainer rank 0")
        self.names = {rank: f"rollout worker {rank}" for rank in range(receivers)}
        self.key = ClusterKey.generate()
        self._sockets, self.address = listen(HOST, self.key)

    def send(self, weights: Any) -> None:
        sender = StreamSender(self.own)
        try:
            sender.connect(self._sockets, self.names)
            asyncio.run(sender.send(weights))
        finally:
            sender.close()
            self._sockets.close()

    def receive(
        self, rank: int, own: StreamConfig | None = None, each: Callable[[str], None] | None = None
    ) -> list[Named]:
        """Receives all tensors, in the calling thread."""
        return receive(
            own or config(f"rollout worker {rank}", self.own.providers[0]), self.address, self.key, rank, each
        )


def receive(
    own: StreamConfig, address: Address, key: ClusterKey, rank: int, each: Callable[[str], None] | None = None
) -> list[Named]:
    async def collect(receiver: StreamReceiver) -> list[Named]:
        found = []
        async for name, tensor in receiver.receive():
            found.append((name, tensor.clone()))
            if each is not None:
                each(name)
        return found

    return run_receiver(own, address, key, rank, collect)


def run_receiver(
    own: StreamConfig,
    address: Address,
    key: ClusterKey,
    rank: int,
    consume: Callable[[StreamReceiver], Coroutine[Any, Any, _T]],
) -> _T:
    """Connects a receiver, runs its consumer in the calling thread, and closes it."""
    receiver, sockets = StreamReceiver(own), sockets_of(key)
    try:
        receiver.connect(sockets, address, "trainer rank 0", rank)
        return asyncio.run(consume(receiver))
    finally:
        receiver.close()
        sockets.close()


def receive_in_process(
    told: Connection, own: StreamConfig, address: Address, key: ClusterKey, rank: int, stop: str
) -> None:
    """Receives until the tensor ``stop``, reports it, and waits to be killed."""

    def each(name: str) -> None:
        if name == stop:
            told.send(name)
            threading.Event().wait()

    receive(own, address, key, rank, each)


def send_in_process(told: Connection, own: StreamConfig, receivers: int, seed: int, stop: str) -> None:
    """Sends until the tensor ``stop``, reports it, and waits to be killed."""
    update = StreamUpdate(receivers, own)
    told.send((update.address, update.key))

    def weights() -> Iterator[Named]:
        for name, tensor in drawn(seed):
            if name == stop:
                told.send(name)
                threading.Event().wait()
            yield name, tensor

    update.send(weights())
