"""The sentences of the data plane's contract (docs/architecture.md) as tests, over every lane."""

from __future__ import annotations

import select
import signal
import threading
import time
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kv_connector.engine import ArmedLayer, ErrorCode, Event, EventKind, PagedWrite, Pages, TransferError
from kv_connector.engine.transfer_engine import TransferEngine

from .node import LIMIT, NewPair, NewReceiver, Pair, connect


def shuffled(count: int, of: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).choice(of, count, replace=False)


def write_pages(pair: Pair, write: PagedWrite) -> int:
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.write_pages(transfer, write)
    pair.engine.seal(transfer)
    return transfer


def write_one(pair: Pair, nbytes: int = 64, immediate: int | None = None) -> Event:
    """Writes once from offset 0 to offset 0, and returns the final event."""
    transfer = pair.engine.write_one(
        pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, nbytes, immediate
    )
    return pair.engine.wait_transfer(transfer, LIMIT)


def await_values(pair: Pair, counters: int, expected: list[int]) -> None:
    """Waits for the values: the receiver's worker may count after the sender's completion."""
    deadline = time.monotonic() + LIMIT
    while (values := pair.at_receiver("counter_values", counters)) != expected:
        assert time.monotonic() < deadline, f"{values} instead of {expected}"


def await_peer_down(engine: TransferEngine, peer: int) -> Event:
    poller = select.poll()
    poller.register(engine.event_fd(), select.POLLIN)
    while True:
        assert poller.poll(LIMIT * 1000), "no event of the peer going down"
        for event in engine.poll_events(1):
            if event.kind is EventKind.PEER_DOWN:
                assert event.id == peer
                return event


# --- Writes


def test_single_writes_of_many_sizes_land_byte_for_byte(new_pair: NewPair) -> None:
    pair = new_pair(nbytes=(4 << 20) + 4096)
    pair.sender.fill(1)
    pair.receiver.call("fill", 2)
    expected = bytearray(pair.receiver.call("read"))
    sizes = [1, 2, 7, 63, 64, 65, 511, 4095, 4096, 4097, 65536, 99991, 1 << 20, (1 << 20) + 1, 4 << 20]
    for number, nbytes in enumerate(sizes):
        source, target = number * 13 % 4096, number * 29 % 4096
        counters, immediate = pair.counter(1)
        transfer = pair.engine.write_one(
            pair.to_receiver, pair.sender.region, source, pair.receiver_region, target, nbytes, immediate
        )
        pair.await_counters(counters)
        expected[target : target + nbytes] = pair.sender.read(source, nbytes)
        assert pair.receiver.call("read") == expected, f"{nbytes} bytes"
        done = pair.engine.wait_transfer(transfer, LIMIT)
        assert (done.kind, done.pages, done.nbytes) == (EventKind.TRANSFER_DONE, 1, nbytes)
        assert pair.at_receiver("counter_values", counters) == [1]


# page bytes, source stride, target stride, source offset, target offset, pages
SHAPES = [
    (1, 1, 1, 0, 0, 300),
    (1, 3, 5, 2, 1, 64),
    (7, 8, 16, 0, 3, 65),
    (64, 64, 128, 0, 0, 63),
    (100, 333, 100, 17, 5, 129),
    (4096, 4096, 4096, 0, 0, 200),
    (4096, 8192, 4096, 4096, 0, 90),
    (16384, 16384, 32768, 0, 16384, 50),
    (65536, 65537, 65536, 1, 0, 20),
    (262144, 262144, 262144, 0, 0, 7),
    (1500000, 1500000, 1500001, 0, 0, 2),
]


