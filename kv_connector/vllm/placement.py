"""Where a vLLM worker's transfers run: the NICs of its GPU, and a core beside the engine's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connector.agent.settings import Settings
from kv_connector.engine.placement import (
    NIC_PROVIDERS,
    CoreChoice,
    CoreClaim,
    choose_core,
    choose_nics,
    choose_nics_without_device,
    cores_in_use,
    device_name,
)
from kv_connector.engine.topology import Machine, cuda_gpu_address, read_machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerPlacement:
    """release() it when the worker has ended."""

    nics: Mapping[str, tuple[str, ...]]
    """By provider, as DomainConfig.device names them; a provider without any makes its own choice."""
    claim: CoreClaim | None
    """The core to pin the transfer worker to."""
    worker_cpu: int | None

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()


def place_worker(settings: Settings, rank: int, kv_cache: Any) -> WorkerPlacement:
    """For one rank of an engine; ``kv_cache`` is a tensor of its KV cache. Logs what was chosen, and why."""
    machine = read_machine()
    gpu = cuda_gpu_address(kv_cache.device.index or 0) if kv_cache.device.type == "cuda" else None
    nics = {
        provider: settings.nics_of(rank) or _nics(machine, gpu, provider)
        for provider in settings.providers
        if provider in NIC_PROVIDERS
    }
    for provider, names in nics.items():
        logger.info(
            "%s takes NICs %s for %s", provider, ", ".join(names) or "none", gpu or "memory of this node"
        )
    if settings.worker_cpu != "auto":
        return WorkerPlacement(nics, None, settings.worker_cpu_of(rank))
    choice = _core(machine, gpu, _compute_threads(kv_cache.device.type))
    claim = CoreClaim.first_free(choice.cores)
    if claim is None:
        reason = (
            "not pinned: other engines' workers are on every free core" if choice.cores else choice.reason
        )
        logger.info("transfer worker: %s", reason)
        return WorkerPlacement(nics, None, None)
    logger.info("transfer worker: pinned to core %d, %s", claim.core, choice.reason)
    return WorkerPlacement(nics, claim, claim.core)


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


def _compute_threads(device_type: str) -> int:
    """Threads of this rank that compute all the time and are bound to no core."""
    if device_type != "cpu":
        return 1  # the one that launches kernels
    # What binds them is also where cores_in_use() reads which cores they have.
    if os.environ.get("OMP_PLACES") or os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("KMP_AFFINITY"):
        return 0
    import torch

    return int(torch.get_num_threads())
