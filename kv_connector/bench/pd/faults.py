"""Pairs of engines whose clients leave, or of which one engine is killed.

Each fault happens to a newly started pair.
"""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL

import msgspec
from rich.console import Console
from rich.markup import escape

from kv_connector.bench.machine import conditions
from kv_connector.bench.pd.clients import (
    ABORTED,
    CLIENTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    RIGHT_SECONDS,
    FaultClients,
    Tokens,
    right_answers,
)
from kv_connector.bench.pd.deployments import DEPLOYMENTS, Deployment, RunningDeployment
from kv_connector.bench.pd.load import LoadError
from kv_connector.bench.pd.run import SETTINGS
from kv_connector.bench.records import append
from kv_connector.bench.tables import leave_out_missing, print_conditions, print_table
from kv_connector.lab.cluster import LocalCluster
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import StartError

ALONE, *PAIRS = DEPLOYMENTS

# 512 blocks, of which eight prompts that are never given back show as a quarter.
_SETTINGS = replace(SETTINGS, kv_cache_bytes=64 << 20)
_ROLES = ("prefill engine", "decode engine")


@dataclass(frozen=True)
class Fault:
    name: str
    """Value of --faults."""
    label: str
    limit: float
    """Longest wait for the KV blocks, in seconds."""
    victim: int | None = None
    """Index of the engine that is killed in a pair."""


FAULTS = (
    Fault("abort", f"{ABORTED} clients leave", 60.0),
    Fault("kill-d", "kill -9 of the decode engine, then restart", 180.0, victim=1),
    Fault("kill-p", "kill -9 of the prefill engine, then restart", 180.0, victim=0),
)


@dataclass(frozen=True)
class FaultPlan:
    deployments: tuple[Deployment, ...]
    faults: tuple[Fault, ...]
    json: Path | None


class Suffered(msgspec.Struct, tag="fault", kw_only=True, frozen=True):
    """The result of one fault in one deployment. None in place of seconds: not within the limit."""

    deployment: str
    fault: str
    failed_before: int
    """Requests that failed before the fault."""
    under_way: int
    """Requests that began before the fault and ended after it."""
    failed: int
    """Requests of ``under_way`` that failed."""
    later: int
    """Requests that began after the fault.

    After a kill each client continues until one of its requests fails.
    """
    failed_later: int
    left: int
    """Requests of ``later`` whose clients left before the end."""
    last_failure_s: float
    """Seconds from the fault to the last failure; 0 if none failed."""
    empty_s: float | None
    """Seconds until every KV block was free, and stayed free, in the remaining engines.

    They count from the kill, or from the moment the last client left.
    """
    right_s: float | None
    """Seconds until an answer is right.

    They count from the restarted engine's good health. Without a kill, they count from the end of the wait
    for free blocks.
    """
    answered: int
    wrong: int
    """Requests of ``answered`` whose tokens differ from one engine's alone."""


def run(plan: FaultPlan, console: Console) -> bool:
    """Measures and prints. Returns whether every deployment reached the end and no answer was wrong."""
    present = leave_out_missing(plan.deployments, console)
    records: list[Suffered] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kv-connector-faults-") as directory:
        where = conditions(
            {
                "model": "Llama, 4 layers, 4 KiB of KV a token, float32",
                "engines": f"1 OpenMP thread, {_SETTINGS.kv_cache_bytes >> 20} MiB of KV, no prefix caching",
                "load": f"{CLIENTS} requests at a time, {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[-1]} tokens, "
                f"{OUTPUT_TOKENS} tokens of output",
            }
        )
        print_conditions(console, where)
        append(plan.json, where)
        model = make_llama(Path(directory) / "model")
        with console.status("right answers"), _started(ALONE, Path(directory), model) as (_, alone):
            expected = asyncio.run(right_answers(alone.url))
        for deployment in present:
            for fault in plan.faults:
                what = f"{deployment.label}, {fault.label}"
                logs = Path(directory) / f"{deployment.name}-{fault.name}"
                try:
                    with console.status(what), _started(deployment, logs, model) as (cluster, running):
                        record = _suffer(deployment, fault, cluster, running, expected)
                except (LoadError, StartError) as error:
                    failures.append(f"{what}: {error}")
                    continue
                records.append(record)
                append(plan.json, record)
    _print(console, present, plan.faults, records)
    for failure in failures:
        console.print(f"[red]failed:[/] {escape(failure)}")
    return not failures and not any(record.wrong for record in records)


