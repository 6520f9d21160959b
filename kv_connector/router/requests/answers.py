"""Answers: what the prefill engine and the decode engine answer to a request."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kv_connector.router.requests.transcript import Transcript


@dataclass(frozen=True)
class Answer:
    """The decode engine's answer, from its beginning on."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    transcript: Transcript | None = None
    """Gets the answer as the client gets it; None: the answer is not recorded."""

    @property
    def streaming(self) -> bool:
        return self.content_type.startswith("text/event-stream")


@dataclass(frozen=True)
class Computed:
    """A prefill engine's report on a prompt. A field is None if the engine does not report it."""

    params: dict[str, Any] | None = None
    """kv_transfer_params of the answer; None for a stream."""
    tokens: int | None = None
    """Tokens of the prompt."""
    cached: int | None = None
    """Tokens of the prompt that were in the engine's prefix cache before."""
    written: int | None = None
    """Tokens of the prompt that were written into the engine's prefix cache."""
