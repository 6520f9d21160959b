"""The parts of this machine, from sysfs: GPUs, NICs, NUMA nodes and cores, and their places in it.

Reading never fails: missing or unreadable entries are left out. Nothing is opened or started.
"""

from __future__ import annotations

import ctypes
import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

_NVIDIA = "0x10de"
# PCI base class 03, "display controller": 0300 is a graphics card, 0302 a 3D controller (data centre GPUs).
_DISPLAY_CLASS = "0x03"
_PCI_COMPONENT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_IWARP_NODE = "4:"  # node_type "4: RNIC"


class Location(msgspec.Struct, frozen=True):
    """The place of a device in the machine."""

    path: tuple[str, ...] = ()
    """From the PCI root ("pci0000:10") through bridges and switches to the device. Empty: not on PCI."""
    numa_node: int | None = None

    def common_depth(self, other: Location) -> int:
        """Number of ancestors that the two paths share, from the root down. 0: not even the root."""
        depth = 0
        for ours, theirs in zip(self.path[:-1], other.path[:-1], strict=False):
            if ours != theirs:
                break
            depth += 1
        return depth


class Gpu(msgspec.Struct, frozen=True):
    address: str
    """PCI address such as "0000:18:00.0", the same as in NVML and CUDA."""
    model: str
    """Vendor and device, such as "10de:2335"."""
    location: Location


class Gid(msgspec.Struct, frozen=True):
    """One address of a port."""

    index: int
    address: str
    kind: str
    """"RoCE v2", "IB/RoCE v1", or empty if the kernel does not report it."""
    interface: str
    """The network interface behind it, or empty."""

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return ipaddress.IPv6Address(self.address).ipv4_mapped

    @property
    def link_local(self) -> bool:
        return ipaddress.IPv6Address(self.address).is_link_local


class Port(msgspec.Struct, frozen=True):
    number: int
    state: str
    """"ACTIVE", "DOWN", "INIT", ..."""
    link_layer: str
    """"InfiniBand", "Ethernet", or "Unspecified" (EFA)."""
    gbit_per_second: float
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


class Nic(msgspec.Struct, frozen=True):
    """An RDMA device."""

    name: str
    """Name in /sys/class/infiniband: "mlx5_0", "rdmap79s0", "rxe0"."""
    driver: str
    """The kernel's driver ("mlx5_core", "efa"). Empty if the NIC is software."""
    kind: str
    """"rc": reliable connections (verbs). "efa": SRD (libfabric). "iwarp": no immediates, so it cannot be
    used."""
    location: Location
    ports: tuple[Port, ...]
    device_file: str | None
    """The file that a process opens, "/dev/infiniband/uverbs0". None: the kernel has none (ib_uverbs is not
    loaded)."""

    @property
    def gbit_per_second(self) -> float:
        """Rate of the fastest port that is up. 0: no port is up."""
        return max((port.gbit_per_second for port in self.ports if port.active), default=0.0)

    @property
    def active(self) -> bool:
        return any(port.active for port in self.ports)


class NumaNode(msgspec.Struct, frozen=True):
    number: int
    cores: tuple[int, ...]
    """Logical cores that are online."""


class Machine(msgspec.Struct, frozen=True):
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    numa_nodes: tuple[NumaNode, ...]
    siblings: dict[int, tuple[int, ...]]
    """For each logical core, all logical cores of the same physical core, including itself."""

    def cores_of(self, numa_node: int) -> tuple[int, ...]:
        return next((node.cores for node in self.numa_nodes if node.number == numa_node), ())


def read_machine(sys: Path = Path("/sys")) -> Machine:
    """Reads `sys`, which may be a test's directory. Takes milliseconds."""
    return Machine(
        gpus=tuple(_gpus(sys)),
        nics=tuple(_nics(sys)),
        numa_nodes=tuple(_numa_nodes(sys)),
        siblings=_siblings(sys),
    )