@contextmanager
def _started(
    deployment: Deployment, logs: Path, model: Path
) -> Iterator[tuple[LocalCluster, RunningDeployment]]:
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(logs, model, _SETTINGS))
        running = deployment.start(cluster, stack)
        cluster.wait_ready()
        yield cluster, running


def _suffer(
    deployment: Deployment,
    fault: Fault,
    cluster: LocalCluster,
    running: RunningDeployment,
    expected: Sequence[Tokens],
) -> Suffered:
    clients = FaultClients(running.url, expected)
    if asyncio.run(clients.until_right()) is None:
        raise LoadError(f"no right answer in the first {RIGHT_SECONDS:.0f} s: {clients.probes[-1].problem}")
    if fault.victim is None:
        empty = asyncio.run(clients.leave(running.engines, fault.limit))
    else:
        victim = running.engines[fault.victim]
        others = [engine for engine in running.engines if engine is not victim]
        empty = asyncio.run(clients.lose(lambda: victim.signal(SIGKILL), others, fault.limit))
        cluster.restart(victim)
        cluster.wait_ready()
    right = asyncio.run(clients.until_right())
    return _suffered(clients, deployment.name, fault.name, empty, right)


def _suffered(
    clients: FaultClients, deployment: str, fault: str, empty: float | None, right: float | None
) -> Suffered:
    under_way = [r for r in clients.requests if r.began < clients.fault < r.ended]
    later = [r for r in clients.requests if r.began >= clients.fault]
    failures = [r.ended - clients.fault for r in (*under_way, *later) if r.problem]
    answers = [r for r in (*clients.requests, *clients.probes) if r.tokens]
    return Suffered(
        deployment=deployment,
        fault=fault,
        failed_before=sum(bool(r.problem) and r.ended <= clients.fault for r in clients.requests),
        under_way=len(under_way),
        failed=sum(bool(r.problem) for r in under_way),
        later=len(later),
        failed_later=sum(bool(r.problem) for r in later),
        left=sum(not r.tokens and not r.problem for r in later),
        last_failure_s=round(max(failures, default=0.0), 2),
        empty_s=None if empty is None else round(empty, 1),
        right_s=None if right is None else round(right, 2),
        answered=len(answers),
        wrong=sum(r.tokens != clients.expected[r.prompt] for r in answers),
    )


def _print(
    console: Console, deployments: Sequence[Deployment], faults: Sequence[Fault], records: Sequence[Suffered]
) -> None:
    cells = {(record.deployment, record.fault): record for record in records}
    header = ["", *(deployment.label for deployment in deployments)]
    rows = [
        [fault.label, *(cell(fault, cells.get((deployment.name, fault.name))) for deployment in deployments)]
        for fault in faults
    ]
    print_table(console, "Effect of each fault", header, rows, names=len(header))


def cell(fault: Fault, record: Suffered | None) -> str:
    if record is None:
        return "-"
    if fault.victim is None:
        lines = [f"{record.left} of {record.later} left, {record.failed_later} failed"]
        blocks, service = "both engines empty", "then right answer"
    else:
        lines = [f"before: {record.failed_before} failed"] if record.failed_before else []
        lines += [f"in flight: {record.failed} of {record.under_way} failed"]
        lines += [f"later: {record.failed_later} of {record.later} failed"]
        lines += [f"last failure after {record.last_failure_s:g} s"] if record.last_failure_s else []
        blocks, service = (
            f"{_ROLES[1 - fault.victim]} empty",
            f"{_ROLES[fault.victim]} restarted: right answer",
        )
    lines += [f"{blocks} after {_seconds(record.empty_s, fault.limit)}"]
    lines += [f"{service} after {_seconds(record.right_s, RIGHT_SECONDS)}"]
    lines += [f"{record.wrong} of {record.answered} answers wrong"]
    return "\n".join(lines)


def _seconds(seconds: float | None, limit: float) -> str:
    return f"{seconds:g} s" if seconds is not None else f"> {limit:g} s"
