"""Messages: a prompt as bytes that do not depend on how a client writes it in JSON.

The next turn of a chat repeats the answer as a message. Clients write that message with other white space,
other escapes, another order of keys, and with fields that no template renders.

Prompts are read in the event loop, or by the parser's child process if they are long. If a prompt has more
parts than messages of usual lengths would have, it is not read, but hashed as it came.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from kv_connector.router.failure import UNREADABLE

# Bytes of a prompt that are looked at. Prompts that differ only behind them count as equal.
LOOKED_AT = 1 << 20

# Most messages, parts and tool calls of a prompt that is read: 1.5 us each. 1 MiB has 2,048 of 512 bytes.
_MOST_PARTS = 2048
_SHORTEST_PART = len('{"role":""},')
# Messages that are read as dicts may have a field for so many bytes on average, and a few in any case. A
# field takes 0.5 us, and a message or a picture as much as eight. Tool calls have 100 bytes a field.
_BYTES_A_FIELD = 32
_FEW_FIELDS = 1024
_FIELDS_A_MESSAGE = 8

# In the URL of a picture within a message, and in a picture of Anthropic's API. A text has \" for a quote.
PICTURE = b";base64,"
_PICTURES = (PICTURE, b'"base64"')
_PICTURE = b"base64"
# The end of a thinking part, which a template may leave out of the next turn.
_THINKING_ENDS = "</think>"

# Claude Code begins its system prompt with a block that differs in each request. vLLM 0.32 does not render
# it: entrypoints/anthropic/serving.py drops such blocks of `system`, and renderers/chat_utils.py drops such a
# line at the beginning of a system message.
_BILLING = "x-anthropic-billing-header"

# Most bytes of messages that are searched for other parts than text. A million tokens of text are 4 MiB; as
# objects, 4 MiB of `{}` are 60 MiB.
_LONGEST_CHAT = 4 << 20
_TEXT_TYPES = ("text", "input_text", "refusal")

_BETWEEN = "\0"
_BETWEEN_PARTS = "\x1e"
# Fields that identify an item and that no template renders. Clients of Anthropic's API set `cache_control` at
# another message in each turn.
_NOT_RENDERED = frozenset(("id", "status", "cache_control"))


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message whose bytes do not indicate its number of tokens."""

    digest: bytes
    nbytes: int
    """Bytes of the part in JSON."""


Segment = bytes | Picture
"""A piece of a message: text, or a part that is only compared as a whole."""


