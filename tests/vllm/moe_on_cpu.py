"""Gathers and scatters a number of tokens that differs by rank: data-parallel experts need it, and vLLM's
CPU communicator cannot.

A worker extension (--worker-extension-cls moe_on_cpu.Worker): its import adds them over gloo in each worker.
"""

import torch
import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class Worker:
    """Nothing to call."""


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
