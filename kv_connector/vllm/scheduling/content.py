"""A request's content key: vLLM's own block hashes, with the proof that another engine computes the same."""

from __future__ import annotations

import hashlib
import os

from kv_connector.protocol.wire.content_key import BASIS_BYTES, ContentKey, content_key
from kv_connector.vllm.internals import Request, block_hashing

# One of each kind of fact that vLLM's hash of a block covers beside the tokens.
_FACTS = (("lora", "adapter", "/path"), ("mm", "picture", 0), ("cache_salt", "salt"))

# The salt of hashes that contain the version of the weights has the form of SaltedHasher's.
_VERSIONED = ("cache_salt", ("version", ""))


def hash_basis(algorithm: str, block_tokens: int, *, versioned: bool = False) -> bytes:
    """Returns what this engine's block hashes depend on, as a digest that peers compare.

    ``algorithm``: vLLM's ``--prefix-caching-hash-algo``. ``block_tokens``: tokens of a hashed block.
    ``versioned``: whether the hashes contain the version of the weights (kept_cache.py). An engine that
    has kept its KV over an update has earlier KV under hashes without a version.

    It is made of the hash of a fixed block. So it differs if the function, its serialization or its seed
    differs. With the xxhash algorithms every process has its own seed, unless PYTHONHASHSEED is set.

    Call it in the scheduler's process, and not before the first request: vLLM sets the seed once it has made
    the scheduler.
    """
    caches, hashing = block_hashing()
    function = hashing.get_hash_fn_by_name(algorithm)
    facts = (*_FACTS, _VERSIONED) if versioned else _FACTS
    block: bytes = caches.hash_block_tokens(function, None, range(block_tokens), facts)
    return hashlib.blake2b(block, digest_size=BASIS_BYTES).digest()


class HashBasis:
    """hash_basis() of this engine, computed with the first question and kept."""

    def __init__(self, algorithm: str) -> None:
        """``algorithm``: as of hash_basis()."""
        self._algorithm = algorithm
        self._versioned = False
        self._known: dict[int, bytes] = {}  # by tokens of a hashed block, of which an engine has one number

    def of(self, block_tokens: int) -> bytes:
        """Returns hash_basis(), and has its conditions."""
        if block_tokens not in self._known:
            self._known[block_tokens] = hash_basis(self._algorithm, block_tokens, versioned=self._versioned)
        return self._known[block_tokens]

    def note_versions(self) -> None:
        """Notes that the block hashes contain the version of the weights from now on."""
        self._versioned = True
        self._known.clear()


def prefix_key(algorithm: str, block_tokens: int, *, keeps_cache: bool = False) -> str:
    """Returns a key by which routers find engines with equal block hashes; "": no other engine has them.

    ``algorithm``, ``block_tokens``: as of hash_basis(). ``keeps_cache``: whether the engine keeps its KV over
    an update. Its hashes contain the version from the first update on, so the key differs from the start.
    Unlike the basis, the key is known in every process, and before the first request. The lender still
    compares the bases.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        return ""
    facts = f"{algorithm}/{block_tokens}/{seed or ''}{'/kept' if keeps_cache else ''}"
    return hashlib.blake2b(facts.encode(), digest_size=BASIS_BYTES).hexdigest()


def content_key_of(request: Request, basis: bytes, block_tokens: int) -> ContentKey:
    """Returns the key of a request's prompt, as far as it fills hashed blocks."""
    return content_key(basis, block_tokens, [bytes(digest) for digest in request.block_hashes])
