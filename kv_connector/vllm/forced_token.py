"""ForcedToken: has D go on with the token that P sampled, whatever D would sample itself.

A logits processor by vLLM's entry point ``vllm.logits_processors``, so vLLM loads it in every engine of the
environment, with our connector or without: it does nothing there. vLLM has two model runners with an
interface each under that one name, and refuses to start with a class that lacks its own: this one has both.

The token travels in the request's ``SamplingParams.extra_args``, where the connector's scheduler side puts it
before the request is scheduled first: so all workers of D have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Not through internals.py, which refuses a vLLM that the connector was not written for: that must not keep an
# engine from its start which has no connector.
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor
except ImportError:  # an older vLLM, which has V1's runner alone
    V2LogitsProcessor = object

if TYPE_CHECKING:
    import torch

# Nobody but the connector may set it: a client's is refused at admission.
KEY = "kv_connector_sampled_token"


def force(sampling_params: Any, token: int) -> None:
    """Before the request is scheduled first."""
    sampling_params.extra_args = {**(sampling_params.extra_args or {}), KEY: token}


def _forced(sampling_params: Any) -> int | None:
    return (sampling_params.extra_args or {}).get(KEY)


def _row(params: Any, _: list[int] | None, output: list[int]) -> tuple[int, list[int]] | None:
    token = _forced(params)
    return None if token is None else (token, output)


class ForcedToken(V1LogitsProcessor, V2LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed for mypy
    """One engine's, on its model runner's thread. Nothing waits for the device."""

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        """``rest``: of V1 the device and whether memory is pinned, of V2 the requests' state."""
        self._requests = rest[0] if len(rest) == 1 else None
        self._rows: dict[int, tuple[int, list[int]]] = {}
        """V1, by row of the batch: the token, and the request's output so far, which vLLM lengthens."""
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

    # --- Either

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        forced = self._first_rows() if ctx is None else self._first_rows_of(ctx)
        for row, token in forced:
            if token < logits.shape[-1]:
                logits[row] = -float("inf")
                # Whatever it was: min_tokens may have masked it, and a softmax needs something.
                # As a slice: of one element PyTorch copies the number to the device, and waits for it.
                logits[row, token : token + 1] = 0.0
        return logits

    def _first_rows(self) -> list[tuple[int, int]]:
        return [(row, token) for row, (token, output) in self._rows.items() if not output]

    def _first_rows_of(self, ctx: Any) -> list[tuple[int, int]]:
        """Rows and requests are the same here: with speculative decoding nothing is forced."""
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
