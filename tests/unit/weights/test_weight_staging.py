"""Staging: parts are laid out in one half of the memory while the other half is sent."""

from __future__ import annotations

from functools import partial

import torch

from kv_connector.weights.memory.buffer import ALIGNMENT
from kv_connector.weights.trainer.staging import Staging

CPU = torch.device("cpu")


def staged(staging: Staging, place: int | None, like: torch.Tensor) -> torch.Tensor:
    """Returns the contents of a place of the memory, with this tensor's type and shape."""
    assert place is not None
    nbytes = like.numel() * like.element_size()
    return staging._buffer.bytes[place : place + nbytes].view(like.dtype).view(like.shape)


def test_parts_lie_aligned_behind_each_other_until_a_half_is_full() -> None:
    staging = Staging(4 * ALIGNMENT, CPU)
    part = torch.arange(3, dtype=torch.float32)
    places = [staging.put(part + number, torch.float32) for number in range(3)]
    assert places == [0, ALIGNMENT, None]
    for number, place in enumerate(places[:2]):
        assert torch.equal(staged(staging, place, part), part + number)
    assert staging.range.nbytes == 2 * staging.half_bytes == 4 * ALIGNMENT


def test_turn_waits_for_the_other_half_and_fills_it_from_its_beginning() -> None:
    staging = Staging(2 * ALIGNMENT, CPU)
    waits: list[int] = []
    full = torch.full((ALIGNMENT,), 1, dtype=torch.uint8)
    for turn in range(3):
        place = staging.put(full + turn, torch.uint8)
        assert place == turn % 2 * staging.half_bytes
        assert staging.put(full, torch.uint8) is None
        before = 1 - turn % 2
        if turn:
            kept = staged(staging, before * staging.half_bytes, full)
            assert torch.equal(kept, full + turn - 1), "the half that may be on its way is left alone"
        staging.turn(partial(waits.append, turn))
    assert waits == [0, 1, 2]


def test_part_is_converted_and_packed_row_by_row() -> None:
    staging = Staging(2 * ALIGNMENT, CPU)
    columns = torch.arange(12, dtype=torch.float32).view(3, 4)[:, 1:3]
    place = staging.put(columns, torch.bfloat16)
    staging.packed()
    found = staged(staging, place, torch.empty(3, 2, dtype=torch.bfloat16))
    assert found.tolist() == [[1, 2], [5, 6], [9, 10]]


def test_smallest_staging_has_room_for_something() -> None:
    assert Staging(0, CPU).half_bytes == ALIGNMENT
