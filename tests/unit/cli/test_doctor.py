"""kv-connector doctor and topology: their findings about machines that the tests simulate."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import machines
import msgspec
import pytest
from command_line import invoke

from kv_connector.cli import doctor
from kv_connector.cli import topology as topology_command
from kv_connector.cli.common.findings import Verdict
from kv_connector.cli.doctor import Roots
from kv_connector.cli.main import app
from kv_connector.engine.rank_placement import CoresInUse
from kv_connector.moe.gpus import Gpus, visible_gpus

NO_LIBRARY = "libibverbs.so.1 is not there: apt-get install libibverbs1 ibverbs-providers"
UNPRIVILEGED = "CapEff:\t0000000000000000\n"
PRIVILEGED = "CapEff:\t000001ffffffffff\n"

run = partial(invoke, app)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """The kernel's files of a machine without devices; tests add devices."""
    found = Roots(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")
    (found.proc / "self").mkdir(parents=True)
    (found.proc / "self/status").write_text(UNPRIVILEGED)
    found.dev.mkdir()
    return found


@pytest.fixture
def usual_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))


def set_lanes(monkeypatch: pytest.MonkeyPatch, lanes: Iterable[tuple[str, bool, str]]) -> None:
    monkeypatch.setattr("kv_connector.engine.transfer_engine.providers", lambda: list(lanes))


def nic_words(roots: Roots, machine: machines.FakeSys) -> dict[str, tuple[Verdict, str]]:
    return {f.subject: (f.verdict, f.words) for f in doctor.nics(roots, machine.machine())}


# --- The whole command


def test_on_this_machine_it_lists_the_lanes_and_is_content() -> None:
    status, output = run("doctor", "--control-port", "5699")
    assert status == 0, output
    for subject in ("lane host", "lane tcp", "experts", "port 5699", "memlock", "NICs", "transfer"):
        assert subject in output


def test_a_machine_with_nothing(roots: Roots, monkeypatch: pytest.MonkeyPatch, usual_limit: None) -> None:
    machines.laptop(roots.sys)
    monkeypatch.setattr(doctor, "ROOTS", roots)
    set_lanes(
        monkeypatch, [("verbs", False, NO_LIBRARY), ("host", True, ""), ("tcp", True, ""), ("sim", True, "")]
    )
    status, output = run("doctor")
    assert status == 0, output
    assert NO_LIBRARY in output
    assert "no RDMA device: transfers to other machines use tcp" in output
    assert "no GPU on the PCI bus" in output
    assert "8192 KiB; only RDMA needs it" in output


def test_a_machine_with_libfabric_only(
    roots: Roots, monkeypatch: pytest.MonkeyPatch, usual_limit: None
) -> None:
    machines.laptop(roots.sys)
    monkeypatch.setattr(doctor, "ROOTS", roots)
    lanes = [("verbs", False, NO_LIBRARY), ("libfabric", True, ""), ("tcp", False, "no network stack")]
    set_lanes(monkeypatch, lanes)
    assert run("doctor")[0] == 0
    status, output = run("doctor", "--require", "libfabric", "--require", "verbs")
    assert status == 1
    assert "lane libfabric" in output
    assert NO_LIBRARY in output


def test_a_machine_with_software_nics(
    roots: Roots, monkeypatch: pytest.MonkeyPatch, usual_limit: None
) -> None:
    machines.soft_roce(roots.sys)
    (roots.dev / "infiniband").mkdir()
    for i in range(3):
        (roots.dev / f"infiniband/uverbs{i}").touch()
    monkeypatch.setattr(doctor, "ROOTS", roots)
    set_lanes(monkeypatch, [("verbs", True, ""), ("tcp", True, "")])
    status, output = run("doctor")
    assert status == 0, output
    assert "2.5 Gb/s, software, for verbs" in output
    assert "iWARP has no writes with immediates" in output
    assert "ulimit -l unlimited" in output
    assert run("doctor", "--require", "tcp")[0] == 0
    assert run("doctor", "--require", "verbs")[0] == 1, "a KV cache cannot be locked in memory"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run("doctor", "--require", "verbs")[0] == 0


