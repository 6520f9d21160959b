"""The kernel of page sums by itself: GB/s over the pages of a prompt, and beside the copy of a tensor.

Needs torch, a GPU and this package. Prints a table. The pages have the shape of an 8B Llama (32 layers, with
64 KiB in each block of 16 tokens), in random blocks. Each row is the median of the rounds, with the launch,
the lists of blocks and the return of the sums. One flipped bit must change exactly one sum.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kv_connector import _native

LAYERS, PAGE, TOKENS = 32, 64 << 10, 16


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1024, 7000, 32000], help="tokens of a prompt"
    )
    parser.add_argument("--blocks", type=int, default=4000, help="of the cache; 4,000 take 8 GB")
    parser.add_argument("--rounds", type=int, default=20)
    plan = parser.parse_args()
    cache = torch.randint(0, 255, (LAYERS, plan.blocks, PAGE), dtype=torch.uint8, device="cuda")
    other = torch.empty_like(cache[0])
    summer = _native.PageSummer(True)
    rng = np.random.default_rng(1)
    layers = [layer * plan.blocks * PAGE for layer in range(LAYERS)]
    print(f"{torch.cuda.get_device_name()}: sums of {PAGE >> 10} KiB pages in {LAYERS} layers")
    for length in plan.lengths:
        blocks = rng.permutation(plan.blocks)[: -(-length // TOKENS)].tolist()
        nbytes = len(blocks) * LAYERS * PAGE

        def sums(blocks: list[int] = blocks) -> bytes:
            return summer.sum(cache.data_ptr(), cache.nbytes, layers, blocks, PAGE, [0], PAGE)

        def apart(blocks: list[int] = blocks) -> None:
            for layer in layers:
                summer.sum(cache.data_ptr(), cache.nbytes, [layer], blocks, PAGE, [0], PAGE)

        first = sums()
        spent, by_layer = milliseconds(sums, plan.rounds), milliseconds(apart, plan.rounds)
        assert sums() == first
        cache[3, blocks[1], 77] ^= 1
        torch.cuda.synchronize()
        changed = np.frombuffer(first, np.uint64) != np.frombuffer(sums(), np.uint64)
        assert np.flatnonzero(changed).tolist() == [3 * len(blocks) + 1]
        print(
            f"  {length:6d} tokens, {nbytes / 1e6:7.0f} MB: {spent:7.3f} ms, "
            f"{nbytes / spent / 1e6:6.0f} GB/s; with a launch for each layer: {by_layer:7.3f} ms"
        )

    def copy() -> None:
        other.copy_(cache[1])
        torch.cuda.synchronize()

    copy()
    spent = milliseconds(copy, plan.rounds)
    print(f"  a copy on the GPU (reads and writes): {2 * other.nbytes / spent / 1e6:6.0f} GB/s")


if __name__ == "__main__":
    main()
