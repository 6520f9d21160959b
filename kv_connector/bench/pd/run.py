"""One run of the benchmark of pairs: all deployments are started, then measured in turn while the others are
stopped."""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from kv_connector.bench.machine import conditions
from kv_connector.bench.pd.deployments import Deployment, RunningDeployment
from kv_connector.bench.pd.load import OUTPUT_TOKENS, LoadAnswer, LoadError, PromptLoad, serve
from kv_connector.bench.records import append
from kv_connector.bench.tables import leave_out_missing, print_conditions, print_table, verdict
from kv_connector.lab import plots
from kv_connector.lab.cluster import EngineSettings, LocalCluster
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process, StartError

LOADS = (PromptLoad(512, 1, 6), PromptLoad(512, 8, 16), PromptLoad(2048, 1, 6), PromptLoad(2048, 8, 16))

TTFT_LIMIT = 1.5
"""Limit for our TTFT as a multiple of one engine's, one request at a time."""

# Connections broke while a deployment was frozen. The first requests after it may fail until they are back.
_WARM_UP_SECONDS = 60.0
_WARM_UP = PromptLoad(300, 1, 2)

# The whole prompt is one step, and no prompt occurs twice, so that prefill and transfer are measured.
SETTINGS = EngineSettings(max_batched_tokens=4096, prefix_caching=False)


class MeasuredDeployment(msgspec.Struct, tag="pd", kw_only=True, frozen=True):
    """One deployment under one load in one round."""

    round: int
    deployment: str
    load: PromptLoad
    seconds: float
    ttft: list[float]
    cpu_seconds: float
    """CPU seconds of the engines (and a deployment's own proxy), over all requests."""
    equal: int
    """Answers whose tokens are those of one engine alone."""


@dataclass(frozen=True)
class PdPlan:
    deployments: tuple[Deployment, ...]
    rounds: int
    model: Path | None
    """Model directory; None: a small Llama with random weights, made for the run."""
    json: Path | None
    plot: Path | None = None


def run(plan: PdPlan, console: Console) -> bool:
    """Measures and prints.

    Returns whether nothing failed and all answers, one at a time, were those of one engine.
    """
    present = leave_out_missing(plan.deployments, console)
    with tempfile.TemporaryDirectory(prefix="kv-connector-bench-") as directory, ExitStack() as stack:
        model = plan.model or make_llama(Path(directory) / "model")
        where = conditions(
            {
                "rounds": f"{plan.rounds}, deployments in turn within a round, the others stopped meanwhile",
                "model": str(plan.model) if plan.model else "Llama, 4 layers, 4 KiB of KV a token, float32",
                "engines": f"1 OpenMP thread each, {OUTPUT_TOKENS} tokens of output, no prefix caching",
            }
        )
        print_conditions(console, where)
        bench = _Bench(Path(directory), model, stack, console)
        records = bench.run(present, plan.rounds)
    for line in (where, *records):
        append(plan.json, line)
    _print(console, present, records)
    if plan.plot is not None:
        _plot(plan.plot, present, records)
    for failure in bench.failures:
        console.print(f"[red]failed:[/] {escape(failure)}")
    wrong = any(record.equal < record.load.requests for record in records if record.load.concurrency == 1)
    return not wrong and not bench.failures


