"""Answers: what a request got from its prefill engine and from its decode engine."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The decode engine's answer, from its beginning on."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]

    @property
    def streaming(self) -> bool:
        return self.content_type.startswith("text/event-stream")


@dataclass(frozen=True)
class Computed:
    """What a prefill engine said of a prompt."""

    params: dict[str, Any] | None = None
    """kv_transfer_params, where it was no stream."""
    tokens: int | None = None
    """Of the prompt, where it says so."""
    cached: int | None = None
    """Of them, in its prefix cache before, where it says so."""
    written: int | None = None
    """Tokens of the prompt that went into its prefix cache, where it says so."""