class Texts(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as it reads."""

    form: Literal["text", "messages"]
    messages: list[list[Segment]]
    """The segments of each message. A text is one segment."""


class _Part(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    type: Literal["text", "input_text", "output_text"]
    text: str
    # Not rendered.
    annotations: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()
    cache_control: msgspec.Raw = msgspec.Raw()


class Function(msgspec.Struct, gc=False):
    name: str | None = ""
    arguments: str | None = ""


class ToolCall(msgspec.Struct, gc=False):
    function: Function


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
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
        if self.role == "system":
            content = _rendered(content)
        elif not isinstance(content, str):
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


class _Block(msgspec.Struct, gc=False):
    """A block of Anthropic's `system`, of which only the text is rendered."""

    type: str
    text: str | None = None


class _Typed(msgspec.Struct, gc=False):
    type: str


class _Chat(msgspec.Struct, gc=False):
    content: str | list[str | _Typed] | None = None


_MESSAGES = msgspec.json.Decoder(list[ChatMessage])
_MESSAGE = msgspec.json.Decoder(ChatMessage)
_SYSTEM = msgspec.json.Decoder(str | list[_Block])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_DICT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DICTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_TEXT = msgspec.json.Decoder(str)
_CHAT = msgspec.json.Decoder(list[_Chat])


def read(name: str, raw: bytes | msgspec.Raw) -> Texts | None:
    """Returns a prompt as it reads; None if it is too long, has too many parts, or has another shape.

    ``name``: its field, one of PASSED_ON.
    """
    data = bytes(raw)
    if len(data) > LOOKED_AT:
        return None
    try:
        if name == "prompt":
            return Texts("text", [[_encode(_TEXT.decode(data))]])
        if name == "system":
            return Texts("messages", [[message.encode()] for message in _system(data)])
        if name == "input" and data.lstrip()[:1] == b'"':
            return Texts("messages", [[ChatMessage(role="user", content=_TEXT.decode(data)).encode()]])
        messages = _messages(data)
    except UNREADABLE:
        return None
    return None if messages is None else Texts("messages", messages)


def only_text(messages: msgspec.Raw) -> bool:
    """Returns whether the messages of a chat are text alone, as far as they can be read.

    A chat of 26,000 words takes 50 us.
    """
    if len(memoryview(messages)) > _LONGEST_CHAT:
        return False
    try:
        parts = [
            part
            for message in _CHAT.decode(messages)
            if isinstance(message.content, list)
            for part in message.content
        ]
    except UNREADABLE:
        return False
    return all(isinstance(part, str) or part.type in _TEXT_TYPES for part in parts)


def _messages(data: bytes) -> list[list[Segment]] | None:
    """Returns the segments of each message of a JSON list; None if the list has too many parts."""
    try:
        messages = _MESSAGES.decode(data)
    except UNREADABLE:
        items = _ITEMS.decode(data)
        budget = _Budget(max(_FEW_FIELDS, len(data) // _BYTES_A_FIELD))
        return None if len(items) > _MOST_PARTS else [_segments(item, budget) for item in items]
    if len(data) > _SHORTEST_PART * _MOST_PARTS and sum(map(_parts, messages)) > _MOST_PARTS:
        return None
    return [[message.encode()] for message in messages]


def _parts(message: ChatMessage) -> int:
    content = message.content
    return 1 + (len(content) if isinstance(content, list) else 0) + len(message.tool_calls or ())


def _system(data: bytes) -> list[ChatMessage]:
    """Returns Anthropic's `system` as the message that vLLM makes of it. No message: nothing is rendered."""
    said = _SYSTEM.decode(data)
    if not isinstance(said, str):
        if len(said) > _MOST_PARTS:
            raise msgspec.ValidationError(f"more than {_MOST_PARTS} blocks")
        texts = (block.text for block in said if block.type == "text" and block.text)
        said = "".join(text for text in texts if not text.startswith(_BILLING))
    return [ChatMessage(role="system", content=said)] if said else []


def _rendered(content: str | list[_Part] | None) -> str:
    """Returns the content of a system message without the lines that vLLM drops."""
    found = []
    for text in (content,) if isinstance(content, str) else (part.text for part in content or ()):
        if text.startswith(_BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
        found.append(text)
    return _BETWEEN_PARTS.join(found)


class _Budget:
    """Counts the fields of messages that are read as dicts."""

    def __init__(self, fields: int) -> None:
        self._left = fields

    def take(self, fields: int) -> None:
        """Counts so many fields; ValidationError if they are too many."""
        self._left -= fields
        if self._left < 0:
            raise msgspec.ValidationError("too many fields")


def _segments(item: msgspec.Raw, budget: _Budget) -> list[Segment]:
    """Returns the segments of a message that may have fields or parts that ChatMessage does not have."""
    try:
        return [_MESSAGE.decode(item).encode()]
    except UNREADABLE:
        fields = _DICT.decode(item)
    budget.take(_FIELDS_A_MESSAGE + len(fields))
    found: list[Segment] = []
    texts: list[bytes] = []
    for key in sorted(fields):
        if key in _NOT_RENDERED:
            continue
        texts.append(key.encode())
        for part in _parts_of(fields[key], budget):
            if _PICTURE in part and any(mark in part for mark in _PICTURES):
                budget.take(_FIELDS_A_MESSAGE)
                found += (b"".join(texts), Picture(blake2b(part, digest_size=16).digest(), len(part)))
                texts.clear()
            else:
                texts.append(part)
    return [*found, b"".join(texts)]


def _parts_of(value: msgspec.Raw, budget: _Budget) -> list[bytes]:
    """Returns the parts of a field of a message, or the field itself if it has no parts."""
    data = bytes(value)
    if data[:1] != b"[":
        return [data]
    try:
        parts = _DICTS.decode(data)
    except UNREADABLE:
        return [data]
    budget.take(len(parts) + sum(map(len, parts)))
    return [b"".join([part[key] for key in sorted(part) if key not in _NOT_RENDERED]) for part in parts]


def _encode(text: str) -> bytes:
    return text.encode(errors="replace")
