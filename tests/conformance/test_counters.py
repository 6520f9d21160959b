"""Counters over every lane: expected repeatedly, polled, and raised only by the peers that they are allocated
for."""

from __future__ import annotations

import queue
import time

import pytest

from kv_connector.engine import ErrorCode, Event, EventKind, TransferError

from .node import LIMIT, NewPair, NewReceiver, Pair, connect
from .test_contract import await_peer_down, await_values


def raise_it(pair: Pair, immediate: int, offset: int = 0) -> int:
    """Has the receiver write 64 bytes to the sender, counted there on `immediate`."""
    transfer: int = pair.at_receiver(
        "write_one", pair.to_sender, pair.receiver.region, offset, pair.sender_region, offset, 64, immediate
    )
    return transfer


def test_new_targets_follow_those_that_were_reached(new_pair: NewPair) -> None:
    pair = new_pair()
    counters = pair.at_receiver("alloc_counters", 2)
    first, second = counters.immediates
    for number in range(1, 6):
        pair.at_receiver("expect", counters.id, [2 * number, number])
        transfer = pair.engine.open_transfer(pair.to_receiver)
        for immediate in (first, second, first):
            pair.engine.write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 64, immediate)
        pair.engine.seal(transfer)
        event = pair.at_receiver("wait_counters", counters.id, LIMIT)
        assert (event.kind, event.id) == (EventKind.COUNTERS_REACHED, counters.id)
        assert pair.at_receiver("counter_values", counters.id) == [2 * number, number]
        assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
    # Targets below the counts: the event comes at once, and once.
    pair.at_receiver("expect", counters.id, [10, 5])
    assert [event.id for event in pair.at_receiver("poll_events")] == [counters.id]
    assert pair.at_receiver("poll_events") == []


def test_a_callback_may_set_the_next_targets(new_pair: NewPair) -> None:
    rounds = 20
    pair = new_pair()
    counters = pair.engine.alloc_counters(1)
    seen: queue.SimpleQueue[tuple[Event, list[int]]] = queue.SimpleQueue()

    def reached(event: Event) -> None:
        (count,) = pair.engine.counter_values(counters.id)
        if count < rounds:
            pair.engine.expect(counters.id, [count + 1], reached)
        seen.put((event, [count]))

    pair.engine.expect(counters.id, [1], reached)
    for _ in range(rounds):
        raise_it(pair, counters.immediates[0])
    last = 0
    while last < rounds:
        event, (count,) = seen.get(timeout=LIMIT)
        assert (event.kind, event.id) == (EventKind.COUNTERS_REACHED, counters.id)
        assert count > last, "one event for each targets that are set"
        last = count
    assert pair.engine.poll_events() == []


def test_new_targets_are_refused_while_the_last_are_not_reached(new_pair: NewPair) -> None:
    pair = new_pair()
    counters = pair.engine.alloc_counters(2)
    pair.engine.expect(counters.id, [1, 2])
    raise_it(pair, counters.immediates[0])
    with pytest.raises(TransferError, match="not reached") as refused:
        pair.engine.expect(counters.id, [3, 3])
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    for _ in range(2):
        raise_it(pair, counters.immediates[1])
    assert pair.engine.wait_counters(counters.id, LIMIT).kind is EventKind.COUNTERS_REACHED
    assert pair.engine.counter_values(counters.id) == [1, 2]


def test_polling_a_counter_returns_the_counted_writes(new_pair: NewPair) -> None:
    pages = 32
    pair = new_pair()
    pair.receiver.call("fill", 1)
    counters = pair.engine.alloc_counters(2)
    reader = pair.engine.counter_reader(counters.id)
    assert (len(reader), reader.value(0), reader.value(1)) == (2, 0, 0)
    with pytest.raises(IndexError):
        reader.value(2)
    deadline = time.monotonic() + LIMIT
    for number in range(1, pages + 1):
        offset = (number - 1) * 64
        raise_it(pair, counters.immediates[1], offset)
        while reader.value(1) < number:
            assert time.monotonic() < deadline
        assert pair.sender.read(offset, 64) == pair.receiver.call("read", offset, 64)
    assert (reader.value(0), reader.value(1)) == (0, pages)
    pair.engine.release_counters(counters.id)
    assert reader.value(1) == 0


def test_stranger_raises_no_counter_and_loses_its_link(new_pair: NewPair, new_receiver: NewReceiver) -> None:
    pair = new_pair()
    engine = pair.engine
    other = connect(pair.sender, new_receiver("other"), "other")
    stranger = connect(pair.sender, new_receiver("stranger"), "stranger")
    mine = engine.alloc_counters(1, [pair.to_receiver])
    ours = engine.alloc_counters(1, [other.to_receiver, pair.to_receiver])

    raise_it(stranger, mine.immediates[0])
    down = await_peer_down(engine, stranger.to_receiver)
    assert down.error is not None
    assert (down.error.code, down.error.peer) == (ErrorCode.REFUSED, "stranger")
    assert engine.stats().immediates_foreign == 1
    deadline = time.monotonic() + LIMIT
    while EventKind.PEER_DOWN not in {event.kind for event in stranger.at_receiver("poll_events")}:
        assert time.monotonic() < deadline

    engine.expect(mine.id, [1])
    engine.expect(ours.id, [2])
    for raiser, counters in [(pair, mine), (pair, ours), (other, ours)]:
        raise_it(raiser, counters.immediates[0])
    engine.wait_counters(mine.id, LIMIT)
    engine.wait_counters(ours.id, LIMIT)
    assert engine.counter_values(mine.id) == [1]
    assert engine.counter_values(ours.id) == [2]
    # One of the two may not raise a counter that is allocated for the other.
    raise_it(other, mine.immediates[0])
    await_peer_down(engine, other.to_receiver)
    assert engine.counter_values(mine.id) == [1]
    assert engine.stats().peers == 3  # until they are fenced
    reached, immediate = pair.counter(1)
    engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, immediate)
    await_values(pair, reached, [1])
