"""What peers cost over our lanes, between two processes: time to connect them, memory, file descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kv_connector.bench.contestants.ours import EngineSide
from kv_connector.bench.harness import BenchError, Pair
from kv_connector.bench.lane import Lane
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import Failure, Peers, append
from kv_connector.bench.side import Contestant
from kv_connector.bench.tables import print_conditions, print_table


@dataclass(frozen=True)
class Plan:
    lanes: Sequence[Lane]
    peers: int
    rounds: int
    json: Path | None


def run(plan: Plan, console: Console) -> bool:
    """Measures and prints; True if nothing failed."""
    where = conditions(
        {
            "lanes": ", ".join(lane.name for lane in plan.lanes),
            "engines": "one a side; they connect again and again, each time as another peer",
            "peers": str(plan.peers),
            "KiB": "of the process, without what the kernel keeps for sockets and queue pairs",
            "rounds": str(plan.rounds),
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    found: list[Peers] = []
    failed = False
    for number in range(1, plan.rounds + 1):
        for lane in plan.lanes:
            with console.status(f"round {number} of {plan.rounds}: {lane.name}"):
                result = _measure(number, lane, plan.peers)
            append(plan.json, result)
            if isinstance(result, Peers):
                found.append(result)
            else:
                console.print(f"[red]failed: {lane.name}:[/] {escape(result.reason)}")
                failed = True
    print_table(
        console,
        "Peers: to connect them all, and what one of them costs each side",
        ["", "side", "round", "seconds", "KiB idle", "KiB written to", "descriptors"],
        _rows(found),
        names=2,
    )
    return not failed


def _measure(number: int, lane: Lane, peers: int) -> Peers | Failure:
    contestant = Contestant(lane.name, lane.name, partial(EngineSide, lane=lane))
    try:
        with Pair(contestant, pin=False) as pair:
            return pair.peers(number, peers)
    except BenchError as error:
        return Failure(round=number, contestant=lane.name, case="peers", reason=str(error))


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
