"""Data-parallel experts on CPUs. vLLM for CPUs lacks parts of this.

A worker extension (--worker-extension-cls moe_on_cpu.Worker). Its import adds these parts in each worker:

- collectives over gloo for a number of tokens that differs by rank,
- calls of the manager that return a sum in place, as in vLLM's communicator for CUDA,
- experts that skip experts of other ranks, which vLLM's kernel for CPUs would index out of bounds.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from prometheus_client import REGISTRY
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class Worker:
    """Queries to the ranks over collective_rpc. vLLM returns the answer of one rank only."""

    def write_exchange_counts(self, directory: str) -> None:
        """Writes this rank's counts and process id into a file per rank."""
        rank = get_ep_group().rank_in_group
        manager = get_ep_group().device_communicator.all2all_manager
        counts = {
            sample.labels.get("reason", "taken"): int(sample.value)
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name in ("kv_connector_moe_taken_total", "kv_connector_moe_passed_total")
        }
        counted = {"pid": os.getpid(), "manager": type(manager).__name__, "counts": counts}
        path = Path(directory) / f"rank-{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(counted))
        path.with_suffix(".new").rename(path)


def all_gatherv(
    self: CpuCommunicator,
    given: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    assert dim == 0
    assert sizes is not None
    if isinstance(given, list):
        return [all_gatherv(self, one, dim, sizes) for one in given]
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([one[:size] for one, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(
    self: CpuCommunicator, given: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    assert dim == 0
    assert sizes is not None
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group]


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv


def allocate_combine_input(self: CpuCommunicator, *given: Any, **named: Any) -> torch.Tensor | None:
    return self.all2all_manager.allocate_combine_input(*given, **named)


def combine_into_output(self: CpuCommunicator, *given: Any, **named: Any) -> torch.Tensor:
    return self.all2all_manager.combine_into_output(*given, **named)


def get_symmetric_memory_buffer(self: CpuCommunicator, *_: Any) -> None:
    return None


def reduce_scatterv_into_output(
    self: CpuCommunicator,
    given: torch.Tensor,
    output: torch.Tensor,
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    return output.copy_(reduce_scatterv(self, given, dim, sizes))


CpuCommunicator.allocate_combine_input = allocate_combine_input
CpuCommunicator.combine_into_output = combine_into_output
CpuCommunicator.get_symmetric_memory_buffer = get_symmetric_memory_buffer
CpuCommunicator.reduce_scatterv_into_output = reduce_scatterv_into_output

apply = CPUUnquantizedExperts.apply


@functools.wraps(apply)
def apply_own(self: CPUUnquantizedExperts, **named: Any) -> None:
    """Applies the experts of this rank. Others get weight 0, and expert 0 of this rank computes in their
    place."""
    if (places := named.get("expert_map")) is not None:
        local = places[named["topk_ids"].long()]
        named["topk_weights"] = torch.where(local < 0, 0.0, named["topk_weights"])
        named["topk_ids"] = local.clamp(min=0).to(named["topk_ids"].dtype)
    apply(self, **named)


CPUUnquantizedExperts.apply = apply_own
