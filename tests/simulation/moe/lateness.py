"""A model of deadlines: every order in which ranks can be late beside a stuck rank, in a group that survives.

Time passes in ticks. A rank works, raises the flag of a phase at all ranks, and waits for their flags. The
stuck rank stops while it raises a flag, so only some ranks have it. Every other rank is healthy: it works for
less than the timeout, and the process of the stuck rank is ended within that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

STUCK = 0
"""The number of the stuck rank."""


@dataclass(frozen=True)
class Rules:
    """The rule that decides which rank is accused. A planted mistake changes one of its parts."""

    waiting_is_excused: bool = True
    """The time of a rank does not count while that rank waits itself."""
    seen_by_change: bool = True
    """A rank shows that it waits by changes of a flag. The alternative sets and clears a flag."""
    fence_is_a_wait: bool = True
    """A rank that waits for the end of a process shows that it waits."""
    by_flags: bool = False
    """Instead, the ranks whose flags are furthest behind are accused."""


@dataclass(frozen=True)
class Rank:
    """A healthy rank."""

    phase: int = 0
    """Phases that it has completed."""
    waits: bool = False
    """It has raised the flag of its phase, and waits for the flags of the others."""
    worked: int = 0
    """Ticks since its last wait."""
    fence: int = 0
    """Ticks in which it waited for the end of the stuck rank's process. It has masked that rank."""
    counted: tuple[int, ...] = ()
    """Ticks of its wait that count against each rank."""
    masked: bool = False
    """It goes on without the stuck rank."""

    def raised(self) -> int:
        return self.phase + self.waits


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    """Healthy ranks, from rank 1."""
    stuck: Rank
    ended: bool
    """The process of the stuck rank has ended."""


def places(ranks: int, phases: int) -> list[tuple[int, frozenset[int]]]:
    """Every phase in which the stuck rank can stop, with every set of ranks that have its last flag."""
    others = [rank for rank in range(ranks) if rank != STUCK]
    subsets = chain.from_iterable(combinations(others, size) for size in range(ranks))
    return [(phase, frozenset(subset)) for subset in subsets for phase in range(phases)]


@dataclass
class Found:
    states: int = 0
    violation: str = ""


class Lateness:
    """All orders of one group. The stuck rank stops in `phase`, when the ranks of `reached` have its flag."""

    def __init__(
        self, ranks: int, phases: int, timeout: int, phase: int, reached: frozenset[int], rules: Rules
    ) -> None:
        self._ranks, self._phases, self._timeout = ranks, phases, timeout
        self._phase, self._reached, self._rules = phase, reached, rules

    def run(self) -> Found:
        """Explores all states. Each must have a way to the end, and no healthy rank may be accused."""
        idle = Rank(counted=(0,) * self._ranks)
        start = State((idle,) * (self._ranks - 1), idle, False)
        came: dict[State, list[State]] = {start: []}
        todo = [start]
        ends: list[State] = []
        while todo:
            state = todo.pop()
            if all(rank.phase == self._phases for rank in state.ranks):
                ends.append(state)
                continue
            for following in self._following(state):
                if isinstance(following, str):
                    return Found(len(came), following)
                if following not in came:
                    came[following] = []
                    todo.append(following)
                came[following].append(state)
        living, todo = set(ends), ends
        while todo:
            for before in came[todo.pop()]:
                if before not in living:
                    living.add(before)
                    todo.append(before)
        return Found(len(came), "" if len(living) == len(came) else "a rank waits for good")

    def _flag(self, state: State, holder: int, rank: int) -> int:
        """Phases of `rank` whose flags `holder` has."""
        if rank != STUCK:
            return state.ranks[rank - 1].raised()
        raised = state.stuck.raised()
        return raised - (raised > self._phase and holder not in self._reached)

    def _missing(self, state: State, holder: int) -> list[int]:
        rank = self._rank(state, holder)
        if not rank.waits:
            return []
        others = (other for other in range(self._ranks) if other != holder)
        return [
            other
            for other in others
            if not (other == STUCK and rank.masked) and self._flag(state, holder, other) <= rank.phase
        ]

    def _at_fence(self, state: State, rank: Rank) -> bool:
        """A dispatch, in every second phase, begins after the end of the masked rank's process."""
        return rank.masked and not rank.waits and rank.phase % 2 == 0 and not state.ended

    def _rank(self, state: State, number: int) -> Rank:
        return state.stuck if number == STUCK else state.ranks[number - 1]

    def _stopped(self, state: State, number: int) -> bool:
        return number == STUCK and state.stuck.raised() > self._phase

    def _following(self, state: State) -> Iterator[State | str]:
        accused = any(rank.masked for rank in state.ranks)
        if accused and not state.ended:
            yield state._replace(ended=True)
        ticks = True
        for number in range(self._ranks):
            rank = self._rank(state, number)
            if self._stopped(state, number) or rank.phase == self._phases:
                continue
            if not rank.waits:
                if not self._at_fence(state, rank):
                    yield self._put(state, number, self._raise(rank))
                    ticks = ticks and rank.worked + 1 < self._timeout
                ticks = ticks and rank.fence + 1 < self._timeout
                continue
            missing = self._missing(state, number)
            if not missing:  # a rank that polls goes on at once
                ticks = False
                yield self._put(state, number, replace(rank, phase=rank.phase + 1, waits=False))
            for other in missing:
                late = rank.counted[other] >= self._timeout
                ticks = ticks and not late
                if late and other != STUCK:
                    yield f"rank {number} accuses rank {other}, which is healthy"
                elif late or (other == STUCK and accused):  # another rank reported it
                    yield self._put(state, number, replace(rank, masked=True))
        if ticks:
            yield self._tick(state)

    def _raise(self, rank: Rank) -> Rank:
        return replace(rank, waits=True, worked=0, fence=0, counted=(0,) * self._ranks)

    def _put(self, state: State, number: int, rank: Rank) -> State:
        if number == STUCK:
            return state._replace(stuck=rank)
        return state._replace(ranks=(*state.ranks[: number - 1], rank, *state.ranks[number:]))

    def _shows(self, state: State, number: int) -> bool:
        """Whether the other ranks see that a rank waits."""
        if self._stopped(state, number):
            return not self._rules.seen_by_change
        rank = self._rank(state, number)
        return rank.waits or (self._rules.fence_is_a_wait and self._at_fence(state, rank))

    def _tick(self, state: State) -> State:
        after = state
        for number in range(self._ranks):
            rank = self._rank(state, number)
            if self._stopped(state, number) or rank.phase == self._phases:
                continue
            if rank.waits:
                rank = replace(rank, counted=self._counted(state, number, rank))
            elif self._at_fence(state, rank):
                rank = replace(rank, fence=rank.fence + 1)
            else:
                rank = replace(rank, worked=rank.worked + 1)
            after = self._put(after, number, rank)
        return after

    def _counted(self, state: State, number: int, rank: Rank) -> tuple[int, ...]:
        counted = [0] * self._ranks
        missing = self._missing(state, number)
        last = min((self._flag(state, number, other) for other in missing), default=0)
        for other in missing:
            counted[other] = rank.counted[other]
            if self._rules.by_flags:
                counted[other] += self._flag(state, number, other) == last
            elif not (self._rules.waiting_is_excused and self._shows(state, other)):
                counted[other] += 1
            else:
                counted[other] = 0
        return tuple(counted)
