"""Peer groups over every lane: scatter and barrier."""

from __future__ import annotations

import pytest

from kv_connector.engine import ErrorCode, EventKind, ScatterSlice, TransferError

from .node import LIMIT, Pair
from .test_contract import await_peer_down


def test_a_scatter_gives_each_member_its_slice_and_counts_it_there(members: list[Pair]) -> None:
    sender = members[0].sender
    sender.fill(1)
    group = sender.engine.add_peer_group([pair.to_receiver for pair in members])
    counters = [pair.counter(1) for pair in members]
    slices = [
        ScatterSlice(1000 * number, pair.receiver_region, 8, 1000, counters[number][1])
        for number, pair in enumerate(members)
    ]
    event = sender.engine.wait_transfer(sender.engine.scatter(group, sender.region, slices), LIMIT)
    assert (event.kind, event.pages, event.nbytes) == (EventKind.TRANSFER_DONE, 3, 3000)
    for number, pair in enumerate(members):
        pair.await_counters(counters[number][0])
        assert pair.receiver.call("read", 8, 1000) == sender.read(1000 * number, 1000)


def test_a_barrier_raises_each_members_counter_by_one(members: list[Pair]) -> None:
    engine = members[0].engine
    group = engine.add_peer_group([pair.to_receiver for pair in members])
    rounds = 10
    counters = [pair.counter(rounds) for pair in members]
    for _ in range(rounds):
        event = engine.wait_transfer(engine.barrier(group, [immediate for _, immediate in counters]), LIMIT)
        assert event.kind is EventKind.TRANSFER_DONE
    for pair, (counter, _) in zip(members, counters, strict=True):
        pair.await_counters(counter)
        assert pair.at_receiver("counter_values", counter) == [rounds]
        assert pair.receiver.call("read") == bytes(8192)


def test_killed_member_fails_with_an_error_and_stops_no_other(members: list[Pair]) -> None:
    engine = members[0].engine
    group = engine.add_peer_group([pair.to_receiver for pair in members])
    counters = [pair.counter(1) for pair in members]
    members[1].receiver.kill()
    await_peer_down(engine, members[1].to_receiver)
    event = engine.wait_transfer(engine.barrier(group, [immediate for _, immediate in counters]), LIMIT)
    assert event.kind is EventKind.TRANSFER_FAILED
    ((peer, error),) = event.failures
    assert (peer, error.peer, error.code) == (members[1].to_receiver, "receiver-1", ErrorCode.PEER_DOWN)
    for number in (0, 2):
        members[number].await_counters(counters[number][0])


def test_a_group_of_strangers_is_refused(members: list[Pair]) -> None:
    engine = members[0].engine
    with pytest.raises(TransferError) as refused:
        engine.add_peer_group([members[0].to_receiver, 4711])
    assert refused.value.code is ErrorCode.UNKNOWN_PEER
    group = engine.add_peer_group([members[0].to_receiver])
    with pytest.raises(TransferError, match="one for each"):
        engine.barrier(group, [0, 0])
    engine.remove_peer_group(group)
    with pytest.raises(TransferError, match="no peer group"):
        engine.barrier(group, [0])
