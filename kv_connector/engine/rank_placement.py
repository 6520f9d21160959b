"""Chooses the NICs of a device and the core of its transfer thread. ``place`` makes both choices.

NICs: those that share the deepest PCI ancestor with the device, otherwise those of its NUMA node, otherwise
all. They are divided evenly among the devices with the same nearest NICs.

Core: on the device's NUMA node, but never a core that an engine on this machine is bound to, nor its sibling.
If no core is known to be spare, the transfer thread stays unpinned, and the kernel places it. A thread pinned
onto an engine's core costs far more than a thread that moves.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

import msgspec

from kv_connector.engine import DomainConfig
from kv_connector.engine.topology import (
    Gpu,
    Location,
    Machine,
    Nic,
    cuda_gpu_address,
    parse_cores,
    read_machine,
)

logger = logging.getLogger(__name__)

MAX_NICS = 8
"""Most domains of a group that the transfer engine accepts."""

NIC_PROVIDERS = {"verbs": "rc", "libfabric": "efa"}
"""The providers that run over NICs, with the kind of NIC that each uses here."""

# A NIC slower than this share of the fastest one is meant for management or storage, not for data.
_SLOWEST_SHARE = 0.5
# Busy threads of an engine beside its compute threads: the API server, EngineCore's loop, the agent's thread.
_OTHER_BUSY_THREADS = 3


def device_name(provider: str, nic: str) -> str:
    """The name of this NIC in DomainConfig.device."""
    # libfabric's efa provider makes two domains of each NIC, for datagrams ("-dgrm") and for reliable writes.
    return f"efa:{nic}-rdm" if provider == "libfabric" else nic


class Nearness(StrEnum):
    SWITCH = "behind the same PCI bridge"
    ROOT = "under the same PCI root"
    NODE = "on the same NUMA node"
    MACHINE = "in the same machine"
    NONE = "none"


class NicChoice(msgspec.Struct, frozen=True):
    nics: tuple[str, ...]
    nearness: Nearness
    shared: bool
    """Whether other devices were given some of these NICs too."""


class CoreChoice(msgspec.Struct, frozen=True):
    cores: tuple[int, ...]
    """Spare cores, the best first. Empty: do not pin."""
    reason: str


class CoresInUse(msgspec.Struct, frozen=True):
    """The cores on which engines and other processes compute."""

    allowed: frozenset[int]
    """The cores where this process may run: its affinity mask, which the kernel keeps within its cgroup's
    cpuset."""
    bound: frozenset[int] | None
    """Cores that engines and other processes are bound to. None: bound to cores that cannot be determined."""


def choose_nics(machine: Machine, gpus: Sequence[Gpu], provider: str) -> dict[str, NicChoice]:
    """For each of `gpus`, by address, the NICs that `provider` opens for it."""
    usable = usable_nics(machine, provider)
    nearest = {gpu.address: _nearest(gpu.location, usable) for gpu in gpus}
    own = {}
    for gpu in gpus:
        nics, _ = nearest[gpu.address]
        rivals = [other for other in gpus if nearest[other.address][0] == nics]
        own[gpu.address] = tuple(nic.name for nic in _share(nics, rivals.index(gpu), len(rivals))[:MAX_NICS])
    users = Counter(name for names in own.values() for name in names)
    return {
        address: NicChoice(names, nearest[address][1], shared=any(users[name] > 1 for name in names))
        for address, names in own.items()
    }


def choose_nics_without_device(machine: Machine, provider: str, numa_node: int | None) -> NicChoice:
    """The NICs for an engine in CPU memory."""
    nics, nearness = _nearest(Location(numa_node=numa_node), usable_nics(machine, provider))
    return NicChoice(tuple(nic.name for nic in nics[:MAX_NICS]), nearness, shared=False)


def usable_nics(machine: Machine, provider: str) -> list[Nic]:
    """NICs of the kind that `provider` uses, with a port that is up, and fast enough to be meant for data."""
    up = [nic for nic in machine.nics if nic.active and nic.kind == NIC_PROVIDERS[provider]]
    fastest = max((nic.gbit_per_second for nic in up), default=0.0)
    return [nic for nic in up if nic.gbit_per_second >= fastest * _SLOWEST_SHARE]


def choose_core(
    machine: Machine,
    in_use: CoresInUse,
    *,
    numa_node: int | None,
    engine_threads: int,
    turn: tuple[int, int] = (0, 1),
) -> CoreChoice:
    """Spare cores for the transfer thread of a device on `numa_node` (None: unknown).

    `engine_threads`: compute threads of the engine that are bound to no core. `turn` (i, n): this is the i-th
    of n devices of that node. Each begins its search at another core.
    """
    if in_use.bound is None:
        return CoreChoice(
            (), "not pinned: the engine's threads are bound to cores by a setting that cannot be read"
        )
    if numa_node is None:
        numa_node = _only_node(machine, in_use.bound & in_use.allowed or in_use.allowed)
        if numa_node is None:
            return CoreChoice((), "not pinned: the NUMA node of the memory is unknown")
    spare = []
    for core in machine.cores_of(numa_node):
        siblings = machine.siblings.get(core, (core,))
        runnable = [sibling for sibling in siblings if sibling in in_use.allowed]
        if runnable and core == runnable[0] and not in_use.bound.intersection(siblings):
            spare.append(core)
    needed = engine_threads + _OTHER_BUSY_THREADS
    if len(spare) <= needed:
        return CoreChoice(
            (),
            f"not pinned: {len(spare)} cores of NUMA node {numa_node} are free, and the engine's unbound "
            f"threads may need {needed}",
        )
    # From the end, because interrupts and programs that count cores from 0 use the first ones.
    spare.reverse()
    position, count = turn
    begin = position * len(spare) // count
    return CoreChoice(
        tuple(spare[begin:] + spare[:begin]), f"one of {len(spare)} free cores of NUMA node {numa_node}"
    )


class CoreClaim:
    """Keeps the transfer threads of other engines off a core while this object lives.

    It holds an abstract socket's name, which one process at a time can take and which is free again when that
    process ends. Processes of one network namespace see it. Engines that use the host's NICs share that
    namespace.
    """

    def __init__(self, core: int, holder: socket.socket) -> None:
        self.core = core
        self._holder = holder

    @classmethod
    def first_free(cls, cores: Sequence[int]) -> Self | None:
        for core in cores:
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                holder.bind(f"\0kv-connector/core/{core}")
            except OSError:
                holder.close()
                continue
            return cls(core, holder)
        return None

    def release(self) -> None:
        self._holder.close()


@dataclass(frozen=True)
class Device:
    """The device whose memory is written and read."""

    kind: Literal["cpu", "cuda"]
    index: int = 0
    """Index in this process's numbering."""


