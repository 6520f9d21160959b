"""Canaries: prompts with a code that no other prompt has, so that another prompt's answer is recognised."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

Prompt = str | tuple[int, ...]

# Ordinary words, which any tokenizer splits into few tokens.
_WORDS = (
    "river",
    "stone",
    "garden",
    "winter",
    "letter",
    "bridge",
    "market",
    "candle",
    "forest",
    "window",
    "silver",
    "harbor",
    "meadow",
    "copper",
    "thunder",
    "island",
    "mirror",
    "ladder",
    "blanket",
    "orchard",
    "anchor",
    "kettle",
    "marble",
    "saddle",
    "lantern",
    "pepper",
    "velvet",
    "cottage",
    "feather",
    "compass",
    "barrel",
    "whistle",
)
WORDS_IN_SENTENCE = 8
# End of each prompt. A trained model continues it with the code.
END = "\nThe code once more:"
# Words of the two lengths of prompts that are given as text.
SHORT_WORDS = 12


class Route(StrEnum):
    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Route.CHAT else "/v1/completions"


class Cache(StrEnum):
    """The part of the prompt that a prefix cache may hold when the prompt is sent."""

    MISS = "miss"
    HALF = "half"
    HIT = "hit"


@dataclass(frozen=True)
class Canary:
    """One prompt. Its answer must not depend on who computes it."""

    number: int
    route: Route
    prompt: Prompt
    code: str
    cache: Cache
    """MISS, or HALF: an earlier canary has the same first half."""

    def __str__(self) -> str:
        length = f"{len(self.prompt)} {'tokens' if self.route is Route.TOKENS else 'characters'}"
        return f"canary {self.number} ({self.route.value}, {length})"


@dataclass(frozen=True)
class Tokenized:
    """A text of the model's own tokens, from the reference's tokenizer."""

    tokens: tuple[int, ...]
    end: tuple[int, ...]
    """Tokens of the end of a prompt, without special tokens."""


def lengths(block: int, longest: int) -> list[int]:
    """Returns prompt lengths at block boundaries: one token below, at, and above, for few, some and many
    blocks. The longest one has at most `longest` tokens."""
    most = max((longest - 1) // block, 1)
    some = max(round(most**0.5), 1)
    counts = sorted({1, some, most})
    return [n for count in counts for n in range(count * block - 1, count * block + 2) if 1 < n <= longest]


class Maker:
    """Makes the canaries of one run. Equal salts give equal prompts."""

    def __init__(self, salt: str) -> None:
        self._random = random.Random(salt)
        self._codes: set[str] = set()
        self._number = 0

    def code(self) -> str:
        """Returns a code that no other canary of the run has."""
        while True:
            number, words = self._random.randrange(1000, 10000), self._random.sample(_WORDS, 2)
            code = f"{number}-{'-'.join(words)}"
            if code not in self._codes:
                self._codes.add(code)
                return code

    def text(self, code: str, words: int, *, end: bool = True) -> str:
        """Returns a text of about this many words that begins with the code."""
        filler = self._random.choices(_WORDS, k=max(words, 1))
        sentences = [
            " ".join(filler[at : at + WORDS_IN_SENTENCE]) for at in range(0, len(filler), WORDS_IN_SENTENCE)
        ]
        return f"{code} is the code. {'. '.join(sentences)}.{END if end else ''}"

    def of_tokens(self, code: str, length: int, tokenized: Tokenized, first: Canary | None = None) -> Canary:
        """Returns a canary of exactly `length` tokens. `first`: the canary whose first half it shares."""
        half: Sequence[int] = ()
        if first is not None:
            half = first.prompt[: length // 2] if isinstance(first.prompt, tuple) else ()
        room = length - len(half) - len(tokenized.end)
        if room > len(tokenized.end):
            own = (*tokenized.tokens[:room], *tokenized.end)
        else:
            own = tokenized.tokens[: length - len(half)]
        return self._next(Route.TOKENS, (*half, *own), code, first)

    def of_text(self, route: Route, code: str, words: int, first: Canary | None = None) -> Canary:
        text = self.text(code, words)
        if first is not None and isinstance(first.prompt, str):
            text = first.prompt[: len(first.prompt) // 2] + " " + text
        return self._next(route, text, code, first)

    def _next(self, route: Route, prompt: Prompt, code: str, first: Canary | None) -> Canary:
        self._number += 1
        return Canary(self._number, route, prompt, code, Cache.MISS if first is None else Cache.HALF)
