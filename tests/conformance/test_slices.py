"""Armed slices over every lane: written as a signal passes them, for a sender that packs as it goes."""

from __future__ import annotations

import pytest

from kv_connector.engine import ArmedSlice, ErrorCode, EventKind, TransferError

from .node import LIMIT, NewPair
from .test_contract import await_peer_down, await_values

MOST = 65536  # slices of a transfer that may wait or be in flight: kMaxArmedSlices


def test_slices_of_several_regions_are_written_as_the_signal_passes_them(new_pair: NewPair) -> None:
    rounds, nbytes = 5, 700
    pair = new_pair(nbytes=65536)
    pair.sender.fill(1)
    # Four separate regions on each side.
    offsets = [16384 * number for number in range(4)]
    ours = pair.sender.register_parts(offsets, 8192)
    theirs = pair.engine.import_regions(
        pair.to_receiver,
        pair.at_receiver("region_descriptor", pair.receiver.call("register_parts", offsets, 8192)),
    )
    counters = pair.at_receiver("alloc_counters", 2)
    expected = bytearray(65536)
    slices = []
    for value in range(1, rounds + 1):
        for number in range(4):
            source, target = 1000 * value + number, 100 * number + 900 * value
            slices.append(
                ArmedSlice(
                    value,
                    ours[number],
                    source,
                    theirs[3 - number],
                    target,
                    nbytes + value,
                    counters.immediates[number] if number < 2 else None,
                )
            )
            begin = offsets[3 - number] + target
            expected[begin : begin + nbytes + value] = pair.sender.read(
                offsets[number] + source, nbytes + value
            )
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.arm_slices(transfer, signal, slices[::-1])  # any order is allowed
    for value in (1, 3):
        signal.store(value)
        pair.engine.wait_drained(transfer, value, LIMIT)
        assert pair.engine.progress(transfer).pages_done == 4 * value
        await_values(pair, counters.id, [value, value])
        with pytest.raises(TransferError) as armed:
            pair.engine.wait_drained(transfer, value + 1, 0.01)
        assert armed.value.code is ErrorCode.TIMEOUT
    signal.store(rounds + 1)
    pair.engine.seal(transfer)
    done = pair.engine.wait_transfer(transfer, LIMIT)
    assert (done.kind, done.pages) == (EventKind.TRANSFER_DONE, 4 * rounds)
    await_values(pair, counters.id, [rounds, rounds])
    assert pair.receiver.call("read") == expected


def test_source_bytes_may_be_packed_anew_once_they_are_drained(new_pair: NewPair) -> None:
    rounds, nbytes = 32, 30000
    pair = new_pair(nbytes=rounds * nbytes)
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    expected = b""
    for value in range(1, rounds + 1):
        pair.engine.arm_slices(
            transfer,
            signal,
            [ArmedSlice(value, pair.sender.region, 0, pair.receiver_region, (value - 1) * nbytes, nbytes)],
        )
        pair.sender.memory[:nbytes] = value
        expected += bytes([value]) * nbytes
        signal.store(value)
        pair.engine.wait_drained(transfer, value, LIMIT)
    pair.sender.zero()
    pair.engine.seal(transfer)
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == rounds
    assert pair.receiver.call("read") == expected


def test_a_transfer_takes_so_many_slices_and_more_once_some_are_drained(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(2)
    counters, immediate = pair.counter(2)
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)

    def armed(value: int) -> ArmedSlice:
        return ArmedSlice(value, pair.sender.region, 0, pair.receiver_region, 0, 16, immediate)

    pair.engine.arm_slices(transfer, signal, [armed(1), *([armed(2)] * (MOST - 1))])
    for _ in range(2):
        with pytest.raises(TransferError, match="wait_drained") as refused:
            pair.engine.arm_slices(transfer, signal, [armed(3)])
        assert refused.value.code is ErrorCode.RESOURCES
    signal.store(1)
    pair.engine.wait_drained(transfer, 1, LIMIT)
    pair.engine.arm_slices(transfer, signal, [armed(3)])
    with pytest.raises(TransferError):
        pair.engine.arm_slices(transfer, signal, [armed(3)])
    # Each transfer has this limit to itself.
    other = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.arm_slices(other, signal, [armed(1)])
    pair.engine.seal(other)
    assert pair.engine.wait_transfer(other, LIMIT).kind is EventKind.TRANSFER_DONE
    pair.await_counters(counters)
    pair.engine.cancel(transfer)
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == 1


def test_slices_that_are_cancelled_are_never_written(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.sender.fill(3)
    counters, immediate = pair.counter(1)
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.arm_slices(
        transfer,
        signal,
        [
            ArmedSlice(value, pair.sender.region, 0, pair.receiver_region, 1024 * value, 1024, immediate)
            for value in (1, 2, 3)
        ],
    )
    signal.store(1)
    pair.await_counters(counters)
    pair.engine.cancel(transfer)
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert (event.kind, event.pages, event.quiesced) == (EventKind.TRANSFER_CANCELLED, 1, True)
    signal.store(3)
    after = pair.engine.write_one(
        pair.to_receiver, pair.sender.region, 0, pair.receiver_region, 0, 1024, immediate
    )
    pair.engine.wait_transfer(after, LIMIT)
    await_values(pair, counters, [2])
    assert pair.receiver.call("read") == pair.sender.read(0, 1024) * 2 + bytes(2048)


def test_a_list_with_a_wrong_slice_adds_nothing(new_pair: NewPair) -> None:
    pair = new_pair()
    ours, theirs = pair.sender.region, pair.receiver_region
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    good = ArmedSlice(1, ours, 0, theirs, 0, 64)
    for bad, code in [
        (ArmedSlice(1, ours, 4033, theirs, 0, 64), ErrorCode.OUT_OF_RANGE),
        (ArmedSlice(1, ours, 0, theirs, 2**64 - 1, 64), ErrorCode.OUT_OF_RANGE),
        (ArmedSlice(1, ours, 0, theirs, 0, 0), ErrorCode.INVALID_ARGUMENT),
        (ArmedSlice(1, 4711, 0, theirs, 0, 64), ErrorCode.UNKNOWN_REGION),
        (ArmedSlice(1, ours, 0, 4711, 0, 64), ErrorCode.UNKNOWN_REGION),
    ]:
        with pytest.raises(TransferError) as refused:
            pair.engine.arm_slices(transfer, signal, [good, bad])
        assert refused.value.code is code
    signal.store(1)
    pair.engine.seal(transfer)
    assert pair.engine.wait_transfer(transfer, LIMIT).pages == 0


def test_waiting_for_slices_fails_when_the_peer_is_down(new_pair: NewPair) -> None:
    pair = new_pair()
    signal = pair.engine.create_signal()
    transfer = pair.engine.open_transfer(pair.to_receiver)
    pair.engine.arm_slices(
        transfer,
        signal,
        [ArmedSlice(value, pair.sender.region, 0, pair.receiver_region, 0, 64) for value in (1, 2)],
    )
    signal.store(1)
    pair.engine.wait_drained(transfer, 1, LIMIT)
    pair.receiver.kill()
    await_peer_down(pair.engine, pair.to_receiver)
    event = pair.engine.wait_transfer(transfer, LIMIT)
    assert (event.kind, event.pages) == (EventKind.TRANSFER_FAILED, 1)
    with pytest.raises(TransferError):
        pair.engine.wait_drained(transfer, 1, LIMIT)
