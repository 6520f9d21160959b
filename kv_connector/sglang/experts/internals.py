"""SGLang's internals that the exchange of experts uses, and its facts."""

from __future__ import annotations

from typing import Any

import sglang
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens, get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat
from sglang.srt.layers.moe.token_dispatcher.flashinfer import FlashinferDispatcher, FlashinferDispatchOutput
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopKOutputChecker
from sglang.srt.layers.moe.utils import (
    FlashinferA2ADispatchType,
    get_flashinfer_a2a_dispatch_type,
    get_moe_a2a_backend,
)
from sglang.srt.runtime_context import get_disagg, get_exec, get_flags, get_parallel, get_spec
from sglang.srt.utils import is_cpu, is_cuda

from kv_connector.sglang.experts.layers import ExpertRank, SglangLayer, ranks_problem
from kv_connector.sglang.internals import check_release

__all__ = [
    "BaseDispatcher",
    "CombineInputFormat",
    "FlashinferDispatchOutput",
    "FlashinferDispatcher",
    "StandardDispatcher",
    "StandardTopKOutput",
    "TopKOutputChecker",
    "expert_layer",
    "expert_rank",
    "get_is_extend_in_batch",
    "process_group",
    "tokens_of_ranks",
]

check_release(sglang.__version__)


def expert_rank() -> ExpertRank:
    """Returns the place of this process. Raises nothing: an obstacle is the field ``problem``."""
    parallel = get_parallel()
    return ExpertRank(
        rank=int(parallel.tp_rank),
        ranks=int(parallel.tp_size),
        device=torch.cuda.current_device() if is_cuda() else None,
        problem=_configured_problem(),
    )


def _configured_problem() -> str:
    backend = get_moe_a2a_backend()
    if not backend.is_flashinfer():
        return f"--moe-a2a-backend is {backend.value}. Set flashinfer"
    parallel, flags = get_parallel(), get_flags().moe
    refused = {
        "the platform is neither CUDA nor a CPU": not (is_cuda() or is_cpu()),
        "the ranks are on several nodes (--nnodes)": parallel.nnodes > 1,
        "--attn-dp-size differs from --tp-size": parallel.attn_dp_size != parallel.tp_size,
        "--ep-size differs from --tp-size": parallel.moe_ep_size != parallel.tp_size,
        # A stage that is not the last passes its results on before the error of a void step.
        "pipeline parallelism is on (--pp-size)": parallel.pp_size > 1,
        "layer norm sequence parallelism is on (--enable-layernorm-sp)": parallel.enable_layernorm_sp,
        "distributed weight data parallelism is on (--dwdp-size)": parallel.dwdp_size > 1,
        "elastic expert parallelism is on (--elastic-ep-backend)": (
            get_exec().moe.elastic_ep_backend is not None
        ),
        # A draft's graphs are live beside the model's, and both would use one slot.
        "speculative decoding is on (--speculative-algorithm)": get_spec().speculative_algorithm is not None,
        "two-batch overlap is on (--enable-two-batch-overlap)": bool(flags.tbo_enabled),
        "single-batch overlap is on (--enable-single-batch-overlap)": bool(flags.sbo_enabled),
        # Ranks then do not know each other's tokens.
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER is set": bool(envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get()),
        # Prefill and decode would run on two streams at once.
        "--enable-pdmux is on": bool(get_disagg().enable_pdmux),
        "rows travel in another type than bf16 (--flashinfer-a2a-dispatch-type)": (
            get_flashinfer_a2a_dispatch_type() != FlashinferA2ADispatchType.BF16
        ),
    }
    return next((reason for reason, given in refused.items() if given), "") or ranks_problem(parallel.tp_size)


def expert_layer(config: Any, quant_method: Any) -> SglangLayer:
    """Returns the facts of a layer, from SGLang's configuration of its runner."""
    runner = config.runner_backend
    return SglangLayer(
        hidden=int(config.hidden_size or 0),
        experts=int(config.num_experts or 0),
        local=int(config.num_local_experts or 0),
        shared=int(config.num_fused_shared_experts or 0),
        top_k=int(config.top_k or 0),
        dtype=str(config.params_dtype).removeprefix("torch."),
        runner="" if runner is None else str(runner.value),
        method=type(quant_method).__name__,
    )


def process_group() -> Any:
    """Returns the group of processes in which SGLang's ranks agree, over gloo."""
    return get_parallel().tp_group.cpu_group


def tokens_of_ranks(ranks: int) -> list[int]:
    """Returns the tokens of each rank in this step, with padding. Raises RuntimeError where unknown."""
    tokens = get_dp_global_num_tokens()
    if tokens is None or len(tokens) != ranks:
        found = 0 if tokens is None else len(tokens)
        raise RuntimeError(
            f"experts: SGLang announces the tokens of {found} ranks instead of {ranks}. "
            "Unset KV_CONNECTOR_MOE for this server."
        )
    return [int(count) for count in tokens]
