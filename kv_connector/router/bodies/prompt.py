"""Prompt: what a router can learn about a request's prompt without a tokenizer.

Texts and messages are hashed as they read, not as a client writes them in JSON (messages.py). Lists of token
ids, and prompts over 1 MiB, are hashed as the client wrote them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

import msgspec

from kv_connector.router.bodies.fields import Shapes, is_nothing
from kv_connector.router.bodies.messages import LOOKED_AT, PICTURE, ChatMessage, Picture, Segment, Texts

# About 256 tokens of text, which a GPU computes in milliseconds. Shorter hits are not worth counting.
PREFIX_BYTES = 1024

# The same for lists of token ids: about 50 tokens. In a chat, each message ends a prefix. In a list, the end
# of an answer, from which the next turn goes on, is only known to such a piece.
ID_PREFIX_BYTES = 256

# Most prefixes of one prompt: those of LOOKED_AT bytes, and as many that end with a message. Each takes 80
# bytes of memory, so all take 160 KiB at most, and 0.5 us to hash. Those of token ids take
# 480 KiB, with their counts. Counting takes 0.15 ms for 128 KiB (2026-11-30).
_MOST_PREFIXES = 2 * LOOKED_AT // PREFIX_BYTES
_MOST_ID_PREFIXES = LOOKED_AT // ID_PREFIX_BYTES

# Average of common tokenizers for English text, used until answers give a better value.
PRIOR_BYTES_PER_TOKEN = 4.0
# Lowest and highest value: prompts of nothing but rare characters, and of nothing but spaces or pictures.
_BYTES_PER_TOKEN = (1.0, 16.0)

# Models with a learned size. Fine-tunings, each with its own name, may come and go.
_MODELS = 4096

# A client writes all lists of token ids alike: compactly, or as Python's json does.
_SEPARATOR = re.compile(rb"\[\d+(,|, )\d")

_FIELD = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
# Fields that templates put before the prompt, besides `system`.
_BEFORE = ("tools", "instructions")
_SYSTEM = "system"
# If one of these fields differs, the same prompt has other KV, or other tokens. How the answer is sampled
# does not matter, nor which part of it is returned.
_ELSE = (
    "model",
    "cache_salt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "output_config",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "previous_response_id",
)

# Bytes that a picture counts for: 1,000 tokens at the prior. Models of 2026 have 256 to 2,500 for one.
_PICTURE_BYTES = 4000


class PromptTail(NamedTuple):
    """The end of a prompt, from which an answer continues it."""

    last: int
    """Hash of the last prefix, or the seed of the hashes if there is none."""
    rest: bytes
    """Bytes behind the last prefix."""
    form: str
    """Form of the prompt: "messages", "text", or the separator of a list of token ids. Empty: no answer
    continues it."""


class _Chain:
    """Hashes of a prompt that grows.

    Python's hash() is keyed by this process, and takes 0.45 us for 1 KiB (Intel Xeon, 2026-11-29).
    """

    def __init__(self, last: int, size: int = 0, *, before: int = 0, ids: bool = False) -> None:
        """``before``: number of prefixes that the prompt has already. ``ids``: it is a list of token ids."""
        self.last = last
        self.size = size
        self._ids = ids
        self._piece = ID_PREFIX_BYTES if ids else PREFIX_BYTES
        self.rest = b""
        self.prefixes: list[int] = []
        self.ends: list[int] = []
        self.counts: list[int] = []
        """Whole ids in each piece of a list of token ids. Empty: it is no such list."""
        self.pictures = False
        self._most = (_MOST_ID_PREFIXES if ids else _MOST_PREFIXES) - before

    def add(self, data: bytes) -> None:
        """Adds bytes that a later prompt may continue: only whole pieces become prefixes."""
        begin = self.size - len(self.rest)
        self.size += len(data)
        if self.rest:
            data = self.rest + data
        whole = max(0, min(len(data), LOOKED_AT - begin)) // self._piece * self._piece
        self._put(data, whole, begin)
        # Behind the limit, no more prefixes follow.
        self.rest = data[whole:] if len(data) - whole < self._piece else b""

    def close(self) -> None:
        """Makes a prefix end here: the next bytes belong to another message."""
        if self.rest and self.size <= LOOKED_AT:
            self._end(self.rest)
        self.rest = b""

    def message(self, message: list[Segment]) -> None:
        """Adds a message behind a closed one."""
        for segment in message:
            if isinstance(segment, Picture):
                self.pictures = True
                self.close()
                self.size += min(segment.nbytes, _PICTURE_BYTES)
                self._end(segment)
            elif self.rest or self.size + len(segment) > LOOKED_AT or len(message) > 1:
                self.add(segment)
            else:  # the same in one step
                self._put(segment, len(segment), self.size)
                self.size += len(segment)
        self.close()

    def _put(self, data: bytes, length: int, begin: int) -> None:
        """Adds prefixes that end with the pieces of so many bytes of ``data``, which are behind ``begin``
        bytes of the prompt."""
        last, prefixes, ends, piece = self.last, self.prefixes, self.ends, self._piece
        stop = min(length, piece * (self._most - len(prefixes)))
        end = begin
        for at in range(0, stop, piece):
            last = hash((last, data[at : at + piece]))
            end += piece
            prefixes.append(last)
            ends.append(end)
        if self._ids:
            self.counts += [data.count(b",", at, at + piece) for at in range(0, stop, piece)]
        if end > begin + length:  # the last piece is shorter
            ends[-1] = begin + length
        self.last = last

    def _end(self, piece: Segment) -> None:
        """Adds a prefix that ends here, with this piece."""
        if len(self.prefixes) < self._most:
            self.last = hash((self.last, piece))
            self.prefixes.append(self.last)
            self.ends.append(self.size)


@dataclass(frozen=True)
class Prompt:
    """The facts about a request's prompt that a policy sees."""

    model: str
    size: int
    """Bytes of the prompt as it is hashed, with the tools and the system prompt that stand before it."""
    tokens: int | None
    """Number of tokens, if the prompt is a list of token ids; None: it is text."""
    prefixes: tuple[int, ...]
    """Hashes of the beginnings of the prompt. A prefix ends PREFIX_BYTES behind the one before (of token ids:
    ID_PREFIX_BYTES), or with a message. Requests for different KV differ in the first hash already. Different
    processes have different hashes."""
    pictures: bool = False
    """Whether the prompt has pictures: its bytes do not indicate its number of tokens."""
    ends: tuple[int, ...] = field(default=(), compare=False)
    """Bytes of each prefix."""
    counts: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Whole token ids in each prefix of a list of token ids. Empty: the prompt is no such list, or something
    else stands before it."""
    tail: PromptTail = field(default=PromptTail(0, b"", ""), compare=False, repr=False)
    cut: bool = False
    """Whether the engine may drop a part of the prompt, and compute another beginning. Such a prompt has no
    prefixes."""

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], shapes: Shapes) -> Self:
        """Reads a request's prompt, as _read() does. Of a prompt that the engine may cut, only its size."""
        prompt = cls._read(path, body, shapes)
        if _is_cut(path, body):
            return replace(prompt, prefixes=(), ends=(), counts=(), tail=PromptTail(0, b"", ""), cut=True)
        return prompt

    @classmethod
    def _read(cls, path: str, body: Mapping[str, Any], shapes: Shapes) -> Self:
        """Reads a request's prompt. ``body``: the prompt in it is a msgspec.Raw. ``shapes``: the shapes of
        its values. 25 KiB in 18 messages take 0.09 ms (Intel Xeon, busy, 2026-11-29)."""
        name = _FIELD.get(path, "prompt")
        raw = body.get(name, msgspec.Raw())
        whole = memoryview(raw)

        def known(key: str) -> Any:
            value = body.get(key)
            if isinstance(value, msgspec.Raw):
                return shapes.of(key, value).digest
            return value

        tokens = shapes.of(name, raw).tokens
        model = body.get("model")
        seed = hash(msgspec.json.encode([path, *map(known, _ELSE)]))
        chain = _Chain(seed, ids=tokens is not None)
        unseen = _add_head(chain, body, shapes)
        head = chain.size
        texts = shapes.texts(name, raw) if tokens is None else None
        form = ""
        if texts is not None:
            _add(chain, texts)
            form = texts.form
        else:
            looked_at = bytes(whole[:LOOKED_AT])
            if tokens is None and PICTURE in looked_at:
                chain.pictures = True
                chain.size += min(len(whole), looked_at.count(PICTURE) * _PICTURE_BYTES)
            else:
                # The last byte closes a list or a string. If the prompt has grown, another byte stands there.
                inside = looked_at[:-1] if len(whole) <= LOOKED_AT else looked_at
                chain.add(inside)
                chain.size += len(whole) - len(inside)
                if tokens is not None and len(whole) <= LOOKED_AT:
                    form = _separator(looked_at)
        return cls(
            model if isinstance(model, str) else "",
            chain.size + unseen,
            tokens,
            tuple(chain.prefixes),
            chain.pictures,
            tuple(chain.ends),
            () if head else tuple(accumulate(chain.counts)),
            PromptTail(chain.last, chain.rest if form else b"", form),
        )

    @property
    def measurable(self) -> bool:
        """Whether the prompt's bytes indicate its number of tokens."""
        return not (self.pictures or self.cut)

    def bytes_of(self, prefixes: int) -> int:
        """Returns the bytes of the first so many prefixes."""
        return self.ends[prefixes - 1] if prefixes else 0

    def end_behind(self, nbytes: int) -> int:
        """Returns the bytes of the shortest prefix that is longer than so many bytes."""
        behind = bisect_right(self.ends, nbytes)
        return self.ends[behind] if behind < len(self.ends) else self.size

    @property
    def in_messages(self) -> bool:
        """Whether prefixes end with messages."""
        return self.tail.form == "messages"

    def tokens_of(self, nbytes: int, tokens: int) -> int:
        """Returns the tokens of so many bytes of the prompt, which has ``tokens`` in all.

        In a list of token ids they are counted: messages and answers may have ids of different lengths.
        """
        if self.counts and nbytes < self.size:
            whole = bisect_right(self.ends, nbytes)
            return min(tokens, self.counts[whole - 1]) if whole else 0
        return min(tokens, tokens * nbytes // self.size) if self.size else 0

    def bytes_with(self, cached: int, tokens: int) -> int:
        """Returns the bytes of the first ``cached`` tokens of the prompt, which has ``tokens`` in all, as far
        as they are prefixes."""
        if self.counts:
            return self.bytes_of(bisect_right(self.counts, cached))
        return max(0, min(self.size * cached // tokens, self.bytes_of(len(self.prefixes))))

    def followed_by(self, answer: ChatMessage | str | bytes) -> Prompt:
        """Returns the beginning of the next turn's prompt, which repeats this prompt and its answer.

        ``answer``: a message for a chat, text behind a text, a list of token ids, as JSON without brackets,
        behind token ids. If the answer does not fit the prompt, the result is the prompt itself. A template
        strips the thinking of an answer that thinks aloud, so no later prompt has that answer.
        """
        last, rest, form = self.tail
        chain = _Chain(last, self.size, before=len(self.prefixes), ids=self.tokens is not None)
        chain.rest = rest
        tokens = None
        match answer:
            case ChatMessage() if form == "messages":
                chain.message([answer.encode()])
            case str() if form == "text":
                chain.add(answer.encode(errors="replace"))
            case bytes() if form.startswith(",") and self.tokens is not None:
                chain.size -= 1  # the bracket
                chain.add(b",%b" % answer if form == "," else b", " + answer.replace(b",", b", "))
                chain.size += 1
                tokens = self.tokens + answer.count(b",") + 1
            case _:
                return self
        continued = replace(
            self,
            size=chain.size,
            tokens=tokens,
            prefixes=(*self.prefixes, *chain.prefixes),
            ends=(*self.ends, *chain.ends),
            counts=self._counts_with(chain.counts),
            tail=PromptTail(chain.last, chain.rest, form),
        )
        hidden = isinstance(answer, ChatMessage) and answer.thinks_aloud
        return continued.hidden_behind(self) if hidden else continued

    def hidden_behind(self, beginning: Prompt) -> Prompt:
        """Returns this prompt so that later prompts have only the prefixes of its beginning. The rest takes
        room in a cache."""
        before = len(beginning.prefixes)
        # A part that is hidden twice stays hidden: the inverse of the inverse would be the prefix itself.
        hidden = (hash((one, None)) for one in self.prefixes[before:])
        return replace(self, prefixes=(*self.prefixes[:before], *hidden))

    def _counts_with(self, more: list[int]) -> tuple[int, ...]:
        if self.tokens is None or len(self.counts) != len(self.ends):
            return ()
        counted = self.counts[-1] if self.counts else 0
        return (*self.counts, *(counted + ids for ids in accumulate(more)))


def _add_head(chain: _Chain, body: Mapping[str, Any], shapes: Shapes) -> int:
    """Adds what stands before the prompt. Returns the bytes that are not looked at."""
    before = [body[key] for key in _BEFORE if body.get(key)]
    system = body.get(_SYSTEM)
    texts = None
    if isinstance(system, msgspec.Raw) and not is_nothing(system):
        texts = shapes.texts(_SYSTEM, system)
        if texts is None:
            before.append(system)
    if before:
        chain.add(msgspec.json.encode([_beginning(value) for value in before]))
        chain.close()
    if texts is not None:
        _add(chain, texts)
    return sum(len(memoryview(value)[LOOKED_AT:]) for value in before if isinstance(value, msgspec.Raw))


def _add(chain: _Chain, texts: Texts) -> None:
    """Adds a prompt as it reads."""
    if texts.form == "text":
        (text,) = texts.messages[0]
        assert isinstance(text, bytes)
        chain.add(text)
        return
    for message in texts.messages:
        chain.message(message)


def _is_cut(path: str, body: Mapping[str, Any]) -> bool:
    """Returns whether the request lets vLLM drop a part of the prompt, by default its beginning."""
    # vLLM takes null of /v1/responses for "auto".
    responses = path == "/v1/responses" and body.get("truncation", "disabled") != "disabled"
    return responses or body.get("truncate_prompt_tokens") is not None


def _separator(ids: bytes) -> str:
    """Returns the separator of a list of token ids; "" for a list in a list, or if the client wrote it
    otherwise."""
    found = _SEPARATOR.match(ids)
    return found[1].decode() if found else ""


class TokenSizes:
    """Bytes of a prompt per token, by model, learned from answers."""

    def __init__(self) -> None:
        self._sizes: dict[str, float] = {}  # in the order in which they were first learned
        self.typical = 0.0
        """Tokens of recent prompts, on average."""

    def tokens(self, prompt: Prompt) -> int:
        """Returns the prompt's number of tokens: exact for a list of token ids, else a forecast. At
        least 1."""
        if prompt.tokens is not None:
            return prompt.tokens
        return max(1, round(prompt.size / self._sizes.get(prompt.model, PRIOR_BYTES_PER_TOKEN)))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Learns from a prompt for which an engine has counted so many tokens."""
        if tokens < 1:
            return
        self.typical += (tokens - self.typical) / 8
        if prompt.tokens is not None or not prompt.measurable:
            return
        size = self._sizes.get(prompt.model)
        if size is None:
            if len(self._sizes) == _MODELS:
                del self._sizes[next(iter(self._sizes))]
            size = PRIOR_BYTES_PER_TOKEN
        # Long prompts weigh more: the template is a large part of a short prompt, and a short prompt costs
        # little.
        weight = min(max(prompt.size / 65536, 1 / 64), 1 / 4)
        self._sizes[prompt.model] = size + weight * (bytes_per_token(prompt, tokens) - size)


def bytes_per_token(prompt: Prompt, tokens: int) -> float:
    """Returns the bytes per token of a prompt, limited to values that are possible for text."""
    least, most = _BYTES_PER_TOKEN
    return min(max(prompt.size / tokens, least), most)


def _beginning(value: Any) -> Any:
    """Cuts a long value to the bytes that prefixes are made of."""
    return msgspec.Raw(memoryview(value)[:LOOKED_AT]) if isinstance(value, msgspec.Raw) else value
