"""Samples of processes: private memory, open descriptors, threads, and gauges of /metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

KIB = 1 << 10
_ANSWER_SECONDS = 20.0
_PROC = Path("/proc")
_LISTEN = "0A"  # TCP_LISTEN of the kernel, in hexadecimal

# Beginning of the names of the transfer engine's threads, by which an engine's worker is found.
_THREADS = "kvc"

CHILD = " child "
"""In the names of processes that are neither a server nor a worker."""

ENGINE_GAUGES = (
    "kv_connector_live_prefill_requests",
    "kv_connector_live_decode_requests",
    "kv_connector_live_transfers",
    "kv_connector_live_counter_sets",
    "kv_connector_remembered_transfers",
    "kv_connector_peers",
    "vllm:kv_cache_usage_perc",
)
ROUTER_GAUGES = (
    "kv_connector_router_in_flight",
    "kv_connector_router_prefixes",
    "kv_connector_router_sessions",
    "kv_connector_router_engines",
    "kv_connector_router_engine_requests",
)
SERIES_OF_METRICS = "series of /metrics"
BYTES_OF_STATUS = "bytes of /status.json"


@dataclass(frozen=True)
class Sample:
    """The measured values of one process at one moment."""

    at: float
    """Seconds since the load began."""
    requests: int
    """Requests that had ended by then."""
    process: str
    pid: int
    values: Mapping[str, float]
    """``memory``, ``descriptors`` and ``threads``, or gauges by name."""


def of_group(name: str, leader: int) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yields (name, process id, values) of a process and the other processes of its group. Those that end
    meanwhile are left out.

    The others are numbered, in the order of their starts. The first one of an engine is its engine core.
    """
    others = 0
    for pid in _group(leader):
        try:
            lines = (_PROC / str(pid) / "status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            tasks = (_PROC / str(pid) / "task").iterdir()
            threads = [(task / "comm").read_text() for task in tasks]
            values = {
                "memory": float(_memory(status)),
                "descriptors": float(sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())),
                "threads": float(len(threads)),
            }
        except (OSError, KeyError):  # it ended: a zombie has no memory
            continue
        if pid == leader:
            yield name, pid, values
        elif any(thread.startswith(_THREADS) for thread in threads):
            yield f"{name} worker", pid, values
        else:
            others += 1
            yield f"{name}{CHILD}{others}", pid, values


def _group(leader: int) -> list[int]:
    """Returns the process ids of a process group, the leader first."""
    found = []
    for pid in _pids():
        try:
            if os.getpgid(pid) == leader:
                found.append(pid)
        except ProcessLookupError:
            continue
    return sorted(found, key=lambda pid: (pid != leader, pid))


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _memory(status: Mapping[str, str]) -> int:
    """Returns the bytes of memory that the process has written: anonymous and shared memory, also in swap.

    Files are left out. A forked process shares anonymous pages with its parent until one of the two writes
    them, which does not change this number.
    """
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap")) * KIB


def listener(port: int) -> int | None:
    """Returns the leader of the group of processes that listen at this TCP port; None: none listens there.

    A forked engine core has inherited the socket of its API server, which leads their group.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for pid in _pids() if sockets else ():
        try:
            if any(str(entry.readlink()) in sockets for entry in (_PROC / str(pid) / "fd").iterdir()):
                return os.getpgid(pid)
        except OSError:
            continue  # it ended meanwhile, or closed a descriptor
    return None


def _listening(port: int) -> Iterator[str]:
    """Yields the inodes of the sockets that listen at this port."""
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


async def engine_gauges(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Returns the gauges of an engine; none if it does not answer."""
    text = await _text(http, f"{url}/metrics")
    return {} if text is None else _gauges(text, ENGINE_GAUGES)


async def router_gauges(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Returns the gauges of the router, and the sizes of its answers to observers."""
    text, status = await _text(http, f"{url}/metrics"), await _text(http, f"{url}/status.json")
    if text is None or status is None:
        return {}
    series = sum(1 for line in text.splitlines() if line and not line.startswith("#"))
    sizes = {SERIES_OF_METRICS: float(series), BYTES_OF_STATUS: float(len(status))}
    return _gauges(text, ROUTER_GAUGES) | sizes


async def _text(http: httpx.AsyncClient, url: str) -> str | None:
    try:
        answer = await http.get(url, timeout=_ANSWER_SECONDS)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


def _gauges(text: str, names: Sequence[str]) -> dict[str, float]:
    """Returns the sum of each gauge over its labels."""
    sums = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    return sums


def write(file: Path, samples: Iterable[Sample]) -> None:
    """Appends the samples, a JSON line each."""
    with file.open("a") as lines:
        for sample in samples:
            lines.write(json.dumps(asdict(sample)) + "\n")


def read(file: Path) -> list[Sample]:
    """Reads samples. A last line that was broken off is left out."""
    samples = []
    for line in file.read_text().splitlines():
        try:
            samples.append(Sample(**json.loads(line)))
        except json.JSONDecodeError:
            break
    return samples
