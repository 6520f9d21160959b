"""The results of a run of the transfer benchmark: tables, and a comparison with the aims."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.contestant import Contestant, Face
from kv_connector.bench.records import FailedMeasurement, Idle, Latency, Record, Throughput
from kv_connector.bench.tables import print_table, verdict
from kv_connector.bench.workloads import LATENCY_BYTES, WORKLOADS
from kv_connector.lab import plots

R = TypeVar("R", bound=Record)
Measure = Callable[[Record], float | None]
"""Returns a number for the records that it concerns, and None for all others."""

_OURS = ("host-shared", "host", "tcp")
_RIVALS_OF_TCP = ("mooncake", "nixl-tcp")
_SMALL_PAGE = 16 << 10

IDLE_LIMIT = 0.01
"""Limit for each side, as a part of one core."""


@dataclass(frozen=True)
class Aim:
    """The aim for `ours` over `baseline` in one case: at least (or else at most) `limit`."""

    ours: str
    baseline: str
    case: str
    measure: Measure
    limit: float
    at_least: bool = True

    def reached(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit


def aims() -> Iterator[Aim]:
    """Yields the ratios that are this project's aims."""
    rates = [(workload, _rate_in(workload.name)) for workload in WORKLOADS]
    for workload, rate in rates:
        yield Aim("host-shared", "memcpy", workload.name, rate, 0.8)
    for workload, rate in rates:
        yield Aim("host", "process_vm_writev", workload.name, rate, 0.9)
    yield Aim("host", "socket", "latency", _back_to_back, 1.5, at_least=False)
    for workload, rate in rates:
        if workload.page_bytes in (64 << 10, 4 << 10):
            yield Aim("tcp", "socket", workload.name, rate, 0.8 if workload.page_bytes > _SMALL_PAGE else 0.6)
    yield Aim("tcp", "socket", "latency", _back_to_back, 1.5, at_least=False)
    for rival in _RIVALS_OF_TCP:
        for workload, rate in rates:
            yield Aim("tcp", rival, workload.name, rate, 1.0 if workload.page_bytes > _SMALL_PAGE else 2.0)


def ratio(aim: Aim, records: Sequence[Record]) -> float | None:
    """Returns the median over rounds of the ratio of `ours` to `baseline` in one round; None if one is
    missing.

    Within a round both were measured minutes apart at most, so a slow spell of the machine hits both.
    """
    ours, baseline = (_by_round(name, aim.measure, records) for name in (aim.ours, aim.baseline))
    common = ours.keys() & baseline.keys()
    return statistics.median(ours[n] / baseline[n] for n in common) if common else None


def all_verified(records: Iterable[Record]) -> bool:
    return all(record.verified for record in _only(Throughput, records))


def print_results(console: Console, contestants: Sequence[Contestant], records: Sequence[Record]) -> None:
    """Prints all tables. Contestants without a record are left out."""
    batches = _only(Throughput, records)
    workloads = [workload.name for workload in WORKLOADS if any(r.workload == workload.name for r in batches)]
    print_table(
        console,
        "GB/s: median over rounds / best batch [CPU seconds a GB, both sides]",
        ["", *workloads],
        _throughput_rows(contestants, workloads, batches),
    )
    latencies = _only(Latency, records)
    pauses = sorted({record.pause_us for record in latencies})
    print_table(
        console,
        f"One-way latency of a {LATENCY_BYTES >> 10} KiB write to its counter in µs: p50 / p99",
        [
            "",
            "wake-up target",
            *("back to back" if p == 0 else f"after {p / 1000:g} ms of rest" for p in pauses),
        ],
        _latency_rows(contestants, pauses, latencies),
        names=2,
    )
    print_table(
        console,
        "CPU while connected and idle: highest over rounds",
        ["", "initiator", "target"],
        _idle_rows(contestants, _only(Idle, records)),
    )
    print_table(
        console,
        "Ratios to the aims: median over rounds",
        ["ours", "over", "in", "ratio", "aim", ""],
        _aim_rows(records),
        names=3,
    )
    if batches:
        # The mean is weighted by time: the kernel counts in ticks, which are longer than the shortest
        # batches.
        elapsed = sum(sum(record.seconds) for record in batches)
        foreign = sum(record.foreign_cores * sum(record.seconds) for record in batches) / elapsed
        console.print(f"\nMeanwhile other processes kept {foreign:.2f} cores busy on average.")
    for failure in _only(FailedMeasurement, records):
        where = f"round {failure.round}, {failure.contestant}, {failure.case}"
        console.print(f"[red]failed in {where}:[/] {escape(failure.reason)}")


