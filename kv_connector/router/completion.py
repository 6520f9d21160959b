"""Completion: one request of a client, and what the prefill and the decode engine are to get of it."""

import codecs
import re
from typing import Any, Self

import msgspec

from kv_connector.router.endpoint import Endpoint
from kv_connector.router.failure import bad_request
from kv_connector.router.prompt import Prompt

Body = dict[str, Any]

# What P need not know whose answer nobody reads.
_OF_THE_WHOLE = ("stream_options", "min_tokens", "return_token_ids")

# What may be long, and is of no interest here: passed on as it came. To make objects of 32,000 token ids and
# to write them twice takes 2 ms, which a client would wait for; to find their end takes 0.2.
_PASSED_ON = ("prompt", "messages", "input")

# So is the JSON of any longer field. As objects, 63 MiB of `{}` in a list would be 1.8 GiB; 4 KiB of them are
# 100 KiB. No value that the router decides by is longer.
_LONGEST_READ = 4096
# vLLM's own requests have about 100.
_MOST_FIELDS = 256

# Parameters of a transfer are the router's word alone, never a client's. vLLM also reads them in vllm_xargs.
_OF_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


class Completion:
    """The decoded body of /v1/completions, /v1/chat/completions or /v1/messages."""

    goes_to_named_rank = True
    """Whether vLLM gives it to the data-parallel rank that RANK_HEADER names."""

    def __init__(self, body: Body) -> None:
        self.body = {key: value for key, value in body.items() if key not in _OF_TRANSFERS}
        """The fields. Those that are passed on, and any long one, stay JSON."""
        self._begun = False

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Reads a request; Failure 400 if it is no JSON object."""
        raw = raw.removeprefix(codecs.BOM_UTF8)  # of PowerShell and .NET, and vLLM reads it
        try:
            _check_utf8(raw)  # of what is passed on msgspec reads the syntax alone
            fields: Body = {
                key: value
                if key in _PASSED_ON or len(memoryview(value)) > _LONGEST_READ
                else msgspec.json.decode(value)
                for key, value in _fields(raw).items()
            }
            if xargs := fields.get("vllm_xargs"):
                fields["vllm_xargs"] = _without_transfers(xargs)
            return cls(fields)
        except msgspec.ValidationError as error:
            raise bad_request(f"the body must be a JSON object: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"the body is not JSON: {error}") from None

    def prompt(self, path: str) -> Prompt:
        """Its prompt, as a policy sees it."""
        return Prompt.of(path, self.body)

    @property
    def model(self) -> str | None:
        name = self.body.get("model")
        return name if isinstance(name, str) else None

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    def behind_its_token(self) -> Self:
        """The same, of a client who has its first token already."""
        again = type(self)(self.body)
        again._begun = True
        return again

    def repeats_itself(self) -> bool:
        """Whether another engine would sample the same first token."""
        return self.body.get("temperature") == 0 or self.body.get("seed") is not None

    def local_reason(self) -> str | None:
        """Why this request must be prefilled by the decode engine itself; None if P and D can share it.

        vLLM gives all prompts of a request, and all its beams, the same kv_transfer_params: with several
        prompts one transfer would stand for different KV. A prompt of embeddings has no token ids, by which
        P and D make sure that they mean the same one. And who asks for the prompt's log probabilities needs
        a whole prefill where they are computed.
        """
        prompt, embeds = self.body.get("prompt"), self.body.get("prompt_embeds")
        if (prompt is not None and _several(prompt)) or _several_embeds(embeds):
            return "several_prompts"
        if embeds:
            return "several_prompts" if prompt is not None and not _is_nothing(prompt) else "prompt_embeds"
        if self.body.get("use_beam_search"):
            return "beam_search"
        if self.body.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        if self.body.get("echo") and self.body.get("logprobs") is not None:
            return "prompt_logprobs"
        return None

    def local_body(self, *, ids: bool = False) -> bytes:
        """For D, when it prefills itself. ``ids``: it says the token ids, whether the client wants them or
        not."""
        return msgspec.json.encode({**self.body, **({"return_token_ids": True} if ids else {})})

    def late_reason(self) -> str | None:
        """Why the client gets the first token of D, and not of P, which has it earlier; None if of P.

        Of some requests more is said with a token than its text, or it is not sure yet that the text is to be
        seen.
        """
        body = self.body
        if self._begun:
            return "begun"
        if body.get("stream") is not True:
            return "not_streamed"
        if any(body.get(key) not in (None, 1) for key in ("n", "best_of")):
            return "several_answers"
        if any(body.get(key) for key in ("echo", "return_tokens_as_token_ids")):
            return "more_than_text"
        if not (body.get("logprobs") is None or body.get("logprobs") is False):  # 0 asks for some
            return "more_than_text"
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            return "more_than_text"  # nobody knows: vLLM refuses it
        if options and options.get("continuous_usage_stats"):
            return "more_than_text"
        if body.get("stop"):
            return "stop_strings"
        if body.get("tools") or body.get("functions"):
            return "tools"
        return None

    def prefill_body(self, transfer_id: str, *, serial: bool, early: bool = False) -> bytes:
        """For P: the same prompt, one token, answered at once. ``serial``: D is asked after that.
        ``early``: the client gets that token, as a stream.

        The one token makes vLLM run the prefill to its end; D computes it again from the pages it got.
        """
        body = dict(self.body)
        # n and best_of: one child fills the KV that all of D's children read.
        for key in ("n", "best_of", *(() if early else _OF_THE_WHOLE)):
            body.pop(key, None)
        if body.get("min_tokens"):  # it forbids an end where the first token is
            body["min_tokens"] = 1
        body |= self._one_token()
        body["stream"] = early
        if early:  # what it says of the prompt's length and of its prefix cache
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
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
        if "max_completion_tokens" in self.body:
            limits["max_completion_tokens"] = 1
        return limits

    def decode_body(self, kv_transfer_params: dict[str, Any], *, ids: bool = False) -> bytes:
        """For D: `decode_params` where it is dispatched together with P, else what P answered. ``ids``: as
        local_body's."""
        body = {**self.body, "kv_transfer_params": kv_transfer_params}
        return msgspec.json.encode({**body, **({"return_token_ids": True} if ids else {})})