def test_it_is_not_content_where_only_the_toy_works(monkeypatch: pytest.MonkeyPatch) -> None:
    set_lanes(monkeypatch, [("tcp", False, "no network stack"), ("sim", True, "")])
    status, output = run("doctor")
    assert status == 1
    assert "no network stack" in output
    assert "no engine can start here" in output


def test_doctor_lists_no_lane_of_tests_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    set_lanes(monkeypatch, [("tcp", True, ""), ("sim", True, ""), ("shuffle", True, "")])
    assert [found.subject for found in doctor.lanes(())] == ["lane tcp"]
    assert [found.subject for found in doctor.lanes(("sim",))] == ["lane tcp", "lane sim"]
    assert "Choose one of tcp" in [*doctor.lanes(("pigeon",))][-1].words


def test_a_required_lane_that_is_unknown_fails_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    set_lanes(monkeypatch, [("tcp", True, "")])
    status, output = run("doctor", "--require", "pigeon")
    assert status == 1
    assert "no such lane. Choose one of tcp" in output


@pytest.mark.parametrize("reason", ["this build holds no GPU kernels", "no CUDA driver: it is missing"])
def test_bounce_without_gpu_kernels_or_driver_is_not_usable_for_gpus(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    set_lanes(monkeypatch, [("nvlink", False, reason), ("tcp", True, ""), ("bounce", True, "")])
    finding = {found.subject: found for found in doctor.lanes(())}["lane bounce"]
    assert finding.verdict is Verdict.NOTE
    assert "usable for host memory only" in finding.words
    assert reason in finding.words
    assert [found.verdict for found in doctor.lanes(("bounce",)) if found.subject == "lane bounce"] == [
        Verdict.FAIL
    ]


def test_bounce_with_gpu_kernels_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_lanes(monkeypatch, [("nvlink", True, ""), ("bounce", True, "")])
    assert {found.verdict for found in doctor.lanes(("bounce",))} == {Verdict.OK}


# --- Experts


class FakeDriver:
    """A CUDA driver with these GPUs."""

    def __init__(self, gpus: Gpus, init: int = 0) -> None:
        self._gpus, self._init = gpus, init

    def cuInit(self, _: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._gpus.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceCanAccessPeer(self, can: Any, one: int, two: int) -> int:
        can._obj.value = int((one - 100, two - 100) not in self._gpus.apart)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert attribute == 103
        value._obj.value = int(device - 100 not in self._gpus.sealed)
        return 0


@pytest.mark.parametrize(
    ("gpus", "verdict", "words"),
    [
        (None, Verdict.OK, "no GPU is usable"),
        (Gpus(0, (), ()), Verdict.OK, "no GPU is usable"),
        (Gpus(1, (), ()), Verdict.OK, "1 GPU is usable. KV_CONNECTOR_MOE=1 needs 2 or more"),
        (Gpus(4, (), ()), Verdict.OK, "4 GPUs reach each other's memory"),
        (Gpus(2, ((0, 1),), ()), Verdict.NOTE, "no peer access from GPU 0 to 1 (nvidia-smi topo -p2p r):"),
        (
            Gpus(3, tuple((a, b) for a in range(3) for b in range(3) if a != b), (2,)),
            Verdict.NOTE,
            "GPU 0 to 1, 0 to 2, 1 to 0, 1 to 2 and 2 more (nvidia-smi topo -p2p r); "
            "the driver exports no memory of GPU 2 as a descriptor: KV_CONNECTOR_MOE=1 has no effect",
        ),
    ],
)
def test_experts_name_the_gpus_that_cannot_exchange_rows(
    gpus: Gpus | None, verdict: Verdict, words: str
) -> None:
    found = doctor.experts(None if gpus is None else visible_gpus(FakeDriver(gpus)))
    assert (found.subject, found.verdict) == ("experts", verdict)
    assert words in found.words


def test_a_driver_that_does_not_start_is_no_gpu() -> None:
    assert visible_gpus(FakeDriver(Gpus(2, (), ()), init=100)) is None


# --- Parts of the command


@pytest.mark.parametrize(
    ("scope", "capabilities", "verdict"),
    [
        ("0", UNPRIVILEGED, Verdict.OK),
        ("1", UNPRIVILEGED, Verdict.OK),
        ("2", UNPRIVILEGED, Verdict.NOTE),
        ("2", PRIVILEGED, Verdict.OK),
        ("3", PRIVILEGED, Verdict.NOTE),
    ],
)
def test_yamas_scope(roots: Roots, scope: str, capabilities: str, verdict: Verdict) -> None:
    assert doctor.ptrace(roots).verdict is Verdict.OK  # no Yama
    (roots.proc / "self/status").write_text(capabilities)
    file = roots.proc / "sys/kernel/yama/ptrace_scope"
    file.parent.mkdir(parents=True)
    file.write_text(scope)
    assert doctor.ptrace(roots).verdict is verdict


def test_an_unsupported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.31.0")
    assert doctor.vllm().verdict is Verdict.FAIL
    for version in ("0.32.1", "0.33.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert doctor.vllm().verdict is Verdict.OK


@pytest.mark.parametrize(("version", "verdict"), [("0.5.23", Verdict.OK), ("0.5.22", Verdict.FAIL)])
def test_sglang_where_it_is(monkeypatch: pytest.MonkeyPatch, version: str, verdict: Verdict) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    (finding,) = doctor.sglang()
    assert finding.verdict is verdict


def test_sglang_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    assert not list(doctor.sglang())


def test_a_nics_device_file_is_missing_or_forbidden_or_fine(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys = machines.two_sockets_one_nic(roots.sys)
    verdict, words = nic_words(roots, sys)["NIC mlx5_0"]
    assert verdict is Verdict.NOTE
    assert "docker run --device=/dev/infiniband" in words
    (roots.dev / "infiniband").mkdir()
    (roots.dev / "infiniband/uverbs0").touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may open anything
    assert "cannot be opened" in nic_words(roots, sys)["NIC mlx5_0"][1]
    monkeypatch.setattr("os.access", lambda *_: True)
    assert nic_words(roots, sys)["NIC mlx5_0"] == (Verdict.OK, "100 Gb/s, mlx5_core, for verbs")


@pytest.mark.parametrize(
    ("nic", "words"),
    [
        ({"state": "1: DOWN"}, "port 1 is DOWN: check the cable"),
        (
            {
                "link_layer": "Ethernet",
                "gids": [("fe80:0000:0000:0000:0ac0:ebff:fe12:3456", "RoCE v2", "eth0")],
            },
            "no RoCE v2 address",
        ),
        (
            {
                "link_layer": "Ethernet",
                "gids": [("0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "eth0")],
            },
            "no RoCE v2 address",
        ),
        # An old kernel does not report types, which is not the device's fault.
        (
            {"link_layer": "Ethernet", "gids": [("0000:0000:0000:0000:0000:ffff:0a00:0001", "", "")]},
            "uverbs0 does not exist",
        ),
        ({"link_layer": "InfiniBand"}, "uverbs0 does not exist"),
    ],
)
def test_reason_for_an_unusable_nic_is_reported(roots: Roots, nic: dict[str, str], words: str) -> None:
    sys = machines.FakeSys(roots.sys)
    sys.nic("mlx5_0", "pci0000:10", "0000:10:00.0", **nic)  # type: ignore[arg-type]
    assert words in nic_words(roots, sys)["NIC mlx5_0"][1]


@pytest.mark.parametrize(
    ("vendor", "device", "words"),
    [
        ("0x15b3", "0x1021", "modprobe mlx5_ib"),
        ("0x1d0f", "0xefa2", "modprobe efa"),
        ("0x8086", "0x1572", "no RDMA"),
    ],
)
def test_a_nic_without_its_module(roots: Roots, vendor: str, device: str, words: str) -> None:
    sys = machines.FakeSys(roots.sys)
    sys.pci(("pci0000:10", "0000:10:00.0"), 0, vendor, device, "0x020000")
    assert words in nic_words(roots, sys)["NICs"][1]


@pytest.mark.parametrize(
    ("driver", "module", "verdict", "words"),
    [
        ("", "", Verdict.NOTE, "no NVIDIA driver is loaded"),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2",
            "",
            Verdict.NOTE,
            "modprobe nvidia-peermem",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2",
            "nvidia_peermem",
            Verdict.OK,
            "by nvidia-peermem",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1.2", "", Verdict.OK, "by DMA-BUF"),
    ],
)
def test_how_nics_reach_gpu_memory(
    roots: Roots, monkeypatch: pytest.MonkeyPatch, driver: str, module: str, verdict: Verdict, words: str
) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.8.0-1009-aws")
    machine = machines.dgx(roots.sys).machine()
    if driver:
        (roots.proc / "driver/nvidia").mkdir(parents=True)
        (roots.proc / "driver/nvidia/version").write_text(driver + "\n")
    if module:
        (roots.sys / "module" / module).mkdir(parents=True)
    found = list(doctor.gpus(roots, machine))
    assert found[-1].verdict is verdict
    if found[-1].subject == "GPUDirect RDMA":
        required = list(doctor.gpus(roots, machine, ("verbs",)))[-1].verdict
        assert required is (Verdict.OK if verdict is Verdict.OK else Verdict.FAIL)
    assert words in found[-1].words
    assert "8 x 10de:2335" in found[0].words


def test_doctor_names_a_lane_that_carries_pages_of_gpus_without_a_nic(roots: Roots) -> None:
    machine = msgspec.structs.replace(machines.dgx(roots.sys / "dgx").machine(), nics=())
    (found,) = doctor.nics(roots, machine)
    assert "other machines use bounce" in found.words


def test_an_old_kernel_has_no_dma_buf(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.10.0")
    (roots.proc / "driver/nvidia").mkdir(parents=True)
    (roots.proc / "driver/nvidia/version").write_text("Open Kernel Module 570.1.2\n")
    found = list(doctor.gpus(roots, machines.dgx(roots.sys).machine()))
    assert found[-1].verdict is Verdict.NOTE


def test_the_memlock_limit_matters_where_a_nic_is(roots: Roots, usual_limit: None) -> None:
    nothing = machines.laptop(roots.sys / "laptop").machine()
    nic = machines.two_sockets_one_nic(roots.sys / "nic").machine()
    assert doctor.memlock(roots, nothing).verdict is Verdict.OK
    assert doctor.memlock(roots, nic).verdict is Verdict.NOTE
    assert doctor.memlock(roots, nic, ("verbs",)).verdict is Verdict.FAIL
    assert doctor.memlock(roots, nic, ("libfabric",)).verdict is Verdict.NOTE, "the NIC is not of that lane"
    (roots.proc / "self/status").write_text(PRIVILEGED)
    assert doctor.memlock(roots, nic).verdict is Verdict.OK


# --- kv-connector topology


def test_the_topology_of_this_machine_as_tables_and_as_json() -> None:
    status, output = run("topology")
    assert status == 0, output
    for title in ("Placement", "NICs", "Cores"):
        assert title in output
    status, output = run("topology", "--json")
    assert status == 0, output
    found = json.loads(output)
    assert found["machine"]["numa_nodes"][0]["cores"]
    assert found["placements"]


def test_the_topology_of_a_dgx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machines.dgx(tmp_path).machine()
    monkeypatch.setattr(topology_command, "read_machine", lambda: machine)
    in_use = CoresInUse(frozenset(machine.siblings), frozenset({0, 1}))
    monkeypatch.setattr(topology_command, "cores_in_use", lambda: in_use)
    status, output = run("topology")
    assert status == 0, output
    assert "0000:13:00.0 10de:2335" in output
    assert "behind the same PCI bridge" in output
    assert "56-111,168-223" in output
    found = json.loads(run("topology", "--json")[1])
    assert [placement["nics"]["nics"] for placement in found["placements"]] == [
        [f"mlx5_{i}"] for i in range(8)
    ]
    firsts = [placement["core"]["cores"][0] for placement in found["placements"]]
    assert len(set(firsts)) == 8
    assert found["bound_cores"] == [0, 1]
