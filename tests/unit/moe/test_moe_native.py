"""The compiled expert group refuses bad arguments, and its descriptors are not inherited."""

import os
import threading
import time

import numpy as np
import pytest

from kv_connector._native import MoeGroup
from kv_connector.engine import TransferError


def group() -> MoeGroup:
    return MoeGroup(0, 1, -1, 4096, 4096, 4, 2, 1, 1.0)


def test_moe_group_descriptor_is_not_inherited() -> None:
    made = group()
    descriptor = made.descriptor()
    try:
        assert not os.get_inheritable(descriptor)
        assert os.fstat(descriptor).st_size == made.segment_bytes
    finally:
        os.close(descriptor)
        made.close(1.0)


def test_moe_group_refuses_offset_of_unknown_slot() -> None:
    made = group()
    assert made.dispatch_offset(0) < made.combine_offset(0) < made.segment_bytes
    for offset in (made.dispatch_offset, made.combine_offset):
        with pytest.raises(TransferError, match="slot 1"):
            offset(1)
    made.close(1.0)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_moe_group_refuses_timeout(timeout: float) -> None:
    with pytest.raises(TransferError, match="timeout"):
        MoeGroup(0, 1, -1, 4096, 4096, 4, 2, 1, timeout)


class Members:
    """Three ranks of one process over host memory, with a token each that goes to every rank."""

    def __init__(self) -> None:
        self.groups = [MoeGroup(rank, 3, -1, 1 << 12, 1 << 12, 1, 8, 1, 20.0) for rank in range(3)]
        for group in self.groups:
            for rank, other in enumerate(self.groups):
                if other is not group:
                    descriptor = other.descriptor()
                    group.attach(rank, descriptor)
                    os.close(descriptor)
        self.row = np.zeros(64, dtype=np.uint8)
        self.ids = np.zeros(1, dtype=np.int32)
        self.out = np.zeros((3, 32), dtype=np.uint16)

    def dispatch(self, rank: int, phases: int = 3) -> None:
        column = (self.row.ctypes.data, 64, 0, True)
        self.groups[rank].dispatch(0, 0, [1, 1, 1], self.ids.ctypes.data, 4, 1, [column], phases)

    def combine(self, rank: int, phases: int = 3) -> None:
        out = (self.out[rank].ctypes.data + 15) // 16 * 16
        self.groups[rank].combine(0, 0, [1, 1, 1], out, 8, False, phases)

    def close(self) -> None:
        for group in self.groups:
            group.close(5.0)


def test_moe_group_waits_for_no_survivor_of_a_dead_rank() -> None:
    """Rank 0 learned of rank 2's end before its flags arrived. It gave up, and raises no flag any more. Rank
    1 has all flags of rank 2, and would wait for rank 0."""
    members = Members()
    members.groups[0].lose(2)
    first = threading.Thread(target=members.dispatch, args=(0,))
    second = threading.Thread(target=members.dispatch, args=(1,))
    first.start()
    second.start()
    first.join()
    assert members.groups[0].fault() == (3, 2)
    members.dispatch(2, 1)
    members.combine(2, 1)
    second.join()
    assert members.groups[1].fault() is None
    members.groups[1].lose(2)
    begin = time.monotonic()
    members.combine(1)
    assert members.groups[1].fault() == (3, 2)
    assert time.monotonic() - begin < 10.0  # half of the groups' timeout
    members.close()


def test_moe_group_waits_on_when_a_rank_has_left_after_its_part() -> None:
    members = Members()
    members.dispatch(2, 1)
    members.combine(2, 1)
    members.groups[1].lose(2, left=True)
    waiting = threading.Thread(target=members.dispatch, args=(1,))
    waiting.start()
    members.dispatch(0)
    waiting.join()
    assert members.groups[1].fault() is None
    second = threading.Thread(target=members.combine, args=(1,))
    second.start()
    members.combine(0)
    second.join()
    assert [group.fault() for group in members.groups] == [None] * 3
    members.close()