@dataclass(frozen=True)
class RankPlacement:
    """The chosen NICs and core. Call release() when the transfer thread has ended."""

    nics: Mapping[str, tuple[str, ...]]
    """The NICs of each provider, in the names of DomainConfig.device. A provider without NICs makes its own
    choice."""
    claim: CoreClaim | None
    worker_cpu: int | None
    """The core to pin the transfer thread to."""

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()


def place(
    device: Device,
    *,
    providers: Sequence[str],
    nics: tuple[str, ...],
    worker_cpu: int | Literal["auto", "none"],
    compute_threads: int,
) -> RankPlacement:
    """Chooses what the operator leaves open with ``nics`` (empty) and ``worker_cpu`` ("auto"), and logs each
    choice with its reason.

    ``compute_threads``: threads with which this process computes if its device is a CPU.
    """
    machine = read_machine()
    gpu = cuda_gpu_address(device.index) if device.kind == "cuda" else None
    chosen = _chosen_nics(machine, gpu, providers, nics)
    if worker_cpu != "auto":
        return RankPlacement(chosen, None, None if worker_cpu == "none" else worker_cpu)
    choice = _core(machine, gpu, _unbound_threads(device, compute_threads))
    claim = CoreClaim.first_free(choice.cores)
    if claim is None:
        reason = (
            "not pinned: transfer threads of other engines use every free core"
            if choice.cores
            else choice.reason
        )
        logger.info("transfer thread: %s", reason)
        return RankPlacement(chosen, None, None)
    logger.info("transfer thread: pinned to core %d, %s", claim.core, choice.reason)
    return RankPlacement(chosen, claim, claim.core)


