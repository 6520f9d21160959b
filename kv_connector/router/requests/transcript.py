"""Transcript: the text of an answer, in the form in which its conversation's next turn will repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kv_connector.router.bodies.messages import ChatMessage, Function, ToolCall
from kv_connector.router.failure import UNREADABLE
from kv_connector.router.requests.events import END, data_of
from kv_connector.router.requests.token_counts import cached_tokens, prompt_tokens

# Bytes of events that are kept until they are read: about 16 events of a chat, read together in 30 us.
_AT_ONCE = 4 << 10
# Characters of one answer that are kept: about 16,000 tokens of text. A longer answer is known up to there.
_MOST_OF_ONE = 64 << 10
# Characters of all answers in flight that are kept. 16,000 streams have 2,000 characters each.
MOST_IN_ALL = 32 << 20
# Bytes of a whole answer that is read. It has the form of a stream's text with more fields.
_LONGEST = 1 << 20

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Said:
    """The facts about an answer that show what its engine has cached. None: not known."""

    answer: ChatMessage | str | None = None
    """The answer as the next turn repeats it: a message of a chat, or text."""
    ids: bytes = b""
    """Token ids of the answer, as JSON without brackets; empty: the client did not request them."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the engine reports as cached."""

    @property
    def calls(self) -> bool:
        """Whether the answer is a message that calls tools."""
        return isinstance(self.answer, ChatMessage) and bool(self.answer.tool_calls)

    @property
    def thinks(self) -> bool:
        """Whether the answer is a message with a thinking part."""
        return isinstance(self.answer, ChatMessage) and bool(self.answer.reasoning)


class Budget:
    """The characters that all answers in flight may still keep."""

    def __init__(self, left: int = MOST_IN_ALL) -> None:
        self.left = left


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int | None = None
    function: _FunctionDelta | None = None


class _Text(msgspec.Struct):
    """A delta or a message of a chat, or a block of Anthropic's API."""

    type: str = ""
    text: str | None = None
    content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    token_ids: list[int] | None = None


class _Item(msgspec.Struct):
    """An item of the output of /v1/responses."""

    type: str = ""
    content: list[_Text] | None = None


class _StreamEvent(msgspec.Struct):
    """An event of a stream, or a whole answer, of any API."""

    type: str = ""
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    delta: str | _Text | None = None
    item: _Item | None = None
    content_block: _Text | None = None
    content: list[_Text] | None = None
    output: list[_Item] | None = None


_EVENT = msgspec.json.Decoder(_StreamEvent)
# Blocks and items whose text is kept; of others the next turn's form is not known.
_KNOWN_BLOCKS = ("", "text", "output_text", "text_delta", "thinking", "thinking_delta", "signature_delta")
_KNOWN_ITEMS = ("message", "reasoning")


class Transcript:
    """Collects one answer while it goes to the client. Used from the event loop's thread only.

    To add a chunk is one append, and the chunks are read every _AT_ONCE bytes: 1.7 us for an event
    (integration/benchmarks/router_decision.py, 2026-11-29).
    """

    def __init__(self, path: str, budget: Budget, *, echo: bool = False) -> None:
        """``echo``: the answer begins with the prompt."""
        self._path = path
        self._budget = budget
        self._chunks: list[bytes] = []
        self._pending = 0
        self._kept = 0
        self._full = echo
        self._odd = echo  # whether the next turn's form of the answer is not known
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[str]] = {}  # {index: [name, arguments, ...]}
        self._ids = bytearray()
        self._usage: dict[str, Any] | None = None

    def add(self, chunk: bytes) -> None:
        """Adds whole events of a stream."""
        self._chunks.append(chunk)
        self._pending += len(chunk)
        if self._pending > _AT_ONCE:
            self._read()

    def whole(self, body: bytes) -> None:
        """Takes an answer that is no stream."""
        if len(body) <= _LONGEST:
            self._take(body)

    def said(self) -> Said:
        """Returns what the answer has shown, after its end."""
        self._read()
        tokens, cached = prompt_tokens(self._usage), cached_tokens(self._usage)
        return Said(self._answer(), bytes(self._ids), tokens, cached)

    def close(self) -> None:
        """Gives back the part of the budget. To be called once, at the end."""
        self._budget.left += self._kept
        self._kept = 0
        self._full = True

    def _answer(self) -> ChatMessage | str | None:
        if self._odd:
            return None
        text = "".join(self._text)
        if self._path == COMPLETIONS:
            return text
        calls = [ToolCall(Function(name, "".join(parts))) for name, *parts in self._calls.values()]
        return ChatMessage(
            role="assistant",
            content=text,
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls or None,
        )

    def _read(self) -> None:
        chunks, self._chunks, self._pending = self._chunks, [], 0
        for event in b"".join(chunks).split(END):
            data = event[6:] if event.startswith(b"data: ") else data_of(event)
            if data.startswith(b"{"):
                self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            event = _EVENT.decode(data)
        except UNREADABLE:
            self._odd = True
            return
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.index == 0 and not self._full:
                self._choose(choice)
        if self._path in (CHAT, COMPLETIONS) or self._full:
            return
        for item in (event.item, *(event.output or ())):
            if item is not None:
                self._odd |= item.type not in _KNOWN_ITEMS
        for part in _parts(event):
            self._add(part)
        if isinstance(event.delta, str):
            (self._reasoning if "reasoning" in event.type else self._text).append(self._keep(event.delta))

    def _choose(self, choice: _Choice) -> None:
        if choice.text:
            self._text.append(self._keep(choice.text))
        for part in (choice.delta, choice.message):
            if part is not None:
                self._add(part)
        if (ids := choice.token_ids) and len(self._ids) < _MOST_OF_ONE:
            before = b"," if self._ids else b""
            self._ids += before + ",".join(map(str, ids)).encode()

    def _add(self, part: _Text) -> None:
        self._odd |= part.type not in _KNOWN_BLOCKS
        if text := part.content or part.text:
            self._text.append(self._keep(text))
        if thought := part.reasoning or part.reasoning_content or part.thinking:
            self._reasoning.append(self._keep(thought))
        for call in part.tool_calls or ():
            if call.function is None:
                continue
            # A stream numbers its calls, and names each once. A whole answer only lists them.
            index = call.index if call.index is not None else len(self._calls)
            parts = self._calls.setdefault(index, [""])
            parts[0] += call.function.name or ""
            parts.append(self._keep(call.function.arguments or ""))

    def _keep(self, text: str) -> str:
        """Counts a text that is kept. The answer ends for the transcript when there is no room."""
        self._kept += len(text)
        self._budget.left -= len(text)
        if self._kept > _MOST_OF_ONE or self._budget.left < 0:
            self._full = True
        return text


def _parts(event: _StreamEvent) -> Iterator[_Text]:
    """Yields the parts with text of an event of Anthropic's API, or of a whole answer."""
    if isinstance(event.delta, _Text):
        yield event.delta
    if event.content_block is not None:
        yield event.content_block
    yield from event.content or ()
    for item in event.output or ():
        if item.type == "message":
            yield from item.content or ()
        elif item.content:
            yield from (_Text(reasoning=part.text) for part in item.content)
