"""kv-connector topology: GPUs, NICs and cores of this machine, and which of them belong together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kv_connector.engine.rank_placement import (
    NIC_PROVIDERS,
    CoreChoice,
    CoresInUse,
    Nearness,
    NicChoice,
    choose_core,
    choose_nics,
    choose_nics_without_device,
    cores_in_use,
)
from kv_connector.engine.topology import Machine, Port, read_machine

_FILE_COLUMNS = 140
# The engine's thread that launches kernels. Compute threads run on the GPU.
_GPU_ENGINE_THREADS = 1


class DevicePlacement(msgspec.Struct, frozen=True):
    """The resources that an engine on one device would get now."""

    device: str
    """A GPU's PCI address, or "cpu"."""
    numa_node: int | None
    provider: str | None
    """Provider of these NICs. None: no usable NIC."""
    nics: NicChoice
    core: CoreChoice


class TopologyReport(msgspec.Struct, frozen=True):
    machine: Machine
    allowed_cores: tuple[int, ...]
    bound_cores: tuple[int, ...] | None
    placements: tuple[DevicePlacement, ...]


def topology(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Shows GPUs, NICs and cores, the NICs chosen for each GPU, and the core of its transfer thread.

    The settings `nics` and `worker_cpu` in kv_connector_extra_config override the choice.
    """
    found = report(read_machine(), cores_in_use())
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_COLUMNS)
    for title, header, rows in (
        (
            "Placement",
            ("device", "NUMA", "NICs", "distance", "transfer thread's core"),
            _placement_rows(found),
        ),
        (
            "NICs",
            ("name", "driver", "PCI", "NUMA", "port", "state", "link", "Gb/s", "addresses"),
            _nic_rows(found),
        ),
        (
            "Cores",
            ("NUMA node", "cores", "for this process", "bound by other processes or the engine"),
            _core_rows(found),
        ),
    ):
        table = Table(*header, title=title, title_justify="left", title_style="bold")
        for row in rows:
            table.add_row(*row)
        if table.row_count:
            console.print(table)
        else:
            console.print(f"[bold]{title}[/]: none")


def report(machine: Machine, in_use: CoresInUse) -> TopologyReport:
    return TopologyReport(
        machine=machine,
        allowed_cores=tuple(sorted(in_use.allowed)),
        bound_cores=None if in_use.bound is None else tuple(sorted(in_use.bound)),
        placements=tuple(_placements(machine, in_use)),
    )


def _placements(machine: Machine, in_use: CoresInUse) -> Iterator[DevicePlacement]:
    provider = next((name for name, kind in NIC_PROVIDERS.items() if _has_active(machine, kind)), None)
    by_gpu = choose_nics(machine, machine.gpus, provider) if provider is not None else {}
    for gpu in machine.gpus:
        node = gpu.location.numa_node
        neighbours = [other for other in machine.gpus if other.location.numa_node == node]
        core = choose_core(
            machine,
            in_use,
            numa_node=node,
            engine_threads=_GPU_ENGINE_THREADS,
            turn=(neighbours.index(gpu), len(neighbours)),
        )
        yield DevicePlacement(gpu.address, node, provider, by_gpu.get(gpu.address, _NO_NICS), core)
    if not machine.gpus:
        # By default, an engine on CPUs has as many threads as there are cores.
        core = choose_core(machine, in_use, numa_node=None, engine_threads=len(in_use.allowed))
        nics = choose_nics_without_device(machine, provider, None) if provider is not None else _NO_NICS
        yield DevicePlacement("cpu", None, provider, nics, core)


_NO_NICS = NicChoice((), Nearness.NONE, shared=False)


def _has_active(machine: Machine, kind: str) -> bool:
    return any(nic.active and nic.kind == kind for nic in machine.nics)


def _placement_rows(found: TopologyReport) -> Iterator[tuple[str, ...]]:
    models = {gpu.address: gpu.model for gpu in found.machine.gpus}
    for placement in found.placements:
        core = placement.core
        yield (
            f"{placement.device} {models.get(placement.device, '')}".strip(),
            _number(placement.numa_node),
            ", ".join(placement.nics.nics) or "none",
            f"{placement.nics.nearness}{', shared' if placement.nics.shared else ''}"
            if placement.nics.nics
            else "",
            f"{core.cores[0]}: {core.reason}" if core.cores else core.reason,
        )


def _nic_rows(found: TopologyReport) -> Iterator[tuple[str, ...]]:
    for nic in found.machine.nics:
        for port in nic.ports:
            yield (
                nic.name,
                nic.driver or "software",
                nic.location.path[-1] if nic.location.path else "",
                _number(nic.location.numa_node),
                str(port.number),
                f"[green]{port.state}" if port.active else f"[red]{port.state}",
                "EFA" if nic.kind == "efa" else port.link_layer,
                f"{port.gbit_per_second:g}",
                _addresses(port),
            )


def _core_rows(found: TopologyReport) -> Iterator[tuple[str, ...]]:
    allowed = set(found.allowed_cores)
    for node in found.machine.numa_nodes:
        here = set(node.cores)
        bound = "unknown" if found.bound_cores is None else cores_text(here.intersection(found.bound_cores))
        yield (str(node.number), cores_text(here), cores_text(here & allowed), bound)


def _addresses(port: Port) -> str:
    """Returns the port's IPv4 addresses, or else its first other address."""
    ipv4 = sorted({str(gid.ipv4) for gid in port.gids if gid.ipv4 is not None})
    return ", ".join(ipv4) or next((gid.address for gid in port.gids), "none")


def _number(number: int | None) -> str:
    return "?" if number is None else str(number)


def cores_text(cores: set[int]) -> str:
    """Formats cores like the kernel: "0-3,8", or "none"."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"