@pytest.mark.parametrize("memfd", [True, False], ids=["memfd", "private memory"])
def test_paged_writes_of_many_shapes_land_byte_for_byte(new_pair: NewPair, memfd: bool) -> None:
    nbytes = 4 << 20
    pair = new_pair(nbytes=nbytes, memfd=memfd)
    pair.sender.fill(3)
    pair.receiver.call("fill", 4)
    expected = bytearray(pair.receiver.call("read"))
    for seed, (page, source_stride, target_stride, source_offset, target_offset, count) in enumerate(SHAPES):
        sources = shuffled(count, (nbytes - source_offset - page) // source_stride + 1, 2 * seed)
        targets = shuffled(count, (nbytes - target_offset - page) // target_stride + 1, 2 * seed + 1)
        counters, immediate = pair.counter(count)
        transfer = write_pages(
            pair,
            PagedWrite(
                page,
                pair.sender.region,
                Pages(sources, source_stride, source_offset),
                pair.receiver_region,
                Pages(targets, target_stride, target_offset),
                immediate,
            ),
        )
        for source, target in zip(sources, targets, strict=True):
            begin = target_offset + int(target) * target_stride
            expected[begin : begin + page] = pair.sender.read(
                source_offset + int(source) * source_stride, page
            )
        pair.await_counters(counters)
        assert pair.receiver.call("read") == expected, f"pages of {page} bytes"
        done = pair.engine.wait_transfer(transfer, LIMIT)
        assert (done.kind, done.pages, done.nbytes) == (EventKind.TRANSFER_DONE, count, count * page)
        assert pair.at_receiver("counter_values", counters) == [count]


def test_both_ends_can_write(new_pair: NewPair) -> None:
    pair = new_pair(nbytes=8192)
    pair.receiver.call("fill", 5)
    counters = pair.engine.alloc_counters(1)
    pair.engine.expect(counters.id, [1])
    pair.at_receiver(
        "write_one",
        pair.to_sender,
        pair.receiver.region,
        0,
        pair.sender_region,
        4096,
        4096,
        counters.immediates[0],
    )
    pair.engine.wait_counters(counters.id, LIMIT)
    assert pair.sender.read(4096, 4096) == pair.receiver.call("read", 0, 4096)
    assert pair.sender.read(0, 4096) == bytes(4096)


def test_an_uncounted_write_raises_nothing(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(6)
    assert write_one(pair, 4096).kind is EventKind.TRANSFER_DONE
    assert pair.receiver.call("read") == pair.sender.read()
    assert pair.at_receiver("stats").immediates_received == 0


def test_an_empty_page_list_is_done_at_once(new_pair: NewPair) -> None:
    pair = new_pair()
    transfer = write_pages(
        pair, PagedWrite(64, pair.sender.region, Pages([], 64), pair.receiver_region, Pages([], 64))
    )
    done = pair.engine.wait_transfer(transfer, LIMIT)
    assert (done.kind, done.pages) == (EventKind.TRANSFER_DONE, 0)


def test_source_pages_may_be_reused_once_the_transfer_is_done(new_pair: NewPair) -> None:
    page, rounds = 16384, 48
    pair = new_pair(nbytes=page * rounds)
    expected = b""
    for number in range(rounds):
        pair.sender.memory[:page] = np.random.default_rng(number).integers(0, 256, page, dtype=np.uint8)
        expected += pair.sender.read(0, page)
        transfer = pair.engine.write_one(
            pair.to_receiver, pair.sender.region, 0, pair.receiver_region, number * page, page
        )
        assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
    assert pair.receiver.call("read") == expected


# --- Counts


@pytest.mark.parametrize(("sender_domains", "receiver_domains"), [(1, 1), (2, 2), (4, 4), (1, 3), (4, 2)])
def test_counts_are_exact(new_pair: NewPair, sender_domains: int, receiver_domains: int) -> None:
    page, targets = 1024, [700, 299, 1]
    total = sum(targets)
    pair = new_pair(page * total, sender_domains, receiver_domains)
    pair.sender.fill(9)
    counters = pair.at_receiver("alloc_counters", len(targets))
    pair.at_receiver("expect", counters.id, targets)
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pages = shuffled(total, total, 10)
    for indices, immediate in zip(np.split(pages, np.cumsum(targets)[:-1]), counters.immediates, strict=True):
        side = Pages(indices, page)
        pair.engine.write_pages(
            transfer, PagedWrite(page, pair.sender.region, side, pair.receiver_region, side, immediate)
        )
    pair.engine.seal(transfer)
    pair.await_counters(counters.id)
    assert pair.receiver.call("read") == pair.sender.read()
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == total
    assert pair.at_receiver("counter_values", counters.id) == targets
    stats = pair.at_receiver("stats")
    assert (stats.immediates_received, stats.immediates_stale) == (total, 0)


@pytest.mark.parametrize(("sender_domains", "receiver_domains"), [(1, 1), (2, 2), (3, 1), (1, 4), (2, 3)])
def test_a_large_write_counts_once_over_many_domains(
    new_pair: NewPair, sender_domains: int, receiver_domains: int
) -> None:
    nbytes = (4 << 20) + 321  # split over the links, in parts of 512 KiB and more
    pair = new_pair(2 * nbytes, sender_domains, receiver_domains)
    pair.sender.fill(12)
    counters = pair.at_receiver("alloc_counters", 1)
    pair.at_receiver("expect", counters.id, [2])
    for offset, domain in ((0, None), (nbytes, sender_domains - 1)):  # the second one is pinned
        transfer = pair.engine.write_one(
            pair.to_receiver,
            pair.sender.region,
            offset,
            pair.receiver_region,
            offset,
            nbytes,
            counters.immediates[0],
            domain=domain,
        )
        done = pair.engine.wait_transfer(transfer, LIMIT)
        assert (done.kind, done.pages, done.nbytes) == (EventKind.TRANSFER_DONE, 1, nbytes)
    pair.await_counters(counters.id)
    assert pair.receiver.call("read") == pair.sender.read()
    assert pair.at_receiver("counter_values", counters.id) == [2]
    assert pair.at_receiver("stats").immediates_received == 2


def test_an_immediate_before_expect_is_not_lost(new_pair: NewPair) -> None:
    pair = new_pair()
    counters = pair.at_receiver("alloc_counters", 2)
    for immediate in counters.immediates:
        assert write_one(pair, immediate=immediate).kind is EventKind.TRANSFER_DONE
    await_values(pair, counters.id, [1, 1])
    pair.at_receiver("expect", counters.id, [1, 1])
    pair.await_counters(counters.id)


def test_a_late_immediate_is_stale_and_never_credited_to_the_new_owner(new_pair: NewPair) -> None:
    pair = new_pair()
    old = pair.at_receiver("alloc_counters", 1)
    pair.at_receiver("release_counters", old.id)
    everything = pair.at_receiver("alloc_counters", 65536)  # the old slot has a new owner now
    assert old.immediates[0] not in everything.immediates
    write_one(pair, immediate=old.immediates[0])
    write_one(pair, immediate=everything.immediates[7])
    deadline = time.monotonic() + LIMIT
    while (stats := pair.at_receiver("stats")).immediates_received < 2:
        assert time.monotonic() < deadline
    assert stats.immediates_stale == 1
    values = pair.at_receiver("counter_values", everything.id)
    assert (sum(values), values[7]) == (1, 1)


# --- Layer signals


def test_armed_layers_are_posted_when_the_signal_passes_them(new_pair: NewPair) -> None:
    layers, page, count = 6, 512, 70
    layer_bytes = page * count
    pair = new_pair(nbytes=layers * layer_bytes)
    pair.sender.fill(12)
    counters = pair.at_receiver("alloc_counters", layers)
    pair.at_receiver("expect", counters.id, [count] * layers)
    signal_word = pair.engine.create_signal()
    signal_word.store(1)  # layer 0 is computed before anything is armed
    side = Pages(shuffled(count, count, 13), page)
    plan = [
        ArmedLayer(layer + 1, layer * layer_bytes, layer * layer_bytes, counters.immediates[layer])
        for layer in range(layers)
    ]
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.arm(
        transfer,
        signal_word,
        PagedWrite(page, pair.sender.region, side, pair.receiver_region, side),
        plan[::-1],  # any order is allowed
    )
    pair.engine.seal(transfer)
    for value, posted in [(1, 1), (2, 2), (4, 4)]:
        signal_word.store(value)
        await_values(pair, counters.id, [count] * posted + [0] * (layers - posted))
        pair.engine.quiesce(transfer, LIMIT)
        assert pair.engine.progress(transfer).pages_posted == posted * count
        assert pair.receiver.call("read", 0, posted * layer_bytes) == pair.sender.read(
            0, posted * layer_bytes
        )
    signal_word.store(100)
    pair.await_counters(counters.id)
    assert pair.receiver.call("read") == pair.sender.read()
    assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE


# --- Cancel, drain, fence


def endless(pair: Pair, page: int, immediate: int | None = None) -> int:
    """Starts a transfer that does not end within any test."""
    side = Pages(np.arange(200_000) % 16, page)
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.write_pages(
        transfer, PagedWrite(page, pair.sender.region, side, pair.receiver_region, side, immediate)
    )
    return transfer


def test_a_cancelled_transfer_drains(new_pair: NewPair) -> None:
    page = 65536
    pair = new_pair(nbytes=page * 16)
    counters = pair.at_receiver("alloc_counters", 1)
    pair.at_receiver("expect", counters.id, [100])
    transfer = endless(pair, page, counters.immediates[0])
    pair.await_counters(counters.id)  # the transfer is in flight
    pair.engine.cancel(transfer)
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert (event.kind, event.quiesced) == (EventKind.TRANSFER_CANCELLED, True)
    assert 100 <= event.pages < 200_000
    # Drained: every posted page is counted, and none follows.
    await_values(pair, counters.id, [event.pages])
    pair.receiver.call("zero")
    assert write_one(pair, 64).kind is EventKind.TRANSFER_DONE  # a round trip on every lane
    assert pair.at_receiver("counter_values", counters.id) == [event.pages]
    assert pair.receiver.call("read", 64) == bytes(page * 16 - 64)
    with pytest.raises(TransferError) as refused:
        pair.engine.cancel(transfer)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_after_fence_no_write_of_that_peer_lands(new_pair: NewPair) -> None:
    page = 65536
    pair = new_pair(nbytes=page * 16)
    pair.sender.fill(30)
    counters = pair.at_receiver("alloc_counters", 1)
    pair.at_receiver("expect", counters.id, [200])
    transfer = endless(pair, page, counters.immediates[0])
    pair.await_counters(counters.id)
    pair.at_receiver("fence", pair.to_sender, LIMIT)
    pair.receiver.call("zero")
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert event.kind is EventKind.TRANSFER_FAILED
    assert event.error is not None
    assert event.error.code is ErrorCode.PEER_DOWN
    assert pair.receiver.call("read") == bytes(page * 16)
    assert pair.at_receiver("stats").peers == 0
    # The same engines connect again.
    pair.engine.fence(pair.to_receiver, LIMIT)
    again = connect(pair.sender, pair.receiver, "receiver")
    assert write_one(again, page).kind is EventKind.TRANSFER_DONE
    assert pair.receiver.call("read", 0, page) == pair.sender.read(0, page)


# --- Errors


def test_bytes_outside_a_region_are_refused_and_nothing_is_added(new_pair: NewPair) -> None:
    pair = new_pair()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    good = Pages([0], 1024)
    for bad in [
        Pages([4], 1024),
        Pages([-1], 1024),
        Pages([-1], 0),
        Pages([3], 1024, 1),
        Pages([1], 2**64 - 1),
        Pages([0], 1, 2**64 - 1),
        Pages([2**63 - 1], 1024),
    ]:
        for source, target in [(good, bad), (bad, good)]:
            with pytest.raises(TransferError) as refused:
                pair.engine.write_pages(
                    transfer, PagedWrite(1024, pair.sender.region, source, pair.receiver_region, target)
                )
            assert refused.value.code is ErrorCode.OUT_OF_RANGE
    pair.engine.seal(transfer)
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == 0
    assert pair.receiver.call("read") == bytes(4096)


def test_a_wrong_key_fails_the_transfer_and_touches_nothing(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(20)
    descriptor = bytearray(pair.at_receiver("region_descriptor", pair.receiver.region))
    descriptor[-1] ^= 0xFF  # the last byte of the last key
    wrong = pair.engine.import_region(pair.to_receiver, bytes(descriptor))
    counters = pair.at_receiver("alloc_counters", 1)
    transfer = pair.engine.write_one(
        pair.to_receiver, pair.sender.region, 0, wrong, 0, 4096, counters.immediates[0]
    )
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert event.kind is EventKind.TRANSFER_FAILED
    assert event.error is not None
    assert event.error.peer == "receiver"
    assert event.error.provider == pair.engine.lane(pair.to_receiver)
    assert pair.at_receiver("counter_values", counters.id) == [0]
    assert pair.receiver.call("read") == bytes(4096)


def test_a_deregistered_region_is_not_written_any_more(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(21)
    pair.at_receiver("deregister_memory", pair.receiver.region, LIMIT)
    assert write_one(pair, 4096).kind is EventKind.TRANSFER_FAILED
    assert pair.receiver.call("read") == bytes(4096)


def test_killed_peer_fails_only_its_own_transfers(new_pair: NewPair, new_receiver: NewReceiver) -> None:
    page = 65536
    pair = new_pair(nbytes=page * 16)
    other = connect(pair.sender, new_receiver("other", page * 16), "other")
    busy = endless(pair, page)
    idle = pair.engine.open_transfer(pair.to_receiver)
    while pair.engine.progress(busy).pages_done < 100:
        time.sleep(0)
    pair.receiver.kill()
    down = await_peer_down(pair.engine, pair.to_receiver)
    assert down.error is not None
    assert down.error.peer == "receiver"
    for transfer in (busy, idle):
        event = pair.engine.wait_transfer(transfer, LIMIT)
        assert event.kind is EventKind.TRANSFER_FAILED
        assert event.error is not None
        assert event.error.code is ErrorCode.PEER_DOWN
    with pytest.raises(TransferError) as refused:
        pair.engine.open_transfer(pair.to_receiver)
    assert refused.value.code is ErrorCode.PEER_DOWN
    assert write_one(other, page).kind is EventKind.TRANSFER_DONE
    pair.engine.fence(pair.to_receiver, LIMIT)
    assert pair.engine.poll_events() == []  # each failure was reported once
    stats = pair.engine.stats()
    assert (stats.peers, stats.transfers_open) == (1, 0)


def test_an_idle_peer_that_is_killed_is_noticed(new_pair: NewPair) -> None:
    pair = new_pair()
    write_one(pair)  # both ends are connected
    pair.receiver.kill()
    await_peer_down(pair.engine, pair.to_receiver)


# --- Lanes and waiting


def test_both_sides_name_the_lane(new_pair: NewPair, provider: str) -> None:
    pair = new_pair()
    assert pair.engine.lane(pair.to_receiver) == provider
    assert pair.at_receiver("lane", pair.to_sender) == provider
    assert [line.split()[0] for line in pair.engine.domains()] == [provider]


def test_a_callback_gets_the_event_on_its_own_thread(new_pair: NewPair) -> None:
    pair = new_pair()
    got: list[tuple[str, Event]] = []
    called = threading.Event()

    def callback(event: Event) -> None:
        got.append((threading.current_thread().name, event))
        called.set()
        raise RuntimeError("a bad callback stops nothing")

    for _ in range(2):
        called.clear()
        transfer = pair.engine.write_one(
            pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, None, callback
        )
        assert called.wait(LIMIT)
        thread, event = got[-1]
        assert (thread, event.kind, event.id) == ("kvc-callbacks", EventKind.TRANSFER_DONE, transfer)
    assert pair.engine.poll_events() == []


def test_the_descriptor_is_readable_while_events_wait(new_pair: NewPair) -> None:
    pair = new_pair()
    poller = select.poll()
    poller.register(pair.engine.event_fd(), select.POLLIN)
    assert poller.poll(0) == []
    transfer = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64)
    assert poller.poll(LIMIT * 1000)
    assert [event.id for event in pair.engine.poll_events()] == [transfer]
    assert poller.poll(0) == []


def test_a_wait_gives_way_to_signals(new_pair: NewPair) -> None:
    pair = new_pair()
    transfer = pair.engine.open_transfer(pair.to_receiver)

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            pair.engine.wait_transfer(transfer, LIMIT)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_closing_ends_waits_and_transfers(new_pair: NewPair) -> None:
    pair = new_pair()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    counters = pair.engine.alloc_counters(1)
    waiting = threading.Event()
    errors: list[ErrorCode] = []
    ended: list[Event] = []

    def wait() -> None:
        waiting.set()
        try:
            pair.engine.wait_counters(counters.id, LIMIT)
        except TransferError as error:
            errors.append(error.code)

    pair.engine.open_transfer(pair.to_receiver, ended.append)
    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    pair.engine.close()
    thread.join(LIMIT)
    assert errors == [ErrorCode.CLOSED]
    assert [(event.kind, event.error and event.error.code) for event in ended] == [
        (EventKind.TRANSFER_FAILED, ErrorCode.CLOSED)
    ]
    with pytest.raises(TransferError) as refused:
        pair.engine.seal(transfer)
    assert refused.value.code is ErrorCode.CLOSED
