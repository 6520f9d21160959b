"""The prompt's fingerprint, by which P and D notice that one transfer id stands for two different prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

PROMPT_HASH_BYTES = 16


def prompt_hash(token_ids: Sequence[int]) -> bytes:
    """16 bytes: BLAKE2b over the token ids as little-endian 64-bit integers."""
    return hashlib.blake2b(
        np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=PROMPT_HASH_BYTES
    ).digest()
