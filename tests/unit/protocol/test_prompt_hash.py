"""The prompt's hash: the same bytes on every machine, and different bytes for another prompt."""

from hashlib import blake2b

import pytest

from kv_connector.protocol.wire.prompt_hash import PROMPT_HASH_BYTES, prompt_hash


def test_it_is_blake2b_over_little_endian_32_bit_token_ids() -> None:
    token_ids = [1, 128_000, 2**32 - 1]
    raw = bytes.fromhex("0100000000f40100ffffffff")
    assert prompt_hash(token_ids) == blake2b(raw, digest_size=PROMPT_HASH_BYTES).digest()


@pytest.mark.parametrize("other", [[1, 3], [2, 1], [1], [1, 2, 0]])
def test_another_prompt_has_another(other: list[int]) -> None:
    assert prompt_hash(other) != prompt_hash([1, 2])


def test_prompt_hash_covers_the_facts_beside_the_tokens() -> None:
    beside = ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("a\0b",), ("a", "1 b"), ("a1 b",))
    hashes = [prompt_hash([1, 2], words) for words in beside]
    assert len(set(hashes)) == len(hashes)
    assert {len(found) for found in hashes} == {PROMPT_HASH_BYTES}


def test_words_of_a_client_that_are_no_text_have_a_hash() -> None:
    assert prompt_hash([1], ("salt \ud800",)) != prompt_hash([1], ("salt ?",))
