"""Continuation: the rest of a running request, as it is requested from another pair of engines.

Its prompt is the request's own prompt and all tokens of the answer so far. If the next token depends on these
tokens alone, the answer is the one that the first engine would have continued with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kv_connector.router.bodies.prompt import Prompt
from kv_connector.router.failure import UNREADABLE, failure
from kv_connector.router.requests.completion import Body, Completion
from kv_connector.router.requests.events import END, data_of

CHAT = "/v1/chat/completions"
# Paths whose answers are text alone: their first token may come from the prefill engine, and they may move.
PATHS = ("/v1/completions", CHAT)

# Fields that a continuation keeps: sampling that depends on the tokens so far, wherever the prompt ends, and
# fields that do not affect sampling.
_KEPT = (
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",  # over prompt and answer alike
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "return_token_ids",
    "cache_salt",
    "priority",
    "user",
)
# Fields that are counted down, that the prompt's ids already include, or that no engine uses.
_COUNTED = ("max_tokens", "max_completion_tokens", "min_tokens")
_DONE_WITH = (
    *_COUNTED,
    "prompt",
    "messages",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "parallel_tool_calls",
    "metadata",
    "store",
    "service_tier",
)
# Fields that keep a request on its engine if they are set, with the reason.
_STAYS = {
    "seed": "seed",  # the generator's state is not known
    "presence_penalty": "penalties",  # over the answer alone
    "frequency_penalty": "penalties",
    "stop": "stop_strings",  # text is held back
    "n": "several_answers",
    "best_of": "several_answers",
    "use_beam_search": "several_answers",
    "logprobs": "more_than_text",
    "top_logprobs": "more_than_text",
    "prompt_logprobs": "more_than_text",
    "echo": "more_than_text",
    "return_tokens_as_token_ids": "more_than_text",
    "response_format": "constrained",
    "structured_outputs": "constrained",
    "bad_words": "constrained",
    "tools": "tools",
    "tool_choice": "tools",
    "functions": "tools",
}
_KNOWN = {*_KEPT, *_DONE_WITH, *_STAYS}
# Values with the same meaning as leaving the key out.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
# vLLM's default for a completion.
_MAX_TOKENS = 16


def stay_reason(path: str, completion: Completion) -> str | None:
    """Returns why this request must end on the engine where it began; None if it may move."""
    body = completion.body
    if path not in PATHS:
        return "other_api"
    if not completion.streamed:
        return "not_streamed"
    if completion.local_reason() == "several_prompts":
        return "several_answers"
    for key, reason in _STAYS.items():
        value = body.get(key)
        nothing = value is None or value is False or value in ("", [], {}, *_PLAIN.get(key, ()))
        if not nothing and not (key == "seed" and body.get("temperature") == 0):
            return reason
    counts = (body.get(key) for key in _COUNTED)
    if not _KNOWN.issuperset(body) or not all(isinstance(count, int | None) for count in counts):
        return "other_key"
    return None if has_ids(path, completion) else "other_key"


def has_ids(path: str, completion: Completion) -> bool:
    """Returns whether an engine can report the token ids of prompt and answer, if the router wants them.

    Other APIs have no field for ids. Of several answers the router does not know which the client keeps. An
    echo repeats the prompt in the answer.
    """
    body = completion.body
    return (
        path in PATHS
        and completion.local_reason() is None
        and completion.one_answer()
        and not body.get("echo")
        # vLLM takes 1 and "yes", too: whether the client gets ids is not known here.
        and isinstance(body.get("return_token_ids"), bool | None)
    )


def tokens_left(path: str, completion: Completion, said: int) -> int | None:
    """Returns how many tokens are left of an answer that has ``said`` tokens; None: as many as fit."""
    body = completion.body
    limit = body.get("max_tokens")
    if path != CHAT:
        limit = _MAX_TOKENS if limit is None else limit
    elif body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    return None if limit is None else limit - said


class Continuation(Completion):
    """A request to /v1/completions, whatever the client's path was: there a prompt may be token ids."""

    _why = "moved"

    @classmethod
    def of(
        cls,
        completion: Completion,
        ids: bytes,
        said: int,
        max_tokens: int,
        *,
        why: str = "moved",
        prompt: Prompt | None = None,
    ) -> Continuation:
        """Makes the continuation of a completion. ``ids``: token ids of prompt and answer, as in a JSON list.
        ``said``: how many of them are the answer's. ``why``: as of late_reason(). ``prompt``: the prompt as
        policies are to see it; None: the token ids."""
        body: Body = {key: completion.body[key] for key in _KEPT if key in completion.body}
        body |= {"prompt": msgspec.Raw(b"[%s]" % ids), "max_tokens": max_tokens}
        if (least := (completion.body.get("min_tokens") or 0) - said) > 0:
            body["min_tokens"] = least
        made = cls(body)
        made._why = why
        if prompt is not None:
            made._prompts[PATHS[0]] = prompt
        return made

    def late_reason(self) -> str | None:
        """Returns "moved" or "resumed". At a move the first engine's stream has this token, too, and
        continues if the second engine fails. A resumed stream has begun long ago."""
        return self._why


