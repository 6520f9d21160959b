"""The nvlink lane between all pairs of GPUs at once: GB/s out of each GPU, and into it.

Needs torch and this package, and as many GPUs as --gpus. Each GPU has a process with a transfer engine that
is connected to all others. First one GPU writes to one other, then each to the next one, then each to all
others. The time is from a common start until every rank has counted every page for it. The bytes of the first
round are compared. Each measurement appends a line of JSON to --json. --provider host runs in memory, to try
it.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_connector.engine import DomainConfig, EngineConfig, EventKind, PagedWrite, Pages
from kv_connector.engine.transfer_engine import TransferEngine

PAGE = 64 << 10
TIMEOUT_SECONDS = 20.0

Patterns = Mapping[str, list[tuple[int, int]]]


def patterns(ranks: int) -> Patterns:
    """Returns the targets of each writer."""
    return {
        "one to one": [(0, 1)],
        "each to the next": [(rank, (rank + 1) % ranks) for rank in range(ranks)],
        "each to all others": [*itertools.permutations(range(ranks), 2)],
    }


class GpuRank:
    """One GPU's transfer engine.

    Its memory has a part for pages to send, and a part for each rank's pages.
    """

    def __init__(
        self, number: int, ranks: int, most: int, provider: str, pipes: Mapping[int, Connection]
    ) -> None:
        """``most``: pages of 64 KiB in each part."""
        self._number = number
        self._pipes = pipes
        device = "cpu" if provider == "host" else f"cuda:{number}"
        self._most = most
        self._memory = torch.zeros((ranks + 1, most, PAGE), dtype=torch.uint8, device=device)
        self._memory[0] = content(number, most, device)
        if device != "cpu":
            torch.cuda.synchronize(number)
        domain = DomainConfig(provider, device="" if device == "cpu" else str(number))
        self.engine = TransferEngine(EngineConfig(f"rank {number}", [domain], spin_us=300))
        self._region = self.engine.register_memory(self._memory.data_ptr(), self._memory.nbytes)
        self._peers = {}
        for other, pipe in pipes.items():
            if number < other:
                offer = self.engine.offer(f"rank {other}")
                pipe.send_bytes(offer.data)
                self.engine.complete(offer.peer, pipe.recv_bytes())
                peer = offer.peer
            else:
                answer = self.engine.accept(f"rank {other}", pipe.recv_bytes())
                pipe.send_bytes(answer.data)
                peer = answer.peer
            pipe.send_bytes(self.engine.region_descriptor(self._region))
            self._peers[other] = (peer, self.engine.import_region(peer, pipe.recv_bytes()))

    def round(self, pairs: list[tuple[int, int]], pages: int, start: Barrier, seed: int) -> float:
        """Returns the seconds until all pages for this rank are counted and all its writes have landed."""
        mine = self._number
        sources = [one for one, other in pairs if other == mine]
        targets = [other for one, other in pairs if one == mine]
        counters = self.engine.alloc_counters(max(1, len(sources)))
        for source, immediate in zip(sources, counters.immediates, strict=False):
            self._pipes[source].send(immediate)
        if sources:
            self.engine.expect(counters.id, [pages] * len(sources))
        immediates = {target: self._pipes[target].recv() for target in targets}
        order = np.random.default_rng(seed).permutation(self._most)[:pages]
        start.wait(TIMEOUT_SECONDS)
        begin = time.perf_counter()
        transfers = []
        for target in targets:
            peer, region = self._peers[target]
            transfer = self.engine.open_transfer(peer)
            there = Pages(order, PAGE, (mine + 1) * self._most * PAGE)
            write = PagedWrite(PAGE, self._region, Pages(order, PAGE), region, there, immediates[target])
            self.engine.write_pages(transfer, write)
            self.engine.seal(transfer)
            transfers.append(transfer)
        for transfer in transfers:
            event = self.engine.wait_transfer(transfer, TIMEOUT_SECONDS)
            if event.kind is not EventKind.TRANSFER_DONE:
                raise RuntimeError(f"rank {mine}: {event.error}")
        if sources:
            self.engine.wait_counters(counters.id, TIMEOUT_SECONDS)
        seconds = time.perf_counter() - begin
        self.engine.release_counters(counters.id)
        if pages == self._most and seed == 0:
            for source in sources:
                right = content(source, pages, self._memory.device)
                if not torch.equal(self._memory[source + 1], right):
                    raise RuntimeError(f"rank {mine}: the pages from rank {source} have wrong bytes")
        start.wait(TIMEOUT_SECONDS)
        return seconds


def content(rank: int, pages: int, device: Any) -> torch.Tensor:
    """Returns pages whose contents differ between ranks and between pages."""
    words = torch.arange(pages * PAGE // 8, device=device)
    return ((words + (rank << 40)) * 0x5851F42D4C957F2D).view(torch.uint8).view(pages, PAGE)


def run(
    number: int,
    plan: argparse.Namespace,
    pipes: Mapping[int, Connection],
    start: Barrier,
    results: Connection,
) -> None:
    sizes = [(mib << 20) // PAGE for mib in plan.mib]
    rank = GpuRank(number, plan.gpus, max(sizes), plan.provider, pipes)
    with rank.engine:
        for name, pairs in patterns(plan.gpus).items():
            for pages in sizes:
                for seed in range(plan.rounds + 1):
                    seconds = rank.round(pairs, pages, start, seed)
                    if seed:  # the first round warms up, and its bytes are compared
                        results.send((name, pages, seed, seconds))
        results.send(None)
        start.wait(TIMEOUT_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--mib", nargs="+", type=int, default=[512, 32, 1], help="MiB to each peer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--provider", default="nvlink")
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="file to which JSON lines are appended"
    )
    plan = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(plan.gpus)
    pipes: list[dict[int, Connection]] = [{} for _ in range(plan.gpus)]
    for one in range(plan.gpus):
        for other in range(one + 1, plan.gpus):
            pipes[one][other], pipes[other][one] = context.Pipe()
    readers, ranks = [], []
    for number in range(plan.gpus):
        reader, writer = context.Pipe(duplex=False)
        arguments = (number, plan, pipes[number], start, writer)
        ranks.append(context.Process(target=run, args=arguments, daemon=True))
        ranks[-1].start()
        writer.close()
        readers.append(reader)
    slowest: dict[tuple[str, int], dict[int, float]] = {}
    for reader in readers:
        while (told := reader.recv()) is not None:
            name, pages, seed, seconds = told
            rounds = slowest.setdefault((name, pages), {})
            rounds[seed] = max(rounds.get(seed, 0.0), seconds)
    for rank in ranks:
        rank.join()
    print("| | MiB to each peer | out of each GPU that writes, GB/s | all GPUs, GB/s | us |")
    print("|---|---|---|---|---|")
    with plan.json.open("a") as sink:
        for (name, pages), rounds in slowest.items():
            pairs = patterns(plan.gpus)[name]
            seconds = statistics.median(rounds.values())
            whole = len(pairs) * pages * PAGE / seconds / 1e9
            each = whole / len({one for one, _ in pairs})
            mib = pages * PAGE >> 20
            print(f"| {name} | {mib} | {each:.1f} | {whole:.1f} | {seconds * 1e6:.0f} |")
            line = {"pattern": name, "gpus": plan.gpus, "MiB": mib, "GB/s a GPU": each, "seconds": seconds}
            sink.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
