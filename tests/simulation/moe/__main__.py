"""`make interleavings`: larger groups and more rounds than the tests explore.

Prints one line for each family of groups, and ends with status 1 and the trace at the first violation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

from .explore import Exploration
from .lateness import Lateness, Rules, places
from .program import Sizes


def _idle(ranks: int, rounds: int) -> list[Sizes]:
    """Every choice of ranks that have a token in a round."""
    return list(product(product((0, 1), repeat=ranks), repeat=rounds))


def _families() -> Iterator[tuple[str, list[Sizes], dict[str, Any]]]:
    yield "3 ranks, 3 rounds", _idle(3, 3), {}
    yield "3 ranks, 5 rounds, no rank idle", [((1, 1, 1),) * 5], {}
    for victim in range(3):
        yield f"3 ranks, 2 rounds, rank {victim} dies", _idle(3, 2), {"victim": victim}
    for stuck in range(3):
        yield f"3 ranks, 2 rounds, rank {stuck} is stuck", _idle(3, 2), {"stuck": stuck}
    moved: list[Sizes] = [((1, 1, 1), (0, 1, 1)), ((1, 0, 1), (0, 1, 1))]
    for rank in range(3):
        survive: dict[str, Any] = {"survive": True}
        yield f"3 ranks, 2 rounds, without rank {rank} that dies", moved, survive | {"victim": rank}
        yield f"3 ranks, 2 rounds, without rank {rank} that is late", moved, survive | {"stuck": rank}
    yield "3 ranks, 2 rounds, waits run out", _idle(3, 2), {"deadlines": True}
    # The whole exploration of four ranks does not fit into memory.
    moving: list[Sizes] = [((1, 0, 2, 1), (0, 1, 1, 2)), ((1, 1, 1, 1), (1, 0, 1, 0))]
    yield "4 ranks, 2 rounds, reduced", moving, {"reduced": True}


def main() -> int:
    for name, groups, options in _families():
        begin, states = time.monotonic(), 0
        for sizes in groups:
            found = Exploration(sizes, **options).run()
            states += found.states
            if found.violation:
                print(f"{name}, sizes {sizes}: {found.violation}", *found.trace, sep="\n  ")
                return 1
        print(f"{name}: {len(groups)} groups, {states} states, {time.monotonic() - begin:.0f} s", flush=True)
    for ranks, phases, timeout in ((3, 6, 5), (4, 4, 2)):
        begin, states = time.monotonic(), 0
        for place in places(ranks, phases):
            late = Lateness(ranks, phases, timeout, *place, Rules()).run()
            states += late.states
            if late.violation:
                print(f"{ranks} ranks, a rank is stuck at {place}: {late.violation}")
                return 1
        name = f"{ranks} ranks, {phases} phases, timeout of {timeout}"
        print(f"{name}: {states} states, {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
