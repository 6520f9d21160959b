"""Content keys of vLLM's requests: two engines compute the same, or their bases differ."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.vllm.internals import block_hashing
from kv_connector.vllm.scheduling.content import content_key_of, hash_basis, prefix_key

caches, hashing = block_hashing()


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with monkeypatch.context() as patch:
        for name in ("NONE_HASH", "_NONE_HASH_SEED"):
            patch.setattr(caches, name, None, raising=False)
        yield


def basis(algorithm: str = "sha256", tokens: int = 16) -> bytes:
    """Returns the basis of an engine that starts."""
    caches.init_none_hash(hashing.get_hash_fn_by_name(algorithm))
    return hash_basis(algorithm, tokens)


def key(tokens: list[int], **facts: Any) -> list[bytes]:
    """Returns the digests of a request of an engine that starts."""
    function = hashing.get_hash_fn_by_name("sha256")
    caches.init_none_hash(function)
    others = {"mm_features": [], "lora_request": None, "cache_salt": None, "prompt_embeds": None, **facts}
    request = SimpleNamespace(block_hashes=[], num_tokens=len(tokens), all_token_ids=tokens, **others)
    request.block_hashes = caches.get_request_block_hasher(16, function)(request)
    found = content_key_of(request, hash_basis("sha256", 16), 16)
    assert found.covered == len(tokens) // 16 * 16
    return found.each()


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_two_engines_with_a_cryptographic_hash_have_one_basis(algorithm: str) -> None:
    assert basis(algorithm) == basis(algorithm)


def test_basis_depends_on_the_algorithm_the_block_and_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {basis(), basis("sha256_cbor"), basis(tokens=32)}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert len({*found, basis()}) == 4


def test_prefix_key_is_equal_where_the_basis_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [("sha256", 16), ("sha256", 16), ("sha256_cbor", 16), ("sha256", 32)]
    bases, keys = [basis(*one) for one in made], [prefix_key(*one) for one in made]
    assert [bases.index(one) for one in bases] == [keys.index(one) for one in keys] == [0, 0, 2, 3]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert prefix_key("sha256", 16) not in keys


def test_engine_with_a_random_seed_has_no_prefix_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefix_key("xxhash", 16) == prefix_key("xxhash_cbor", 16) == ""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert prefix_key("xxhash", 16)


def test_two_engines_with_random_seeds_have_two_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash", reason="vLLM's xxhash algorithms need the package xxhash")
    assert basis("xxhash") != basis("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert basis("xxhash") == basis("xxhash")


def test_key_covers_the_facts_that_vllm_hashes() -> None:
    tokens = list(range(50))
    adapter = SimpleNamespace(lora_name="french", lora_path="/french", adapter_id=1)
    place = SimpleNamespace(offset=20, length=4)
    picture = SimpleNamespace(identifier="a", mm_position=place)
    plain = key(tokens)
    assert key(tokens) == plain
    assert key([*tokens[:40], 7])[:2] == plain[:2]
    assert key(tokens, mm_features=[picture])[0] == plain[0]
    changed = (key(tokens, lora_request=adapter), key(tokens, cache_salt="s"), key(tokens, cache_salt="t"))
    assert len({one[0] for one in (plain, *changed)}) == 4
    assert key(tokens, mm_features=[picture])[1] != plain[1]
