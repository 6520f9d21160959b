"""Streams of weights between threads and processes, over host and tcp: contents, order and deaths."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from weight_streams import (
    BUCKET_BYTES,
    PATIENCE,
    InThread,
    Named,
    StreamUpdate,
    config,
    drawn,
    receive_in_process,
    run_receiver,
    same,
    send_in_process,
)
from weight_trainer import FORKSERVER

from kv_connector.weights.tensor_stream.buckets import StreamError
from kv_connector.weights.tensor_stream.stream import sockets_of
from kv_connector.weights.tensor_stream.stream_receiver import StreamReceiver


@pytest.mark.parametrize("provider", ["host", "tcp"])
def test_receivers_get_all_tensors_bit_by_bit_in_several_updates(provider: str) -> None:
    for seed in range(3):
        update = StreamUpdate(2, config("trainer rank 0", provider))
        receivers = [InThread(partial(update.receive, rank)) for rank in range(2)]
        update.send(drawn(seed))
        for receiver in receivers:
            same(receiver.result(), drawn(seed))


def test_a_stream_without_tensors_ends() -> None:
    update = StreamUpdate(1)
    receiver = InThread(lambda: update.receive(0))
    update.send([])
    assert receiver.result() == []


def test_small_tensors_are_views_of_the_buffer_and_large_ones_own_their_memory() -> None:
    """verl's consumers copy a tensor before they draw the next one if, and only if, it is a view."""
    update = StreamUpdate(1)
    views = {}
    small, large = torch.ones(8), torch.ones(BUCKET_BYTES)

    async def look(receiver: StreamReceiver) -> None:
        async for name, tensor in receiver.receive():
            views[name] = tensor._base is not None

    running = InThread(lambda: run_receiver(config("rollout worker 0"), update.address, update.key, 0, look))
    update.send([("small", small), ("large", large)])
    running.result()
    assert views == {"small": True, "large": False}


def test_the_sender_is_at_most_two_buckets_ahead() -> None:
    """A buffer that the consumer still reads is not written."""
    update = StreamUpdate(1)
    sent: list[int] = []
    ahead: list[int] = []

    def weights() -> Iterator[Named]:
        for number in range(12):  # each fills most of a bucket
            sent.append(number)
            yield str(number), torch.full((BUCKET_BYTES - 4096,), number, dtype=torch.uint8)

    receiver = InThread(lambda: update.receive(0, each=lambda name: ahead.append(len(sent) - int(name))))
    update.send(weights())
    found = receiver.result()
    assert all(bool((tensor == int(name)).all()) for name, tensor in found)
    # Of those ahead, two are in the buffers, one waits for a buffer, and one may be drawn meanwhile.
    assert max(ahead) <= 4


def test_a_receiver_may_leave_once_it_has_taken_all() -> None:
    update = StreamUpdate(2)
    left = threading.Event()

    def each(name: str) -> None:
        if name == "none at the end":
            assert left.wait(PATIENCE)

    receivers = [InThread(partial(update.receive, 0)), InThread(partial(update.receive, 1, each=each))]
    sender = InThread(partial(update.send, drawn(2)))
    same(receivers[0].result(), drawn(2))
    left.set()
    same(receivers[1].result(), drawn(2))
    sender.result()


def test_a_killed_sender_ends_the_wait_of_its_receivers_by_name() -> None:
    ours, theirs = FORKSERVER.Pipe()
    arguments = (theirs, config("trainer rank 0", "tcp"), 1, 7, "layers.30.weight")
    sender = FORKSERVER.Process(target=send_in_process, args=arguments, daemon=True)
    sender.start()
    address, key = answer(ours)
    update = SimpleUpdate(address, key)
    receiver = InThread(lambda: update.receive(0))
    assert answer(ours) == "layers.30.weight"
    assert sender.pid is not None
    os.kill(sender.pid, signal.SIGKILL)
    with pytest.raises(StreamError, match=r"trainer rank 0 is lost: PEER_DOWN"):
        receiver.result()
    sender.join()


@pytest.mark.parametrize("provider", ["host", "tcp"])
def test_a_killed_receiver_is_named_to_the_sender_and_to_other_receivers(provider: str) -> None:
    update = StreamUpdate(2, config("trainer rank 0", provider))
    ours, theirs = FORKSERVER.Pipe()
    own = config("rollout worker 1", provider)
    arguments = (theirs, own, update.address, update.key, 1, "layers.5.weight")
    killed = FORKSERVER.Process(target=receive_in_process, args=arguments, daemon=True)
    killed.start()
    drawn_names: list[str] = []

    def weights() -> Iterator[Named]:
        for name, tensor in drawn(3):
            drawn_names.append(name)
            yield name, tensor

    sender = InThread(lambda: update.send(weights()))
    other = InThread(lambda: update.receive(0))
    assert answer(ours) == "layers.5.weight"
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(StreamError, match=r"^rollout worker 1 is lost: "):
        sender.result()
    with pytest.raises(StreamError, match=r"^trainer rank 0 ended the update: rollout worker 1 is lost: "):
        other.result()
    # The other ranks of the trainer wait for this one in each tensor's collective.
    assert drawn_names == [name for name, _ in drawn(3)]
    killed.join()


def test_an_error_of_the_weights_reaches_the_receivers() -> None:
    update = StreamUpdate(1)

    def weights() -> Iterator[Named]:
        yield from itertools.islice(drawn(1), 5)
        raise ZeroDivisionError("the optimiser's own words")

    receiver = InThread(lambda: update.receive(0))
    with pytest.raises(ZeroDivisionError):
        update.send(weights())
    with pytest.raises(StreamError, match="ended the update: ZeroDivisionError: the optimiser's own words"):
        receiver.result()