def place_nics(
    device: Device, *, providers: Sequence[str], nics: tuple[str, ...]
) -> Mapping[str, tuple[str, ...]]:
    """Does what ``place`` does for ``nics``. Returns ``RankPlacement.nics``."""
    gpu = cuda_gpu_address(device.index) if device.kind == "cuda" else None
    return _chosen_nics(read_machine(), gpu, providers, nics)


def domains_of(
    providers: Sequence[str], address: str, nics: Mapping[str, tuple[str, ...]]
) -> tuple[DomainConfig, ...]:
    """The domains of a transfer engine: one for each NIC of a provider, or one if the provider has none in
    ``nics``. ``address``: address that the listeners bind."""
    return tuple(
        DomainConfig(provider=provider, address=address, device=device)
        for provider in providers
        for device in nics.get(provider) or ("",)
    )


def cores_in_use(environment: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> CoresInUse:
    """The cores in use, from the environment and the threads of this machine. Takes some milliseconds, more
    with many threads."""
    # An OpenMP runtime binds the main thread too, so only all threads together show where this process may
    # run.
    allowed = frozenset().union(*_masks(proc / "self/task"))
    asked = bound_by_environment(environment)
    if asked is None:
        return CoresInUse(allowed, None)
    bound = set(asked)
    for process in proc.glob("[0-9]*"):
        for mask in _masks(process / "task"):
            # A thread that may run on all allowed cores is not bound.
            if not allowed <= mask:
                bound |= mask & allowed
    return CoresInUse(allowed, frozenset(bound))


def bound_by_environment(environment: Mapping[str, str]) -> frozenset[int] | None:
    """The cores to which OpenMP and vLLM are configured to bind their threads. None: the configuration cannot
    be parsed."""
    vllm = environment.get("VLLM_CPU_OMP_THREADS_BIND", "")
    cores: set[int] = set()
    try:
        if vllm not in ("", "auto", "nobind"):
            for rank in vllm.split("|"):
                cores |= parse_cores(rank)
        cores |= _gomp_cores(environment.get("GOMP_CPU_AFFINITY", ""))
        cores |= _omp_places(environment.get("OMP_PLACES", ""))
        cores |= _kmp_cores(environment.get("KMP_AFFINITY", ""))
    except ValueError:
        return None
    return frozenset(cores)


def _chosen_nics(
    machine: Machine, gpu: str | None, providers: Sequence[str], nics: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    chosen = {
        provider: nics or _nics(machine, gpu, provider) for provider in providers if provider in NIC_PROVIDERS
    }
    for provider, names in chosen.items():
        logger.info(
            "%s: uses NICs %s for %s", provider, ", ".join(names) or "none", gpu or "memory of this node"
        )
    return chosen


def _nics(machine: Machine, gpu: str | None, provider: str) -> tuple[str, ...]:
    choice = choose_nics(machine, machine.gpus, provider).get(gpu) if gpu is not None else None
    if choice is None:
        choice = choose_nics_without_device(machine, provider, None)
    return tuple(device_name(provider, nic) for nic in choice.nics)


def _core(machine: Machine, address: str | None, engine_threads: int) -> CoreChoice:
    gpu = next((gpu for gpu in machine.gpus if gpu.address == address), None)
    node = gpu.location.numa_node if gpu is not None else None
    neighbours = [other for other in machine.gpus if other.location.numa_node == node]
    turn = (neighbours.index(gpu), len(neighbours)) if gpu is not None else (0, 1)
    return choose_core(machine, cores_in_use(), numa_node=node, engine_threads=engine_threads, turn=turn)


def _unbound_threads(device: Device, compute_threads: int) -> int:
    """Threads of this process that compute all the time and are bound to no core."""
    if device.kind == "cuda":
        return 1  # the thread that launches kernels
    # The variables that bind threads also let cores_in_use() read which cores they use.
    if os.environ.get("OMP_PLACES") or os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("KMP_AFFINITY"):
        return 0
    return compute_threads


def _gomp_cores(text: str) -> set[int]:
    """Parses GOMP_CPU_AFFINITY, such as "0 3 1-2 4-15:2"."""
    cores: set[int] = set()
    for part in re.split(r"[\s,]+", text.strip()):
        span, _, stride = part.partition(":")
        first, dash, last = span.partition("-")
        if span:
            cores.update(range(int(first), int(last if dash else first) + 1, int(stride or 1)))
    return cores


def _omp_places(text: str) -> set[int]:
    """Parses OMP_PLACES: "{0,1,2}", "{0},{1}", "{0:4}", "{0:4:2}". An abstract name ("cores") names no
    particular cores."""
    if not text or text.partition("(")[0] in ("threads", "cores", "sockets", "ll_caches", "numa_domains"):
        return set()
    cores: set[int] = set()
    if not re.fullmatch(r"\{[0-9:,\s]+\}(,\s*\{[0-9:,\s]+\})*", text):
        raise ValueError(f"OMP_PLACES {text!r}")
    for place in re.findall(r"\{([^}]*)\}", text):
        for part in place.split(","):
            first, *rest = (int(number) for number in part.split(":"))
            count, stride = (*rest, *(1, 1)[len(rest) :])
            cores.update(range(first, first + count * stride, stride))
    return cores


def _kmp_cores(text: str) -> set[int]:
    """Parses KMP_AFFINITY: "granularity=fine,explicit,proclist=[0,1,4-7]". Without a list, the runtime
    decides."""
    match = re.search(r"proclist=\[([^\]]*)\]", text)
    return set(parse_cores(match.group(1))) if match else set()


def _masks(tasks: Path) -> Iterator[frozenset[int]]:
    """The allowed cores of each thread of a process. Threads may start and end meanwhile."""
    for task in tasks.glob("[0-9]*"):
        status = _status(task)
        # The kernel's own threads are bound to every core and have no address space.
        if "\nVmSize:" in status and (match := re.search(r"\nCpus_allowed_list:\s*(\S+)", status)):
            yield parse_cores(match.group(1))


def _status(task: Path) -> str:
    try:
        return (task / "status").read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _only_node(machine: Machine, cores: frozenset[int]) -> int | None:
    nodes = [node.number for node in machine.numa_nodes if cores.intersection(node.cores)]
    return nodes[0] if len(nodes) == 1 else None


def _nearest(location: Location, nics: Sequence[Nic]) -> tuple[list[Nic], Nearness]:
    if not nics:
        return [], Nearness.NONE
    depths = [location.common_depth(nic.location) for nic in nics]
    if deepest := max(depths):
        nearest = [nic for nic, depth in zip(nics, depths, strict=True) if depth == deepest]
        # The first common component is the root itself. The following ones are its bridges.
        return nearest, Nearness.SWITCH if deepest > 1 else Nearness.ROOT
    if location.numa_node is not None:
        nearest = [nic for nic in nics if nic.location.numa_node == location.numa_node]
        if nearest:
            return nearest, Nearness.NODE
    return list(nics), Nearness.MACHINE


def _share(nics: Sequence[Nic], position: int, count: int) -> Sequence[Nic]:
    """The position-th of `count` even parts. With fewer NICs than parts, one shared NIC."""
    if len(nics) >= count:
        return nics[position * len(nics) // count : (position + 1) * len(nics) // count]
    return nics[position * len(nics) // count :][:1]
