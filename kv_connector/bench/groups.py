"""The paper's Tables 8 and 9 over our lanes: the steps of a scatter and of a barrier, by number of peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from kv_connector import _bench
from kv_connector.bench.lane import Lane
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import GroupRun, append, percentile
from kv_connector.bench.side import Role
from kv_connector.bench.tables import print_conditions, print_table

PEERS = (8, 16, 32, 64)
# What the paper's decode step sends each of 64 ranks: a token or two of 7 KiB.
SLICE_BYTES = 16 << 10
ITERATIONS = 2000
_WARM_UP = 100
# The worker stays awake between two iterations: waking a sleeping one is what `latency` measures.
_SPIN_US = 1000
_PERCENTILES = (50, 90, 99, 99.9)
_STEPS = {
    "submit": "call -> enqueued",
    "dequeue": "enqueued -> taken by the worker",
    "first": "enqueued -> first write given to the domain",
    "last": "first -> last write given to the domain",
    "done": "call -> done, told to a sleeping thread",
}


@dataclass(frozen=True)
class Plan:
    lanes: Sequence[Lane]
    peers: Sequence[int]
    iterations: int
    json: Path | None


def run(plan: Plan, console: Console) -> bool:
    """Measures and prints; True if nothing failed."""
    where = conditions(
        {
            "lanes": ", ".join(lane.name for lane in plan.lanes),
            "engines": "one that writes and all its peers in this process, a worker thread each",
            "scatter": f"{SLICE_BYTES >> 10} KiB to each peer, each counted on a counter of its own",
            "barrier": "an immediate alone to each peer",
            "iterations": f"{plan.iterations} after {_WARM_UP}, one at a time",
            "spin time": f"{_SPIN_US} us (the writer), 0 (its peers)",
            "pinned": "no",
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    failed = False
    for lane in plan.lanes:
        try:
            records = []
            with console.status(lane.name):
                for record in _measure(lane, plan, console):
                    append(plan.json, record)
                    records.append(record)
        except RuntimeError as error:
            console.print(f"[red]failed: {lane.name}:[/] {escape(str(error))}")
            failed = True
            continue
        print_table(
            console,
            f"{lane.name}: microseconds",
            ["", "peers", "step", *(f"p{percent:g}" for percent in _PERCENTILES)],
            (
                [record.operation, str(record.peers), words, *_percentiles(getattr(record, step))]
                for record in records
                for step, words in _STEPS.items()
            ),
            names=3,
        )
    return not failed


def _measure(lane: Lane, plan: Plan, console: Console) -> Iterator[GroupRun]:
    for peers in plan.peers:
        group = _bench.GroupSteps(
            domains=lane.native_domains(Role.INITIATOR),
            peer_domains=lane.native_domains(Role.TARGET),
            spin_us=_SPIN_US,
            peers=peers,
            slice_bytes=SLICE_BYTES,
        )
        if peers == plan.peers[0]:
            console.print(f"{lane.name}: {escape(', '.join(group.domains()))}")
        operations = {
            "scatter": group.scatter,
            "prepared scatter": group.prepared_scatter,
            "barrier": group.barrier,
            "prepared barrier": group.prepared_barrier,
        }
        for operation, measure in operations.items():
            measure(_WARM_UP)
            steps = measure(plan.iterations)
            yield GroupRun(
                lane=lane.name,
                operation=operation,
                peers=peers,
                slice_bytes=SLICE_BYTES if "scatter" in operation else 0,
                **steps,
            )


def _percentiles(nanoseconds: list[float]) -> list[str]:
    return [f"{percentile(nanoseconds, percent) / 1000:.2f}" for percent in _PERCENTILES]
