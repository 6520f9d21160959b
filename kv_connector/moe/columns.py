"""The places of columns in a slot's dispatch area. A column is one array that travels with the rows."""

from __future__ import annotations

from collections.abc import Sequence

from kv_connector.moe.settings import MAX_COLUMNS

# A column begins at a multiple of two cache lines of a GPU. Any vector may begin there.
ALIGNMENT = 256


def column_offsets(rows: int, row_bytes: Sequence[int]) -> tuple[int, ...]:
    """Returns the offset of each column of ``rows`` rows in the dispatch area, and the last column's end.

    Every rank computes the same offsets, from the number of all rows and the bytes of one row.
    """
    offsets = []
    end = 0
    for nbytes in row_bytes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + rows * nbytes
    return (*offsets, end)


def dispatch_bytes(rows: int, row_bytes: int) -> int:
    """Bytes of a dispatch area in which columns of together ``row_bytes`` a row always fit.

    Alignment costs less than ALIGNMENT bytes a column.
    """
    return rows * row_bytes + MAX_COLUMNS * ALIGNMENT