def decode_params(transfer_id: str, prefill: Endpoint, *, early: bool = False) -> dict[str, Any]:
    """Whom D is to ask for the pages, and under which name. ``early``: D goes on with P's token."""
    return {
        **({"early_token": True} if early else {}),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": prefill.control_host,
        "remote_port": prefill.control_port,
        "remote_engine_id": None,
    }


_LIST_OF_OTHERS = re.compile(rb"\s*\[\s*[^\s\d-]")  # than numbers

DISOWNED_PATH = "/v1/completions"


def disowned_body(transfer_id: str, prefill: Endpoint) -> bytes:
    """For D, which refuses it: vLLM tells its connector of every refused request that pages were meant for,
    and the connector tells P. The model is one that no engine serves.
    """
    body = {"model": f"nobody-wants/{transfer_id}", "prompt": [0], "max_tokens": 1}
    return msgspec.json.encode({**body, "kv_transfer_params": decode_params(transfer_id, prefill)})


def _several(prompt: msgspec.Raw) -> bool:
    """Whether this is a list of prompts; a list of token ids is one prompt."""
    return _LIST_OF_OTHERS.match(prompt) is not None and not _is_nothing(prompt) and not _is_one(prompt)


def _several_embeds(embeds: object) -> bool:
    if isinstance(embeds, msgspec.Raw):
        return bytes(memoryview(embeds)[:1]) == b"[" and not _is_one(embeds)
    return isinstance(embeds, list) and len(embeds) > 1


def _is_one(array: msgspec.Raw) -> bool:
    """Whether a list has one item. msgspec stops at the second one."""
    try:
        msgspec.json.decode(array, type=tuple[msgspec.Raw])
    except msgspec.ValidationError:
        return False
    return True


def _is_nothing(raw: msgspec.Raw) -> bool:
    """Whether Python would take its value for False."""
    view = memoryview(raw)
    return len(view) <= _LONGEST_READ and not msgspec.json.decode(raw)


class _Name(str):
    """A field's name. msgspec calls a function for each, as for any type that it does not know."""


def _fields(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, each as it came. Of 64 MiB of short fields a dict would be 1.2 GiB."""
    left = _MOST_FIELDS

    def name(_: type, text: str) -> _Name:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        return _Name(text)

    found = msgspec.json.decode(raw, type=dict[_Name, msgspec.Raw], dec_hook=name)
    return {str(key): value for key, value in found.items()}


def _without_transfers(xargs: object) -> object:
    """vllm_xargs, short or long."""
    if isinstance(xargs, msgspec.Raw):
        if bytes(memoryview(xargs)[:1]) != b"{":
            return xargs  # which vLLM refuses
        xargs = _fields(xargs)
    if isinstance(xargs, dict):
        return {key: value for key, value in xargs.items() if key not in _OF_TRANSFERS}
    return xargs


_CHECKED_AT_ONCE = 1 << 20


def _check_utf8(raw: bytes) -> None:
    """Raises UnicodeDecodeError. In parts: a text of 64 MiB with one emoji is 256 MiB as a str."""
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(raw)
    for at in range(0, len(view), _CHECKED_AT_ONCE):
        decoder.decode(view[at : at + _CHECKED_AT_ONCE])
    decoder.decode(b"", True)
