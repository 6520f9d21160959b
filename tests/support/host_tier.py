"""HostTierSpec: vLLM's CPU tier for engines whose KV cache is in CPU memory itself.

vLLM's own CPUOffloadingSpec refuses CPU engines, because its worker copies on CUDA streams. This spec
replaces that worker alone. Keys, lookups, eviction, store jobs and load jobs are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTier(OffloadingWorker):
    """Copies blocks to the tier's memory and back, within the call. A chunk of the tier is one block."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._blocks = [cache.tensor for cache in kv_caches.tensors]
        self._chunks = [torch.zeros((chunks, blocks.shape[1]), dtype=torch.int8) for blocks in self._blocks]
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        """The tensors of each KV cache group."""
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._pairs(src_spec, dst_spec):
            self._chunks[tensor][chunks] = self._blocks[tensor][blocks]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for tensor, blocks, chunks in self._pairs(dst_spec, src_spec):
            self._blocks[tensor][blocks] = self._chunks[tensor][chunks]
        return self._end(job_id)

    def _pairs(self, engine: Any, tier: Any) -> Any:
        """Yields each tensor with the blocks and the chunks of one group."""
        assert len(engine.block_ids) == len(tier.block_ids)
        begin = 0
        for tensors, size in zip(self._tensors, engine.group_sizes, strict=True):
            blocks, chunks = (
                torch.from_numpy(ids[begin : begin + size]).long()
                for ids in (engine.block_ids, tier.block_ids)
            )
            for tensor in tensors:
                yield tensor, blocks, chunks
            begin += size

    def _end(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: each job ends within its call."""


class HostTierSpec(CPUOffloadingSpec):
    """vLLM's CPU tier with HostTier as its worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return HostTier(kv_caches, self.num_chunks)
