"""The cost of peers over our lanes, between two processes: time to connect them, memory, file descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.contestant import Contestant
from kv_connector.bench.contestants.ours import EngineSide
from kv_connector.bench.harness import BenchError, ContestantPair
from kv_connector.bench.lane import Lane
from kv_connector.bench.measurement import LaneMeasurement
from kv_connector.bench.records import FailedMeasurement, Peers
from kv_connector.bench.tables import print_table


@dataclass(kw_only=True)
class PeerCosts(LaneMeasurement[Peers | FailedMeasurement]):
    """Connects many peers over each lane."""

    peers: int

    def settings(self) -> dict[str, str]:
        return {
            "lanes": self.lane_names,
            "engines": "one a side; they connect again and again, each time as another peer",
            "peers": str(self.peers),
            "KiB": "of the process, without what the kernel keeps for sockets and queue pairs",
            "rounds": str(self.rounds),
        }

    def measure(self, number: int, contestant: Lane, console: Console) -> Iterator[Peers | FailedMeasurement]:
        name = contestant.name
        try:
            with ContestantPair(
                Contestant(name, name, partial(EngineSide, lane=contestant)), pin=False
            ) as pair:
                yield pair.peers(number, self.peers)
        except BenchError as error:
            console.print(f"[red]failed: {name}:[/] {escape(str(error))}")
            yield FailedMeasurement(round=number, contestant=name, case="peers", reason=str(error))

    def show(
        self, console: Console, contestants: Sequence[Lane], records: Sequence[Peers | FailedMeasurement]
    ) -> None:
        print_table(
            console,
            "Peers: to connect them all, and what one of them costs each side",
            ["", "side", "round", "seconds", "KiB idle", "KiB written to", "descriptors"],
            _rows([record for record in records if isinstance(record, Peers)]),
            names=2,
        )

    def good(self, records: Sequence[Peers | FailedMeasurement]) -> bool:
        return not any(isinstance(record, FailedMeasurement) for record in records)


def _rows(found: Sequence[Peers]) -> Iterator[list[str]]:
    for record in found:
        for side, cost in (("initiator", record.initiator), ("target", record.target)):
            yield [
                record.contestant,
                side,
                str(record.round),
                f"{record.seconds:.2f}",
                f"{cost.idle_bytes / 1024:.1f}",
                f"{cost.written_bytes / 1024:.1f}",
                f"{cost.descriptors:.2f}",
            ]
