"""ForcedToken: makes D go on with the token that P sampled, whatever D would sample itself.

It is a logits processor of vLLM's entry point ``vllm.logits_processors``. vLLM loads it in every engine of
the environment, also without this connector, and there it does nothing. vLLM has two model runners, each with
its own interface under that name, and refuses to start with a class that lacks the needed one. This class has
both.

The token travels in the request's ``SamplingParams.extra_args``. The scheduler side of the connector puts it
there before the request is scheduled first, so all workers of D have the same token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# These imports bypass internals.py, which refuses an unsupported vLLM: an engine without the connector must
# still start.
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor
except ImportError:  # an older vLLM, which has only V1's runner
    V2LogitsProcessor = object

if TYPE_CHECKING:
    import torch

# Only the connector may set this key. A client's request with it is refused at admission.
KEY = "kv_connector_sampled_token"


def force(sampling_params: Any, token: int) -> None:
    """Sets the token of a request. Call it before the request is scheduled first."""
    sampling_params.extra_args = {**(sampling_params.extra_args or {}), KEY: token}


def _forced(sampling_params: Any) -> int | None:
    return (sampling_params.extra_args or {}).get(KEY)


def _row(params: Any, _: list[int] | None, output: list[int]) -> tuple[int, list[int]] | None:
    token = _forced(params)
    return None if token is None else (token, output)


class ForcedToken(V1LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed for mypy
    """The logits processor of one engine, on its model runner's thread. No call waits for the device."""

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        """``rest``: with V1 the device and whether memory is pinned, with V2 the requests' state."""
        self._requests = rest[0] if len(rest) == 1 else None
        self._rows: dict[int, tuple[int, list[int]]] = {}
        """V1, by row of the batch: the token, and the request's output so far, to which vLLM appends."""
        self._slots: dict[int, int] = {}
        """V2, by the request's slot: the token."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        if _forced(sampling_params) is not None:
            raise ValueError(f"{KEY} is reserved for the engine: remove it from vllm_xargs")

    def is_argmax_invariant(self) -> bool:
        return False

    # --- V1

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    # --- V2

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        token = _forced(sampling_params)
        if token is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = token
        return True

    # --- Both

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        forced = self._first_rows() if ctx is None else self._first_rows_of(ctx)
        for row, token in forced:
            if token < logits.shape[-1]:
                logits[row] = -float("inf")
                # The old value does not count: min_tokens may have masked it, and a softmax needs a finite
                # value. The index is a slice: for a single element PyTorch would copy the number to the
                # device and wait for it.
                logits[row, token : token + 1] = 0.0
        return logits

    def _first_rows(self) -> list[tuple[int, int]]:
        return [(row, token) for row, (token, output) in self._rows.items() if not output]

    def _first_rows_of(self, ctx: Any) -> list[tuple[int, int]]:
        """Returns the rows that sample a first token, with the token.

        Rows and requests are the same here, as nothing is forced with speculative decoding.
        """
        if not self._slots:
            return []
        assert self._requests is not None
        prompt_lengths = self._requests.prompt_len.np
        batch = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        rows = []
        for row, (slot, seen) in enumerate(batch):
            token = self._slots.get(slot)
            if token is None:
                continue
            if seen == prompt_lengths[slot]:
                rows.append((row, token))
            elif seen > prompt_lengths[slot]:  # for good: a request that vLLM resumes is added again
                del self._slots[slot]
        return rows
