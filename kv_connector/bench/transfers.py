"""One run of the transfer benchmark: conditions first, then round after round, then the tables."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kv_connector.bench import report
from kv_connector.bench.harness import REPETITIONS, measure_round
from kv_connector.bench.machine import conditions
from kv_connector.bench.records import Failure, Record, append
from kv_connector.bench.side import Contestant
from kv_connector.bench.tables import leave_out_missing, print_conditions
from kv_connector.bench.workloads import POOL_BYTES
from kv_connector.engine import EngineConfig


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    contestants: tuple[Contestant, ...]
    cases: tuple[str, ...]
    rounds: int
    pin: bool
    json: Path | None
    """Results are appended here as they come."""
    plot: Path | None = None
    """Where they are drawn."""


def run(plan: Plan, console: Console) -> bool:
    """Measures and prints; True if nothing failed and all bytes arrived."""
    present = leave_out_missing(plan.contestants, console)
    ours = EngineConfig(name="", domains=())
    where = conditions(
        {
            "rounds": f"{plan.rounds}, {REPETITIONS} batches each, contestants in turn within a round",
            "pool": f"{POOL_BYTES >> 20} MiB a side",
            "spin time": f"{ours.spin_us} us (ours)",
            "pinned": "initiator to the first core, target to the second" if plan.pin else "no",
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    records: list[Record] = []
    for number in range(1, plan.rounds + 1):
        for contestant in present:
            with console.status(f"round {number} of {plan.rounds}: {contestant.label}"):
                for record in measure_round(number, contestant, plan.cases, pin=plan.pin):
                    records.append(record)
                    append(plan.json, record)
    report.print_results(console, present, records)
    if plan.plot is not None:
        report.plot_results(plan.plot, present, records)
    return report.all_verified(records) and not any(isinstance(record, Failure) for record in records)
