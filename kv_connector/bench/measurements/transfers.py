"""One run of the transfer benchmark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kv_connector.bench import report
from kv_connector.bench.contestant import Contestant
from kv_connector.bench.harness import REPETITIONS, measure_round
from kv_connector.bench.measurement import Measurement
from kv_connector.bench.records import FailedMeasurement, Record
from kv_connector.bench.tables import leave_out_missing
from kv_connector.bench.workloads import POOL_BYTES
from kv_connector.engine import EngineConfig


@dataclass(kw_only=True)
class Transfers(Measurement[Contestant, Record]):
    """The transfer benchmark: our lanes, the limits of the machine, and other projects."""

    chosen: tuple[Contestant, ...]
    cases: tuple[str, ...]
    pin: bool
    plot: Path | None = None
    """File in which the results are drawn."""

    def contestants(self, console: Console) -> Sequence[Contestant]:
        return leave_out_missing(self.chosen, console)

    def label(self, contestant: Contestant) -> str:
        return contestant.label

    def settings(self) -> dict[str, str]:
        return {
            "rounds": f"{self.rounds}, {REPETITIONS} batches each, contestants in turn within a round",
            "pool": f"{POOL_BYTES >> 20} MiB a side",
            "spin time": f"{EngineConfig(name='', domains=()).spin_us} us (ours)",
            "pinned": "initiator to the first core, target to the second" if self.pin else "no",
        }

    def measure(self, number: int, contestant: Contestant, console: Console) -> Iterator[Record]:
        return measure_round(number, contestant, self.cases, pin=self.pin)

    def show(self, console: Console, contestants: Sequence[Contestant], records: Sequence[Record]) -> None:
        report.print_results(console, contestants, records)
        if self.plot is not None:
            report.plot_results(self.plot, contestants, records)

    def good(self, records: Sequence[Record]) -> bool:
        return report.all_verified(records) and not any(
            isinstance(record, FailedMeasurement) for record in records
        )
