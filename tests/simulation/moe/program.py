"""The programs of the ranks as steps on shared memory, and the order that fences leave to these steps.

A step is a store, a read or a wait. It touches one cell and is atomic. Two steps of one rank may take effect
in either order, unless a rule of `_Memory` orders them. A store that takes effect late models a store buffer
for each rank and target that drains in any order. A read that takes effect early models a load
that passes a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

Sizes = Sequence[Sequence[int]]
"""Tokens of each rank, by round."""

Cell = tuple[str, int, int]
"""Name of an array, rank that holds it, place in the array."""

_WORD = 1 << 32


def signed(flag: int, epoch: int) -> bool:
    """The comparison of the protocol: a flag of this epoch or of a later one, across the wrap."""
    return (flag - epoch) % _WORD < _WORD // 2


@dataclass(frozen=True)
class Rules:
    """The program of each rank. The defaults are the protocol; a planted mistake changes one of them."""

    reached: Callable[[int, int], bool] = signed
    """Returns whether a flag's value ends a wait for an epoch."""
    fence_before_arrived: bool = True
    fence_before_ready: bool = True
    flag_after_rows: bool = True
    acquire_after_arrived: bool = True
    acquire_after_ready: bool = True
    wait_for_arrived: bool = True
    wait_for_ready: bool = True
    raise_without_tokens: bool = True
    """A rank without tokens counts the round in its epoch."""
    flag_without_tokens: bool = True
    """A rank without tokens stores its dispatch flags."""
    wait_without_tokens: bool = True
    """A rank without tokens waits in combine."""
    ordered_kernels: bool = True
    """A dispatch kernel waits for the combine kernel before it, as griddepcontrol.wait does."""
    lost_ends_waits: bool = True
    lost_ends_all_waits: bool = True
    """The mask word ends every wait. The alternative ends the waits of a phase that awaits the lost rank."""
    ended_is_a_fault: bool = True
    """A wait that ends by the mask word or a deadline is a fault, and not a flag that was raised."""
    given_up_is_reported: bool = True
    """A rank whose wait runs out reports to all others which rank it gave up."""
    fault_is_silent: bool = True
    """A rank with a fault raises no combine_ready any more."""
    masked_is_left_out: bool = True
    """In a group that survives: the rows and results of a masked rank are not read."""
    mask_stays: bool = True
    """A masked rank is not awaited in later phases."""
    evicted_is_seen: bool = True
    """A rank that was masked and continues ends, because it finds the flag in its memory."""
    combine_checks: bool = True
    """Such a rank looks at the flag after it has read the results, and before it gives out their sums."""
    fence_after_mask: bool = True
    """After a mask no rank begins a dispatch before the process of the masked rank has ended."""


class Kind(Enum):
    STORE = auto()
    READ = auto()
    WAIT = auto()


class Step(NamedTuple):
    rank: int
    kind: Kind
    cell: Cell
    round: int
    value: int
    """A flag's epoch, or a row's token: the number of its token in the round, over all ranks."""
    before: frozenset[int]
    """Steps of the same rank, by their place in its program, that take effect earlier."""

    def __str__(self) -> str:
        name, holder, place = self.cell
        what = self.kind.name.lower()
        return f"rank {self.rank}, round {self.round}: {what} {name}[{place}] of rank {holder}"


class _Memory:
    """One rank's program in the making."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.steps: list[Step] = []
        self.order: frozenset[int] = frozenset()
        """Steps that take effect before every step added from now on."""

    def fence(self) -> None:
        """Orders all earlier steps before all later ones."""
        self.order |= frozenset(range(len(self.steps)))

    def acquire(self) -> None:
        """Orders earlier reads and waits before all later steps. Stores may remain in flight."""
        loads = (place for place, step in enumerate(self.steps) if step.kind is not Kind.STORE)
        self.order |= frozenset(loads)

    def overlap(self, order: frozenset[int]) -> None:
        """Takes back the order made since `order`: a kernel starts beside the kernel before it."""
        self.order = order

    def add(self, kind: Kind, cell: Cell, round: int, value: int, *needs: int) -> int:
        """Appends a step that follows `needs` and every earlier step on its cell. Returns its place."""
        same = (place for place, step in enumerate(self.steps) if step.cell == cell)
        before = self.order | frozenset(same) | frozenset(needs)
        self.steps.append(Step(self._rank, kind, cell, round, value, before))
        return len(self.steps) - 1


def program(rank: int, sizes: Sizes, rules: Rules, epoch: int, checks: bool = False) -> list[Step]:
    """The steps of one rank in program order.

    `checks`: a combine ends with a read of the flag of a masked rank. `epoch` is the value of all flags
    before the first round. Each rank's own rows are left out, as no other rank touches them. Every row goes
    to every rank, because no order in the protocol comes from a row.
    """
    memory = _Memory(rank)
    others = [peer for peer in range(len(sizes[0])) if peer != rank]
    for round, tokens in enumerate(sizes):
        if tokens[rank] or rules.raise_without_tokens:
            epoch = (epoch + 1) % _WORD
        if rules.flag_after_rows:
            _send_rows(memory, rank, others, tokens, round)
        if rules.fence_before_arrived:
            memory.fence()
        if tokens[rank] or rules.flag_without_tokens:
            _raise(memory, "arrived", rank, others, round, epoch)
        if not rules.flag_after_rows:
            memory.fence()
            _send_rows(memory, rank, others, tokens, round)
        if rules.wait_for_arrived:
            _wait(memory, "arrived", rank, others, round, epoch)
        if rules.acquire_after_arrived:
            memory.acquire()

        for source in others:
            for row in _rows(tokens, source):
                read = memory.add(Kind.READ, ("row", rank, row), round, row)
                memory.add(Kind.STORE, ("out", rank, row), round, row, read)

        combine = memory.order
        if rules.fence_before_ready:
            memory.fence()
        _raise(memory, "ready", rank, others, round, epoch)
        if rules.wait_for_ready and (tokens[rank] or rules.wait_without_tokens):
            _wait(memory, "ready", rank, others, round, epoch)
        if rules.acquire_after_ready:
            memory.acquire()
        for peer in others:
            for row in _rows(tokens, rank):
                memory.add(Kind.READ, ("out", peer, row), round, row)
        if checks:
            memory.acquire()
            memory.add(Kind.READ, ("evicted", rank, 0), round, 0)
        if rules.ordered_kernels:
            memory.acquire()  # a kernel's loads end with it
        else:
            memory.overlap(combine)
    return memory.steps


def _rows(tokens: Sequence[int], source: int) -> range:
    """Rows of a source: they begin behind those of the ranks before it, so they move with the sizes."""
    first = sum(tokens[:source])
    return range(first, first + tokens[source])


def _send_rows(memory: _Memory, rank: int, others: list[int], tokens: Sequence[int], round: int) -> None:
    for peer in others:
        for row in _rows(tokens, rank):
            memory.add(Kind.STORE, ("row", peer, row), round, row)


def _raise(memory: _Memory, flag: str, rank: int, others: list[int], round: int, epoch: int) -> None:
    for peer in others:
        memory.add(Kind.STORE, (flag, peer, rank), round, epoch)


def _wait(memory: _Memory, flag: str, rank: int, others: list[int], round: int, epoch: int) -> None:
    for peer in others:
        memory.add(Kind.WAIT, (flag, rank, peer), round, epoch)
