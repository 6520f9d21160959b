"""Exhaustive exploration: every order in which the steps of all ranks can take effect.

A state is one integer: the set of steps that took effect. The contents of memory follow from it, because each
store is checked to follow the stores of earlier rounds to its cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .program import Kind, Rules, Sizes, Step, program

_Test = tuple[int, int]
"""Mask and value: holds in a state where `state & mask == value`."""


class _Move(NamedTuple):
    """A change of state: one step, or an event in the life of a rank."""

    bit: int
    name: str
    rank: int
    enabled: tuple[_Test, ...]
    """One of these must hold. This is the part that steps of other ranks and events decide."""
    checks: tuple[_Test, ...]
    """One of these must hold when the move is taken."""
    complaint: str
    urgent: bool
    """The move stays enabled, and neither disables nor endangers another. It is taken at once."""


def _is_flag(step: Step) -> bool:
    return step.cell[0] in ("arrived", "ready")


def _event(bit: int, rank: int, what: str) -> _Move:
    return _Move(bit, f"rank {rank} {what}", rank, ((0, 0),), ((0, 0),), "", False)


@dataclass
class Found:
    """The outcome of an exploration."""

    states: int = 0
    violation: str = ""
    trace: tuple[str, ...] = ()
    """Moves from the start to the violation."""
    ends: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Final states by the number of rounds that each rank completed without a fault."""


