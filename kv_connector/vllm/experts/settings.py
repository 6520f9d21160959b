"""Facts of an engine that decide whether its ranks exchange rows over kv-connector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kv_connector.moe.settings import MAX_RANKS
from kv_connector.vllm.internals import current_platform
from kv_connector.vllm.model.configuration import configured_connectors

MOST_TOKENS = 8192
"""Tokens of one rank in a step: the default of vLLM's server on large GPUs (--max-num-batched-tokens)."""
DECODE_TOKENS = 1024
"""Tokens of one rank in a step that a segment always has room for. More are a prefill."""
MEMORY_PART = 64
"""A segment for more than DECODE_TOKENS takes at most this fraction of a GPU's memory, 1.25 GiB of 80 GiB.
vLLM does not count the memory in ``--gpu-memory-utilization``, which leaves a tenth by default."""


@dataclass(frozen=True)
class ExchangeSettings:
    """Facts of this engine, from its configuration."""

    rank: int
    ranks: int
    """Number of ranks that exchange rows."""
    hidden: int
    experts: int
    """Physical experts. 0: the model's configuration does not name the number."""
    top_k: int
    """Experts of a token. 0: the model's configuration does not name the number."""
    max_tokens: int
    """Most tokens of one rank in a step, if the memory of a segment were free."""
    sequence_parallel: bool
    """Each rank of the tensor parallel group has its own tokens."""
    divides_experts: bool
    """Whether each rank has its own whole experts (expert parallelism)."""
    device: int | None
    """CUDA ordinal. None: host memory."""
    memory: int = 0
    """Bytes of the GPU's memory. 0: host memory."""
    problem: str = ""
    """The reason why vLLM keeps its exchange, or ""."""

    def tokens_for(self, token_bytes: int) -> int:
        """Returns the most tokens of one rank in a step.

        ``token_bytes``: bytes of one token of one rank in the segment of each rank.
        """
        room = self.memory // MEMORY_PART // (self.ranks * token_bytes)
        return min(self.max_tokens, max(DECODE_TOKENS, room))


def settings_of(vllm_config: Any, manager: Any) -> ExchangeSettings:
    """Returns the facts for a manager of vLLM. Raises nothing: an obstacle is the field ``problem``."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    sequence_parallel = bool(parallel.use_sequence_parallel_moe)
    rank, ranks = manager.dp_rank, manager.dp_world_size
    if sequence_parallel:
        rank, ranks = manager.rank, manager.world_size
    experts = int(model.get_num_experts())
    if experts and parallel.enable_eplb:
        experts += int(parallel.eplb_config.num_redundant_experts)
    device = torch.cuda.current_device() if current_platform.is_cuda() else None
    return ExchangeSettings(
        rank=int(rank),
        ranks=int(ranks),
        hidden=int(model.get_hidden_size()),
        experts=experts,
        top_k=int(model.get_num_experts_per_tok()),
        max_tokens=min(MOST_TOKENS, int(vllm_config.scheduler_config.max_num_batched_tokens)),
        sequence_parallel=sequence_parallel,
        # Without sequence parallelism and with several tensor parallel ranks, the ranks that exchange rows
        # own only a part of the experts. The rows then go to all of them.
        divides_experts=bool(parallel.enable_expert_parallel) and ranks == manager.world_size,
        device=device,
        memory=0 if device is None else torch.cuda.get_device_properties(device).total_memory,
        problem=_configured_problem(vllm_config, manager, ranks),
    )


def _configured_problem(vllm_config: Any, manager: Any, ranks: int) -> str:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if manager.internode:
        return "the ranks are on several nodes"
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks exchange rows instead of 2 to {MAX_RANKS}"
    if ranks != manager.world_size:
        # vLLM reads the answers of tensor parallel rank 0, which would not know of another rank's void step.
        return "tensor parallel ranks exchange rows apart, as sequence parallelism is off"
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return "the platform is neither CUDA nor a CPU"
    if manager.tcp_store_group is not None or parallel.enable_elastic_ep:
        return "elastic expert parallelism is on (--enable-elastic-ep)"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism is on"
    if parallel.pipeline_parallel_size > 1:
        # A stage that is not the last passes its results on before the error of a void step. The later stages
        # have other groups, without a fault, and vLLM drops the errors of the earlier stages.
        return "pipeline parallelism is on"
    if parallel.use_ubatching:
        return "dual batch overlap is on (--enable-dbo)"
    if model.dtype != torch.bfloat16:
        return f"the model computes in {str(model.dtype).removeprefix('torch.')} instead of bfloat16"
    for name, role in configured_connectors(vllm_config):
        # A step with a lost rank is void, and its error follows after the step. By then a connector that
        # stores pages layer by layer would have passed on wrong pages.
        if name != "MultiConnector" and (name, role) != ("WriteImmConnector", "kv_consumer"):
            return f"the KV connector {name} ({role}) may store pages of a void step"
    return ""
