"""Completion: a client's request, and the bodies that the prefill and the decode engine get for it."""

from typing import Any, Self

import msgspec

from kv_connector.router.bodies.fields import (
    PASSED_ON,
    BodyError,
    Content,
    Fields,
    Shapes,
    encode,
    is_nothing,
    parse,
    stays_json,
)
from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.failure import UNREADABLE, bad_request

Body = dict[str, Any]

# Fields that the prefill engine need not know if its answer is not passed on.
_OF_THE_WHOLE = ("stream_options", "min_tokens", "return_token_ids")

# Most bytes of fields that become objects. The event loop needs 1.3 ms for 64 KiB of `{}` in 250 fields (AMD
# EPYC, 2026-11-29). Of a request with more bytes, only the fields in _DECIDING are read. The router decides
# by no other field.
_READ_IN_ALL = 64 << 10
_DECIDING = frozenset(
    (
        *("model", "stream", "stream_options", "temperature", "seed", "n", "best_of", "use_beam_search"),
        *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_embeds", "return_token_ids"),
        *("return_tokens_as_token_ids", "max_tokens", "max_completion_tokens", "min_tokens", "stop"),
        *("presence_penalty", "frequency_penalty", "response_format", "structured_outputs", "bad_words"),
        *("tools", "tool_choice", "functions", "vllm_xargs", "background", "previous_response_id"),
    )
)

# Fields on which the embeddings of a chat's pictures depend, and the fields by which the engine finds them.
_OF_PICTURES = (
    *("model", "messages", "mm_processor_kwargs", "media_io_kwargs", "chat_template", "chat_template_kwargs"),
    *("cache_salt", "priority"),
)

# Texts that vLLM and SGLang read as true, by pydantic's rules, in any case. 1 and 1.0 are true, too.
_TRUE = ("1", "on", "t", "true", "y", "yes")

# Only the router sets parameters of a transfer, never a client. vLLM also reads them in vllm_xargs.
_OF_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


