"""The choice of NICs for a device and of a core for its transfer thread, on machines built in a directory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import machines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.engine import rank_placement
from kv_connector.engine.rank_placement import (
    CoreClaim,
    CoresInUse,
    Device,
    Nearness,
    RankPlacement,
    bound_by_environment,
    choose_core,
    choose_nics,
    choose_nics_without_device,
    cores_in_use,
    place,
)
from kv_connector.engine.topology import Gpu, Location, Machine, Nic, NumaNode, Port, parse_cores


def everything(machine: Machine) -> frozenset[int]:
    return frozenset(machine.siblings)


# --- NICs


def test_on_a_dgx_each_gpu_has_the_nic_of_its_switch(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path).machine()
    choices = choose_nics(machine, machine.gpus, "verbs")
    for i, gpu in enumerate(machine.gpus):
        assert choices[gpu.address].nics == (f"mlx5_{i}",)
        assert choices[gpu.address].nearness is Nearness.SWITCH
        assert not choices[gpu.address].shared


def test_on_a_p5_each_gpu_has_the_four_efas_of_its_switch(tmp_path: Path) -> None:
    machine = machines.p5(tmp_path).machine()
    choices = choose_nics(machine, machine.gpus, "libfabric")
    assert choices[machine.gpus[0].address].nics == tuple(f"rdmap{n}s0" for n in (69, 70, 71, 72))
    taken = [name for choice in choices.values() for name in choice.nics]
    assert len(taken) == len(set(taken)) == 32
    # verbs does not use EFA.
    assert {c.nics for c in choose_nics(machine, machine.gpus, "verbs").values()} == {()}


def test_one_nic_serves_both_gpus_the_near_one_and_the_far_one(tmp_path: Path) -> None:
    machine = machines.two_sockets_one_nic(tmp_path).machine()
    far, near = (choose_nics(machine, machine.gpus, "verbs")[gpu.address] for gpu in machine.gpus)
    assert far.nics == near.nics == ("mlx5_0",)
    assert (far.nearness, near.nearness) == (Nearness.MACHINE, Nearness.NODE)
    assert far.shared
    assert near.shared


def test_gpus_behind_one_switch_divide_its_nics(tmp_path: Path) -> None:
    sys = machines.FakeSys(tmp_path)
    switch = ("pci0000:10", "0000:10:01.0", "0000:11:00.0")
    for i in range(2):
        sys.gpu(*switch, f"0000:12:0{i}.0")
    for i in range(4):
        sys.nic(f"mlx5_{i}", *switch, f"0000:12:1{i}.0")
    machine = sys.machine()
    choices = [choose_nics(machine, machine.gpus, "verbs")[gpu.address].nics for gpu in machine.gpus]
    assert choices == [("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")]


def test_nics_that_are_down_or_for_management_are_not_chosen(tmp_path: Path) -> None:
    sys = machines.FakeSys(tmp_path)
    switch = ("pci0000:10", "0000:10:01.0", "0000:11:00.0")
    sys.gpu(*switch, "0000:12:00.0")
    sys.nic("mlx5_0", *switch, "0000:12:01.0", state="1: DOWN")
    sys.nic("mlx5_1", *switch, "0000:12:02.0", gbit="25 Gb/sec (1X EDR)")
    sys.nic("mlx5_2", "pci0000:20", "0000:20:01.0", numa_node=0)
    machine = sys.machine()
    assert choose_nics(machine, machine.gpus, "verbs")["0000:12:00.0"].nics == ("mlx5_2",)


def test_memory_without_a_device_takes_the_nics_of_its_node(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path / "dgx").machine()
    choice = choose_nics_without_device(machine, "verbs", numa_node=1)
    assert choice.nics == ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_9")
    assert choice.nearness is Nearness.NODE
    vm = machines.soft_roce(tmp_path / "vm").machine()
    assert choose_nics_without_device(vm, "verbs", numa_node=0).nics == ("rxe0", "rxe1")
    nothing = choose_nics_without_device(machines.laptop(tmp_path / "l").machine(), "verbs", numa_node=0)
    assert (nothing.nics, nothing.nearness) == ((), Nearness.NONE)


@given(
    gpus=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    nics=st.lists(st.integers(0, 2), max_size=12),
)
def test_nics_are_divided_evenly_whatever_the_machine(gpus: list[int], nics: list[int]) -> None:
    """GPUs and NICs are behind one of three switches."""

    def behind(switch: int, leaf: str) -> Location:
        return Location((f"pci0000:{switch:02x}", f"0000:{switch:02x}:01.0", leaf), numa_node=0)

    machine = Machine(
        gpus=tuple(Gpu(f"g{i}", "10de:1", behind(switch, f"g{i}")) for i, switch in enumerate(gpus)),
        nics=tuple(
            Nic(
                f"n{i}",
                "mlx5_core",
                "rc",
                behind(switch, f"n{i}"),
                (Port(1, "ACTIVE", "InfiniBand", 400.0),),
                None,
            )
            for i, switch in enumerate(nics)
        ),
        numa_nodes=(NumaNode(0, (0,)),),
        siblings={0: (0,)},
    )
    choices = choose_nics(machine, machine.gpus, "verbs")
    users = Counter(name for choice in choices.values() for name in choice.nics)
    for i, switch in enumerate(gpus):
        choice = choices[f"g{i}"]
        assert bool(choice.nics) == bool(nics)
        own = {f"n{k}" for k, where in enumerate(nics) if where == switch}
        # A GPU gets NICs behind its switch if there are any, and as many as its neighbours there.
        assert not own or set(choice.nics) <= own
        assert choice.nearness is (Nearness.SWITCH if own else Nearness.NODE if nics else Nearness.NONE)
        for k, where in enumerate(gpus):
            assert where != switch or abs(len(choices[f"g{k}"].nics) - len(choice.nics)) <= 1
        assert choice.shared == any(users[name] > 1 for name in choice.nics)


# --- Cores


def test_each_gpu_of_a_node_begins_at_its_own_core(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path).machine()
    in_use = CoresInUse(everything(machine), frozenset())
    firsts = [
        choose_core(machine, in_use, numa_node=1, engine_threads=1, turn=(i, 4)).cores[0] for i in range(4)
    ]
    assert len(set(firsts)) == 4
    assert set(firsts) <= set(machine.cores_of(1))


def test_a_core_of_the_engine_and_its_sibling_are_left_alone(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path).machine()
    in_use = CoresInUse(everything(machine), frozenset(range(40)))
    cores = choose_core(machine, in_use, numa_node=0, engine_threads=0).cores
    assert set(cores) == set(range(40, 56))  # one for each physical core, and none of 112..151
    siblings = CoresInUse(everything(machine), frozenset(range(112, 152)))
    assert set(choose_core(machine, siblings, numa_node=0, engine_threads=0).cores) == set(range(40, 56))


def test_only_cores_that_this_process_may_use_are_chosen(tmp_path: Path) -> None:
    machine = machines.dgx(tmp_path).machine()
    allowed = frozenset({3, 4, 5, 6, 7, 116})
    choice = choose_core(machine, CoresInUse(allowed, frozenset()), numa_node=0, engine_threads=0)
    assert set(choice.cores) == {3, 4, 5, 6, 7}
    elsewhere = choose_core(machine, CoresInUse(allowed, frozenset()), numa_node=1, engine_threads=0)
    assert elsewhere.cores == ()
    assert "0 cores of NUMA node 1" in elsewhere.reason


def test_nothing_is_pinned_when_the_engine_may_need_every_core(tmp_path: Path) -> None:
    machine = machines.laptop(tmp_path).machine()
    in_use = CoresInUse(everything(machine), frozenset())
    full = choose_core(machine, in_use, numa_node=0, engine_threads=8)
    assert full.cores == ()
    assert "8 cores of NUMA node 0 are free" in full.reason
    assert "may need 11" in full.reason
    assert choose_core(machine, in_use, numa_node=0, engine_threads=1).cores[0] == 7


def test_numa_node_follows_the_engines_cores_without_a_device(tmp_path: Path) -> None:
    machine = machines.two_sockets_one_nic(tmp_path).machine()
    bound = CoresInUse(everything(machine), frozenset(range(16, 26)))
    assert set(choose_core(machine, bound, numa_node=None, engine_threads=0).cores) == set(range(26, 32))
    unknown = choose_core(
        machine, CoresInUse(everything(machine), frozenset()), numa_node=None, engine_threads=0
    )
    assert unknown.cores == ()
    assert "NUMA node" in unknown.reason


def test_only_numa_node_is_assumed_when_the_firmware_names_none(tmp_path: Path) -> None:
    machine = machines.virtual(tmp_path).machine()
    assert [gpu.location.numa_node for gpu in machine.gpus] == [None, None]
    assert {choice.nearness for choice in choose_nics(machine, machine.gpus, "verbs").values()} == {
        Nearness.NONE
    }
    in_use = CoresInUse(everything(machine), frozenset())
    first, second = (
        choose_core(machine, in_use, numa_node=None, engine_threads=1, turn=(i, 2)).cores[0] for i in range(2)
    )
    assert (first, second) == (31, 15)


def test_a_binding_that_cannot_be_read_means_no_pinning(tmp_path: Path) -> None:
    machine = machines.laptop(tmp_path).machine()
    choice = choose_core(machine, CoresInUse(everything(machine), None), numa_node=0, engine_threads=0)
    assert choice.cores == ()
    assert "cannot be read" in choice.reason


@pytest.fixture
def two_sockets(tmp_path: Path) -> Machine:
    return machines.dgx(tmp_path).machine()


# All examples may use one machine: nothing changes it.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    allowed=st.frozensets(st.integers(0, 223)),
    bound=st.frozensets(st.integers(0, 223)),
    threads=st.integers(0, 60),
    node=st.sampled_from([0, 1, None]),
    turn=st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
)
def test_a_chosen_core_is_always_allowed_spare_and_near(
    two_sockets: Machine,
    allowed: frozenset[int],
    bound: frozenset[int],
    threads: int,
    node: int | None,
    turn: tuple[int, int],
) -> None:
    choice = choose_core(
        two_sockets, CoresInUse(allowed, bound), numa_node=node, engine_threads=threads, turn=turn
    )
    assert len(set(choice.cores)) == len(choice.cores)
    for core in choice.cores:
        assert core in allowed
        assert not bound.intersection(two_sockets.siblings[core])
        assert node is None or core in two_sockets.cores_of(node)
    assert not choice.cores or len(choice.cores) > threads


# --- Cores in use


@pytest.mark.parametrize(
    ("environment", "cores"),
    [
        ({}, ""),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, ""),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, ""),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3,8|4-7"}, "0-8"),
        ({"GOMP_CPU_AFFINITY": "0 2-4 8-14:2"}, "0,2-4,8,10,12,14"),
        ({"OMP_PLACES": "{0,1,2}"}, "0-2"),
        ({"OMP_PLACES": "{0},{4:3},{8:2:4}"}, "0,4-6,8,12"),
        ({"OMP_PLACES": "cores(4)"}, ""),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,4-6]"}, "0,4-6"),
        ({"KMP_AFFINITY": "compact"}, ""),
    ],
)
def test_bindings_are_read_from_the_environment(environment: dict[str, str], cores: str) -> None:
    assert bound_by_environment(environment) == parse_cores(cores)


@pytest.mark.parametrize("name", ["VLLM_CPU_OMP_THREADS_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES"])
def test_a_binding_in_unknown_words_is_not_taken_for_none(name: str) -> None:
    assert bound_by_environment({name: "the fast ones"}) is None


def test_threads_bound_to_some_of_our_cores_are_seen(tmp_path: Path) -> None:
    def thread(process: str, task: int, cores: str, *, kernel: bool = False) -> None:
        directory = tmp_path / process / "task" / str(task)
        directory.mkdir(parents=True)
        memory = "" if kernel else "VmSize:\t 100 kB\n"
        (directory / "status").write_text(f"Name:\tx\n{memory}Threads:\t2\nCpus_allowed_list:\t{cores}\n")

    thread("self", 1, "0")  # the main thread, bound by OpenMP
    thread("self", 2, "0-7")
    thread("1", 1, "0")
    thread("1", 2, "0-7")
    thread("7", 7, "0-15")  # may run anywhere, so it is not bound
    thread("8", 8, "4-5")
    thread("9", 9, "2", kernel=True)
    thread("10", 10, "9")  # on cores that this process may not use
    found = cores_in_use({"GOMP_CPU_AFFINITY": "1"}, proc=tmp_path)
    assert found.allowed == frozenset(range(8))
    assert found.bound == frozenset({0, 1, 4, 5})


def test_this_process_is_seen() -> None:
    assert cores_in_use().allowed


def test_a_claimed_core_is_not_given_twice() -> None:
    # Far beyond any real core, so that no other process claims them.
    first = CoreClaim.first_free([100_001, 100_002])
    second = CoreClaim.first_free([100_001, 100_002])
    assert first is not None
    assert second is not None
    assert (first.core, second.core) == (100_001, 100_002)
    assert CoreClaim.first_free([100_001, 100_002]) is None
    first.release()
    again = CoreClaim.first_free([100_001, 100_002])
    assert again is not None
    assert again.core == 100_001
    again.release()
    second.release()


# --- One worker


def placed(
    device: Device,
    *,
    providers: tuple[str, ...] = ("host", "tcp"),
    nics: tuple[str, ...] = (),
    worker_cpu: int | Literal["auto", "none"] = "auto",
) -> RankPlacement:
    return place(device, providers=providers, nics=nics, worker_cpu=worker_cpu, compute_threads=8)


@pytest.fixture
def dgx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process runs on a DGX, and CUDA numbers its GPUs in reverse order."""
    machine = machines.dgx(tmp_path).machine()
    monkeypatch.setattr(rank_placement, "read_machine", lambda: machine)
    in_use = CoresInUse(frozenset(machine.siblings), frozenset())
    monkeypatch.setattr(rank_placement, "cores_in_use", lambda: in_use)
    monkeypatch.setattr(rank_placement, "cuda_gpu_address", lambda ordinal: machine.gpus[7 - ordinal].address)
    return machine


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machines.laptop(tmp_path).machine()
    monkeypatch.setattr(rank_placement, "read_machine", lambda: machine)
    monkeypatch.setattr(rank_placement, "cores_in_use", lambda: CoresInUse(frozenset(range(8)), frozenset()))
    for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)


