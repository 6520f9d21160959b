"""Fake sysfs trees of machines, built in a directory, for the tests of topology and doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kv_connector.engine.topology import Machine, read_machine

H200 = "0x2335"


@dataclass
class FakeSys:
    """A sysfs tree. Devices are named by their PCI path, root first."""

    root: Path
    infiniband: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def machine(self) -> Machine:
        return read_machine(self.root)

    def pci(self, path: Sequence[str], numa_node: int, vendor: str, device: str, class_: str) -> Path:
        directory = self.root.joinpath("devices", *path)
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in {
            "vendor": vendor,
            "device": device,
            "class": class_,
            "numa_node": str(numa_node),
        }.items():
            (directory / name).write_text(text + "\n")
        link = self.root / "bus/pci/devices" / path[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
        return directory

    def gpu(self, *path: str, numa_node: int = 0) -> None:
        self.pci(path, numa_node, "0x10de", H200, "0x030200")

    def nic(
        self,
        name: str,
        *path: str,
        numa_node: int = 0,
        driver: str = "mlx5_core",
        gbit: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        link_layer: str = "InfiniBand",
        node_type: str = "1: CA",
        gids: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        """Adds a NIC. `gids`: (address, type, interface) of each entry from 0 on. An address of zeros is an
        empty entry.

        Without a `path` it is a software NIC.
        """
        if path:
            device = self.pci(path, numa_node, "0x15b3", "0x1021", "0x020700")
            module = self.root / "bus/pci/drivers" / driver
            module.mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(module)
        else:
            device = self.root / "devices/virtual"
        entry = device / "infiniband" / name
        port = entry / "ports/1"
        for directory in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / directory).mkdir(parents=True)
        if path:
            (entry / "device").symlink_to(device)
        (entry / "node_type").write_text(node_type + "\n")
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(gbit + "\n")
        (port / "link_layer").write_text(link_layer + "\n")
        for index, (address, kind, interface) in enumerate(gids):
            (port / f"gids/{index}").write_text(address + "\n")
            if kind:
                (port / f"gid_attrs/types/{index}").write_text(kind + "\n")
            if interface:
                (port / f"gid_attrs/ndevs/{index}").write_text(interface + "\n")
        links = self.root / "class/infiniband"
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(entry)
        verbs = self.root / f"class/infiniband_verbs/uverbs{self.infiniband}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(name + "\n")
        self.infiniband += 1

    def cores(self, *nodes: str, threads: int = 1) -> None:
        """Writes one core list per NUMA node. With `threads` 2, cores c and c + half are siblings."""
        system = self.root / "devices/system"
        online = [core for cores in nodes for core in _cores(cores)]
        for number, cores in enumerate(nodes):
            (system / f"node/node{number}").mkdir(parents=True)
            (system / f"node/node{number}/cpulist").write_text(cores + "\n")
        half = len(online) // threads
        for core in online:
            topology = system / f"cpu/cpu{core}/topology"
            topology.mkdir(parents=True)
            siblings = sorted(core % half + thread * half for thread in range(threads))
            (topology / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
        (system / "cpu/online").write_text(",".join(nodes) + "\n")


def dgx(root: Path) -> FakeSys:
    """Builds a machine with eight H200 and eight NICs: a pair behind each PCI switch, four on each socket. It
    also has two NICs for storage, a slow one for management, and 112 cores with two threads each.
    """
    sys = FakeSys(root)
    for i in range(8):
        bus = 0x10 + 0x10 * i
        switch = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
        node = i // 4
        sys.gpu(*switch, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 3:02x}:00.0", numa_node=node)
        sys.nic(
            f"mlx5_{i}",
            *switch,
            f"0000:{bus + 2:02x}:01.0",
            f"0000:{bus + 4:02x}:00.0",
            numa_node=node,
            gids=[("fe80:0000:0000:0000:a088:c203:0041:0000", "IB/RoCE v1", "")],
        )
    for i, node in ((8, 0), (9, 1)):
        sys.nic(f"mlx5_{i}", f"pci0000:{0xA0 + i:02x}", f"0000:{0xA0 + i:02x}:01.0", numa_node=node)
    sys.nic(
        "mlx5_10",
        "pci0000:00",
        "0000:00:1c.0",
        "0000:01:00.0",
        gbit="25 Gb/sec (1X EDR)",
        link_layer="Ethernet",
    )
    sys.cores("0-55,112-167", "56-111,168-223", threads=2)
    return sys


def p5(root: Path) -> FakeSys:
    """Builds a machine with eight H100 and 32 EFA of 100 Gb/s, four beside each GPU, and 96 cores with two
    threads each."""
    sys = FakeSys(root)
    for i in range(8):
        bus, node = 0x40 + 0x10 * i, i // 4
        root_port = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:00.0")
        sys.gpu(*root_port, f"0000:{bus + 9:02x}:00.0", numa_node=node)
        for k in range(4):
            sys.nic(
                f"rdmap{bus + 5 + k}s0",
                *root_port,
                f"0000:{bus + 5 + k:02x}:00.0",
                numa_node=node,
                driver="efa",
                gbit="100 Gb/sec (4X EDR)",
                link_layer="Unspecified",
                node_type="<unknown>",
            )
    sys.cores("0-47,96-143", "48-95,144-191", threads=2)
    return sys


def two_sockets_one_nic(root: Path) -> FakeSys:
    """Builds a machine with two GPUs, one on each socket without a switch, and one RoCE NIC on the second
    socket."""
    sys = FakeSys(root)
    sys.gpu("pci0000:10", "0000:10:01.0", "0000:11:00.0", numa_node=0)
    sys.gpu("pci0000:90", "0000:90:01.0", "0000:91:00.0", numa_node=1)
    sys.nic(
        "mlx5_0",
        "pci0000:a0",
        "0000:a0:01.0",
        "0000:a1:00.0",
        numa_node=1,
        gbit="100 Gb/sec (4X EDR)",
        link_layer="Ethernet",
        gids=[
            ("fe80:0000:0000:0000:0ac0:ebff:fe12:3456", "IB/RoCE v1", "ens1np0"),
            ("fe80:0000:0000:0000:0ac0:ebff:fe12:3456", "RoCE v2", "ens1np0"),
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "ens1np0"),
            ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "ens1np0"),
            ("0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
        ],
    )
    sys.cores("0-15", "16-31")
    return sys


def virtual(root: Path) -> FakeSys:
    """Builds a virtual machine with two H200s passed through, as seen in practice: all devices are on the
    root bus, and the firmware reports no NUMA nodes.
    """
    sys = FakeSys(root)
    sys.pci(("pci0000:00", "0000:00:03.0"), -1, "0x1af4", "0x1041", "0x020000")
    sys.gpu("pci0000:00", "0000:00:06.0", numa_node=-1)
    sys.gpu("pci0000:00", "0000:00:07.0", numa_node=-1)
    sys.cores("0-31")
    return sys


def laptop(root: Path) -> FakeSys:
    """Builds a machine without GPU and NIC, whose kernel has no NUMA."""
    sys = FakeSys(root)
    system = root / "devices/system/cpu"
    system.mkdir(parents=True)
    (system / "online").write_text("0-7\n")
    sys.pci(("pci0000:00", "0000:00:02.0"), -1, "0x8086", "0x9a49", "0x030000")
    return sys


def soft_roce(root: Path) -> FakeSys:
    """Builds a virtual machine with two software NICs, a software iWARP NIC and one core."""
    sys = FakeSys(root)
    for i in range(2):
        sys.nic(
            f"rxe{i}",
            gbit="2.5 Gb/sec (1X SDR)",
            link_layer="Ethernet",
            gids=[
                ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2", f"veth{i}"),
                (f"0000:0000:0000:0000:0000:ffff:0a4d:000{i + 1}", "RoCE v2", f"veth{i}"),
            ],
        )
    sys.nic("siw0", gbit="10 Gb/sec (4X SDR)", link_layer="Ethernet", node_type="4: RNIC")
    (root / "devices/system/cpu").mkdir(parents=True)
    (root / "devices/system/cpu/online").write_text("0\n")
    return sys


def _cores(text: str) -> list[int]:
    from kv_connector.engine.topology import parse_cores

    return sorted(parse_cores(text))
