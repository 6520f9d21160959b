"""EarlyToken: the token that the prefill engine sampled behind the prompt. A client that gets it need not
wait until the decode engine has the prompt's pages.

The prefill engine answers with a stream of one token. The decode engine continues with that token, so its
stream begins with the same text. The client gets this text from the prefill engine, and all that follows from
the decode engine. The text to leave out is found by comparison, and also by its token id if the client wants
ids. Events are never counted, because a server may put several tokens into one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_connector.router.failure import UNREADABLE, reported_failure
from kv_connector.router.requests.events import END, data_of

# An answer has only one creation time. In a generated text the quotes would be escaped.
_CREATED = re.compile(rb'("created": ?)\d+')
# As vLLM writes it: in the choice of a completion, beside the choice of a chat. In a text the quotes would be
# escaped.
_PROMPT_IDS = b'"prompt_token_ids":['
# Where an event's text is: in a completion's choice, and in a chat's delta.
_TEXTS = ("text", "content", "reasoning", "reasoning_content")
# First characters of the marks of reasoning that vLLM's parsers look for. Requests with tools are left out.
MARKS = "<[|"
# A tokenizer's decoder returns this character if some of a character's bytes are missing.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Mismatch(ValueError):
    """The decode engine began with another text than the client already has."""


@dataclass(frozen=True)
class EarlyToken:
    events: bytes
    """Events for the client."""
    key: str
    text: str
    tokens: tuple[int, ...]
    """The token's id, if the client wants ids."""
    created: int | None


class PrefillStream:
    """Reads the prefill engine's answer, event by event."""

    def __init__(self) -> None:
        self._opening = b""  # events that name the role
        self._over = False  # whether the event with a token has come
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        """Tokens of the prompt that the prefill engine had in its prefix cache. This and ``prompt_tokens``
        are None if it does not report them."""

    def feed(self, events: bytes) -> EarlyToken | None:
        """Returns the token if these events have it and it can be passed on. Failure if the engine reports an
        error."""
        token = None
        for event in events.split(END):
            said = _said(event)
            if said is None:
                continue
            if isinstance(problem := said.get("error"), dict):
                raise reported_failure(problem, data_of(event))
            self._count(said)
            choice = _choice(said)
            if choice is None or self._over:
                continue
            texts = [(key, text) for key, text in _texts(choice) if text]
            tokens = tuple(choice.get("token_ids") or ())
            if not texts and not tokens and choice.get("finish_reason") is None:
                self._opening += event + END
                continue
            self._over = True
            if _plain(choice) and (len(texts) == 1 or (tokens and not texts)):
                key, text = texts[0] if texts else ("text" if "text" in choice else "content", "")
                if not _sure(key, text) or choice.get("finish_reason") == "stop":
                    continue
                # The end at this token is the prefill engine's limit, not the end of the answer.
                choice |= {"finish_reason": None}
                if "stop_reason" in choice:
                    choice["stop_reason"] = None
                created = said.get("created")
                begun = created if isinstance(created, int) else None
                said.pop("system_fingerprint", None)  # vLLM writes it in a last event only
                token = EarlyToken(self._opening + _event(said), key, text, tokens, begun)
        return token

    def _count(self, said: dict[str, Any]) -> None:
        usage = said.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int):
            self.cached_tokens = cached
        if isinstance(tokens := usage.get("prompt_tokens"), int):
            self.prompt_tokens = tokens