class Completion:
    """The decoded body of /v1/completions, /v1/chat/completions or /v1/messages."""

    goes_to_named_rank = True
    """Whether vLLM gives the request to the data-parallel rank that RANK_HEADER names."""

    def __init__(self, body: Body, shapes: Shapes | None = None) -> None:
        self.body = {key: value for key, value in body.items() if key not in _OF_TRANSFERS}
        """The fields. Fields that are passed on, and long fields, stay JSON."""
        if _is_true(self.body.get("stream")):
            # The router's time limits of streams, and all that it decides by this field, then apply.
            self.body["stream"] = True
        self._shapes = shapes or Shapes()
        self._prompts: dict[str, Prompt] = {}
        self._begun = False
        self._embeddings: Body | None = None

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Reads a request; Failure 400 if it is not a JSON object."""
        try:
            return cls.of_fields(parse(raw))
        except BodyError as error:
            raise bad_request(str(error)) from None

    @classmethod
    def of_fields(cls, fields: Fields) -> Self:
        """Reads a request's short fields; Failure 400 if one cannot be read."""
        body: Body = dict(fields.values)
        short = [key for key, value in body.items() if not (key in PASSED_ON or stays_json(value))]
        if sum(len(memoryview(body[key])) for key in short) > _READ_IN_ALL:
            short = [key for key in short if key in _DECIDING]
        try:
            for key in short:
                body[key] = msgspec.json.decode(body[key])
        except UNREADABLE as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        xargs = body.get("vllm_xargs") if fields.xargs is None else fields.xargs
        if isinstance(xargs, dict):
            body["vllm_xargs"] = {key: value for key, value in xargs.items() if key not in _OF_TRANSFERS}
        return cls(body, fields.shapes)

    def prompt(self, path: str) -> Prompt:
        """Returns the request's prompt as a policy sees it. Each attempt looks at the same prompt."""
        if (prompt := self._prompts.get(path)) is None:
            prompt = self._prompts[path] = Prompt.of(path, self.body, self._shapes)
        return prompt

    def only_text(self) -> bool:
        """Returns whether a chat's messages are text alone. The token ids of all pictures are alike."""
        messages = self.body.get("messages")
        return messages is None or self._shapes.only_text(messages)

    def encoder_body(self) -> Content:
        """Returns the body for an encoder engine, which reads the pictures and computes no token."""
        body = {key: self.body[key] for key in _OF_PICTURES if key in self.body}
        return encode({**body, "max_tokens": 1})

    def with_embeddings(self, announced: Body) -> Self:
        """Returns the same request, whose prefill engine fetches the pictures' embeddings.

        ``announced``: the encoder engine's `ec_transfer_params`.
        """
        again = self._again()
        again._embeddings = announced
        return again

    def _again(self) -> Self:
        again = type(self)(self.body, self._shapes)
        again._prompts, again._begun, again._embeddings = self._prompts, self._begun, self._embeddings
        return again

    @property
    def model(self) -> str | None:
        name = self.body.get("model")
        return name if isinstance(name, str) else None

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    def behind_its_token(self) -> Self:
        """Returns the same request, for a client that already has its first token."""
        again = self._again()
        again._begun = True
        return again

    def repeats_itself(self) -> bool:
        """Returns whether another engine would sample the same first token."""
        return self.body.get("temperature") == 0 or self.body.get("seed") is not None

    def local_reason(self) -> str | None:
        """Returns why the decode engine must compute this prompt itself; None if two engines can share the
        request.

        vLLM gives all prompts of a request, and all its beams, the same kv_transfer_params. With several
        prompts, one transfer would stand for different KV. A prompt of embeddings has no token ids, by which
        the two engines verify that they mean the same prompt. If the client wants the prompt's log
        probabilities, they need a whole prefill where they are computed.
        """
        prompt, embeds = self.body.get("prompt"), self.body.get("prompt_embeds")
        if self._several("prompt") or self._several("prompt_embeds"):
            return "several_prompts"
        if embeds:
            return "several_prompts" if prompt is not None and not is_nothing(prompt) else "prompt_embeds"
        if self.body.get("use_beam_search"):
            return "beam_search"
        if self.body.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if self.body.get("echo") and self.body.get("logprobs") is not None:
            return "prompt_logprobs"
        return None

    def _several(self, key: str) -> bool:
        """Returns whether this field has a list of several prompts."""
        value = self.body.get(key)
        if isinstance(value, msgspec.Raw):
            return self._shapes.of(key, value).several
        return isinstance(value, list) and len(value) > 1

    def one_answer(self) -> bool:
        """Returns whether the prompt has one answer.

        Otherwise vLLM makes a request of each answer, and each of them would load a prefix by itself.
        """
        return all(self.body.get(key) in (None, 1) for key in ("n", "best_of"))

    def local_body(self, *, ids: bool = False, prefix: Body | None = None) -> Content:
        """Returns the body for a decode engine that computes the prompt itself.

        ``ids``: the engine reports token ids, whether the client wants them or not. ``prefix``: as of
        prefill_body().
        """
        more: Body = {"return_token_ids": True} if ids else {}
        if prefix is not None:
            more["kv_transfer_params"] = {"prefix_from": prefix}
        return encode({**self.body, **more})

    def late_reason(self) -> str | None:
        """Returns why the client gets the decode engine's first token; None: it gets the prefill engine's,
        which is earlier.

        For some requests an engine reports more with a token than its text, or the text may still be held
        back.
        """
        body = self.body
        if self._begun:
            return "begun"
        if body.get("stream") is not True:
            return "not_streamed"
        if not self.one_answer():
            return "several_answers"
        if any(body.get(key) for key in ("echo", "return_tokens_as_token_ids")):
            return "more_than_text"
        if not (body.get("logprobs") is None or body.get("logprobs") is False):  # 0 requests some
            return "more_than_text"
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            return "more_than_text"  # its meaning is unknown: vLLM refuses it
        if options and options.get("continuous_usage_stats"):
            return "more_than_text"
        if body.get("stop"):
            return "stop_strings"
        if body.get("tools") or body.get("functions"):
            return "tools"
        return None

    def prefill_body(
        self, transfer_id: str, *, serial: bool, early: bool = False, prefix: Body | None = None
    ) -> Content:
        """Returns the body for the prefill engine: the same prompt, one token, answered at once.

        ``serial``: the decode engine gets the request after that. ``early``: the client gets the token, as a
        stream. ``prefix``: prefix_params() of the engine that may have the prompt's beginning.

        The one token makes vLLM run the prefill to its end. The decode engine computes the token again from
        the pages that it received.
        """
        body = dict(self.body)
        # n and best_of: one child request computes the KV that all children on the decode engine read.
        for key in ("n", "best_of", *(() if early else _OF_THE_WHOLE)):
            body.pop(key, None)
        if body.get("min_tokens"):  # it forbids an end at the first token
            body["min_tokens"] = 1
        body |= self._one_token()
        body["stream"] = early
        if early:  # usage reports the prompt's length and its cached tokens
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        body["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
            "serial": serial,
            **({} if prefix is None else {"prefix_from": prefix}),
        }
        if self._embeddings is not None:
            body["ec_transfer_params"] = self._embeddings
        return encode(body)

    def _one_token(self) -> Body:
        """Returns the fields of this API that limit the prefill engine's answer to one token."""
        limits = {"max_tokens": 1}
        if "max_completion_tokens" in self.body:
            limits["max_completion_tokens"] = 1
        return limits

    def decode_body(self, kv_transfer_params: dict[str, Any], *, ids: bool = False) -> Content:
        """Returns the body for the decode engine.

        ``kv_transfer_params``: `decode_params` in concurrent dispatch, else the prefill engine's answer.
        ``ids``: as in local_body().
        """
        body = {**self.body, "kv_transfer_params": kv_transfer_params}
        return encode({**body, **({"return_token_ids": True} if ids else {})})


