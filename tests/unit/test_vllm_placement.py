"""What a vLLM worker makes of the machine it is on and of the operator's words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machines
import pytest

from kv_connector.agent.settings import Settings
from kv_connector.engine.placement import CoresInUse
from kv_connector.engine.topology import Machine
from kv_connector.vllm import placement
from kv_connector.vllm.placement import place_worker


def kv_cache(device: str = "cpu", index: int | None = None) -> Any:
    return SimpleNamespace(device=SimpleNamespace(type=device, index=index))


@pytest.fixture
def dgx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process runs on a DGX, and CUDA counts its GPUs from behind."""
    machine = machines.dgx(tmp_path).machine()
    monkeypatch.setattr(placement, "read_machine", lambda: machine)
    in_use = CoresInUse(frozenset(machine.siblings), frozenset())
    monkeypatch.setattr(placement, "cores_in_use", lambda: in_use)
    monkeypatch.setattr(placement, "cuda_gpu_address", lambda ordinal: machine.gpus[7 - ordinal].address)
    return machine


def test_a_gpu_worker_gets_the_nic_beside_its_gpu_and_a_core_of_its_node(dgx: Machine) -> None:
    placed = place_worker(Settings(providers=("verbs", "host", "tcp")), 0, kv_cache("cuda", 2))
    try:
        assert placed.nics == {"verbs": ("mlx5_5",)}
        assert placed.worker_cpu in dgx.cores_of(1)
    finally:
        placed.release()


def test_efa_is_named_as_libfabric_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machines.p5(tmp_path).machine()
    monkeypatch.setattr(placement, "read_machine", lambda: machine)
    monkeypatch.setattr(placement, "cuda_gpu_address", lambda _: machine.gpus[7].address)
    placed = place_worker(Settings(providers=("libfabric",), worker_cpu="none"), 0, kv_cache("cuda", 7))
    assert placed.nics["libfabric"] == tuple(f"efa:rdmap{n}s0-rdm" for n in (181, 182, 183, 184))


def test_workers_of_one_machine_do_not_share_a_core(dgx: Machine) -> None:
    settings = Settings()
    placed = [place_worker(settings, rank, kv_cache("cuda", 1)) for rank in range(4)]
    cores = [worker.worker_cpu for worker in placed]
    for worker in placed:
        worker.release()
    assert len(set(cores)) == 4
    again = place_worker(settings, 0, kv_cache("cuda", 1))
    again.release()
    assert again.worker_cpu == cores[0]


def test_the_operators_words_come_first(dgx: Machine) -> None:
    settings = Settings(
        providers=("verbs", "tcp"), worker_cpu=(3, 5), nics=(("mlx5_8",), ("mlx5_9", "mlx5_1"))
    )
    placed = place_worker(settings, 1, kv_cache("cuda", 0))
    assert (placed.nics, placed.worker_cpu) == ({"verbs": ("mlx5_9", "mlx5_1")}, 5)
    assert place_worker(Settings(worker_cpu="none"), 0, kv_cache("cuda", 0)).worker_cpu is None


def test_an_engine_on_cpus_whose_threads_want_every_core_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = machines.laptop(tmp_path).machine()
    monkeypatch.setattr(placement, "read_machine", lambda: machine)
    monkeypatch.setattr(placement, "cores_in_use", lambda: CoresInUse(frozenset(range(8)), frozenset()))
    monkeypatch.setattr(placement, "_compute_threads", lambda _: 8)
    with caplog.at_level("INFO"):
        assert place_worker(Settings(), 0, kv_cache()).worker_cpu is None
    assert "not pinned: 8 cores of NUMA node 0 are free" in caplog.text
