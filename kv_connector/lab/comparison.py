"""Comparison of greedy answers: where two of them differ first, and whose answer came instead."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Items of both answers that are shown before and after the first difference.
TOKENS_AROUND = 4
CHARACTERS_AROUND = 40
# Equal tokens from which on a common piece of two answers is no coincidence. Short answers must be equal.
LEAST_COMMON = 4


@dataclass(frozen=True)
class Output:
    """One greedy answer."""

    text: str
    tokens: tuple[int, ...] | None = None
    """Token ids; None if the server does not return them."""
    margins: tuple[float | None, ...] = ()
    """Distance of each token's log probability to the next best candidate's, in nats; None: unknown."""

    @property
    def empty(self) -> bool:
        return not self.text and not self.tokens


@dataclass(frozen=True)
class Difference:
    """The first position at which an answer differs from the expected one."""

    unit: Literal["token", "character"]
    position: int
    """Number of equal tokens or characters before it."""
    expected: str
    got: str
    """Text around the position. `expected` and `got` begin at the same character."""
    expected_tokens: tuple[int, ...] = ()
    got_tokens: tuple[int, ...] = ()
    """Token ids around the position; empty if the answers are compared by their texts."""
    margin: float | None = None
    """Margin of the expected token at this position, in nats; None: unknown."""


def first_difference(expected: Output, got: Output) -> Difference | None:
    """Compares by token ids if both answers have them, and then by text. Returns None for equal answers."""
    if expected.tokens is not None and got.tokens is not None and expected.tokens != got.tokens:
        at = common(expected.tokens, got.tokens)
        window = slice(max(0, at - TOKENS_AROUND), at + TOKENS_AROUND)
        return Difference(
            "token",
            at,
            *_texts(expected.text, got.text),
            expected.tokens[window],
            got.tokens[window],
            expected.margins[at] if at < len(expected.margins) else None,
        )
    if expected.text != got.text:
        at = common(expected.text, got.text)
        return Difference("character", at, *_texts(expected.text, got.text))
    return None


def whose(got: Output, position: int, references: Mapping[Key, Output]) -> list[Key]:
    """Returns the keys of the reference answers that `got` equals from `position` on.

    `position` is that of the difference between `got` and its own reference. With position 0 the whole answer
    is another's. A later one is right if only the rest was exchanged.
    """
    found = []
    for key, reference in references.items():
        if reference.tokens is not None and got.tokens is not None:
            mine, theirs = got.tokens, reference.tokens
        else:
            mine, theirs = _characters(got.text), _characters(reference.text)
        if mine[position:] == theirs[position:] and (
            len(mine) - position >= LEAST_COMMON or (mine == theirs and len(mine) > 0)
        ):
            found.append(key)
    return found


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the number of equal items at the beginning of both."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return number
    return min(len(one), len(other))


def _characters(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def _texts(expected: str, got: str) -> tuple[str, str]:
    """Returns both texts around their first difference, beginning at the same character."""
    at = common(expected, got)
    window = slice(max(0, at - CHARACTERS_AROUND), at + CHARACTERS_AROUND)
    return expected[window], got[window]