def test_a_consumer_that_fails_ends_the_update() -> None:
    update = StreamUpdate(1)

    async def fail(receiver: StreamReceiver) -> None:
        weights = receiver.receive()
        async for name, _ in weights:
            if name == "layers.3.weight":
                await weights.aclose()
                return

    running = InThread(lambda: run_receiver(config("rollout worker 0"), update.address, update.key, 0, fail))
    with pytest.raises(StreamError, match="rollout worker 0 ended the update: the consumer ended before"):
        update.send(drawn(1))
    running.result()


def test_a_tensor_that_cannot_be_sent_ends_the_update_once_all_are_drawn() -> None:
    """The other ranks of the trainer wait for this rank in each tensor's collective."""
    update = StreamUpdate(1)
    names: list[str] = []

    def weights() -> Iterator[Named]:
        for name in ("before", "sparse", "after"):
            names.append(name)
            yield name, torch.eye(3).to_sparse() if name == "sparse" else torch.eye(3)

    receiver = InThread(lambda: update.receive(0))
    with pytest.raises(RuntimeError) as raised:
        update.send(weights())
    assert not isinstance(raised.value, StreamError)
    assert names == ["before", "sparse", "after"]
    with pytest.raises(StreamError, match=f"ended the update: {type(raised.value).__name__}: "):
        receiver.result()


def test_an_abandoned_update_does_not_disturb_the_next_in_the_same_loop() -> None:
    """A consumer's error keeps the generator. The next update's engine gets the same descriptors."""
    abandoned, later = StreamUpdate(1), StreamUpdate(1)

    async def receive() -> list[Named]:
        receiver, sockets = StreamReceiver(config("rollout worker 0")), sockets_of(abandoned.key)
        receiver.connect(sockets, abandoned.address, "trainer rank 0", 0)
        kept = receiver.receive()
        await anext(kept)
        receiver.close()
        sockets.close()
        receiver, sockets = StreamReceiver(config("rollout worker 0")), sockets_of(later.key)
        receiver.connect(sockets, later.address, "trainer rank 0", 0)
        found = []
        async for name, tensor in receiver.receive():
            found.append((name, tensor.clone()))
            await kept.aclose()
        receiver.close()
        sockets.close()
        return found

    running = InThread(lambda: asyncio.run(receive()))
    with pytest.raises(StreamError, match="rollout worker 0"):
        abandoned.send(drawn(1))
    later.send(drawn(2))
    same(running.result(), drawn(2))


def test_a_receiver_that_takes_nothing_is_named_after_the_timeout() -> None:
    update = StreamUpdate(1, config("trainer rank 0", timeout=0.5))
    stopped, go_on = threading.Event(), threading.Event()

    def each(name: str) -> None:
        stopped.set()
        go_on.wait(PATIENCE)

    receiver = InThread(lambda: update.receive(0, each=each))
    with pytest.raises(StreamError, match=r"rollout worker 0 did not take bucket \d+ within 0.5 s"):
        update.send(drawn(1))
    assert stopped.is_set()
    go_on.set()
    with pytest.raises(StreamError, match="trainer rank 0 ended the update: rollout worker 0 did not take"):
        receiver.result()


def test_a_sender_that_sends_nothing_is_named_after_the_timeout() -> None:
    update = StreamUpdate(1)
    go_on = threading.Event()

    def weights() -> Iterator[Named]:
        go_on.wait(PATIENCE)
        yield from ()

    sender = InThread(lambda: update.send(weights()))
    with pytest.raises(StreamError, match=r"trainer rank 0 did not send bucket 0 within 0.5 s"):
        update.receive(0, config("rollout worker 0", timeout=0.5))
    go_on.set()
    with pytest.raises(StreamError, match="rollout worker 0 ended the update: trainer rank 0 did not send"):
        sender.result()


def test_a_missing_receiver_is_named_after_the_timeout() -> None:
    update = StreamUpdate(2, config("trainer rank 0", timeout=0.5))
    with pytest.raises(StreamError, match=r"rollout worker 0, rollout worker 1 did not connect within 0.5 s"):
        update.send([])


def test_a_stranger_is_refused() -> None:
    update = StreamUpdate(1)
    sender = InThread(lambda: update.send(drawn(1)))
    with pytest.raises(StreamError, match="trainer rank 0 refused the connection: it is not awaited"):
        update.receive(5)
    receiver = InThread(lambda: update.receive(0))
    sender.result()
    same(receiver.result(), drawn(1))


def test_buckets_of_two_sizes_are_refused() -> None:
    update = StreamUpdate(1)
    sender = InThread(lambda: update.send(drawn(1)))
    receiver = InThread(lambda: update.receive(0, config("rollout worker 0", nbytes=2 * BUCKET_BYTES)))
    with pytest.raises(StreamError, match="rollout worker 0: its buckets have 131072 bytes instead of 65536"):
        sender.result()
    with pytest.raises(StreamError, match="trainer rank 0"):
        receiver.result()


def answer(told: Any) -> Any:
    assert told.poll(PATIENCE), "the process does not answer"
    return told.recv()


class SimpleUpdate(StreamUpdate):
    """An update whose sender is in another process."""

    def __init__(self, address: Any, key: Any) -> None:
        self.address, self.key = address, key
        self.own = config("trainer rank 0", "tcp")
