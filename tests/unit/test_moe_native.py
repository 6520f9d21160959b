"""What the compiled expert group refuses, and what a process that it starts does not inherit."""

import os

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
