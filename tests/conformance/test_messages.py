"""Small messages between engines, over every lane."""

from __future__ import annotations

import select
import threading

import pytest

from kv_connector.engine import ErrorCode, EventKind, Message, TransferError
from kv_connector.engine.transfer_engine import MAX_MESSAGE_BYTES

from .node import LIMIT, NewPair


def numbered(number: int) -> bytes:
    """Returns message `number`, whose length depends on it."""
    return number.to_bytes(4, "little") + bytes([number % 251]) * (number * 37 % (MAX_MESSAGE_BYTES - 3))


def test_messages_arrive_whole_and_once_both_ways(new_pair: NewPair) -> None:
    pair = new_pair()
    count = 100
    sends = [pair.engine.send(pair.to_receiver, numbered(number)) for number in range(count)]
    for number in range(count):
        pair.at_receiver("send", pair.to_sender, numbered(number))
    theirs = [pair.engine.wait_message(LIMIT) for _ in range(count)]
    ours = [pair.at_receiver("wait_message", LIMIT) for _ in range(count)]
    expected = sorted(numbered(number) for number in range(count))
    assert sorted(message.data for message in ours) == expected
    assert sorted(message.data for message in theirs) == expected
    assert {message.peer for message in ours} == {pair.to_sender}
    assert {message.peer for message in theirs} == {pair.to_receiver}
    for send in sends:
        assert pair.engine.wait_transfer(send, LIMIT).kind is EventKind.TRANSFER_DONE
    assert pair.at_receiver("receive") == []


@pytest.mark.parametrize("nbytes", [0, MAX_MESSAGE_BYTES + 1])
def test_a_message_has_one_byte_and_some_kilobytes_at_most(new_pair: NewPair, nbytes: int) -> None:
    pair = new_pair()
    with pytest.raises(TransferError) as refused:
        pair.engine.send(pair.to_receiver, bytes(nbytes))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def test_unread_messages_hold_their_sender_back_and_no_write(new_pair: NewPair) -> None:
    pair = new_pair(nbytes=65536)
    sent = 0

    def send_for_ever() -> None:
        nonlocal sent
        while True:
            pair.engine.send(pair.to_receiver, numbered(sent))
            sent += 1

    with pytest.raises(TransferError) as held_back:
        send_for_ever()
    assert held_back.value.code is ErrorCode.RESOURCES
    counters, immediate = pair.counter(1)
    pair.engine.write_one(pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 65536, immediate)
    pair.await_counters(counters)
    got: list[bytes] = []
    while len(got) < sent:
        got.append(pair.at_receiver("wait_message", LIMIT).data)
        got += [message.data for message in pair.at_receiver("receive", 256)]
    assert sorted(got) == sorted(numbered(number) for number in range(sent))


def test_the_descriptor_is_readable_while_a_message_waits(new_pair: NewPair) -> None:
    pair = new_pair()
    poller = select.poll()
    poller.register(pair.engine.message_fd(), select.POLLIN)
    assert poller.poll(0) == []
    pair.at_receiver("send", pair.to_sender, b"hello")
    assert poller.poll(LIMIT * 1000)
    assert pair.engine.receive() == [Message(pair.to_receiver, b"hello")]
    assert poller.poll(0) == []


def test_a_callback_gets_each_message_until_it_is_taken_back(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.at_receiver("send", pair.to_sender, b"before")
    got: list[tuple[str, Message]] = []
    all_there = threading.Semaphore(0)

    def callback(message: Message) -> None:
        got.append((threading.current_thread().name, message))
        all_there.release()
        raise RuntimeError("a bad callback stops nothing")

    pair.engine.on_message(callback)
    pair.at_receiver("send", pair.to_sender, b"after")
    for _ in range(2):
        assert all_there.acquire(timeout=LIMIT)
    assert {thread for thread, _ in got} == {"kvc-messages"}
    assert {message.data for _, message in got} == {b"before", b"after"}
    pair.engine.on_message(None)
    pair.at_receiver("send", pair.to_sender, b"to receive()")
    assert pair.engine.wait_message(LIMIT).data == b"to receive()"


def test_messages_to_a_killed_peer_fail(new_pair: NewPair) -> None:
    pair = new_pair()
    sends = [pair.engine.send(pair.to_receiver, numbered(number)) for number in range(200)]
    pair.receiver.kill()
    events = [pair.engine.wait_transfer(send, LIMIT) for send in sends]
    failed = [event for event in events if event.kind is EventKind.TRANSFER_FAILED]
    assert failed, "the receiver's share of its pool is smaller"
    assert {event.error.code for event in failed if event.error} == {ErrorCode.PEER_DOWN}
