"""Prepared scatters over every lane: checked once, submitted with other lengths and offsets."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from kv_connector.engine import ErrorCode, Event, EventKind, PreparedSlice, ScatterUpdate, TransferError

from .node import LIMIT, Pair
from .test_contract import await_peer_down, await_values

SLICE = 1000  # bytes prepared for each slice; each member has two slices


class Prepared:
    """A prepared scatter. Of member i's slices 2 * i and 2 * i + 1, only the first is counted, on a counter
    per member."""

    def __init__(self, members: list[Pair]) -> None:
        self.members = members
        self.sender = members[0].sender
        self.engine = self.sender.engine
        self.sender.fill(1)
        self.counters = [pair.at_receiver("alloc_counters", 1) for pair in members]
        self.group = self.engine.add_peer_group([pair.to_receiver for pair in members])
        self.slices = [
            PreparedSlice(
                number // 2,
                self.sender.region,
                SLICE * number,
                members[number // 2].receiver_region,
                SLICE * number,
                SLICE,
                None if number % 2 else self.counters[number // 2].immediates[0],
            )
            for number in range(2 * len(members))
        ]
        self.scatter = self.engine.prepare_scatter(self.group, self.slices)
        self.expected = [bytearray(8192) for _ in members]

    def submit(self, updates: list[ScatterUpdate]) -> Event:
        """Submits the scatter, waits for its end, and records it."""
        event = self.engine.wait_transfer(self.engine.submit_scatter(self.scatter, updates), LIMIT)
        for number, (source, target, nbytes) in enumerate(updates):
            begin = SLICE * number + target
            self.expected[number // 2][begin : begin + nbytes] = self.sender.read(
                SLICE * number + source, nbytes
            )
        return event

    def check(self, number: int, count: int) -> None:
        pair = self.members[number]
        await_values(pair, self.counters[number].id, [count])
        assert pair.receiver.call("read") == self.expected[number], f"member {number}"


@pytest.fixture
def prepared(members: list[Pair]) -> Prepared:
    return Prepared(members)


def test_each_submission_has_its_own_lengths_and_offsets(prepared: Prepared) -> None:
    random = np.random.default_rng(2)
    rounds = 10
    for _ in range(rounds):
        updates = []
        for _ in prepared.slices:
            nbytes = int(random.integers(1, SLICE + 1))
            source, target = random.integers(0, SLICE - nbytes + 1, 2)
            updates.append(ScatterUpdate(int(source), int(target), nbytes))
        event = prepared.submit(updates)
        assert (event.kind, event.pages, event.failures) == (EventKind.TRANSFER_DONE, 6, ())
        assert event.nbytes == sum(update.nbytes for update in updates)
    for number in range(3):
        prepared.check(number, rounds)
    assert prepared.engine.poll_events() == []


def test_no_bytes_are_an_immediate_alone_or_nothing(prepared: Prepared) -> None:
    updates = [ScatterUpdate()] * 6
    updates[3] = ScatterUpdate(0, 0, SLICE)  # the uncounted one of member 1
    assert prepared.submit(updates).nbytes == SLICE
    assert prepared.submit([ScatterUpdate()] * 6).nbytes == 0
    for number in range(3):
        prepared.check(number, 2)


def test_unprepared_scatter_is_refused_and_sends_nothing(prepared: Prepared) -> None:
    good = ScatterUpdate(0, 0, 1)
    largest = 2**64 - 1
    for bad in [
        (0, 0, SLICE + 1),
        (1, 0, SLICE),
        (0, 1, SLICE),
        (SLICE + 1, 0, 0),
        (largest, 0, 1),
        (0, largest, 1),
        (1, 1, largest),
    ]:
        with pytest.raises(TransferError) as refused:
            prepared.engine.submit_scatter(prepared.scatter, [good] * 5 + [ScatterUpdate(*bad)])
        assert refused.value.code is ErrorCode.OUT_OF_RANGE
        assert refused.value.peer == "receiver-2"
    with pytest.raises(TransferError, match="one for each"):
        prepared.engine.submit_scatter(prepared.scatter, [good] * 5)
    first, last = prepared.slices[0], prepared.slices[-1]
    for wrong, code in [
        ([last, first], ErrorCode.INVALID_ARGUMENT),  # not in the order of the members
        ([PreparedSlice(3)], ErrorCode.INVALID_ARGUMENT),  # one of three
        ([PreparedSlice(0, first.source, 8000, first.target, 0, 193)], ErrorCode.OUT_OF_RANGE),
        ([PreparedSlice(0, first.source, 0, first.target, 8000, 193)], ErrorCode.OUT_OF_RANGE),
        ([PreparedSlice(0, first.source, 0, last.target, 0, 1)], ErrorCode.INVALID_ARGUMENT),  # wrong peer
        ([PreparedSlice(0, 4711, 0, first.target, 0, 1)], ErrorCode.UNKNOWN_REGION),
    ]:
        with pytest.raises(TransferError) as refused:
            prepared.engine.prepare_scatter(prepared.group, wrong)
        assert refused.value.code is code
    assert prepared.engine.stats().batches_posted == 0
    # A correct submit after the failed ones arrives, and only this one.
    prepared.submit([good] * 6)
    for number in range(3):
        prepared.check(number, 1)


def test_the_callback_gets_each_submissions_event_until_it_is_released(prepared: Prepared) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    scatter = prepared.engine.prepare_scatter(prepared.group, prepared.slices, events.put)
    updates = np.zeros((6, 3), np.uint64)  # rows are accepted as well
    ids = [prepared.engine.submit_scatter(scatter, updates) for _ in range(8)]
    got = [events.get(timeout=LIMIT) for _ in ids]
    assert sorted(event.id for event in got) == ids
    assert {event.kind for event in got} == {EventKind.TRANSFER_DONE}
    for number in range(3):
        prepared.check(number, 8)
    prepared.engine.release_scatter(scatter)
    with pytest.raises(TransferError, match="no prepared scatter") as refused:
        prepared.engine.submit_scatter(scatter, updates)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(TransferError, match="no prepared scatter"):
        prepared.engine.release_scatter(scatter)
    assert events.empty()


def test_a_submission_in_flight_ends_though_its_scatter_is_released(prepared: Prepared) -> None:
    for _ in range(20):
        scatter = prepared.engine.prepare_scatter(prepared.group, prepared.slices)
        submitted = prepared.engine.submit_scatter(scatter, [ScatterUpdate(0, 0, SLICE)] * 6)
        prepared.engine.release_scatter(scatter)
        assert prepared.engine.wait_transfer(submitted, LIMIT).kind is EventKind.TRANSFER_DONE


def test_a_killed_member_fails_each_submission_and_stops_no_other(prepared: Prepared) -> None:
    lost = prepared.members[1]
    lost.receiver.kill()
    await_peer_down(prepared.engine, lost.to_receiver)
    for count in (1, 2):  # before and after the fence
        event = prepared.submit([ScatterUpdate(count, 0, SLICE - count)] * 6)
        assert event.kind is EventKind.TRANSFER_FAILED
        ((peer, error),) = event.failures
        assert (peer, error.peer, error.code) == (lost.to_receiver, "receiver-1", ErrorCode.PEER_DOWN)
        assert event.pages == 4
        for number in (0, 2):
            prepared.check(number, count)
        if count == 1:
            prepared.engine.fence(lost.to_receiver, LIMIT)