def decode_params(transfer_id: str, prefill: Endpoint, *, early: bool = False) -> dict[str, Any]:
    """Returns the decode engine's parameters: the control address that it requests pages from, and the
    transfer id.

    ``early``: the decode engine continues with the prefill engine's token.
    """
    return {
        **({"early_token": True} if early else {}),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": prefill.control_host,
        "remote_port": prefill.control_port,
        "remote_engine_id": None,
    }


def prefix_params(lender: Endpoint, tokens: int) -> dict[str, Any]:
    """Returns the proposal for an engine that ``lender`` has so many leading tokens of the prompt."""
    return {"host": lender.control_host, "port": lender.control_port, "tokens": tokens}


PREFETCH_PATH = "/v1/completions"


def prefetch_body(body: Body, ids: bytes, lender: Endpoint, tokens: int, most: int) -> Content:
    """Returns a body that makes a prefill engine load the end of a prompt from ``lender``, and compute
    nothing.

    ``body``: the client's. ``ids``: token ids of its prompt and answer, as in a JSON list. ``tokens``: those
    that the lender has of them. ``most``: tokens that the prefill engine lacks, if it has dropped none.
    """
    kept: Body = {key: body[key] for key in ("model", "cache_salt") if key in body}
    prefix = {**prefix_params(lender, tokens), "prefetch": most}
    return encode(
        {
            **kept,
            "prompt": msgspec.Raw(b"[%s]" % ids),
            "max_tokens": 1,
            "kv_transfer_params": {"prefix_from": prefix},
        }
    )


DISOWNED_PATH = "/v1/completions"


def disowned_body(transfer_id: str, prefill: Endpoint) -> bytes:
    """Returns a body that a decode engine refuses, so that it notifies the prefill engine.

    vLLM reports every refused request with transfer parameters to its connector, and the connector notifies
    the prefill engine. No engine serves the model that the body names.
    """
    body = {"model": f"nobody-wants/{transfer_id}", "prompt": [0], "max_tokens": 1}
    return msgspec.json.encode({**body, "kv_transfer_params": decode_params(transfer_id, prefill)})


def _is_true(value: object) -> bool:
    return value.lower() in _TRUE if isinstance(value, str) else value == 1
