"""The command line of a fuzzer whose scenarios are drawn from numbered seeds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from suite_numbers import whole


def chosen_seeds(description: str | None, default: int, scenarios: str) -> range:
    """Reads the command line and returns the seeds to try. ``scenarios``: their noun, for the help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=whole, default=default, help=f"Number of {scenarios}.")
    parser.add_argument("--first", type=int, default=0, help=f"Seed of the first of the {scenarios}.")
    given = parser.parse_args()
    return range(given.first, given.first + given.seeds)


def search(seeds: range, scenarios: str, report: Callable[[int], str | None]) -> None:
    """Tries each seed and prints each fault, which ``report`` describes. Exits with 1 if it finds one."""
    started = time.monotonic()
    found = 0
    for seed in seeds:
        if text := report(seed):
            print(f"FOUND with {text}", flush=True)
            found += 1
    print(f"{len(seeds)} {scenarios} in {time.monotonic() - started:.0f} s: {found} faults found")
    sys.exit(min(found, 1))