class Exploration:
    """All interleavings of one group.

    `victim` is a rank that may die at any moment. The hosts of the other ranks then set their mask words,
    each at any later moment. With `deadlines` any wait may run out, because no rank can distinguish a stuck
    peer from a slow peer. `stuck` is a rank that is slower than the deadline: any wait for it may run out.
    All ranks, the stuck rank as well, then learn at any later moment that it was given up. `reduced` takes
    urgent moves alone: the same violations in fewer states. With `survive` a rank that waits for the victim
    masks it and goes on. Its process ends at any moment after its death, and no store of it lands later. A
    `stuck` rank of such a group may continue at any moment. It gets no flags of a rank that has masked it,
    and ends at any later moment.
    """

    def __init__(
        self,
        sizes: Sizes,
        rules: Rules | None = None,
        *,
        epoch: int = 0,
        victim: int | None = None,
        deadlines: bool = False,
        stuck: int | None = None,
        reduced: bool = False,
        survive: bool = False,
    ) -> None:
        self._rules = rules or Rules()
        self._sizes = sizes
        self._ranks = len(sizes[0])
        self._epoch = epoch
        self._wakes = survive and stuck is not None
        if self._wakes:
            victim, stuck = stuck, None
        self._victim = victim
        self._deadlines = deadlines
        self._stuck = stuck
        # A wait that may end with a fault is a choice, and no choice may be skipped.
        self._reduced = reduced and victim is None and stuck is None and not deadlines
        self._checked = self._wakes and self._rules.combine_checks
        programs = [
            program(rank, sizes, self._rules, epoch, self._checked and rank == victim)
            for rank in range(self._ranks)
        ]
        self._steps = [step for steps in programs for step in steps]
        self._first = [sum(map(len, programs[:rank])) for rank in range(self._ranks)]
        self._local = [
            ((1 << len(steps)) - 1) << first for first, steps in zip(self._first, programs, strict=True)
        ]
        count = len(self._steps)
        self._died = 1 << count
        self._lost = [2 << count + rank for rank in range(self._ranks)]
        self._stopped = [2 << count + self._ranks + rank for rank in range(self._ranks)]
        if victim is not None:
            self._stopped[victim] = self._died
        self._given_up = 0 if stuck is None else sum(self._stopped)
        self._survive = survive
        self._masked = [2 << count + 2 * self._ranks + rank for rank in range(self._ranks)]
        self._fenced = 2 << count + 3 * self._ranks
        # Flags of a rank that has masked the stuck rank. They do not reach it.
        self._withheld = {
            number: self._fenced << 1 + number
            for number, step in enumerate(self._steps)
            if self._wakes and step.kind is Kind.STORE and _is_flag(step) and step.cell[1] == victim
        }
        self._moves = [self._move(number) for number in range(count)]
        self._before = [
            sum(1 << self._first[step.rank] + place for place in step.before) for step in self._steps
        ]
        self._candidates: list[dict[int, tuple[_Move, ...]]] = [{} for _ in range(self._ranks)]

    def run(self) -> Found:
        """Explores until all states are known or one is a violation."""
        found = Found()
        came: dict[int, _Move | None] = {0: None}
        stack = [0]
        while stack:
            state = stack.pop()
            moves = self._enabled(state)
            if self._blocked(state, moves):
                return self._report(found, came, state, f"deadlock: {self._unfinished(state)}")
            if not moves:
                found.ends[self._completed(state)] += 1
            for move in moves:
                following = state | move.bit
                if following in came:
                    continue
                came[following] = move
                if not any(state & mask == value for mask, value in move.checks):
                    return self._report(found, came, following, move.complaint)
                stack.append(following)
        found.states = len(came)
        return found

    # --- Moves

    def _enabled(self, state: int) -> list[_Move]:
        moves = []
        for rank in range(self._ranks):
            for move in self._candidates_of(rank, state):
                for mask, value in move.enabled:
                    if state & mask == value:
                        if move.urgent:
                            return [move]
                        moves.append(move)
                        break
        return moves

    def _candidates_of(self, rank: int, state: int) -> tuple[_Move, ...]:
        """Moves of the rank whose order in its own program allows them."""
        events = self._lost[rank] | self._stopped[rank] | self._masked[rank]
        key = state & (self._local[rank] | self._died | self._fenced | events)
        if state & self._given_up:
            key |= self._given_up ^ self._stopped[rank]
        if self._wakes and rank == self._victim:
            key |= state & sum(self._masked)
        known = self._candidates[rank].get(key)
        if known is None:
            known = self._candidates[rank][key] = tuple(self._candidate_moves(rank, key))
        return known

    def _candidate_moves(self, rank: int, state: int) -> list[_Move]:
        stopped = bool(state & self._stopped[rank])
        if stopped and state & self._fenced:
            return []
        moves = []
        awaited = set()
        first = self._first[rank]
        for number in range(first, first + self._local[rank].bit_count()):
            step, move = self._steps[number], self._moves[number]
            if state & move.bit:
                continue
            ready = state & self._before[number] == self._before[number]
            if stopped:
                # What is in flight may land late. A later step does not begin.
                loud = step.cell[0] == "ready" and not self._rules.fault_is_silent and rank != self._victim
                if step.kind is Kind.STORE and (ready or loud):
                    moves.append(move)
            elif ready:
                if number in self._withheld and state & self._masked[rank]:
                    move = move._replace(bit=move.bit | self._withheld[number], name=f"{move.name}, withheld")
                moves.append(move)
                if step.kind is Kind.WAIT:
                    awaited.add(step.cell[2])
        return moves + self._events(rank, state, awaited)

    def _events(self, rank: int, state: int, awaited: set[int]) -> list[_Move]:
        """Returns the events in the life of a rank. `awaited` are the ranks that it waits for, if it has not
        stopped."""
        if rank == self._victim:
            may = not self._wakes or (state & sum(self._masked) and self._rules.evicted_is_seen)
            return [_event(self._died, rank, "dies")] if may and not state & self._died else []
        lost = bool(state & self._lost[rank])
        events = []
        if state & self._died and not lost and not self._wakes:
            events.append(_event(self._lost[rank], rank, "gets the mask word from its host"))
        if self._survive:
            return events + self._survivals(rank, state, awaited)
        if state & self._given_up and not lost and self._rules.given_up_is_reported:
            events.append(_event(self._lost[rank], rank, f"learns that rank {self._stuck} was given up"))
        ended = lost and self._rules.lost_ends_waits
        if not self._rules.lost_ends_all_waits:
            ended = ended and self._victim in awaited
        late = self._deadlines or self._stuck in awaited
        if awaited and (ended or late) and self._rules.ended_is_a_fault:
            events.append(_event(self._stopped[rank], rank, "ends its wait with a fault"))
        return events

    def _survivals(self, rank: int, state: int, awaited: set[int]) -> list[_Move]:
        """Returns the events of a rank that goes on without the victim."""
        if not state & self._lost[rank] and not self._wakes:
            return []
        events = []
        if self._victim in awaited and not state & self._masked[rank] and self._rules.lost_ends_waits:
            events.append(_event(self._masked[rank], rank, f"masks rank {self._victim}"))
        if state & self._died and not state & self._fenced:
            events.append(_event(self._fenced, rank, f"learns that the process of {self._victim} has ended"))
        return events

    def _of_victim(self, numbers: Iterable[int]) -> int:
        """The bits of those steps that belong to a victim whose group survives."""
        return sum(1 << n for n in numbers if self._survive and self._steps[n].rank == self._victim)

    def _move(self, number: int) -> _Move:
        step = self._steps[number]
        stores = self._stores(step)
        enabled: tuple[_Test, ...] = ((0, 0),)
        checks, complaint, urgent = [(0, 0)], "", False
        masked = self._masked[step.rank]
        if step.kind is Kind.WAIT:
            enabled, lasting = self._wait(step, stores)
            urgent = lasting
            if (
                self._survive
                and step.cell[2] == self._victim
                and (step.cell[0] == "arrived" or self._rules.mask_stays)
            ):
                enabled = (*enabled, (masked, masked))
        elif step.cell[0] == "evicted":
            enabled = ((sum(self._masked), 0),)
        elif step.cell[0] in ("row", "out"):
            newer = sum(1 << other for other in stores if self._steps[other].round > step.round)
            if step.kind is Kind.READ:
                current = [other for other in stores if self._steps[other].round == step.round]
                wanted = sum(1 << other for other in current)
                checks, complaint = [(wanted | newer, wanted)], f"{step}: the row is not of this round"
                if not wanted:
                    raise ValueError(f"no store for {step}")
                if self._of_victim(current) and self._rules.masked_is_left_out:
                    checks.append((masked, masked))
                if self._of_victim([number]) and step.cell[0] == "out" and self._checked:
                    holder = self._masked[step.cell[1]]
                    checks.append((holder, holder))
            else:
                readers = [
                    other
                    for other, reader in enumerate(self._steps)
                    if reader.cell == step.cell and reader.kind is Kind.READ and reader.round < step.round
                ]
                older = [other for other in stores if self._steps[other].round < step.round]
                needed = sum(1 << other for other in (*readers, *older))
                checks = [(newer | needed, needed)]
                complaint = f"{step}: before the last reader of an earlier round, or over a newer row"
                # What a dead rank has not read or stored, it never will. The sums that a masked rank has not
                # given out, it never will.
                void = masked if self._checked and step.cell[0] == "out" else 0
                exempt = ((self._died, readers), (self._fenced, (*readers, *older)), (void, readers))
                for event, gone in exempt:
                    if event and (left := self._of_victim(gone)):
                        rest = needed & ~left | event
                        checks.append((newer | rest, rest))
                if self._survive and step.cell[0] == "row" and self._rules.fence_after_mask:
                    enabled = ((masked, 0), (self._fenced, self._fenced))
        else:
            urgent = all(
                self._wait(wait, stores)[1]
                for wait in self._steps
                if wait.cell == step.cell and wait.kind is Kind.WAIT
            )
        urgent = urgent and self._reduced
        return _Move(1 << number, str(step), step.rank, enabled, tuple(checks), complaint, urgent)

    def _stores(self, step: Step) -> list[int]:
        """Stores to the cell of a step, in the order of the rounds."""
        return [
            number
            for number, other in enumerate(self._steps)
            if other.cell == step.cell and other.kind is Kind.STORE
        ]

    def _wait(self, step: Step, stores: list[int]) -> tuple[tuple[_Test, ...], bool]:
        """When a wait ends, and whether it can end at any time after the first chance."""
        values = [self._epoch, *(self._steps[number].value for number in stores)]
        ends = [self._rules.reached(value, step.value) for value in values]
        tests: list[_Test] = []
        lasting = False
        for landed, end in enumerate(ends):
            if not end:
                continue
            value = 1 << stores[landed - 1] if landed else 0
            withheld = self._withheld.get(stores[landed - 1], 0) if landed else 0
            if all(ends[landed:]):
                tests.append((value | withheld, value))
                lasting = True
                break
            tests.append((value | withheld | 1 << stores[landed], value))
        if not self._rules.ended_is_a_fault:
            late = self._deadlines or step.cell[2] == self._stuck
            lost = 0 if late else self._lost[step.rank]
            tests.append((lost, lost))
        return tuple(tests), lasting and len(tests) == 1

    # --- Ends

    def _blocked(self, state: int, moves: list[_Move]) -> bool:
        """Returns whether a rank waits for ever.

        A late store of a rank that ended must not be what it waits for.
        """
        if any(not state & self._stopped[move.rank] for move in moves):
            return False
        return bool(self._unfinished(state))

    def _unfinished(self, state: int) -> list[str]:
        return [
            str(step)
            for number, step in enumerate(self._steps)
            if step.kind is Kind.WAIT and not state & (1 << number | self._stopped[step.rank])
        ]

    def _completed(self, state: int) -> tuple[int, ...]:
        completed = []
        for rank in range(self._ranks):
            missing = [
                step.round
                for number, step in enumerate(self._steps)
                if step.rank == rank and step.kind is not Kind.STORE and not state & 1 << number
            ]
            completed.append(min(missing, default=len(self._sizes)))
        return tuple(completed)

    def _report(self, found: Found, came: dict[int, _Move | None], state: int, violation: str) -> Found:
        trace: list[str] = []
        at = state
        while (move := came[at]) is not None:
            trace.append(move.name)
            at ^= move.bit
        found.states, found.violation, found.trace = len(came), violation, tuple(reversed(trace))
        return found
