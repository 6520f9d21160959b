"""Completion words over every lane, if the machine has a GPU or the driver's stand-in."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from kv_connector.engine import Event, EventKind, TransferError
from kv_connector.engine.transfer_engine import CompletionWord

from .gpu import GpuMemory
from .node import LIMIT, NewPair, Pair


@pytest.fixture
def gpu(stand_in_driver: str | None) -> Iterator[GpuMemory]:
    memory = GpuMemory(4096, 0, stand_in_driver)
    yield memory
    memory.free()


def raise_it(pair: Pair, immediate: int) -> None:
    """Has the receiver raise the sender's counter by one."""
    pair.at_receiver(
        "write_one", pair.to_sender, pair.receiver.region, 0, pair.sender_region, 0, 64, immediate
    )


def test_a_word_has_its_value_before_the_event(gpu: GpuMemory, new_pair: NewPair) -> None:
    pair = new_pair()
    word = CompletionWord(0)
    counters = pair.engine.alloc_counters(1)
    reader = pair.engine.counter_reader(counters.id)
    pair.engine.expect(counters.id, [2], None, word, 7)
    raise_it(pair, counters.immediates[0])
    deadline = time.monotonic() + LIMIT
    while reader.value(0) < 1:
        assert time.monotonic() < deadline
    assert gpu.read_word(word.device_pointer) == 0
    raise_it(pair, counters.immediates[0])
    event = pair.engine.wait_counters(counters.id, LIMIT)
    assert (event.kind, event.error) == (EventKind.COUNTERS_REACHED, None)
    assert gpu.read_word(word.device_pointer) == 7

    # Targets that are reached already, and a callback.
    told: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
    pair.engine.expect(
        counters.id, [2], lambda event: told.put((event, gpu.read_word(word.device_pointer))), word, 8
    )
    event, value = told.get(timeout=LIMIT)
    assert (event.kind, event.error, value) == (EventKind.COUNTERS_REACHED, None, 8)
    # Targets without a word leave the word as it is.
    pair.engine.expect(counters.id, [2])
    pair.engine.wait_counters(counters.id, LIMIT)
    assert gpu.read_word(word.device_pointer) == 8


def test_a_word_in_the_gpus_memory_is_written_by_a_stream(gpu: GpuMemory, new_pair: NewPair) -> None:
    pair = new_pair()
    try:
        word = CompletionWord(0, on_gpu=True)
    except TransferError as error:
        pytest.skip(f"this GPU cannot: {error}")
    counters = pair.engine.alloc_counters(1)
    assert gpu.read_word(word.device_pointer) == 0
    pair.engine.expect(counters.id, [1], None, word, 9)
    raise_it(pair, counters.immediates[0])
    assert pair.engine.wait_counters(counters.id, LIMIT).error is None
    deadline = time.monotonic() + LIMIT
    while gpu.read_word(word.device_pointer) != 9:
        assert time.monotonic() < deadline
