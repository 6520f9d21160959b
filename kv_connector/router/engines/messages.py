"""Messages: the messages of a chat as bytes that do not depend on how a client writes them.

The next turn of a chat repeats the answer as a message. Clients write that message with other white space,
other escapes, another order of keys, and with fields that no template renders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from kv_connector.router.failure import UNREADABLE

# Most messages that become objects: 1 us each, so 4 ms of the event loop. In a text the quotes would be
# escaped.
_ROLE = b'"role"'
_MOST_MESSAGES = 4096
# Most braces, including those in texts, of messages that are read as dicts: 1 us for each pair. 1 MiB of C++
# has 6,000 of them, and 1 MiB of JSON 17,000.
_MOST_BRACES = 8192

# In the URL of a picture within a message.
PICTURE = b";base64,"
# The end of a thinking part, which a template may leave out of the next turn.
_THINKING_ENDS = "</think>"

_BETWEEN = "\0"
_BETWEEN_PARTS = "\x1e"
# Fields that identify an item and that no template renders.
_NOT_RENDERED = ("id", "status")


class Picture(bytes):
    """A part of a message whose bytes do not indicate its number of tokens."""


Segment = bytes | Picture
"""A piece of a message: text, or a part that is only compared as a whole."""


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "input_text", "output_text"]
    text: str
    # Not rendered. Clients of Anthropic's API mark another message in each turn.
    annotations: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    cache_control: msgspec.Raw = msgspec.Raw()


class Function(msgspec.Struct):
    name: str | None = ""
    arguments: str | None = ""


class ToolCall(msgspec.Struct):
    function: Function


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message of text and tool calls. Fields without a docstring are read and not used."""

    role: str
    content: str | list[_Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: msgspec.Raw = msgspec.Raw()
    audio: None = None
    function_call: None = None

    def encode(self) -> bytes:
        """Returns the bytes that stand for the message: role, reasoning, content and tool calls."""
        content = self.content
        if not isinstance(content, str):
            content = _BETWEEN_PARTS.join([part.text for part in content or ()])
        who = f"{self.role}:{self.name}" if self.name else self.role
        texts = [who, self.reasoning or self.reasoning_content or "", content]
        for call in self.tool_calls or ():
            texts += (call.function.name or "", call.function.arguments or "")
        return _BETWEEN.join(texts).encode(errors="replace")

    @property
    def thinks_aloud(self) -> bool:
        """Whether the content has a thinking part, which a template may leave out when it is repeated."""
        return isinstance(self.content, str) and _THINKING_ENDS in self.content


_MESSAGES = msgspec.json.Decoder(list[Message])
_MESSAGE = msgspec.json.Decoder(Message)
_DICTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_FIELDS = frozenset(Message.__struct_fields__)
_TEXT = msgspec.json.Decoder(str)


def segments(raw: bytes) -> list[list[Segment]] | None:
    """Returns the segments of each message of a JSON list; None if the list cannot be read as messages.

    128 KiB of messages take 60 us (Intel Xeon, 2026-11-29).
    """
    if raw.count(_ROLE) > _MOST_MESSAGES:
        return None
    try:
        return [[message.encode()] for message in _MESSAGES.decode(raw)]
    except UNREADABLE:
        pass
    if raw.count(b"{") > _MOST_BRACES:
        return None
    try:
        return [list(_segments(item)) for item in _DICTS.decode(raw)]
    except UNREADABLE:
        return None


def text(raw: bytes) -> str | None:
    """Returns the text of a JSON string; None if it is no string."""
    try:
        return _TEXT.decode(raw)
    except UNREADABLE:
        return None


def _segments(item: Mapping[str, msgspec.Raw]) -> Iterator[Segment]:
    """Yields the segments of a message with fields that Message does not have."""
    if item.keys() <= _FIELDS:
        try:
            yield _MESSAGE.decode(msgspec.json.encode(item)).encode()
            return
        except UNREADABLE:
            pass
    for key in sorted(item.keys() - _NOT_RENDERED):
        value = bytes(item[key])
        yield key.encode()
        if PICTURE not in value:
            yield value
            continue
        try:
            parts = _DICTS.decode(value)
        except UNREADABLE:
            yield Picture(value)
            continue
        for part in parts:
            joined = b"".join(bytes(part[name]) for name in sorted(part))
            yield Picture(joined) if PICTURE in joined else joined
