"""Dispatch and combine of experts between this machine's GPUs, beside an all-gather and a reduce-scatter."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.harness import BenchError
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import ExpertPairs, append, percentile
from kv_connector.bench.tables import print_conditions, print_table

OURS = "ours"
# Seconds for one rank to start (torch, NCCL) or to measure one shape: the slowest shape takes seconds.
_PATIENCE = 180.0


@dataclass(frozen=True)
class ExchangeShape:
    hidden: int
    tokens: int
    """Tokens of one rank."""


@dataclass(frozen=True)
class ExpertsWorkload:
    ranks: int
    shapes: tuple[ExchangeShape, ...]
    top_k: int
    experts: int
    iterations: int


@dataclass(frozen=True)
class MeasuredExchange:
    """The result of one turn of a contestant."""

    shape: ExchangeShape
    contestant: str
    microseconds: list[float]


@dataclass(frozen=True)
class ExpertsPlan:
    workload: ExpertsWorkload
    gpu: bool
    json: Path | None

    @property
    def rival(self) -> str:
        return "NCCL" if self.gpu else "gloo"


def run(plan: ExpertsPlan, console: Console) -> bool:
    """Measures and prints. Returns whether nothing failed."""
    workload = plan.workload
    how = "CUDA graphs of 20 pairs, replayed" if plan.gpu else "calls from Python, a pair each"
    where = conditions(
        {
            "ranks": f"{workload.ranks}, a process each, on {'GPUs' if plan.gpu else 'host memory'}",
            "rows": f"fp8 and fp32 scales, {workload.top_k} of {workload.experts} experts a token; bf16 back",
            "beside": f"torch.distributed's {plan.rival}: all-gather and reduce-scatter",
            "measured": f"{how}; {workload.iterations} repetitions, two turns of each, the slowest rank",
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    times: dict[tuple[ExchangeShape, str], list[float]] = {}
    failure = ""
    try:
        with console.status("experts"):
            for measured in _measure(plan):
                times.setdefault((measured.shape, measured.contestant), []).extend(measured.microseconds)
    except BenchError as error:
        failure = str(error)
        console.print(f"[red]failed:[/] {escape(failure)}")
    for (shape, contestant), microseconds in times.items():
        record = ExpertPairs(
            contestant=contestant,
            memory="gpu" if plan.gpu else "host",
            ranks=workload.ranks,
            hidden=shape.hidden,
            tokens=shape.tokens,
            microseconds=microseconds,
        )
        append(plan.json, record)
    print_table(
        console,
        "dispatch + combine: microseconds",
        ["elements x tokens", "ours p50", "ours p99", f"{plan.rival} p50", f"{plan.rival} p99", "ratio"],
        (_row(shape, times, plan.rival) for shape in workload.shapes if (shape, OURS) in times),
    )
    return not failure


def _row(
    shape: ExchangeShape, times: dict[tuple[ExchangeShape, str], list[float]], rival: str
) -> Sequence[str]:
    ours, theirs = times[shape, OURS], times[shape, rival]
    ratio = statistics.median(ours) / statistics.median(theirs)
    cells = [f"{percentile(one, percent):.1f}" for one in (ours, theirs) for percent in (50, 99)]
    return [f"{shape.hidden} x {shape.tokens}", *cells, f"{ratio:.2f}"]


def _measure(plan: ExpertsPlan) -> Iterator[MeasuredExchange]:
    """Yields each turn as rank 0 sends it. Raises BenchError if a rank fails; no process is left behind."""
    from kv_connector.bench.moe_rank import run_rank, store_in

    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(plan.workload.ranks):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, plan.workload, plan.rival, store_in(Path(directory)), plan.gpu)
                process = context.Process(target=run_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            yield from _received(pipes)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _received(pipes: Sequence[Connection]) -> Iterator[MeasuredExchange]:
    waiting = list(pipes)
    deadline = time.monotonic() + _PATIENCE
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BenchError(f"no rank answered for {_PATIENCE:.0f} s")
        for pipe in waiting:
            if pipe not in ready:
                continue
            try:
                got = pipe.recv()
            except EOFError:
                raise BenchError(f"the process of rank {pipes.index(pipe)} ended") from None
            if isinstance(got, str):
                raise BenchError(got)
            deadline = time.monotonic() + _PATIENCE
            if got is None:
                waiting = [one for one in waiting if one is not pipe]
            else:
                yield got
