"""Prompts as the router sees them, made of pieces of PREFIX_BYTES."""

from __future__ import annotations

from collections.abc import Sequence

from kv_connector.router.bodies.prompt import PREFIX_BYTES, Prompt

# Tokens of a prefix, at the bytes per token that are assumed at first.
TOKENS = PREFIX_BYTES // 4


def prompt(pieces: Sequence[object]) -> Prompt:
    """Returns a prompt with a prefix behind each piece. Equal beginnings have equal prefixes."""
    prefixes = tuple(hash((*pieces[:length], "end")) for length in range(1, len(pieces) + 1))
    ends = tuple(PREFIX_BYTES * length for length in range(1, len(pieces) + 1))
    return Prompt("m", len(pieces) * PREFIX_BYTES, None, prefixes, ends=ends)
