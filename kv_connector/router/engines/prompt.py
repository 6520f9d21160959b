"""Prompt: what a router can learn about a request's prompt without a tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import msgspec
import numpy as np

from kv_connector.router.bodies.fields import Shapes

# About 256 tokens of text, which a GPU computes in milliseconds. Shorter hits are not worth counting.
PREFIX_BYTES = 1024

# Bytes of a prompt that are hashed. Prompts that differ only behind them count as equal.
_LOOKED_AT = 1 << 20

# Average of common tokenizers for English text, used until answers give a better value.
PRIOR_BYTES_PER_TOKEN = 4.0
# Lowest and highest value: prompts of nothing but rare characters, and of nothing but spaces or pictures.
_BYTES_PER_TOKEN = (1.0, 16.0)

# Models with a learned size. Fine-tunings, each with its own name, may come and go.
_MODELS = 4096

_FIELD = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
# Fields that templates put before the prompt.
_BEFORE = ("tools", "system", "instructions")
# If one of these fields differs, the same prompt has other KV, or other tokens. How the answer is sampled
# does not matter, nor which part of it is returned.
_ELSE = (
    "model",
    "cache_salt",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "previous_response_id",
)

_PICTURE = b";base64,"

# A piece's hash is the sum of its 32-bit words, each times its own random 64-bit number. That is twice as
# fast as hash(). Two different pieces have the same hash with a probability of 2**-33 at most.
_KEYS = np.random.default_rng().integers(0, 1 << 64, size=PREFIX_BYTES // 4, dtype=np.uint64)


@dataclass(frozen=True)
class Prompt:
    """The facts about a request's prompt that a policy sees."""

    model: str
    size: int
    """Bytes as the client wrote them, with the tools and the system prompt that stand before the prompt."""
    tokens: int | None
    """Number of tokens, if the prompt is a list of token ids; None: it is text."""
    prefixes: tuple[int, ...]
    """Hashes of the first PREFIX_BYTES bytes, of twice as many, and so on, without the remainder. Requests
    for different KV differ in the first hash already. Different processes have different hashes."""
    pictures: bool = False
    """Whether the prompt has pictures: its bytes do not indicate its number of tokens."""

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], shapes: Shapes) -> Self:
        """Reads a request's prompt. ``body``: the prompt in it is a msgspec.Raw. ``shapes``: the shapes of
        its values."""
        field = _FIELD.get(path, "prompt")
        raw = body.get(field, msgspec.Raw())
        before = [body[key] for key in _BEFORE if body.get(key)]
        head = msgspec.json.encode([_beginning(value) for value in before]) if before else b""
        unseen = sum(
            len(memoryview(value)[_LOOKED_AT:]) for value in before if isinstance(value, msgspec.Raw)
        )
        whole = memoryview(raw)
        looked_at = whole[:_LOOKED_AT]
        text = b"".join((head, looked_at)) if before else raw

        def known(key: str) -> Any:
            value = body.get(key)
            if isinstance(value, msgspec.Raw):
                return shapes.of(key, value).digest
            return value

        tokens = shapes.of(field, raw).tokens
        model = body.get("model")
        return cls(
            model if isinstance(model, str) else "",
            len(head) + unseen + len(whole),
            tokens,
            _prefixes(hash(msgspec.json.encode([path, *map(known, _ELSE)])), text),
            tokens is None and _PICTURE in bytes(looked_at),
        )


class TokenSizes:
    """Bytes of a prompt per token, by model, learned from answers."""

    def __init__(self) -> None:
        self._sizes: dict[str, float] = {}  # in the order in which they were first learned

    def tokens(self, prompt: Prompt) -> int:
        """Returns the prompt's number of tokens: exact for a list of token ids, else a forecast. At
        least 1."""
        if prompt.tokens is not None:
            return prompt.tokens
        return max(1, round(prompt.size / self._sizes.get(prompt.model, PRIOR_BYTES_PER_TOKEN)))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """Learns from a prompt for which an engine has counted so many tokens."""
        if prompt.tokens is not None or tokens < 1:
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
    return msgspec.Raw(memoryview(value)[:_LOOKED_AT]) if isinstance(value, msgspec.Raw) else value


def _prefixes(seed: int, text: bytes) -> tuple[int, ...]:
    # The last byte closes a list or a string. If the prompt has grown, another byte stands there.
    pieces = min(len(memoryview(text)) - 1, _LOOKED_AT) // PREFIX_BYTES
    if pieces < 1:
        return ()
    words = np.frombuffer(text, np.uint32, pieces * len(_KEYS)).reshape(pieces, -1)
    sums = np.einsum("ij,j->i", words, _KEYS).tolist()
    return tuple(accumulate(sums, lambda before, piece: hash((before, piece)), initial=seed))[1:]
