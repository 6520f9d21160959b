"""The data read from sysfs, on machines built in a directory."""

from __future__ import annotations

from pathlib import Path

import machines
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.engine.topology import Machine, parse_cores, read_machine


def test_a_dgx(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path).machine()
    assert [gpu.address for gpu in machine.gpus] == [f"0000:{0x13 + 0x10 * i:02x}:00.0" for i in range(8)]
    assert {gpu.model for gpu in machine.gpus} == {"10de:2335"}
    assert [gpu.location.numa_node for gpu in machine.gpus] == [0] * 4 + [1] * 4
    assert [nic.name for nic in machine.nics] == [f"mlx5_{i}" for i in range(11)]  # 10 after 9, not after 1
    first = machine.nics[0]
    assert (first.driver, first.kind, first.device_file) == ("mlx5_core", "rc", "/dev/infiniband/uverbs0")
    assert (first.active, first.gbit_per_second) == (True, 400.0)
    assert first.ports[0].link_layer == "InfiniBand"
    assert machine.cores_of(1) == (*range(56, 112), *range(168, 224))
    assert machine.siblings[3] == (3, 115)
    # The pair behind one switch shares root, port and switch. It shares nothing with other pairs.
    gpu, pair, other = machine.gpus[2].location, machine.nics[2].location, machine.nics[3].location
    assert gpu.common_depth(pair) == 3
    assert gpu.common_depth(other) == 0


def test_efa_is_distinguished_from_reliable_connections_and_iwarp(tmp_path: Path) -> None:
    assert {nic.kind for nic in machines.p5(tmp_path / "p5").machine().nics} == {"efa"}
    kinds = {nic.name: nic.kind for nic in machines.soft_roce(tmp_path / "vm").machine().nics}
    assert kinds == {"rxe0": "rc", "rxe1": "rc", "siw0": "iwarp"}


def test_gids_carry_their_type_interface_and_ipv4(tmp_path: Path) -> None:
    (nic,) = machines.two_sockets_one_nic(tmp_path).machine().nics
    gids = nic.ports[0].gids
    assert [gid.index for gid in gids] == [0, 1, 2, 3]  # the empty entry is left out
    assert (gids[3].kind, gids[3].interface, str(gids[3].ipv4)) == ("RoCE v2", "ens1np0", "10.0.0.1")
    assert gids[0].ipv4 is None
    assert gids[0].link_local
    assert not gids[3].link_local


def test_software_nics_hang_nowhere(tmp_path: Path) -> None:
    nic = machines.soft_roce(tmp_path).machine().nics[0]
    assert (nic.driver, nic.location.path, nic.location.numa_node) == ("", (), None)
    assert nic.gbit_per_second == 2.5


def test_a_laptop_has_cores_and_nothing_else(tmp_path: Path) -> None:
    machine = machines.laptop(tmp_path).machine()
    assert (machine.gpus, machine.nics) == ((), ())
    assert [(node.number, node.cores) for node in machine.numa_nodes] == [(0, tuple(range(8)))]
    assert machine.siblings[7] == (7,)


def test_a_port_that_is_down_has_no_speed(tmp_path: Path) -> None:
    sys = machines.FakeSys(tmp_path)
    sys.nic("mlx5_0", "pci0000:10", "0000:10:00.0", state="1: DOWN")
    (nic,) = sys.machine().nics
    assert (nic.active, nic.gbit_per_second, nic.ports[0].gbit_per_second) == (False, 0.0, 400.0)


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.numa_nodes
    assert machine.siblings


def test_nothing_at_all_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "not there")
    assert machine.gpus == machine.nics == ()


def test_a_machine_survives_json(tmp_path: Path) -> None:
    machine = machines.two_sockets_one_nic(tmp_path).machine()
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


# Reading continues, whatever a driver writes into a file.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    garbage=st.binary(max_size=40),
    file=st.sampled_from(["state", "rate", "link_layer", "gids/0", "numa_node"]),
)
def test_garbage_in_a_file_is_left_out(tmp_path: Path, garbage: bytes, file: str) -> None:
    root = tmp_path / "sys"
    if not root.exists():
        machines.two_sockets_one_nic(root)
    device = root / "devices/pci0000:a0/0000:a0:01.0/0000:a1:00.0"
    target = device / file if file == "numa_node" else device / "infiniband/mlx5_0/ports/1" / file
    before = target.read_bytes()
    target.write_bytes(garbage)
    (nic,) = read_machine(root).nics
    target.write_bytes(before)
    assert nic.name == "mlx5_0"
    assert nic.gbit_per_second >= 0


@given(st.sets(st.integers(0, 300)))
def test_core_lists_are_read_as_the_kernel_writes_them(cores: set[int]) -> None:
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    assert parse_cores(text + "\n") == cores


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,x", "1--2"])
def test_malformed_core_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of cores"):
        parse_cores(text)
