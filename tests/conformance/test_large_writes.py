"""Writes many times larger than a link's window, and the number of links that they use, over every lane."""

from __future__ import annotations

import time

import pytest

from kv_connector.engine import ArmedSlice, Event, EventKind

from .node import LIMIT, NewPair, Pair
from .test_contract import await_values, write_one


@pytest.fixture
def large(provider: str) -> int:
    """Returns a size that is sent in parts: more than half of a link's window (DomainLimits::window_bytes).

    That is 8 MiB, and 128 MiB over nvlink.
    """
    return (96 << 20 if provider == "nvlink" else 24 << 20) + 321


def test_a_large_write_over_one_link_lands_byte_for_byte_and_counts_once(
    new_pair: NewPair, large: int
) -> None:
    pair = new_pair(nbytes=large + 64)
    pair.sender.fill(1)
    counters, immediate = pair.counter(1)
    transfer = pair.engine.write_one(
        pair.to_receiver, pair.sender.region, 64, pair.receiver_region, 3, large, immediate
    )
    pair.await_counters(counters)
    expected = bytes(3) + pair.sender.read(64, large) + bytes(61)
    assert pair.receiver.call("read") == expected
    done = pair.engine.wait_transfer(transfer, LIMIT)
    assert (done.kind, done.pages, done.nbytes) == (EventKind.TRANSFER_DONE, 1, large)
    assert pair.at_receiver("counter_values", counters) == [1]


def test_a_large_write_that_is_cancelled_drains(new_pair: NewPair, large: int) -> None:
    pair = new_pair(nbytes=large)
    counters, immediate = pair.counter(1)
    transfer = pair.engine.open_transfer(pair.to_receiver)
    for _ in range(2000):  # 50 GB and more: a cancel always hits the middle of one write
        pair.engine.write(transfer, pair.sender.region, 0, pair.receiver_region, 0, large, immediate)
    pair.await_counters(counters)
    pair.engine.cancel(transfer)
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert (event.kind, event.quiesced) == (EventKind.TRANSFER_CANCELLED, True)
    assert 1 <= event.pages < 2000
    await_values(pair, counters, [event.pages])
    pair.receiver.call("zero")
    assert write_one(pair, 64).kind is EventKind.TRANSFER_DONE  # a round trip on every lane
    assert pair.at_receiver("counter_values", counters) == [event.pages]
    assert pair.receiver.call("read", 64) == bytes(large - 64)


def test_a_small_write_ends_before_a_large_one_that_began_earlier(new_pair: NewPair, large: int) -> None:
    pair = new_pair(nbytes=large)
    pair.sender.fill(2)
    signal = pair.engine.create_signal()
    for nbytes in (large, 64):  # armed, so that both begin in one turn of the worker, the large one first
        transfer = pair.engine.open_transfer(pair.to_receiver)
        pair.engine.arm_slices(
            transfer, signal, [ArmedSlice(1, pair.sender.region, 0, pair.receiver_region, 0, nbytes)]
        )
        pair.engine.seal(transfer)
    pair.engine.quiesce(transfer, LIMIT)  # the worker has both: otherwise it may begin the large one alone
    signal.store(1)
    ended: list[Event] = []
    deadline = time.monotonic() + LIMIT
    while len(ended) < 2:
        ended += pair.engine.poll_events()
        assert time.monotonic() < deadline
    assert [(event.kind, event.nbytes) for event in ended] == [
        (EventKind.TRANSFER_DONE, 64),
        (EventKind.TRANSFER_DONE, large),
    ]
    assert pair.receiver.call("read") == pair.sender.read()


# --- Links on first use


def await_links(pair: Pair, links: int) -> None:
    deadline = time.monotonic() + LIMIT
    while (found := (pair.engine.stats().links, pair.at_receiver("stats").links)) != (links, links):
        assert time.monotonic() < deadline, f"{found} links instead of {links}"


@pytest.mark.parametrize(("sender_domains", "receiver_domains"), [(2, 2), (1, 3)])
def test_a_peer_has_one_link_until_there_is_something_to_write(
    new_pair: NewPair, sender_domains: int, receiver_domains: int
) -> None:
    nbytes = 4 << 20  # enough for all links
    pair = new_pair(nbytes, sender_domains, receiver_domains)
    pair.sender.fill(3)
    for _ in range(100):  # longer than making a link takes
        pair.at_receiver("send", pair.to_sender, b"hello")
        pair.engine.wait_message(LIMIT)
        pair.engine.send(pair.to_receiver, b"hello")
        pair.at_receiver("wait_message", LIMIT)
    assert (pair.engine.stats().links, pair.at_receiver("stats").links) == (1, 1)
    counters, immediate = pair.counter(2)
    for _ in range(2):  # over the existing link, then over all
        pair.receiver.call("zero")
        transfer = pair.engine.write_one(
            pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, nbytes, immediate
        )
        assert pair.engine.wait_transfer(transfer, LIMIT).kind is EventKind.TRANSFER_DONE
        assert pair.receiver.call("read") == pair.sender.read()
        await_links(pair, max(sender_domains, receiver_domains))
    pair.await_counters(counters)
    assert pair.at_receiver("counter_values", counters) == [2]
    assert pair.engine.stats().links_lost == 0
