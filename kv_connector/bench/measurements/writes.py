"""The paper's Table 2 over our lanes: single and paged writes by size, between two processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.contestant import Contestant
from kv_connector.bench.contestants.ours import EngineSide
from kv_connector.bench.harness import REPETITIONS, BenchError, ContestantPair
from kv_connector.bench.lane import Lane
from kv_connector.bench.measurement import LaneMeasurement
from kv_connector.bench.records import FailedMeasurement, Record, Singles, Throughput
from kv_connector.bench.tables import print_table
from kv_connector.bench.workloads import POOL_BYTES, PageWorkload
from kv_connector.engine import EngineConfig

SINGLE_BYTES = (64 << 10, 256 << 10, 1 << 20, 32 << 20)
PAGE_BYTES = (1 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10)
# Bytes of one paged request. It takes long compared with its start, and has 65,536 pages at the smallest
# size.
BATCH_BYTES = 64 << 20
# Enough of each single write for a median. The large ones take milliseconds each.
_SINGLES = {size: 200 if size <= 1 << 20 else 20 for size in SINGLE_BYTES}

PAGED = tuple(PageWorkload(f"paged {size >> 10}K", BATCH_BYTES // size, size) for size in PAGE_BYTES)


@dataclass(kw_only=True)
class WriteMeasurement(LaneMeasurement[Record]):
    """Measures single and paged writes over each lane."""

    pin: bool
    shared: bool

    def settings(self) -> dict[str, str]:
        return {
            "lanes": self.lane_names,
            **{f"NIC {number}": nic for number, nic in enumerate(_nics(self.lanes))},
            "single": "one at a time, from the call until a sleeping thread knows it in place",
            "paged": f"requests of {BATCH_BYTES >> 20} MiB, scattered on both sides, {REPETITIONS} a round",
            "rounds": str(self.rounds),
            "pool": f"{POOL_BYTES >> 20} MiB a side, {'a memfd' if self.shared else 'private memory'}",
            "spin time": f"{EngineConfig(name='', domains=()).spin_us} us",
            "pinned": "initiator to the first core, target to the second" if self.pin else "no",
        }

    def measure(self, number: int, contestant: Lane, console: Console) -> Iterator[Record]:
        name = contestant.name
        side = partial(EngineSide, lane=contestant)
        case = "start"
        try:
            with ContestantPair(Contestant(name, name, side, shared_pool=self.shared), pin=self.pin) as pair:
                if number == 1:
                    for role, domains in pair.describe().items():
                        console.print(f"{name}: {role}: {escape(', '.join(domains))}")
                case = "single"
                pair.prepare_singles()
                for size in SINGLE_BYTES:
                    yield pair.singles(number, size, _SINGLES[size])
                for workload in PAGED:
                    case = workload.name
                    yield pair.throughput(number, workload)
        except BenchError as error:
            yield FailedMeasurement(round=number, contestant=name, case=case, reason=str(error))

    def show(self, console: Console, contestants: Sequence[Lane], records: Sequence[Record]) -> None:
        names = [lane.name for lane in contestants]
        print_table(
            console,
            "Single writes, one at a time: Gb/s, median",
            ["", *(_size(size) for size in SINGLE_BYTES)],
            ([name, *(_single(name, size, records) for size in SINGLE_BYTES)] for name in names),
        )
        print_table(
            console,
            "Paged writes: Gb/s / million pages a second, median over rounds [CPU seconds a GB, both sides]",
            ["", *(_size(size) for size in PAGE_BYTES)],
            ([name, *(_paged(name, workload, records) for workload in PAGED)] for name in names),
        )
        for failure in records:
            if isinstance(failure, FailedMeasurement):
                what = f"{failure.contestant}, {failure.case}"
                console.print(f"[red]failed: {what}:[/] {escape(failure.reason)}")

    def good(self, records: Sequence[Record]) -> bool:
        failed = any(isinstance(record, FailedMeasurement) for record in records)
        return not failed and all(r.verified for r in records if isinstance(r, Throughput))


def _nics(lanes: Sequence[Lane]) -> list[str]:
    return sorted({nic for lane in lanes for nic in lane.nics()})


def _single(name: str, size: int, records: Sequence[Record]) -> str:
    found = [
        record.gbit_per_second
        for record in records
        if isinstance(record, Singles) and (record.contestant, record.bytes) == (name, size)
    ]
    return f"{statistics.median(found):.2f}" if found else "-"


def _paged(name: str, workload: PageWorkload, records: Sequence[Record]) -> str:
    found = [
        record
        for record in records
        if isinstance(record, Throughput) and (record.contestant, record.workload) == (name, workload.name)
    ]
    if not found:
        return "-"
    gb = statistics.median(record.gb_per_second for record in found)
    cpu = statistics.median(record.cpu_seconds_per_gb for record in found)
    wrong = "" if all(record.verified for record in found) else " [red]BYTES DIFFER[/]"
    return f"{gb * 8:.2f} / {gb * 1e3 / workload.page_bytes:.3f} \\[{cpu:.2f}]{wrong}"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
