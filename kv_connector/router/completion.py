"""Completion: one request of a client, and what the prefill and the decode engine are to get of it."""

from typing import Any, Self

import msgspec

from kv_connector.router.endpoint import Endpoint
from kv_connector.router.failure import bad_request

Body = dict[str, Any]


class Completion:
    """The decoded body of /v1/completions, /v1/chat/completions or /v1/messages."""

    goes_to_named_rank = True
    """Whether vLLM gives it to the data-parallel rank that RANK_HEADER names."""

    def __init__(self, body: Body) -> None:
        # Where to fetch KV from is the router's word alone, never a client's.
        self._body = {key: value for key, value in body.items() if key != "kv_transfer_params"}

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Reads a request; Failure 400 if it is no JSON object."""
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise bad_request(f"the body must be a JSON object, not {type(body).__name__}")
        return cls(body)

    def local_reason(self) -> str | None:
        """Why this request must be prefilled by the decode engine itself; None if P and D can share it.

        vLLM gives all prompts of a request, and all its beams, the same kv_transfer_params: with several
        prompts one transfer would stand for different KV. A prompt of embeddings has no token ids, by which
        P and D make sure that they mean the same one. And who asks for the prompt's log probabilities needs
        a whole prefill where they are computed.
        """
        if any(_batched(self._body.get(key)) for key in ("prompt", "prompt_embeds")):
            return "several_prompts"
        if self._body.get("prompt_embeds"):
            return "several_prompts" if self._body.get("prompt") else "prompt_embeds"
        if self._body.get("use_beam_search"):
            return "beam_search"
        if self._body.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if self._body.get("echo") and self._body.get("logprobs") is not None:
            return "prompt_logprobs"
        return None

    def local_body(self) -> bytes:
        """For D, when it prefills itself."""
        return msgspec.json.encode(self._body)

    def prefill_body(self, transfer_id: str, *, serial: bool) -> bytes:
        """For P: the same prompt, one token, answered at once. ``serial``: D is asked after that.

        The one token makes vLLM run the prefill to its end; D computes it again from the pages it got.
        """
        body = dict(self._body)
        # n and best_of: one child fills the KV that all of D's children read.
        for key in ("stream_options", "min_tokens", "n", "best_of"):
            body.pop(key, None)
        body |= self._one_token()
        body["stream"] = False
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
            "serial": serial,
        }
        return msgspec.json.encode(body)

    def _one_token(self) -> Body:
        """What P's answer is limited by, in this request's words."""
        limits = {"max_tokens": 1}
        if "max_completion_tokens" in self._body:
            limits["max_completion_tokens"] = 1
        return limits

    def decode_body(self, kv_transfer_params: dict[str, Any]) -> bytes:
        """For D: `decode_params` where it is dispatched together with P, else what P answered."""
        return msgspec.json.encode({**self._body, "kv_transfer_params": kv_transfer_params})


def decode_params(transfer_id: str, prefill: Endpoint) -> dict[str, Any]:
    """Whom D is to ask for the pages, and under which name."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": prefill.control_host,
        "remote_port": prefill.control_port,
        "remote_engine_id": None,
    }


DISOWNED_PATH = "/v1/completions"


def disowned_body(transfer_id: str, prefill: Endpoint) -> bytes:
    """For D, which refuses it: vLLM tells its connector of every refused request that pages were meant for,
    and the connector tells P. The model is one that no engine serves.
    """
    body = {"model": f"nobody-wants/{transfer_id}", "prompt": [0], "max_tokens": 1}
    return msgspec.json.encode({**body, "kv_transfer_params": decode_params(transfer_id, prefill)})


def _batched(prompt: object) -> bool:
    """Whether this is a list of prompts; a list of token ids is one prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int | float)
