#!/usr/bin/env python3
"""Checks dispatch and combine of experts on a machine with GPUs, one process per rank.

    tests/gpu/moe.py [--ranks N] [--out FILE] [bytes] [replays] [kill] [survive] [admit] [times]

Without a name it runs all six. Needs torch for CUDA and an extension that was built with nvcc. Exits with 1
if a byte differs. Ranks may share a GPU, which checks bytes and measures nothing. `times` prints microseconds
of dispatch + combine in CUDA graphs, beside NCCL's all-gather and reduce-scatter: 20 pairs a graph, four
routings in turn, 100 replays, the slowest rank of each.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kv_connector.moe.group import Group, GroupError, GroupSettings

EXPERTS, TOP_K, ROUTINGS = 256, 8, 4
SHAPES = [(hidden, tokens) for hidden in (7168, 4096, 2048) for tokens in (128, 32, 8, 4096)]
REPLAYS = int(os.environ.get("KVC_MOE_REPLAYS", "10000"))
STEPS = int(os.environ.get("KVC_MOE_STEPS", "60"))  # of each shape; fewer under compute-sanitizer


class Rank:
    """A rank of a check: its GPU, its groups, and its exchange with the other ranks on the CPU."""

    def __init__(self, rank: int, ranks: int, port: int, out: str | None) -> None:
        self.rank, self.ranks, self.out = rank, ranks, out
        gpu = rank % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        self.device = torch.device("cuda", gpu)
        self.store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=120))
        self.port, self.room, self.told = port, "", 0
        self.new = False
        """A process that takes the place of a killed rank."""

    def exchange(self, message: bytes) -> list[bytes]:
        self.told += 1
        keys = [f"{self.room}/{self.told}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], message)
        return [bytes(self.store.get(key)) for key in keys]

    def enter(self, room: str) -> None:
        """Counts exchanges anew, as a new process does."""
        self.room, self.told = room, 0

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(message) for message in self.exchange(pickle.dumps(value))]

    def sync(self) -> None:
        torch.cuda.synchronize()
        self.gather(None)

    def settings(
        self, hidden: int, tokens: int, *, timeout: float = 20.0, slots: int = 1, survive: bool = False
    ) -> GroupSettings:
        return GroupSettings(
            rank=self.rank, ranks=self.ranks, hidden=hidden, top_k=TOP_K, experts=EXPERTS, max_tokens=tokens,
            row_bytes=2 * hidden + hidden // 32 + 256, slots=slots, device=self.device.index, timeout=timeout,
            survive=survive,
        )  # fmt: skip

    def form(self, hidden: int, tokens: int, **more: Any) -> Group:
        group = Group.form(self.settings(hidden, tokens, **more), self.exchange)
        group.place([expert * self.ranks // EXPERTS for expert in range(EXPERTS)])
        return group

    def tell(self, **row: Any) -> None:
        if self.rank == 0:
            line = json.dumps(row) + "\n"
            sys.stdout.write(line)
            sys.stdout.flush()
            if self.out:
                with Path(self.out).open("a") as file:
                    file.write(line)


class Step:
    """The inputs of one step. Every rank can compute those of all ranks."""

    def __init__(self, of: Rank, hidden: int, tokens: int, rank: int, seed: int, *, fp8: bool) -> None:
        random_cpu = torch.Generator().manual_seed(1_000 * rank + seed)
        random_gpu = torch.Generator(of.device).manual_seed(1_000 * rank + seed)
        ids = torch.rand(tokens, EXPERTS, generator=random_cpu).topk(TOP_K, dim=1).indices
        self.ids = ids.to(torch.int32).to(of.device)
        self.weights = torch.rand(tokens, TOP_K, generator=random_cpu).to(of.device)
        x = torch.randn(tokens, hidden, generator=random_gpu, device=of.device)
        self.x = x.clamp_(-4, 4).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        self.scales = torch.rand(tokens, hidden // 128, generator=random_gpu, device=of.device)

    def dispatch(self, group: Group, sizes: Sequence[int], slot: int = 0) -> Any:
        return group.dispatch(self.x, self.ids, self.weights, scales=[self.scales], sizes=sizes, slot=slot)


def results_of(of: Rank, rank: int, rows: int, hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(of.device).manual_seed(77 * rank + seed)
    return torch.randn(rows, hidden, generator=generator, device=of.device).to(torch.bfloat16)


def expected_sum(
    of: Rank, step: Step, rows: int, hidden: int, seed: int, first: int, absent: int = -1
) -> torch.Tensor:
    """Returns the sum by its definition: in rank order, in fp32, rounded once. ``absent``: left out."""
    tokens = step.ids.shape[0]
    total = torch.zeros(tokens, hidden, device=of.device)
    for rank in range(of.ranks):
        if rank == absent:
            continue
        part = results_of(of, rank, rows, hidden, seed)[first : first + tokens].float()
        wants = (step.ids.long() * of.ranks // EXPERTS == rank).any(1)
        total += torch.where(wants[:, None], part, torch.zeros_like(part))
    return total.to(torch.bfloat16)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_bytes(of: Rank) -> None:
    rng = random.Random(1)
    cases = 0
    for hidden, most in ((7168, 128), (4096, 300), (2048, 1024), (1152, 64), (2048, 8192)):
        group = of.form(hidden, most, slots=2)
        for case in range(STEPS):
            sizes = [rng.choice((0, 1, most, rng.randrange(most))) for _ in range(of.ranks)]
            slot, fp8, seed = case % 2, case % 3 > 0, rng.randrange(1 << 20)
            steps = [Step(of, hidden, size, rank, seed, fp8=fp8) for rank, size in enumerate(sizes)]
            mine, rows = steps[of.rank], sum(sizes)
            first = sum(sizes[: of.rank])
            group._dispatch_areas[slot].fill_(0xEE)
            of.sync()  # no rank's rows may arrive before the poison
            got = mine.dispatch(group, sizes, slot)
            torch.cuda.synchronize()
            ids = torch.cat([step.ids for step in steps])
            wanted = (ids.long() * of.ranks // EXPERTS == of.rank).any(1)
            assert same(got.ids, ids), f"ids of {sizes}"
            assert same(got.weights, torch.cat([step.weights for step in steps])), f"weights of {sizes}"
            x = torch.cat([step.x.view(torch.uint8) for step in steps])
            assert same(got.x.view(torch.uint8)[wanted], x[wanted]), f"rows of {sizes}"
            assert bool((got.x.view(torch.uint8)[~wanted] == 0xEE).all()), (
                "a row that nobody wants was written"
            )
            assert same(got.scales[0][wanted], torch.cat([step.scales for step in steps])[wanted]), "scales"
            group.combine_buffer(sizes, slot).copy_(results_of(of, of.rank, rows, hidden, seed))
            out = torch.empty(sizes[of.rank], hidden, dtype=torch.bfloat16, device=of.device)
            group.combine(out, sizes, slot)
            torch.cuda.synchronize()
            assert same(out, expected_sum(of, mine, rows, hidden, seed, first)), f"sums of {sizes}"
            group.raise_fault()
            cases += 1
        of.sync()
        group.close()
    of.tell(check="bytes", steps=cases, ranks=of.ranks, different=0)


def check_replays(of: Rank) -> None:
    """Checks one graph of dispatch, a stand-in for experts, and combine. Its inputs change before each
    replay."""
    hidden, tokens = 2048, 32
    group = of.form(hidden, tokens)
    sizes = [tokens] * of.ranks
    rows, first = tokens * of.ranks, tokens * of.rank
    steps = [
        [Step(of, hidden, tokens, rank, seed, fp8=True) for rank in range(of.ranks)]
        for seed in range(ROUTINGS)
    ]
    results = [results_of(of, of.rank, rows, hidden, seed) for seed in range(ROUTINGS)]
    sums = [expected_sum(of, steps[seed][of.rank], rows, hidden, seed, first) for seed in range(ROUTINGS)]
    ids = [torch.cat([step.ids for step in steps[seed]]) for seed in range(ROUTINGS)]
    wanted = [(i.long() * of.ranks // EXPERTS == of.rank).any(1)[:, None] for i in ids]
    xs = [torch.cat([step.x.view(torch.uint8) for step in steps[seed]]) for seed in range(ROUTINGS)]
    static, result = Step(of, hidden, tokens, of.rank, 0, fp8=True), torch.empty_like(results[0])
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=of.device)
    wrong = torch.zeros(1, dtype=torch.int64, device=of.device)

    # Like experts, these read the rows before combine begins. Afterwards a peer's next rows may arrive.
    came_ids, came_x = torch.empty_like(ids[0]), torch.empty_like(xs[0])

    def pair() -> None:
        got = static.dispatch(group, sizes)
        came_ids.copy_(got.ids)
        came_x.copy_(got.x.view(torch.uint8))
        group.combine_buffer(sizes).copy_(result)
        group.combine(out, sizes)

    pair()
    of.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        pair()
    of.sync()
    rng, mine = random.Random(5), random.Random(of.rank)
    for _ in range(REPLAYS):
        seed = rng.randrange(ROUTINGS)
        step = steps[seed][of.rank]
        static.x.copy_(step.x), static.ids.copy_(step.ids), static.weights.copy_(step.weights)
        result.copy_(results[seed])
        if mine.random() < 0.2:
            torch.cuda._sleep(mine.randrange(200_000))  # cycles: up to 0.1 ms
        graph.replay()
        wrong += (came_ids != ids[seed]).sum()
        wrong += ((came_x != xs[seed]) & wanted[seed]).sum()
        wrong += (out.view(torch.int16) != sums[seed].view(torch.int16)).sum()
    torch.cuda.synchronize()
    group.raise_fault()
    different = sum(of.gather(int(wrong)))
    of.tell(check="replays", replays=REPLAYS, ranks=of.ranks, different=different)
    assert different == 0
    group.close()


def check_kill(of: Rank) -> None:
    """Kills the last rank while the kernels of the others wait for it. They must end with an error that names
    it."""
    group = of.form(2048, 32)
    sizes = [32] * of.ranks
    step = Step(of, 2048, 32, of.rank, 3, fp8=True)
    out = torch.empty(32, 2048, dtype=torch.bfloat16, device=of.device)
    for _ in range(3):
        step.dispatch(group, sizes)
        group.combine(out, sizes)
    of.sync()
    if of.rank == of.ranks - 1:
        time.sleep(1.0)  # the kernels of the others are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    step.dispatch(group, sizes)
    group.combine(out, sizes)
    begin = time.monotonic()
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    try:
        group.raise_fault()
        raise AssertionError("no fault although a rank is dead")
    except GroupError as error:
        of.tell(check="kill", ranks=of.ranks, after_s=round(waited - 1.0, 3), error=str(error))
    group.close()


class SurvivingSteps:
    """Steps of a group that survives. Ids and sums are compared with their definition."""

    hidden, tokens = 7168, 32

    def __init__(self, of: Rank, group: Group) -> None:
        self.of, self.group = of, group
        self.sizes, self.rows = [self.tokens] * of.ranks, self.tokens * of.ranks
        self.own = Step(of, self.hidden, self.tokens, of.rank, 0, fp8=True)
        self.ids = torch.empty(self.rows, TOP_K, dtype=torch.int32, device=of.device)
        self.results = torch.empty(self.rows, self.hidden, dtype=torch.bfloat16, device=of.device)
        self.out = torch.empty(self.tokens, self.hidden, dtype=torch.bfloat16, device=of.device)

    def enqueue(self) -> None:
        got = self.own.dispatch(self.group, self.sizes)
        self.ids.copy_(got.ids)  # before combine, after which a peer's next rows may arrive
        self.group.combine_buffer(self.sizes).copy_(self.results)
        self.group.combine(self.out, self.sizes)

    def capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.enqueue()
        return graph

    def check(self, seed: int, absent: int = -1, graph: torch.cuda.CUDAGraph | None = None) -> None:
        of, hidden, tokens = self.of, self.hidden, self.tokens
        steps = [Step(of, hidden, tokens, rank, seed, fp8=True) for rank in range(of.ranks)]
        step = steps[of.rank]
        for name in ("x", "ids", "weights", "scales"):
            getattr(self.own, name).copy_(getattr(step, name))
        self.results.copy_(results_of(of, of.rank, self.rows, hidden, seed))
        graph.replay() if graph is not None else self.enqueue()
        torch.cuda.synchronize()
        self.group.raise_fault()
        ids = torch.cat([step.ids for step in steps])
        if absent >= 0:
            ids[absent * tokens : (absent + 1) * tokens] = -1
        assert same(self.ids, ids), f"ids of step {seed}"
        first = tokens * of.rank
        sums = expected_sum(of, step, self.rows, hidden, seed, first, absent)
        assert same(self.out, sums), f"step {seed}"


def die(of: Rank) -> None:
    of.sync()
    if of.rank == of.ranks - 1:
        time.sleep(1.0)  # the kernels of the others are waiting by then
        os.kill(os.getpid(), signal.SIGKILL)


def check_survive(of: Rank) -> None:
    """Kills the last rank while the kernels of the others wait for it. Their steps go on without it."""
    victim = of.ranks - 1
    group = of.form(SurvivingSteps.hidden, SurvivingSteps.tokens, survive=True)
    steps = SurvivingSteps(of, group)
    for seed in range(3):
        steps.check(seed)
    die(of)
    times = [time.monotonic()]
    for seed in range(3, 3 + STEPS):
        steps.check(seed, victim)
        times.append(time.monotonic())
    assert group.masked() == {victim}
    first_s, next_s = (round(times[step + 1] - times[step], 3) for step in range(2))
    of.tell(check="survive", ranks=of.ranks, after_s=round(first_s - 1.0, 3), next_step_s=next_s, steps=STEPS)
    group.close()


def check_admit(of: Rank) -> None:
    """Kills the last rank, and admits a new process in its place. Graphs of before stay valid."""
    victim, hidden, tokens = of.ranks - 1, SurvivingSteps.hidden, SurvivingSteps.tokens
    if of.new:
        of.store.get("admission")
        of.enter("admission")
        group = Group.join(of.settings(hidden, tokens, survive=True), of.exchange)
        steps, graph, took = SurvivingSteps(of, group), None, 0.0
    else:
        group = of.form(hidden, tokens, survive=True)
        steps = SurvivingSteps(of, group)
        for seed in range(3):
            steps.check(seed)
        graph = steps.capture()
        steps.check(3, -1, graph)
        die(of)
        for seed in range(4, 10):
            steps.check(seed, victim)
        of.store.set("admission", b"1")
        of.enter("admission")
        begin = time.monotonic()
        group.admit(victim, of.exchange)
        took = time.monotonic() - begin
    for seed in range(10, 10 + STEPS):
        steps.check(seed, -1, graph if seed % 2 else None)
    assert group.masked() == frozenset()
    of.sync()
    of.tell(check="admit", ranks=of.ranks, admission_s=round(took, 3), steps=STEPS, different=0)
    group.close()


def capture(of: Rank, call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(ROUTINGS):
            call(index)
    of.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for index in range(calls):
            call(index % ROUTINGS)
    of.sync()
    return graph


def time_of(of: Rank, call: Callable[[int], object], tokens: int, replays: int = 100) -> tuple[float, float]:
    """Returns p50 and p99 in us per call. Each replay counts with the time of its slowest rank."""
    calls = 20 if tokens < 1000 else 4
    graph = capture(of, call, calls)
    times = []
    for replay in range(replays + 10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 10:
            times.append(begin.elapsed_time(end) / calls * 1e3)
    of.sync()
    slowest = sorted(max(one) for one in zip(*of.gather(times), strict=True))
    return round(slowest[len(slowest) // 2], 2), round(slowest[int(len(slowest) * 0.99)], 2)


def measure(of: Rank, hidden: int, tokens: int) -> None:
    group = of.form(hidden, tokens)
    sizes = [tokens] * of.ranks
    steps = [Step(of, hidden, tokens, of.rank, seed, fp8=True) for seed in range(ROUTINGS)]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=of.device)
    group.combine_buffer(sizes).zero_()
    of.sync()
    pad = torch.zeros(4096, device=of.device)

    def pair(index: int) -> None:
        steps[index].dispatch(group, sizes)
        group.combine(out, sizes)

    def apart(index: int) -> None:
        steps[index].dispatch(group, sizes)
        pad.add_(1)
        group.combine(out, sizes)
        pad.add_(1)

    def alone(index: int) -> None:
        pad.add_(1)
        pad.add_(1)

    rows = [
        torch.cat([s.x.view(torch.uint8), s.scales.view(torch.uint8), s.ids.view(torch.uint8),
                   s.weights.view(torch.uint8)], 1) for s in steps
    ]  # fmt: skip
    everything = torch.empty(tokens * of.ranks, rows[0].shape[1], dtype=torch.uint8, device=of.device)
    results = torch.zeros(tokens * of.ranks, hidden, dtype=torch.bfloat16, device=of.device)

    def nccl(index: int) -> None:
        dist.all_gather_into_tensor(everything, rows[index])
        dist.reduce_scatter_tensor(out, results)

    ours, nccls = time_of(of, pair, tokens), time_of(of, nccl, tokens)
    between = time_of(of, apart, tokens)[0] - time_of(of, alone, tokens)[0]
    again = time_of(of, pair, tokens)
    of.tell(check="times", ranks=of.ranks, hidden=hidden, tokens=tokens, ours=ours, again=again,
            apart=round(between, 2), nccl=nccls, ratio=round(ours[0] / nccls[0], 3))  # fmt: skip
    group.raise_fault()
    of.sync()
    group.close()


def check_times(of: Rank) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(of.port + 1), NCCL_NVLS_ENABLE="0")
    dist.init_process_group("nccl", rank=of.rank, world_size=of.ranks, device_id=of.device)
    for hidden, tokens in SHAPES:
        measure(of, hidden, tokens)
    dist.destroy_process_group()


CHECKS = {
    "bytes": check_bytes,
    "replays": check_replays,
    "kill": check_kill,
    "survive": check_survive,
    "admit": check_admit,
    "times": check_times,
}


def run(rank: int, ranks: int, port: int, out: str | None, name: str) -> None:
    of = Rank(min(rank, ranks - 1), ranks, port, out)
    of.new = rank == ranks
    CHECKS[name](of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--out", help="file for the figures, a JSON object a line")
    arguments = parser.parse_args()
    failed = False
    for number, name in enumerate(arguments.checks or CHECKS):
        if name not in CHECKS:
            parser.error(f"no check {name!r}: {', '.join(CHECKS)}")
        port = random.randrange(20_000, 30_000) + 2 * number
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=run, args=(rank, arguments.ranks, port, arguments.out, name))
            for rank in range(arguments.ranks + (name == "admit"))
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(240)
            killed = name in ("kill", "survive", "admit") and rank == arguments.ranks - 1
            if process.exitcode != (-signal.SIGKILL if killed else 0):
                failed = True
                sys.stderr.write(f"{name}: rank {rank} ended with {process.exitcode}\n")
                process.kill()
    sys.exit(failed)


if __name__ == "__main__":
    main()
