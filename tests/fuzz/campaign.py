"""A long run of the fuzzers: `make fuzz`, or `python -m tests.fuzz.campaign --help`.

Deterministic: a finding names its seed and block, and `--seed S --block B` feeds that block again.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from suite_numbers import whole

from tests.fuzz.live import attack
from tests.fuzz.mutator import Mutator
from tests.fuzz.targets import PYTHON_TARGETS, Target, native_targets

BLOCK = 1000
# Decoders keep nothing. The pools of Python's allocator settle within the first inputs.
GROWTH_MIB = 8.0
# A native input makes and fences a peer, which takes about a hundred times as long as a message.
NATIVE_EVERY = 50


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def feed_block(target: Target, seed: str, block: int, counts: Counter[str]) -> None:
    """Feeds BLOCK inputs to one target. An exception is a finding."""
    mutator = Mutator(f"{seed}:{block}", target.corpus)
    taken = 0
    for number in range(BLOCK):
        data = mutator.next()
        try:
            taken += target.feed(data)
        except BaseException:
            print(f"FOUND in {target.name}: --seed {seed} --block {block}, input {number}: {data.hex()}")
            raise
    counts[f"{target.name} taken"] += taken
    counts[f"{target.name} refused"] += BLOCK - taken


def run(inputs: int, seed: str, only: int | None, native: bool) -> None:
    with ExitStack() as stack:
        often = [target for target in PYTHON_TARGETS for _ in range(target.weight)]
        rare = stack.enter_context(native_targets()) if native else ()

        def target_of(block: int) -> Target:
            if rare and block % NATIVE_EVERY == 0:
                return rare[block // NATIVE_EVERY % len(rare)]
            return often[block % len(often)]

        counts: Counter[str] = Counter()
        if only is not None:
            feed_block(target_of(only), seed, only, counts)
            return
        blocks = -(-inputs // BLOCK)
        settled, started = 0.0, time.monotonic()
        for block in range(blocks):
            feed_block(target_of(block), seed, block, counts)
            if block == blocks // 10:
                settled = resident_mib()
            if block % 1000 == 999:
                print(f"{(block + 1) * BLOCK:,} inputs, {time.monotonic() - started:.0f} s", flush=True)
        growth = resident_mib() - settled
    for name, count in sorted(counts.items()):
        print(f"{count:>12,} {name}")
    print(f"{blocks * BLOCK:,} inputs in {time.monotonic() - started:.0f} s; memory grew {growth:.1f} MiB")
    if growth > GROWTH_MIB:
        raise SystemExit(f"FOUND: memory grew by more than {GROWTH_MIB} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=whole, default=1_000_000)
    parser.add_argument("--seed", default=str(time.time_ns()))
    parser.add_argument("--block", type=int, help="feed this block alone")
    parser.add_argument("--no-native", action="store_true", help="leave the native engine's decoders out")
    parser.add_argument("--connections", type=int, default=2000, help="raw connections to a live agent")
    options = parser.parse_args()
    faulthandler.enable()
    print(f"seed {options.seed}", flush=True)
    run(options.inputs, options.seed, options.block, not options.no_native)
    if options.block is None and options.connections:
        for line in attack(options.seed, options.connections):
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
