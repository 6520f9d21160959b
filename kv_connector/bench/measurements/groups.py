"""The paper's Tables 8 and 9 over our lanes: the steps of a scatter and of a barrier, by number of peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from kv_connector import _bench
from kv_connector.bench.contestant import SideRole
from kv_connector.bench.lane import Lane
from kv_connector.bench.measurement import LaneMeasurement
from kv_connector.bench.records import GroupRun, percentile
from kv_connector.bench.tables import print_table

PEERS = (8, 16, 32, 64)
# The paper's decode step sends this to each of 64 ranks: a token or two of 7 KiB.
SLICE_BYTES = 16 << 10
ITERATIONS = 2000
WARM_UP = 100
# The transfer thread stays awake between two iterations. `latency` measures the wake-up.
SPIN_US = 1000
_PERCENTILES = (50, 90, 99, 99.9)
PERCENTILE_NAMES = tuple(f"p{percent:g}" for percent in _PERCENTILES)
_STEPS = {
    "submit": "call -> enqueued",
    "dequeue": "enqueued -> taken by the worker",
    "first": "enqueued -> first write given to the domain",
    "reached": "call -> first write given to the domain",
    "last": "first -> last write given to the domain",
    "done": "call -> done, told to a sleeping thread",
}


@dataclass(kw_only=True)
class Groups(LaneMeasurement[GroupRun]):
    """Measures the steps of scatters and barriers over each lane."""

    tolerated = (RuntimeError,)

    peers: Sequence[int]
    iterations: int

    def settings(self) -> dict[str, str]:
        return {
            "lanes": self.lane_names,
            "engines": "one that writes and all its peers in this process, a worker thread each",
            "scatter": f"{SLICE_BYTES >> 10} KiB to each peer, each counted on a counter of its own",
            "barrier": "an immediate alone to each peer",
            "iterations": f"{self.iterations} after {WARM_UP}, one at a time",
            "spin time": f"{SPIN_US} us (the writer), 0 (its peers)",
            "pinned": "no",
        }

    def measure(self, number: int, contestant: Lane, console: Console) -> Iterator[GroupRun]:
        """Measures one lane and prints its table."""
        records = []
        for peers in self.peers:
            for record in self._of_group(contestant, peers, console):
                records.append(record)
                yield record
        print_table(
            console,
            f"{contestant.name}: microseconds",
            ["", "peers", "step", *PERCENTILE_NAMES],
            (
                [record.operation, str(record.peers), words, *microseconds(getattr(record, step))]
                for record in records
                for step, words in _STEPS.items()
            ),
            names=3,
        )

    def _of_group(self, lane: Lane, peers: int, console: Console) -> Iterator[GroupRun]:
        group = _bench.GroupSteps(
            domains=lane.native_domains(SideRole.INITIATOR),
            peer_domains=lane.native_domains(SideRole.TARGET),
            spin_us=SPIN_US,
            peers=peers,
            slice_bytes=SLICE_BYTES,
        )
        if peers == self.peers[0]:
            console.print(f"{lane.name}: {escape(', '.join(group.domains()))}")
        operations = {
            "scatter": group.scatter,
            "prepared scatter": group.prepared_scatter,
            "barrier": group.barrier,
            "prepared barrier": group.prepared_barrier,
        }
        for operation, steps_of in operations.items():
            steps_of(WARM_UP)
            steps = steps_of(self.iterations)
            yield GroupRun(
                lane=lane.name,
                operation=operation,
                peers=peers,
                slice_bytes=SLICE_BYTES if "scatter" in operation else 0,
                **steps,
            )

    def show(self, console: Console, contestants: Sequence[Lane], records: Sequence[GroupRun]) -> None:
        """Prints nothing: each lane's table is printed when the lane is measured."""


def microseconds(nanoseconds: list[float]) -> list[str]:
    """Returns the percentiles, as cells of a table."""
    return [f"{percentile(nanoseconds, percent) / 1000:.2f}" for percent in _PERCENTILES]
