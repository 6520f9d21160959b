"""Ends that are no failures, over every lane: peers that leave, and memory that is deregistered and
registered again. Also single writes that are pinned to a domain.
"""

from __future__ import annotations

import time

import pytest

from kv_connector.engine import ErrorCode, EventKind, TransferError

from .node import LIMIT, NewPair, connect


def test_peer_disconnects_without_an_error_once_all_transfers_have_ended(new_pair: NewPair) -> None:
    pair = new_pair(sender_domains=2)
    pair.sender.fill(1)
    transfer = pair.engine.open_transfer(pair.to_receiver)
    with pytest.raises(TransferError) as still_open:
        pair.engine.disconnect(pair.to_receiver, 0.05)
    assert still_open.value.code is ErrorCode.TIMEOUT
    with pytest.raises(TransferError) as leaving:
        pair.engine.send(pair.to_receiver, b"too late")
    assert leaving.value.code is ErrorCode.PEER_DOWN
    counters, immediate = pair.counter(1)
    pair.engine.write(transfer, pair.sender.region, 0, pair.receiver_region, 0, 4096, immediate)
    pair.engine.seal(transfer)
    pair.engine.disconnect(pair.to_receiver, LIMIT)
    pair.await_counters(counters)
    assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
    deadline = time.monotonic() + LIMIT
    while not (events := pair.at_receiver("poll_events")):
        assert time.monotonic() < deadline
    assert [(event.kind, event.id, event.error) for event in events] == [
        (EventKind.PEER_LEFT, pair.to_sender, None)
    ]
    assert pair.engine.poll_events() == []
    assert (pair.engine.stats().peers, pair.at_receiver("stats").peers) == (0, 0)

    again = connect(pair.sender, pair.receiver, "receiver")
    again.engine.wait_transfer(again.engine.send(again.to_receiver, b"back again"), LIMIT)
    assert again.at_receiver("wait_message", LIMIT).data == b"back again"


def test_memory_registered_again_has_a_new_key_and_the_old_one_is_refused(new_pair: NewPair) -> None:
    pair = new_pair(sender_domains=2, receiver_domains=2)
    pair.sender.fill(2)
    old = pair.at_receiver("region_descriptor", pair.receiver.region)
    pair.at_receiver("deregister_memory", pair.receiver.region, LIMIT)
    region = pair.receiver.call("register_again")
    new = pair.at_receiver("region_descriptor", region)
    assert new != old
    fresh = pair.engine.import_region(pair.to_receiver, new)
    counters, immediate = pair.counter(1)
    transfer = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, fresh, 0, 4096, immediate)
    pair.await_counters(counters)
    assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
    assert pair.receiver.call("read", 0, 4096) == pair.sender.read(0, 4096)

    pair.receiver.call("zero")
    stale = pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 4096)
    assert pair.engine.wait_transfer(stale, LIMIT).kind is EventKind.TRANSFER_FAILED
    assert pair.receiver.call("read", 0, 4096) == bytes(4096)


def test_a_single_write_can_be_pinned_to_a_domain(new_pair: NewPair) -> None:
    nbytes = 4 << 20
    pair = new_pair(nbytes=nbytes, sender_domains=3, receiver_domains=2)
    pair.sender.fill(3)
    for domain in (None, 0, 1, 2):
        pair.receiver.call("zero")
        counters, immediate = pair.counter(1)
        transfer = pair.engine.write_one(
            pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, nbytes, immediate, domain=domain
        )
        pair.await_counters(counters)
        assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
        assert pair.receiver.call("read") == pair.sender.read()
        assert pair.at_receiver("counter_values", counters) == [1]
    with pytest.raises(TransferError, match="domain 3 of 3"):
        pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 64, domain=3)
