"""The prompt's hash, with which P and D notice that one transfer id stands for two different prompts."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

PROMPT_HASH_BYTES = 16


def prompt_hash(token_ids: Sequence[int], beside: Sequence[str] = ()) -> bytes:
    """The 16 bytes of BLAKE2b over the token ids, as little-endian unsigned 32-bit integers, and over
    ``beside``.

    ``beside``: other facts that decide the content of the pages: adapter, cache salt, pictures.
    """
    # Runs in the scheduler's thread, before the prompt's first step. With 32,000 tokens it takes 0.8 ms,
    # where NumPy and 64 bits took 2.7 ms (medians, two cores: docs/benchmarks/2026-11-27-first-token.md).
    integers = array("I", token_ids)
    if sys.byteorder == "big":
        integers.byteswap()
    digest = _hash(integers)
    if not beside:
        return digest
    # Clients choose some of these words, such as a cache salt. The lengths keep one word from passing for two
    # others.
    words = "".join(f"{len(word)} {word}" for word in beside)
    return _hash(digest + words.encode(errors="surrogatepass"))


def _hash(content: bytes | array[int]) -> bytes:
    return hashlib.blake2b(content, digest_size=PROMPT_HASH_BYTES).digest()
