"""What the measurements of `kv-connector bench` have in common: conditions, rounds, records and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape

from kv_connector.bench.lane import Lane
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import append
from kv_connector.bench.tables import print_conditions

C = TypeVar("C")
R = TypeVar("R", bound=msgspec.Struct)


@dataclass(kw_only=True)
class Measurement(ABC, Generic[C, R]):
    """A run of one command. ``C`` is what takes turns within a round, ``R`` its records."""

    tolerated: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that fail one contestant. The others are still measured."""

    rounds: int = 1
    json: Path | None = None
    """File that conditions and records are appended to, as they come."""

    def run(self, console: Console) -> bool:
        """Measures and prints. True if nothing failed and every aim is reached."""
        contestants = self.contestants(console)
        where = conditions(self.settings())
        print_conditions(console, where)
        append(self.json, where)
        records: list[R] = []
        failed = False
        for number in range(1, self.rounds + 1):
            for contestant in contestants:
                label = self.label(contestant)
                turn = f"round {number} of {self.rounds}: {label}" if self.rounds > 1 else label
                try:
                    with console.status(turn):
                        for record in self.measure(number, contestant, console):
                            records.append(record)
                            append(self.json, record)
                except self.tolerated as error:
                    console.print(f"[red]failed: {label}:[/] {escape(str(error))}")
                    failed = True
        self.show(console, contestants, records)
        return not failed and self.good(records)

    @abstractmethod
    def contestants(self, console: Console) -> Sequence[C]:
        """The contestants in their order. The console is for those that are left out."""

    @abstractmethod
    def label(self, contestant: C) -> str:
        """The contestant's name in the status line and in messages."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """The run's own conditions, by name."""

    @abstractmethod
    def measure(self, number: int, contestant: C, console: Console) -> Iterator[R]:
        """A contestant's records in round ``number``, from 1 on."""

    @abstractmethod
    def show(self, console: Console, contestants: Sequence[C], records: Sequence[R]) -> None:
        """Prints the tables of the whole run."""

    def good(self, records: Sequence[R]) -> bool:
        """Returns whether no record tells of a failure, and every aim is reached."""
        return True


@dataclass(kw_only=True)
class LaneMeasurement(Measurement[Lane, R]):
    """A measurement in which lanes take turns."""

    lanes: Sequence[Lane]

    @property
    def lane_names(self) -> str:
        return ", ".join(lane.name for lane in self.lanes)

    def contestants(self, console: Console) -> Sequence[Lane]:
        return self.lanes

    def label(self, contestant: Lane) -> str:
        return contestant.name
