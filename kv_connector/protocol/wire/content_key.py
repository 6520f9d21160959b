"""The content key of a prefix: a chain of digests, by which another engine finds the same KV in its cache.

Digest k covers the first ``(k + 1) * tokens`` tokens, and all other facts that decide the content of their
pages: adapter, pictures, cache salt. So equal digests mean equal pages, and a request without the salt of
another tenant has other digests.

An engine that keeps a prefix cache has such digests already, and only its framework can look them up. Two
processes compute equal digests only with the same function, the same seed and the same block. The ``basis``
proves that: it is what the function makes of fixed content. Keys of two bases have nothing in common.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kv_connector.protocol.wire.prompt_hash import PROMPT_HASH_BYTES

BASIS_BYTES = 16

# 1 M tokens in blocks of 16. With 32 bytes each (SHA-256) they take half of a message.
MAX_DIGESTS = 1 << 16
_MAX_DIGEST_BYTES = 64
MAX_KEY_BYTES = MAX_DIGESTS * 32

_CHAIN_BYTES = 32


class ContentKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leading tokens of a prompt, as far as they fill blocks of ``tokens``."""

    basis: Annotated[bytes, msgspec.Meta(min_length=BASIS_BYTES, max_length=BASIS_BYTES)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # tokens that each digest adds
    size: Annotated[int, msgspec.Meta(ge=BASIS_BYTES, le=_MAX_DIGEST_BYTES)]  # bytes of a digest
    digests: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]

    @property
    def covered(self) -> int:
        """Number of tokens that the key covers."""
        return len(self.digests) // self.size * self.tokens

    def each(self) -> list[bytes]:
        """The digests, from the first block on."""
        return [self.digests[at : at + self.size] for at in range(0, len(self.digests), self.size)]

    def up_to(self, tokens: int) -> ContentKey:
        """The key of the first ``tokens`` tokens, as far as they fill blocks."""
        return msgspec.structs.replace(self, digests=self.digests[: tokens // self.tokens * self.size])

    def prompt_hash(self, tokens: int) -> bytes:
        """The hash of a prompt of the first ``tokens`` tokens, which must end a block of the key."""
        end = tokens // self.tokens * self.size
        if tokens <= 0 or tokens % self.tokens or end > len(self.digests):
            raise ValueError(f"{tokens} tokens end no block of a key of {self.covered} tokens")
        last = self.basis + self.tokens.to_bytes(4, "little") + self.digests[end - self.size : end]
        return hashlib.blake2b(last, digest_size=PROMPT_HASH_BYTES).digest()


def content_key(basis: bytes, tokens: int, digests: Sequence[bytes]) -> ContentKey:
    """The key of these digests, all of one length. A prompt that is too long is cut."""
    size = len(digests[0]) if digests else BASIS_BYTES
    if any(len(digest) != size for digest in digests):
        raise ValueError("the digests of a content key must have one length")
    most = min(MAX_DIGESTS, MAX_KEY_BYTES // size)
    return ContentKey(basis, tokens, size, b"".join(digests[:most]))


def content_key_problem(key: ContentKey) -> str | None:
    """The problem with a key of a peer, beyond the limits of its fields, or None."""
    if not key.digests or len(key.digests) % key.size:
        return f"a content key has {len(key.digests)} bytes of digests of {key.size} bytes"
    return None


def chain(token_ids: Sequence[int], tokens: int, beside: Iterable[tuple[int, str]] = ()) -> ContentKey:
    """The key of a prompt for frameworks without digests of their own.

    ``tokens``: tokens of a block. ``beside``: the other facts that decide the content of pages, each with the
    first token that it affects. Raises OverflowError or TypeError if a token id is not an unsigned 32-bit
    integer.
    """
    integers = array("I", token_ids)
    if sys.byteorder == "big":
        integers.byteswap()
    words: dict[int, list[str]] = {}
    for position, word in beside:
        # The lengths keep one word from passing for two others. Clients choose some of the words.
        text = f"{position % tokens} {len(word)} {word}"
        words.setdefault(position // tokens, []).append(text)
    digests: list[bytes] = []
    last = b""
    for block in range(len(integers) // tokens):
        content = hashlib.blake2b(last, digest_size=_CHAIN_BYTES)
        content.update(integers[block * tokens : (block + 1) * tokens])
        content.update("".join(words.get(block, ())).encode(errors="surrogatepass"))
        digests.append(last := content.digest())
    basis = hashlib.blake2b(f"kv-connector chain 1, {tokens} tokens".encode(), digest_size=BASIS_BYTES)
    return content_key(basis.digest(), tokens, digests)