def test_a_gpu_worker_gets_the_nic_beside_its_gpu_and_a_core_of_its_node(dgx: Machine) -> None:
    worker = placed(Device("cuda", 2), providers=("verbs", "host", "tcp"))
    worker.release()
    assert worker.nics == {"verbs": ("mlx5_5",)}
    assert worker.worker_cpu in dgx.cores_of(1)


def test_efa_is_named_as_libfabric_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machines.p5(tmp_path).machine()
    monkeypatch.setattr(rank_placement, "read_machine", lambda: machine)
    monkeypatch.setattr(rank_placement, "cuda_gpu_address", lambda _: machine.gpus[7].address)
    worker = placed(Device("cuda", 7), providers=("libfabric",), worker_cpu="none")
    assert worker.nics["libfabric"] == tuple(f"efa:rdmap{n}s0-rdm" for n in (181, 182, 183, 184))


def test_workers_of_one_machine_do_not_share_a_core(dgx: Machine) -> None:
    workers = [placed(Device("cuda", 1)) for _ in range(4)]
    cores = [worker.worker_cpu for worker in workers]
    for worker in workers:
        worker.release()
    assert len(set(cores)) == 4
    again = placed(Device("cuda", 1))
    again.release()
    assert again.worker_cpu == cores[0]


def test_the_operators_words_come_first(dgx: Machine) -> None:
    worker = placed(Device("cuda"), providers=("verbs", "tcp"), nics=("mlx5_9", "mlx5_1"), worker_cpu=5)
    assert (worker.nics, worker.worker_cpu) == ({"verbs": ("mlx5_9", "mlx5_1")}, 5)
    assert placed(Device("cuda"), worker_cpu="none").worker_cpu is None


def test_a_process_whose_threads_want_every_core_is_not_pinned(
    laptop: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert placed(Device("cpu")).worker_cpu is None
    assert "not pinned: 8 cores of NUMA node 0 are free" in caplog.text


def test_threads_that_openmp_binds_want_no_other_core(laptop: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")
    worker = placed(Device("cpu"))
    worker.release()
    assert worker.worker_cpu is not None
