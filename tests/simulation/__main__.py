"""Runs the campaign: `python -m tests.simulation --seeds 200000`, or `--seed N` for a failed seed.

Needs Python, msgspec and pyzmq.
"""

from __future__ import annotations

import argparse
import sys

from .campaign import DRAWS, campaign, run
from .minimize import report

_TOLD = 3  # failing seeds that are reported in full


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3000, help="how many to run (default: 3000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one for each core)")
    parser.add_argument("--stop", action="store_true", help="end with the first violation")
    parser.add_argument(
        "--seed", type=int, help="run this one alone, and tell the smallest scenario that fails as it"
    )
    parser.add_argument(
        "--trace", action="store_true", help="with --seed: everything that happens, failing or not"
    )
    parser.add_argument("--of", choices=sorted(DRAWS), help="simulates this alone (default: each in turn)")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"argument --seeds: {arguments.seeds} is not a whole number of at least 1")
    every = [arguments.of] if arguments.of else sorted(DRAWS)
    if arguments.seed is not None:
        return max(_replay(of, arguments.seed, arguments.trace) for of in every)
    return max(_campaign(of, arguments) for of in every)


def _campaign(of: str, arguments: argparse.Namespace) -> int:
    tally = campaign(
        arguments.first,
        arguments.seeds,
        of=of,
        jobs=arguments.jobs,
        at_first=arguments.stop,
        say=lambda line: print(line, flush=True),
    )
    print("came through: " + ", ".join(f"{what} {n}" for what, n in tally.ended.most_common()))
    told = 1 if arguments.stop else _TOLD
    for seed in sorted(tally.violations)[:told]:
        print(report(of, seed))
    if len(tally.violations) > told:
        print(f"and {len(tally.violations) - told} more seeds: {sorted(tally.violations)[told:100]}")
    return 1 if tally.violations else 0


def _replay(of: str, seed: int, trace: bool) -> int:
    world, violation = run(DRAWS[of](seed), tracing=trace)
    for line in world.books.trace:
        print(line)
    print(f"{of}, seed {seed}: no violation" if violation is None else report(of, seed))
    return 0 if violation is None else 1


if __name__ == "__main__":
    sys.exit(main())