def _throughput_rows(
    contestants: Sequence[Contestant], workloads: Sequence[str], records: Sequence[Throughput]
) -> Iterator[list[str]]:
    for contestant in contestants:
        mine = [record for record in records if record.contestant == contestant.name]
        if mine:
            yield [contestant.label, *(_rate([r for r in mine if r.workload == name]) for name in workloads)]


def _rate(records: Sequence[Throughput]) -> str:
    if not records:
        return "-"
    median = statistics.median(record.gb_per_second for record in records)
    best = max(record.best_gb_per_second for record in records)
    cpu = statistics.median(record.cpu_seconds_per_gb for record in records)
    wrong = "" if all_verified(records) else " [red]BYTES DIFFER[/]"
    return f"{median:.2f}/{best:.2f} \\[{cpu:.2f}]{wrong}"


def _latency_rows(
    contestants: Sequence[Contestant], pauses: Sequence[int], records: Sequence[Latency]
) -> Iterator[list[str]]:
    for contestant in contestants:
        for face in Face:
            mine = [r for r in records if r.contestant == contestant.name and r.face == face]
            if mine:
                cells = (_latency([r for r in mine if r.pause_us == pause]) for pause in pauses)
                yield [contestant.label, face, *cells]


def _latency(records: Sequence[Latency]) -> str:
    if not records:
        return "-"
    p50, p99 = (statistics.median(record.percentile(percent) for record in records) for percent in (50, 99))
    return f"{p50:.1f} / {p99:.1f}"


def _idle_rows(contestants: Sequence[Contestant], records: Sequence[Idle]) -> Iterator[list[str]]:
    for contestant in contestants:
        mine = [record for record in records if record.contestant == contestant.name]
        if mine:
            yield [
                contestant.label,
                f"{max(record.initiator for record in mine):.2%}",
                f"{max(record.target for record in mine):.2%}",
            ]


def _aim_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    for aim in aims():
        value = ratio(aim, records)
        if value is not None:
            bound = f"{'at least' if aim.at_least else 'at most'} {aim.limit:g}"
            yield [aim.ours, aim.baseline, aim.case, f"{value:.2f}", bound, verdict(aim.reached(value))]
    for name in _OURS:
        used = [max(r.initiator, r.target) for r in _only(Idle, records) if r.contestant == name]
        if used:
            reached = verdict(max(used) < IDLE_LIMIT)
            yield [name, "one core", "idle", f"{max(used):.2%}", f"under {IDLE_LIMIT:.0%}", reached]


def _rate_in(workload: str) -> Measure:
    def measure(record: Record) -> float | None:
        if isinstance(record, Throughput) and record.workload == workload:
            return record.gb_per_second
        return None

    return measure


def _back_to_back(record: Record) -> float | None:
    """Returns the latency without Python on either side: ours by the transfer thread's callback, the socket's
    by its blocked thread."""
    if not isinstance(record, Latency) or record.pause_us != 0:
        return None
    return record.percentile(50) if record.face is Face.WORKER or record.contestant == "socket" else None


def _by_round(contestant: str, measure: Measure, records: Iterable[Record]) -> dict[int, float]:
    found = {}
    for record in records:
        if record.contestant == contestant and (value := measure(record)) is not None:
            found[record.round] = value
    return found


def plot_results(file: Path, contestants: Sequence[Contestant], records: Sequence[Record]) -> None:
    """Draws the throughputs by page size."""
    workloads = sorted(WORKLOADS, key=lambda workload: workload.page_bytes)
    batches = _only(Throughput, records)
    measured = [w for w in workloads if any(record.workload == w.name for record in batches)]
    series = []
    for contestant in contestants:
        rates = [
            [
                r.gb_per_second
                for r in batches
                if (r.contestant, r.workload) == (contestant.name, workload.name)
            ]
            for workload in measured
        ]
        if any(rates):
            medians = [statistics.median(of_one) if of_one else None for of_one in rates]
            series.append(plots.Series(contestant.label, medians))
    columns = [workload.name for workload in measured]
    panel = plots.Panel("Pages between two processes", columns, series, "GB/s", "pages of a batch")
    plots.lines(file, [panel])


def _only(kind: type[R], records: Iterable[Record]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]
