"""Experts between nodes: the time from a rank's call until its lanes get the first packet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from kv_connector import _bench
from kv_connector.bench.contestant import SideRole
from kv_connector.bench.lane import Lane
from kv_connector.bench.measurement import LaneMeasurement
from kv_connector.bench.measurements.groups import PERCENTILE_NAMES, SPIN_US, WARM_UP, microseconds
from kv_connector.bench.records import ExpertSends
from kv_connector.bench.tables import print_table

TOKENS = (0, 1, 8)
"""Numbers of tokens of a rank. Without tokens only immediates travel, and nothing is packed."""
ROW_BYTES = 8 << 10
"""A hidden size of 4096 in bf16."""
MOST_PEERS = 7
"""A group has up to eight ranks."""
_STEPS = {
    "submit": "call -> enqueued, the rows packed",
    "first": "enqueued -> first write given to the domain",
    "reached": "call -> first write given to the domain",
}


@dataclass(kw_only=True)
class Experts(LaneMeasurement[ExpertSends]):
    """Measures how soon the packets of dispatch and combine reach the domain, over each lane."""

    tolerated = (RuntimeError,)

    peers: Sequence[int]
    iterations: int

    def settings(self) -> dict[str, str]:
        return {
            "lanes": self.lane_names,
            "ranks": "each is a node of its own in this process. One thread makes their calls in turns",
            "rows": f"{ROW_BYTES >> 10} KiB, each token's row to all ranks",
            "iterations": f"{self.iterations} after {WARM_UP}, one at a time",
            "spin time": f"{SPIN_US} us (rank 0, which is timed), 0 (the others)",
            "pinned": "no",
        }

    def measure(self, number: int, contestant: Lane, console: Console) -> Iterator[ExpertSends]:
        """Measures one lane and prints its table."""
        records = []
        for peers in self.peers:
            for tokens in TOKENS:
                for record in self._of_group(contestant, peers, tokens):
                    records.append(record)
                    yield record
        print_table(
            console,
            f"{contestant.name}: microseconds",
            ["", "peers", "tokens", "step", *PERCENTILE_NAMES],
            (
                [
                    record.operation,
                    str(record.peers),
                    str(record.tokens),
                    words,
                    *microseconds(getattr(record, step)),
                ]
                for record in records
                for step, words in _STEPS.items()
            ),
            names=4,
        )

    def _of_group(self, lane: Lane, peers: int, tokens: int) -> Iterator[ExpertSends]:
        ranks = _bench.ExpertSteps(
            domains=lane.native_domains(SideRole.INITIATOR),
            peer_domains=lane.native_domains(SideRole.TARGET),
            spin_us=SPIN_US,
            peers=peers,
            tokens=tokens,
            row_bytes=ROW_BYTES,
        )
        ranks.steps(WARM_UP)
        measured = ranks.steps(self.iterations)
        for operation, times in (("dispatch", measured["dispatch"]), ("combine", measured["combine"])):
            yield ExpertSends(
                lane=lane.name,
                operation=operation,
                peers=peers,
                tokens=tokens,
                row_bytes=ROW_BYTES,
                submit=times["submit"],
                first=times["first"],
            )

    def show(self, console: Console, contestants: Sequence[Lane], records: Sequence[ExpertSends]) -> None:
        """Prints nothing: each lane's table is printed when the lane is measured."""