class _Bench:
    """The deployments of a run, at most one of them awake."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack, console: Console) -> None:
        self._directory = directory
        self._model = model
        self._stack = stack
        self._console = console
        self._running: dict[str, RunningDeployment] = {}
        self.failures: list[str] = []

    def run(self, deployments: Sequence[Deployment], rounds: int) -> list[MeasuredDeployment]:
        for deployment in deployments:
            with self._console.status(f"starting: {deployment.label}"), self._tolerate(deployment):
                self._running[deployment.name] = self._start(deployment)
        records: list[MeasuredDeployment] = []
        for number in range(1, rounds + 1):
            for load in LOADS:
                expected: Sequence[LoadAnswer] | None = None
                for deployment in deployments:
                    if deployment.name not in self._running:
                        continue
                    status = f"round {number} of {rounds}: {deployment.label}, {load.name}"
                    with self._console.status(status), self._tolerate(deployment):
                        record, answers = self._measure(number, deployment.name, load, expected)
                        records.append(record)
                        expected = expected or answers
        return records

    @contextmanager
    def _tolerate(self, deployment: Deployment) -> Iterator[None]:
        """Records a failure of one deployment, and lets the others continue."""
        try:
            yield
        except (LoadError, StartError) as error:
            self.failures.append(f"{deployment.label}: {error}")

    def _start(self, deployment: Deployment) -> RunningDeployment:
        """Starts a deployment and stops its processes.

        The run's stack ends them. StartError, LoadError: it does not serve.
        """
        with ExitStack() as own:
            logs = self._directory / deployment.name
            cluster = own.enter_context(LocalCluster(logs, self._model, SETTINGS))
            running = deployment.start(cluster, own)
            # Runs before the cluster ends, because a stopped process cannot end by itself.
            own.callback(_signal, running, signal.SIGCONT)
            cluster.wait_ready()
            self._warm_up(running)
            _signal(running, signal.SIGSTOP)
            self._stack.push(own.pop_all())
        return running

    def _measure(
        self, number: int, name: str, load: PromptLoad, expected: Sequence[LoadAnswer] | None
    ) -> tuple[MeasuredDeployment, Sequence[LoadAnswer]]:
        running = self._running[name]
        _signal(running, signal.SIGCONT)
        try:
            self._warm_up(running)
            cpu = _cpu_seconds(running.processes)
            served = serve(running.url, load, seed=number)
            cpu = _cpu_seconds(running.processes) - cpu
        finally:
            _signal(running, signal.SIGSTOP)
        pairs = zip(served.answers, expected or served.answers, strict=True)
        record = MeasuredDeployment(
            round=number,
            deployment=name,
            load=load,
            seconds=round(served.seconds, 4),
            ttft=[round(answer.ttft, 4) for answer in served.answers],
            cpu_seconds=round(cpu, 2),
            equal=sum(mine.tokens == theirs.tokens for mine, theirs in pairs),
        )
        return record, served.answers

    def _warm_up(self, running: RunningDeployment) -> None:
        """Sends requests until one is answered. LoadError: none was, with the last error."""
        deadline = time.monotonic() + _WARM_UP_SECONDS
        while True:
            try:
                serve(running.url, _WARM_UP, seed=0)
                return
            except LoadError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)


def _signal(running: RunningDeployment, number: signal.Signals) -> None:
    for process in running.processes:
        process.signal(number)


def _cpu_seconds(processes: Sequence[Process]) -> float:
    """Returns the CPU seconds so far of these processes and their running children."""
    ticks = 0
    for process in processes:
        for pid in process.members():
            # The fields after the command's name: field 3 (state) comes first, user and system time are 14
            # and 15.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


Cell = tuple[str, PromptLoad]


def _print(
    console: Console, deployments: Sequence[Deployment], records: Sequence[MeasuredDeployment]
) -> None:
    cells: dict[Cell, list[MeasuredDeployment]] = {}
    for record in records:
        cells.setdefault((record.deployment, record.load), []).append(record)
    header = ["", *(load.name for load in LOADS)]
    for title, cell in (
        ("TTFT in ms: median / 90th percentile over all requests", _ttft),
        ("Requests a second: median over rounds [CPU seconds a request]", _rate),
    ):
        rows = [[d.label, *(cell(cells.get((d.name, load), [])) for load in LOADS)] for d in deployments]
        print_table(console, title, header, rows)
    console.print("\n[bold]Answers equal to those of the first row, one request at a time")
    for deployment in deployments:
        mine = [r for r in records if r.deployment == deployment.name and r.load.concurrency == 1]
        equal, requests = sum(r.equal for r in mine), sum(r.load.requests for r in mine)
        console.print(f"  {deployment.label}: {equal} of {requests}")
    summaries = {key: _summary(mine) for key, mine in cells.items()}
    print_table(
        console,
        "Ratios to the aims",
        ["ours over", "load", "in", "ratio", "aim", ""],
        _aim_rows(summaries),
        names=3,
    )


@dataclass(frozen=True)
class _Summary:
    ttft: float
    rate: float
    """Requests a second."""


def _summary(records: Sequence[MeasuredDeployment]) -> _Summary:
    return _Summary(
        ttft=statistics.median(ttft for record in records for ttft in record.ttft),
        rate=statistics.median(record.load.requests / record.seconds for record in records),
    )


def _aim_rows(summaries: Mapping[Cell, _Summary]) -> Iterator[list[str]]:
    """Yields our results beside the other connectors', as far as they took part."""
    for load in LOADS:
        ours = summaries.get(("ours", load))
        if ours is None:
            continue
        alone = summaries.get(("alone", load))
        if alone is not None and load.concurrency == 1:
            ttft = ours.ttft / alone.ttft
            yield [
                "alone",
                load.name,
                "TTFT",
                f"{ttft:.2f}",
                f"at most {TTFT_LIMIT}",
                verdict(ttft <= TTFT_LIMIT),
            ]
        for name in ("nixl", "mooncake"):
            rival = summaries.get((name, load))
            if rival is not None:
                ttft, rate = ours.ttft / rival.ttft, ours.rate / rival.rate
                yield [name, load.name, "TTFT", f"{ttft:.2f}", "under 1", verdict(ttft < 1)]
                yield [name, load.name, "requests/s", f"{rate:.2f}", "over 1", verdict(rate > 1)]


def _plot(file: Path, deployments: Sequence[Deployment], records: Sequence[MeasuredDeployment]) -> None:
    """Draws times to first token, and requests a second."""
    ttft, rate = list[plots.Series](), list[plots.Series]()
    for deployment in deployments:
        of_one = [r for r in records if r.deployment == deployment.name]
        if not of_one:
            continue
        cells = [[r for r in of_one if r.load == load] for load in LOADS]
        times = [_ttft_ms(cell) for cell in cells]
        medians = [median for median, _ in times]
        spread = [(last or 0.0) - (median or 0.0) for median, last in times]
        ttft.append(plots.Series(deployment.label, medians, spread))
        rate.append(plots.Series(deployment.label, [_summary(cell).rate if cell else None for cell in cells]))
    names = [load.name for load in LOADS]
    plots.bars(
        file,
        [
            plots.Panel("Time to first token: median, 90th percentile", names, ttft, "ms"),
            plots.Panel("Requests a second", names, rate, "requests/s"),
        ],
    )


def _ttft_ms(records: Sequence[MeasuredDeployment]) -> tuple[float | None, float | None]:
    """Returns the median and the 90th percentile over all requests."""
    ttfts = sorted(ttft * 1e3 for record in records for ttft in record.ttft)
    return (statistics.median(ttfts), ttfts[len(ttfts) * 9 // 10]) if ttfts else (None, None)


def _ttft(records: Sequence[MeasuredDeployment]) -> str:
    median, last = _ttft_ms(records)
    return "-" if median is None else f"{median:.0f} / {last:.0f}"


def _rate(records: Sequence[MeasuredDeployment]) -> str:
    if not records:
        return "-"
    rate = _summary(records).rate
    cpu = statistics.median(record.cpu_seconds / record.load.requests for record in records)
    return f"{rate:.2f} \\[{cpu:.2f}]"
