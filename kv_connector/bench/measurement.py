"""The base of the measurements of `kv-connector bench`: conditions, rounds, records and tables."""

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
    """A run of one command. Instances of ``C`` take turns within a round, and ``R`` are its records."""

    tolerated: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors that fail one contestant. The others are still measured."""

    rounds: int = 1
    json: Path | None = None
    """File to which conditions and records are appended as they arise."""

    def run(self, console: Console) -> bool:
        """Measures and prints. Returns whether nothing failed and every aim is reached."""
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
        """Returns the contestants in their order. Reports on the console the ones that are left out."""

    @abstractmethod
    def label(self, contestant: C) -> str:
        """Returns the contestant's name in the status line and in messages."""

    @abstractmethod
    def settings(self) -> dict[str, str]:
        """Returns the run's own conditions, by name."""

    @abstractmethod
    def measure(self, number: int, contestant: C, console: Console) -> Iterator[R]:
        """Yields a contestant's records in round ``number``, which counts from 1."""

    @abstractmethod
    def show(self, console: Console, contestants: Sequence[C], records: Sequence[R]) -> None:
        """Prints the tables of the whole run."""

    def good(self, records: Sequence[R]) -> bool:
        """Returns whether no record is a failure and every aim is reached."""
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
