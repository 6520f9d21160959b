"""Runs many seeds on all cores, and collects violations and the ends and faults that were reached."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from . import deferring, prefixes
from . import scenario as requests
from .books import Violation
from .surroundings import Surroundings
from .weights import scenario as weights
from .world import World

Scenario = requests.Scenario | weights.Scenario

DRAWS: dict[str, Callable[[int], Scenario]] = {
    "requests": requests.draw,
    "prefixes": prefixes.draw,
    "deferring": deferring.draw,
    "weights": weights.draw,
}
"""Function that draws a seed's scenario, by the name of the simulated protocol."""

_CHUNK = 100  # seeds that one worker runs before it reports
_SLOWEST_REPORT_S = 5.0
_Chunk = tuple[str, int, int]  # key of DRAWS, first seed, seed behind the last


@dataclass
class Tally:
    seeds: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)  # by seed

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.ended += other.ended
        self.violations |= other.violations


def run(scenario: Scenario, tracing: bool = False) -> tuple[Surroundings, str | None]:
    """Returns the world at its end, and the violation. An error in the model counts as a violation too."""
    world: Surroundings
    if isinstance(scenario, weights.Scenario):
        # The trainers' links are the shipped ones. They import sockets, which requests do not need.
        from .weights.world import World as WeightsWorld

        world = WeightsWorld(scenario, tracing)
    else:
        world = World(scenario, tracing)
    # All objects of a world refer to each other, so nothing can be collected before its end.
    gc.disable()
    try:
        world.run()
    except Violation as violation:
        return world, str(violation)
    except Exception as error:
        return world, f"the simulator failed: {type(error).__name__}: {error}"
    finally:
        gc.enable()
    return world, None


def campaign(
    first: int,
    count: int,
    *,
    of: str = "requests",
    jobs: int = 0,
    at_first: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Runs the seeds [first, first + count). ``of``: a key of DRAWS. ``at_first``: stops at the first
    violation. ``jobs``: number of processes; 0: number of cores."""
    total, begun, said = Tally(), time.monotonic(), time.monotonic()
    end = first + count
    chunks = [(of, start, min(start + _CHUNK, end)) for start in range(first, end, _CHUNK)]
    for tally in _tallies(chunks, jobs or len(os.sched_getaffinity(0))):
        total.add(tally)
        now = time.monotonic()
        if now - said > _SLOWEST_REPORT_S or total.seeds == count:
            said = now
            bad = len(total.violations)
            say(f"{of}: {total.seeds} of {count} seeds in {now - begun:.0f} s, {bad} with a violation")
        if at_first and total.violations:
            break
    return total


def _tallies(chunks: list[_Chunk], jobs: int) -> Iterator[Tally]:
    if jobs == 1 or len(chunks) == 1:
        yield from map(_run_chunk, chunks)
        return
    # Spawned, not forked: the caller may have threads.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_chunk, chunks)


def _run_chunk(chunk: _Chunk) -> Tally:
    tally, (of, first, end) = Tally(), chunk
    for seed in range(first, end):
        world, violation = run(DRAWS[of](seed))
        tally.seeds += 1
        tally.ended += world.books.ended
        if violation is not None:
            tally.violations[seed] = violation
    return tally
