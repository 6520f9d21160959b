"""The object that takes the place of SGLang's FlashinferDispatcher in a layer, and its creation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kv_connector.moe.group import exchange_over
from kv_connector.sglang.experts.exchange import LayerExchange, SglangExperts
from kv_connector.sglang.experts.internals import (
    BaseDispatcher,
    CombineInputFormat,
    FlashinferDispatcher,
    FlashinferDispatchOutput,
    StandardDispatcher,
    StandardTopKOutput,
    TopKOutputChecker,
    expert_layer,
    expert_rank,
    get_is_extend_in_batch,
    process_group,
    tokens_of_ranks,
)


class KvConnectorDispatcher(FlashinferDispatcher):  # type: ignore[misc]  # SGLang is not typed for mypy
    """Dispatch and combine of one layer.

    The base class has SGLang's all-gather for prefill and its reduce-scatter. Its own constructor is not
    called, because that maps FlashInfer's memory.
    """

    def __init__(self, config: Any, layer: LayerExchange) -> None:
        BaseDispatcher.__init__(self)
        self.runner_backend = config.runner_backend
        self.ep_rank, self.ep_size = layer.rank, layer.ranks
        self.num_local_experts = config.num_local_experts
        self.prefill_dispatcher = StandardDispatcher(config)
        self.layer = layer
        # Only these kernels write into memory that they are given.
        self._writes_results = config.runner_backend.is_flashinfer_cutlass()

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Returns what SGLang's dispatch returns: rows of all ranks, in the form flashinfer or standard."""
        prefill = bool(get_is_extend_in_batch())
        sizes = () if prefill else tokens_of_ranks(self.ep_size)
        if not self.layer.takes(sizes, prefill):
            return self._dispatch_prefill_allgather(hidden_states, topk_output)
        if hidden_states.dtype != torch.bfloat16:
            raise TypeError(
                f"experts: rows are {hidden_states.dtype} instead of bfloat16. Unset KV_CONNECTOR_MOE."
            )
        if TopKOutputChecker.format_is_bypassed(topk_output):
            topk_output = topk_output.to_standard()
        # All ranks send columns of the same widths. An idle rank's tensors have types of their own.
        ids, weights = topk_output.topk_ids.to(torch.int32), topk_output.topk_weights.to(torch.float32)
        got = self.layer.dispatch(hidden_states, ids, weights, sizes)
        return FlashinferDispatchOutput(
            got.x,
            None,
            StandardTopKOutput(got.weights, got.ids, topk_output.router_logits),
            self.layer.combine_input() if self._writes_results else None,
            hidden_states.dtype,
        )

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Returns the sums of this rank's tokens."""
        if combine_input.format == CombineInputFormat.STANDARD:
            sums: torch.Tensor = super().combine(combine_input)
            return sums
        return self.layer.combine(combine_input.hidden_states)


@cache
def of_process() -> SglangExperts:
    """Returns the exchange of this process. SGLang must have made its groups of processes."""
    return SglangExperts(expert_rank(), exchange_over(process_group()))


def create_dispatcher(original: Callable[..., Any], config: Any, quant_method: Any) -> Any:
    """Replaces SGLang's create_moe_dispatcher(). Collective, if the layer differs from those before it."""
    layer = of_process().layer(expert_layer(config, quant_method))
    if layer is None:
        return original(config, quant_method)
    return KvConnectorDispatcher(config, layer)


def run_named(call: Callable[[], Any]) -> Any:
    """Calls ``call()``, and leaves the groups after it. Adds the name of a lost rank to its error."""
    try:
        result = call()
    except RuntimeError as error:
        cause = of_process().explain(error)
        if cause is error:
            raise
        raise cause from error
    of_process().close()
    return result


def check_step(result: Any) -> None:
    """Raises GroupError if the step with this result was void. Returns once the GPU has ended the step."""

    def wait() -> None:
        done = getattr(result, "copy_done", None)
        if done is not None:
            done.synchronize()
        elif torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    of_process().check(wait)
