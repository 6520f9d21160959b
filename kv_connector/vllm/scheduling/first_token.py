"""FirstTokenScheduler: vLLM's scheduler for a D whose requests begin with the token that P sampled.

When the pages of a request have arrived, the scheduler appends that token as its first output and sends it to
the API server. vLLM then handles the request as if it was preempted behind its first token: its first step
computes the second token. Positions, seeds, penalties and the grammar's state are those of any other request.

This needs model runner V2, because V1 cannot begin with a request that has output. With V1, or if a request
does not allow it (``_suits``), D computes the prompt's last token again and ForcedToken makes it sample P's
token.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kv_connector.vllm.forced_token import force
from kv_connector.vllm.internals import (
    AsyncScheduler,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
)
from kv_connector.vllm.model.configuration import forces_tokens
from kv_connector.vllm.scheduling.gated_scheduler import GatedAsyncScheduler, GatedScheduler
from kv_connector.vllm.scheduling.scheduler_side import SchedulerSide

logger = logging.getLogger(__name__)


def choose_scheduler(vllm_config: Any) -> None:
    """Chooses the scheduler class for this engine.

    It is FirstTokenScheduler for a D that can begin with P's token, else GatedScheduler. A scheduler that the
    configuration names stays. Call it in the scheduler's process, before vLLM makes the scheduler.
    """
    config, transfer = vllm_config.scheduler_config, vllm_config.kv_transfer_config
    if config.scheduler_cls is not None:
        return
    if transfer.is_kv_consumer and vllm_config.use_v2_model_runner and forces_tokens(vllm_config):
        chosen = FirstTokenAsyncScheduler if config.async_scheduling else FirstTokenScheduler
    else:
        chosen = GatedAsyncScheduler if config.async_scheduling else GatedScheduler
    config.scheduler_cls = f"{chosen.__module__}.{chosen.__name__}"


def has_own_scheduler(vllm_config: Any) -> bool:
    """Returns whether the engine has a scheduler of choose_scheduler(), or will have it.

    Workers can call it: their configuration is from before or after that choice.
    """
    chosen = vllm_config.scheduler_config.scheduler_cls
    if chosen is None:
        return "VLLM_KV_CACHE_LAYOUT" not in os.environ  # with it, vLLM omits the hook that chooses
    return isinstance(chosen, str) and chosen.startswith("kv_connector.vllm.")


class FirstTokenScheduler(GatedScheduler):
    """FirstTokenScheduler without async scheduling: a step is scheduled after the previous step's output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vocabulary: int = self.vllm_config.model_config.get_vocab_size()
        self._giving: list[SchedulerSide] = []
        # With these options every output token has additional data, which a token that was not computed here
        # lacks.
        if self.aux_output_connector is None and not self.return_sampling_mask:
            self._giving = self.sides
        for side in self._giving:
            side.give_first_tokens()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        for side in self._giving:
            for request, token in side.take_first_tokens():
                if self._suits(request, token):
                    client = outputs.setdefault(request.client_index, EngineCoreOutputs())
                    client.outputs.append(self._begin(request, token))
                else:
                    force(request.sampling_params, token)
        return outputs

    def _suits(self, request: Request, token: int) -> bool:
        """Returns whether the answer can begin with this token.

        It cannot if the request ends with the token, or if the answer needs the token's probability. Only the
        engine that computes the prompt's last token knows that.
        """
        params = request.sampling_params
        return (
            token < self._vocabulary
            and token != params.eos_token_id
            and token not in (params.stop_token_ids or ())
            and request.max_tokens > 1
            and request.num_tokens + 1 < self.max_model_len
            and params.num_logprobs is None
            and not request.resumable
        )

    def _begin(self, request: Request, token: int) -> Any:
        """Appends the token to the request, and returns the output for its client."""
        if self.log_stats:
            # without it, the duration of the prefill would be negative
            request.record_event(EngineCoreEventType.SCHEDULED)
        request.append_output_token_ids(token)
        if not self.structured_output_manager.accept_tokens(request, [token]):
            logger.error(
                "request %s failed: the structured-output grammar rejects token %d sampled by the prefill "
                "engine",
                request.request_id,
                token,
            )
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            prefill_stats=request.take_prefill_stats(),
            trace_headers=request.trace_headers,
        )


class FirstTokenAsyncScheduler(FirstTokenScheduler, AsyncScheduler):  # type: ignore[misc]  # vLLM is not typed
    """FirstTokenScheduler for async scheduling: a step is scheduled before the previous step's output."""
