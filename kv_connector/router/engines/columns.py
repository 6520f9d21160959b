"""Columns: the numbers of a side's engines that placement compares, as vectors with a row for each engine.

A loop over 1,000 engines takes 0.9 ms in Python, and operations on such vectors 0.1 ms (2026-11-30). A row is
written anew before the next look, after a change of its engine. A request changes two of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kv_connector.protocol.session.checkpoint import Weights

if TYPE_CHECKING:
    from kv_connector.router.engines.pool import Member

Vector = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]

# The columns. Those without a comment have the names and the meaning of fields of Member and of Workload.
OUTSTANDING, CONTEXT, USED, LENDS, BORROWS = 0, 1, 2, 3, 4
RECENT, RECENT_AT = 5, 6  # tokens at a time; NaN: the engine has come, or come back
UNCACHED, OTHERS, TOKEN, SAID_AT = 7, 8, 9, 10  # the engine's queue
RUNNING = 11  # streams, as the engine reports
BLOCK = 12  # tokens
BIT = 13  # place of the engine's bit in the masks of the index
_COLUMNS = 14

_NO_BIT = 1 << 30
# Sets of weights of which Rows keeps the fitting engines. The replacement of a checkpoint needs two or three.
_MOST_FITTING = 64


class Columns:
    """The numbers of all engines of one pool. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._members: list[Member | None] = []  # by row
        self._free: list[int] = []
        self._stale: set[int] = set()
        self._values: Vector = np.zeros((_COLUMNS, 4))

    def add(self, member: Member) -> None:
        """Gives an engine a row."""
        if not self._free:
            self._free.append(len(self._members))
            self._members.append(None)
        member.row = self._free.pop()
        self._members[member.row] = member
        if len(self._members) > self._values.shape[1]:
            self._values = np.concatenate((self._values, np.zeros_like(self._values)), axis=1)
        member.workload.mark(self._stale, member.row)

    def remove(self, member: Member) -> None:
        """Takes the row back. The member must not be looked at any more."""
        member.workload.unmark(self._stale, member.row)
        self._stale.discard(member.row)
        self._members[member.row] = None
        self._free.append(member.row)

    def member(self, row: int) -> Member:
        found = self._members[row]
        assert found is not None
        return found

    def values(self) -> Vector:
        """Returns all columns, as of now."""
        if self._stale:
            for row in list(self._stale):
                self._write(row)
        return self._values

    def is_whole(self, rows: Numbers) -> bool:
        """Returns whether these are all rows, from the first on."""
        return len(rows) == len(self._members) and bool((rows == np.arange(len(rows))).all())

    def _write(self, row: int) -> None:
        member = self.member(row)
        workload, recent = member.workload, member.recent
        load, cost, backlog = workload.load, workload.cost, workload.backlog
        bit = workload.cache.bit
        self._values[:, row] = (
            member.outstanding,
            member.context,
            member.used,
            bool(member.prefixes),
            member.borrows,
            math.nan if recent is None else recent.given,
            0.0 if recent is None else recent.at,
            backlog.uncached,
            workload.others,
            0.0 if cost is None else cost.token,
            workload.said_at,
            0 if load is None else load.running,
            1 if load is None else load.block_tokens or 1,
            bit.bit_length() - 1 if bit else _NO_BIT,
        )
        if not backlog.ends_by_itself:
            self._stale.discard(row)


def fitting_weights(weights: Iterable[Weights], others: Collection[Weights]) -> set[Weights]:
    """Returns the weights that fit some of the others."""
    # Most are among the others, and need no loop.
    return {one for one in weights if one in others or any(map(one.fits, others))}


def flags_of(mask: int) -> Flags:
    """Returns the bits of a mask, from the lowest on, and zeros."""
    raw = mask.to_bytes(mask.bit_length() // 8 + 1, "little")  # the last flag is zero
    return np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").view(np.bool_)


class Rows:
    """Some engines of a pool, of which placement chooses."""

    def __init__(self, columns: Columns, rows: Numbers) -> None:
        self._columns = columns
        self._rows = rows
        # A slice is a view. To copy 500 numbers takes 1.5 us for each column.
        self._index: slice | Numbers = slice(0, len(rows)) if columns.is_whole(rows) else rows
        self._fitting: dict[frozenset[Weights], Rows] = {}

    @classmethod
    def of(cls, columns: Columns, members: Sequence[Member]) -> Rows:
        """Returns the rows of these engines."""
        return cls(columns, np.sort(np.array([member.row for member in members], np.intp)))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Member]:
        return (self._columns.member(row) for row in self._rows)

    def __getitem__(self, at: int) -> Member:
        return self._columns.member(self._rows[at])

    @cached_property
    def weights(self) -> frozenset[Weights]:
        """Weights of these engines, as of the choice."""
        return frozenset(member.weights for member in self)

    def column(self, name: int) -> Vector:
        """Returns a column's numbers of these engines. They are not to be changed."""
        numbers: Vector = self._columns.values()[name][self._index]
        return numbers

    def fitting(self, weights: Collection[Weights]) -> Rows:
        """Returns the engines whose weights fit some of these."""
        if self.weights.issubset(weights):
            return self
        # While a fleet's weights are replaced, each decision needs it. The pool keeps these rows.
        key = frozenset(weights)
        if (found := self._fitting.get(key)) is None:
            fit = fitting_weights(self.weights, key)
            chosen = np.array([member.weights in fit for member in self], np.bool_)
            if len(self._fitting) >= _MOST_FITTING:
                self._fitting.clear()
            found = self._fitting[key] = self.where(chosen)
        return found

    def holding(self, flags: Flags) -> Flags:
        """Returns, for each engine, whether its bit is set. ``flags``: flags_of() a mask of the index."""
        found: Flags = flags.take(self.column(BIT).astype(np.intp), mode="clip")
        return found

    def where(self, chosen: Flags) -> Rows:
        """Returns a part of the engines. ``chosen``: for each of these engines, whether it has it."""
        return self if chosen.all() else Rows(self._columns, self._rows[chosen])

    def find(self, member: Member | None) -> int | None:
        """Returns the place of an engine of this pool; None: it is not one of these."""
        if member is None:
            return None
        at = int(self._rows.searchsorted(member.row))
        return at if at < len(self._rows) and self._rows[at] == member.row else None

    def first(self, keys: Vector) -> int:
        """Returns the place of the lowest key. Of equals it is the engine with the fewest requests, and of
        these the one that has not been used for longest."""
        (equal,) = (keys == keys.min()).nonzero()
        for name in (OUTSTANDING, USED):
            if len(equal) == 1:
                break
            numbers = self.column(name)[equal]
            equal = equal[numbers == numbers.min()]
        return int(equal[0])

    def queued(self, now: float) -> Vector:
        """Returns the tokens that each engine has still to compute, by this router's forecast and the
        engine's latest report."""
        own, others = self.column(UNCACHED), self.column(OTHERS)
        if not others.any():
            return own
        token = self.column(TOKEN)
        measured = token > 0
        seconds = np.maximum(0.0, others * token - (now - self.column(SAID_AT)))
        left = np.where(measured, np.rint(seconds / np.where(measured, token, 1.0)), others)
        tokens: Vector = own + left
        return tokens