class Rest:
    """Removes from the decode engine's answer what the client already has."""

    def __init__(self, early: EarlyToken) -> None:
        self._early = early
        self._left = early.text
        self._tokens = early.tokens

    def of(self, events: bytes) -> bytes:
        """Returns what the client still has to get of these whole events; raises Mismatch."""
        if self._left or self._tokens:
            events = b"".join(map(self._behind, events.split(END)))
        if self._early.created is None:
            return events
        return _CREATED.sub(rb"\g<1>%d" % self._early.created, events)

    def _behind(self, event: bytes) -> bytes:
        said = _said(event)
        choice = None if said is None else _choice(said)
        if said is None or choice is None or not (self._left or self._tokens):
            return event + END if event else b""
        self._cut_tokens(choice)
        key = self._early.key
        texts = dict(_texts(choice))
        text = texts.pop(key, "")
        more = any(texts.values())  # in one event with the end of the other text: allowed only after that end
        if not _plain(choice) or (more and not text.startswith(self._left)):
            raise _other_beginning(said["choices"], repr(self._left))
        if text.startswith(self._left):
            rest, self._left = text[len(self._left) :], ""
        elif self._left.startswith(text):
            rest, self._left = "", self._left[len(text) :]
        else:
            raise _other_beginning(repr(text), repr(self._left))
        if choice.get("finish_reason") is None:
            if not (rest or more or choice.get("token_ids")):
                return b""  # a role alone too: the client has it already
        elif self._left or self._tokens:
            raise Mismatch(f"the answer ended before {self._left!r}")
        if text:
            (choice if key == "text" else choice["delta"])[key] = rest
        return _event(said)

    def _cut_tokens(self, choice: dict[str, Any]) -> None:
        tokens = choice.get("token_ids") or []
        if not self._tokens or not tokens:
            return
        same = min(len(tokens), len(self._tokens))
        if tuple(tokens[:same]) != self._tokens[:same]:
            raise _other_beginning(tokens, list(self._tokens))
        self._tokens = self._tokens[same:]
        choice["token_ids"] = tokens[same:]
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # the prefill engine's events had them


def _other_beginning(begun: object, sampled: object) -> Mismatch:
    return Mismatch(f"the decode engine began with {begun} where the prefill engine had sampled {sampled}")


def _said(event: bytes) -> dict[str, Any] | None:
    """Decodes an event; None if it is not a JSON object. The prompt's token ids stay JSON.

    To make objects of 7,000 ids, and JSON of these objects, takes half a millisecond, for which a client
    would wait.
    """
    data, ids = data_of(event), msgspec.Raw(b"[]")
    begin = data.find(_PROMPT_IDS) + len(_PROMPT_IDS)
    if begin >= len(_PROMPT_IDS) and (end := data.find(b"]", begin)) >= 0:
        ids = msgspec.Raw(b"[%b]" % data[begin:end])
        data = data[:begin] + data[end:]
    try:
        said = msgspec.json.decode(data)
    except UNREADABLE:
        return None  # [DONE], or not written by vLLM
    if not isinstance(said, dict):
        return None
    for holder in (said, _choice(said) or {}):
        if holder.get("prompt_token_ids") == []:
            holder["prompt_token_ids"] = ids
    return said


def _sure(key: str, text: str) -> bool:
    """Returns whether the decode engine will send this text too.

    The prefill engine's text is the end of its answer, so its server holds nothing back. The decode engine's
    server may hold back text that could still change: an incomplete character. In a chat it may also hold
    back the possible beginning of a mark that its parsers look for, or white space before it.
    """
    if _INCOMPLETE in text:
        return False
    return key == "text" or not text or (bool(text.strip()) and not any(mark in text for mark in MARKS))


def _choice(said: dict[str, Any]) -> dict[str, Any] | None:
    choices = said.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    return choices[0]


def _texts(choice: dict[str, Any]) -> list[tuple[str, str]]:
    delta = choice.get("delta")
    source = delta if isinstance(delta, dict) else choice
    return [(key, text) for key in _TEXTS if isinstance(text := source.get(key), str)]


def _plain(choice: dict[str, Any]) -> bool:
    """Returns whether the choice has text and nothing else, such as a tool call."""
    delta = choice.get("delta")
    return not isinstance(delta, dict) or not any(
        value for key, value in delta.items() if key not in (*_TEXTS, "role")
    )


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(said) + END