def parse_cores(text: str) -> frozenset[int]:
    """Parses the kernel's list format, "0-3,8". Raises ValueError for other texts. An empty text is an empty
    list."""
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if span is None:
            raise ValueError(f"not a list of cores: {text!r}")
        first, last = span.groups()
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _gpus(sys: Path) -> Iterator[Gpu]:
    for device in _entries(sys / "bus/pci/devices"):
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY_CLASS):
            yield Gpu(
                address=device.name,
                model=f"{_text(device / 'vendor')[2:]}:{_text(device / 'device')[2:]}",
                location=_location(device),
            )


def _nics(sys: Path) -> Iterator[Nic]:
    files = {
        _text(entry / "ibdev"): f"/dev/infiniband/{entry.name}"
        for entry in _entries(sys / "class/infiniband_verbs")
    }
    for entry in _entries(sys / "class/infiniband"):
        driver = entry / "device/driver"
        name = driver.resolve().name if driver.exists() else ""
        yield Nic(
            name=entry.name,
            driver=name,
            kind=_kind(name, _text(entry / "node_type")),
            location=_location(entry / "device"),
            ports=tuple(_port(port) for port in _entries(entry / "ports") if port.name.isdecimal()),
            device_file=files.get(entry.name),
        )


def _kind(driver: str, node_type: str) -> str:
    if driver == "efa":
        return "efa"
    return "iwarp" if node_type.startswith(_IWARP_NODE) else "rc"


def _port(port: Path) -> Port:
    rate = re.match(r"[0-9.]+", _text(port / "rate"))
    return Port(
        number=int(port.name),
        state=_text(port / "state").rpartition(" ")[2] or "UNKNOWN",
        link_layer=_text(port / "link_layer") or "Unspecified",
        gbit_per_second=_number(rate.group()) if rate else 0.0,
        gids=tuple(_gids(port)),
    )


def _gids(port: Path) -> Iterator[Gid]:
    for entry in _entries(port / "gids"):
        try:
            index, address = int(entry.name), ipaddress.IPv6Address(_text(entry))
        except ValueError:
            continue
        if int(address) != 0:
            yield Gid(
                index,
                str(address),
                # An entry without a type or an interface cannot be read: the kernel returns EINVAL.
                kind=_text(port / "gid_attrs/types" / entry.name),
                interface=_text(port / "gid_attrs/ndevs" / entry.name),
            )


def _numa_nodes(sys: Path) -> Iterator[NumaNode]:
    nodes = [entry for entry in _entries(sys / "devices/system/node") if re.fullmatch(r"node\d+", entry.name)]
    for node in nodes:
        yield NumaNode(int(node.name.removeprefix("node")), _cores(node / "cpulist"))
    if not nodes:  # a kernel without NUMA
        yield NumaNode(0, _cores(sys / "devices/system/cpu/online"))


def _siblings(sys: Path) -> dict[int, tuple[int, ...]]:
    online = _cores(sys / "devices/system/cpu/online")
    return {
        core: _cores(sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list") or (core,)
        for core in online
    }


def _location(device: Path) -> Location:
    try:
        path = tuple(part for part in device.resolve(strict=True).parts if _PCI_COMPONENT.fullmatch(part))
    except (OSError, RuntimeError):
        return Location()
    node = _text(device / "numa_node")
    # -1: the firmware reports no node.
    return Location(path, int(node) if node.isdecimal() else None)


def _cores(path: Path) -> tuple[int, ...]:
    try:
        return tuple(sorted(parse_cores(_text(path))))
    except ValueError:
        return ()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _entries(directory: Path) -> list[Path]:
    """The entries in numeric order: mlx5_2 before mlx5_10."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    return sorted(entries, key=lambda entry: [(len(part), part) for part in re.split(r"(\d+)", entry.name)])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def cuda_gpu_address(ordinal: int) -> str | None:
    """The PCI address of the CUDA device that this process calls `ordinal`. None if there is no driver.

    CUDA numbers devices by CUDA_VISIBLE_DEVICES and its own order, which only the driver knows.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(16)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetPCIBusId(text, len(text), ordinal) != 0:
        return None
    return text.value.decode("ascii").lower()
