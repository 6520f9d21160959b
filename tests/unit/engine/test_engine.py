"""The Python interface itself: argument checks, errors, lifetimes. tests/conformance has the behaviour of
engines."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kv_connector.engine import (
    DomainConfig,
    EngineConfig,
    ErrorCode,
    Event,
    Message,
    PagedWrite,
    Pages,
    TransferError,
)
from kv_connector.engine.transfer_engine import CompletionWord, SharedMemory, TransferEngine, providers

LIMIT = 30.0


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(EngineConfig("engine", [DomainConfig("sim")])) as engine:
        yield engine


def loopback(engine: TransferEngine, memory: SharedMemory) -> tuple[int, int, int]:
    """The transfer engine as its own peer: (peer, region, the same region imported)."""
    region = engine.register_buffer(memory)
    offer = engine.offer("itself")
    engine.complete(offer.peer, engine.accept("itself", offer.data).data)
    return offer.peer, region, engine.import_region(offer.peer, engine.region_descriptor(region))


def test_a_completion_word_on_no_gpu_is_an_error() -> None:
    with pytest.raises(TransferError):
        CompletionWord(1_000_000)


def test_providers_are_listed_fastest_first_with_a_reason_where_unusable() -> None:
    found = providers()
    assert [status.name for status in found] == [
        "nvlink",
        "host",
        "verbs",
        "libfabric",
        "tcp",
        "bounce",
        "sim",
        "shuffle",
    ]
    assert all(status.usable is not bool(status.reason) for status in found)


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TransferError, match="carrier-pigeon") as refused:
        TransferEngine(EngineConfig("engine", [DomainConfig("carrier-pigeon")]))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert "nvlink, host, verbs, libfabric, tcp, bounce, sim" in str(refused.value)


def test_fallback_names_what_was_left_out() -> None:
    config = EngineConfig(
        "engine", [DomainConfig("carrier-pigeon"), DomainConfig("sim")], allow_fallback=True
    )
    with TransferEngine(config) as engine:
        (reason,) = engine.unusable()
        assert "carrier-pigeon" in reason
        assert engine.domains() == ["sim default"]


def test_an_error_reads_as_one_line_and_survives_pickling() -> None:
    error = TransferError(ErrorCode.PEER_DOWN, "tcp", "decode-0", "write_pages", "connection reset by peer")
    assert str(error) == "PEER_DOWN in write_pages over tcp to decode-0: connection reset by peer"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.code) == (str(error), error.code)


def test_page_indices_may_be_any_integers_but_nothing_else(engine: TransferEngine) -> None:
    memory = SharedMemory("test", 4096)
    view = np.frombuffer(memoryview(memory), dtype=np.uint8)
    view[:64] = 7
    peer, region, remote = loopback(engine, memory)
    transfer = engine.open_transfer(peer)
    indices: Any
    for number, indices in enumerate(
        [[0], (0,), range(1), np.zeros(1, np.int32), np.zeros(1, np.uint64), np.array([0, 9])[::2]], start=1
    ):
        engine.write_pages(
            transfer, PagedWrite(64, region, Pages([0], 64), remote, Pages(indices, 64, number * 64))
        )
    engine.seal(transfer)
    assert engine.wait_transfer(transfer, LIMIT).pages == 6
    assert view[: 7 * 64].tolist() == [7] * 7 * 64
    transfer = engine.open_transfer(peer)
    bad: Any
    for bad in [[0.0], np.array([0.5]), ["0"], [None]]:
        with pytest.raises(TypeError):
            engine.write_pages(transfer, PagedWrite(64, region, Pages(bad, 64), remote, Pages([0], 64)))
    too_large = np.array([2**63], np.uint64)
    with pytest.raises(TransferError, match="OUT_OF_RANGE"):
        engine.write_pages(transfer, PagedWrite(64, region, Pages(too_large, 64), remote, Pages([0], 64)))
    engine.seal(transfer)
    assert engine.wait_transfer(transfer, LIMIT).pages == 0


def test_buffers_of_many_kinds_can_be_registered(engine: TransferEngine) -> None:
    buffers: list[Any] = [
        SharedMemory("test", 100),
        bytearray(100),
        memoryview(bytearray(100)),
        np.zeros((4, 25), np.float32),
    ]
    for buffer in buffers:
        engine.deregister_memory(engine.register_buffer(buffer), LIMIT)
    assert engine.stats().regions == 0


def test_a_read_only_buffer_is_refused(engine: TransferEngine) -> None:
    with pytest.raises(ValueError, match="read-only"):
        engine.register_buffer(memoryview(b"constant"))


def test_a_bad_timeout_is_refused(engine: TransferEngine) -> None:
    for timeout in (-1.0, float("nan")):
        with pytest.raises(TransferError, match="timeout"):
            engine.wait_transfer(1, timeout)


def test_a_callback_whose_call_fails_is_forgotten(engine: TransferEngine) -> None:
    events: list[Event] = []
    with pytest.raises(TransferError, match="UNKNOWN_PEER"):
        engine.open_transfer(4711, events.append)
    counters = engine.alloc_counters(1)
    with pytest.raises(TransferError, match="INVALID_ARGUMENT"):
        engine.expect(counters.id, [1, 2], events.append)
    engine.close()
    assert events == []


def test_a_slow_callback_does_not_hold_the_worker(engine: TransferEngine) -> None:
    memory = SharedMemory("test", 4096)
    peer, region, remote = loopback(engine, memory)
    release, entered = threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        entered.set()
        release.wait(LIMIT)

    engine.write_one(peer, region, 0, remote, 64, 64, None, slow)
    assert entered.wait(LIMIT)
    transfer = engine.write_one(peer, region, 0, remote, 64, 64)
    assert engine.wait_transfer(transfer, LIMIT).pages == 1
    release.set()


def test_shared_memory_starts_at_zero_and_is_writable() -> None:
    memory = SharedMemory("test", 5000)
    assert (memory.nbytes, bytes(memory)) == (5000, bytes(5000))
    view = memoryview(memory)
    view[4999] = 1
    assert np.frombuffer(memoryview(memory), np.uint8)[4999] == 1
    with pytest.raises(TransferError, match="0 bytes"):
        SharedMemory("test", 0)


def test_closed_engine_raises_an_error(engine: TransferEngine) -> None:
    signal = engine.create_signal()
    engine.close()
    engine.close()
    with pytest.raises(TransferError, match="closed") as refused:
        engine.stats()
    assert refused.value.code is ErrorCode.CLOSED
    signal.store(1)  # outlives its engine
    assert signal.load() == 1


def test_a_message_callback_may_take_itself_back_and_the_next_one_goes_on(engine: TransferEngine) -> None:
    peer, _, _ = loopback(engine, SharedMemory("test", 4096))
    got: list[bytes] = []
    first = threading.Event()

    def once(message: Message) -> None:
        got.append(message.data)
        engine.on_message(None)  # from within the callback: this message is its last one
        first.set()

    engine.on_message(once)
    engine.send(peer, b"one")
    assert first.wait(LIMIT)
    engine.send(peer, b"two")
    assert engine.wait_message(LIMIT).data == b"two"
    assert got == [b"one"]
    engine.on_message(lambda message: got.append(message.data))
    engine.close()  # with another callback in place


def test_messages_are_anything_like_bytes(engine: TransferEngine) -> None:
    peer, _, _ = loopback(engine, SharedMemory("test", 4096))
    for data in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]):
        engine.send(peer, data)
        assert engine.wait_message(LIMIT).data == b"abc"


class Hanging(TransferEngine):
    """If its GPU hangs, the engine closes with an error."""

    def close(self) -> None:
        super().close()
        raise TransferError(ErrorCode.TIMEOUT, "nvlink", "", "close", "its GPU hangs")


def test_the_error_that_ended_a_block_is_not_replaced_by_that_of_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig("engine", [DomainConfig("sim")])
    with pytest.raises(KeyError, match="first"), Hanging(config):
        raise KeyError("first")
    assert "engine: the transfer engine is closed, but not cleanly" in caplog.text
    with pytest.raises(TransferError, match="its GPU hangs"), Hanging(config):
        pass
