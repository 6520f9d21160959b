"""A slot of SGLang's metadata buffers as one row."""

from __future__ import annotations

import numpy as np

from kv_connector.sglang.metadata_rows import MetadataRows

WIDTHS = (64, 16, 200)


def test_a_row_carries_a_slots_share_of_all_buffers_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = ([rng.integers(0, 255, (slots, width), np.uint8) for width in WIDTHS] for slots in (4, 6))
    before = [buffer.copy() for buffer in theirs]
    rows = [
        MetadataRows([b.ctypes.data for b in side], [b.nbytes for b in side], WIDTHS, "cpu")
        for side in (ours, theirs)
    ]
    assert [table.slots for table in rows] == [4, 6]
    assert rows[0].row_bytes % 64 == 0
    assert rows[0].row_bytes >= sum(WIDTHS)
    rows[0].pack(3)
    rows[1]._host[5] = rows[0]._host[3]  # as a transfer does
    rows[1].unpack(5)
    for number in range(len(WIDTHS)):
        assert (theirs[number][5] == ours[number][3]).all()
        assert (theirs[number][:5] == before[number][:5]).all()
    assert rows[0].nbytes == 4 * rows[0].row_bytes