def resumed_prompt(prompt: Prompt, tokens: int, said: int) -> Prompt:
    """Returns the prompt of a continuation as policies see it: the beginning of the answer follows.

    ``prompt``: the prompt of the first request, whose KV engines are known to have. ``tokens``: tokens of
    prompt and answer, of which the last ``said`` are the answer's.
    """
    size = round(prompt.size * tokens / max(1, tokens - said))
    return replace(prompt, size=size, tokens=tokens)


class ContinuationTail:
    """Translates a continuation's answer to the form of the stream that it continues."""

    def __init__(
        self,
        last: bytes,
        *,
        prompt: int,
        said: int,
        cached: int | None,
        known: Sequence[int] = (),
        held: str = "",
    ) -> None:
        """``last``: the events that the client got last. They end with one of an answer's part. ``prompt``:
        tokens of the prompt. ``said``: tokens of the answer before the continuation. ``cached``: as in
        Running. ``known``: ids of the continuation's first tokens, if the client has them already. ``held``:
        text before the continuation that the client does not have."""
        events = [event for event in last.split(END) if event]
        begun = msgspec.json.decode(data_of(events[-1]))
        self._choice: dict[str, Any] = begun["choices"][0]
        self._head = {key: begun[key] for key in ("id", "object", "created", "model") if key in begun}
        self._prompt = prompt
        self._said = said
        self._cached = cached
        self._known = list(known)
        self._held = held

    def of(self, events: bytes) -> bytes:
        """Returns whole events of the continuation, translated for the client. Failure if it begins with
        other tokens than the client has."""
        return b"".join(map(self._translate, events.split(END)))

    def _translate(self, event: bytes) -> bytes:
        if not event:
            return b""
        try:
            said = msgspec.json.decode(data_of(event), type=dict[str, Any])
        except UNREADABLE:
            return event + END  # [DONE]
        if not isinstance(choices := said.get("choices"), list):
            return event + END  # an error
        said = self._head | {key: value for key, value in said.items() if key not in self._head}
        if self._known and all(map(self._has, choices)):
            return b""
        said["choices"] = [self._shape(choice) for choice in choices]
        if isinstance(usage := said.get("usage"), dict):
            self._count(usage)
        return b"data: " + msgspec.json.encode(said) + END

    def _has(self, choice: dict[str, Any]) -> bool:
        """Removes the known tokens from a choice. Returns whether nothing of it is left."""
        tokens = choice.get("token_ids") or []
        same = min(len(tokens), len(self._known))
        if tokens[:same] != self._known[:same]:
            words = f"the stream continued with token {tokens[0]}, where the client has {self._known[0]}"
            raise failure(502, "api_error", words)
        self._known, choice["token_ids"] = self._known[same:], tokens[same:]
        return not (tokens[same:] or choice.get("text") or choice.get("finish_reason"))

    def _shape(self, choice: dict[str, Any]) -> dict[str, Any]:
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # the stream's beginning had them
        if "delta" not in self._choice:
            return choice
        shaped = self._choice | {"delta": {"content": self._held + choice["text"]}}
        self._held = ""
        if choice.get("finish_reason") is not None:
            shaped |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
        if "token_ids" in shaped:
            shaped["token_ids"] = choice.get("token_ids")
        return shaped

    def _count(self, usage: dict[str, Any]) -> None:
        answer = self._said + usage.get("completion_tokens", 0)
        usage |= {
            "prompt_tokens": self._prompt,
            "completion_tokens": answer,
            "total_tokens": self._prompt + answer,
        }
        if usage.get("prompt_tokens_details"):
            # The tokens that the second engine had cached are the work of the first engine.
            usage["prompt_tokens_details"] = None if self._cached is None else {"cached_tokens": self._cached}
