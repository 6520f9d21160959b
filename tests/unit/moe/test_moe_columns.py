"""Places of columns, and limits that Python and the native class must have alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_ranks import settings_of

from kv_connector import _native
from kv_connector.moe import columns, memory, settings


def test_columns_lie_one_behind_the_other_at_multiples_of_256() -> None:
    # 3 rows: 300 bytes end at 300, the next begins at 512 and ends at 536, the next begins at 768.
    assert columns.column_offsets(3, (100, 8, 1)) == (0, 512, 768, 771)


def test_columns_of_no_rows_have_no_bytes() -> None:
    assert columns.column_offsets(0, (100, 8)) == (0, 0, 0)


def test_columns_of_exact_alignment_leave_no_gap() -> None:
    assert columns.column_offsets(2, (128, 256)) == (0, 256, 768)


@pytest.mark.parametrize("rows", [1, 2, 31, 1024])
def test_dispatch_area_holds_every_division_of_a_row_into_columns(rows: int) -> None:
    for row_bytes in ((1,) * settings.MAX_COLUMNS, (7168, 224, 32, 32, 4, 1, 1, 1), (1, 7168)):
        assert columns.column_offsets(rows, row_bytes)[-1] <= columns.dispatch_bytes(rows, sum(row_bytes))


def test_limits_are_those_of_the_native_class() -> None:
    assert settings.MAX_RANKS == _native.MOE_MAX_RANKS
    assert settings.MAX_COLUMNS == _native.MOE_MAX_COLUMNS
    assert settings.MAX_TOP_K == _native.MOE_MAX_TOP_K
    assert columns.ALIGNMENT == _native.MOE_COLUMN_ALIGNMENT


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 9}, "ranks is 9. Valid: 1 to 8"),
        ({"rank": 2}, "rank is 2. Valid: 0 to 1"),
        ({"hidden": 60}, "hidden is 60. It must be a multiple of 8"),
        ({"hidden": 0}, "hidden is 0"),
        ({"top_k": 33}, "top_k is 33"),
        ({"experts": 0}, "experts is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"row_bytes": 0}, "row_bytes is 0"),
        ({"slots": 3}, "slots is 3"),
        ({"device": -1}, "device is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"max_tokens": 1 << 24, "hidden": 1 << 18}, "Set a smaller max_tokens"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    given = {"rank": 0, "ranks": 2} | wrong
    with pytest.raises(ValueError, match=words):
        settings_of(**given)


def test_view_has_the_bytes_of_the_area_without_a_copy() -> None:
    area = torch.arange(64, dtype=torch.uint8)
    seen = memory.view(area, 8, (2, 3), torch.int32)
    assert seen.shape == (2, 3)
    assert seen.data_ptr() == area.data_ptr() + 8
    assert seen.view(torch.uint8).flatten().tolist() == list(range(8, 32))
    assert memory.view(area, 8, (0, 3), torch.bfloat16).shape == (0, 3)


def test_bytes_at_an_address_are_the_memory_itself() -> None:
    owner = torch.zeros(32, dtype=torch.uint8)
    memory.bytes_at(owner.data_ptr(), 32, None)[5] = 7
    assert owner[5] == 7
