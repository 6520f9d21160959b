"""Content keys: equal for equal content in every process, and different from the first difference on."""

import os
import subprocess
import sys

import msgspec
import pytest

from kv_connector.protocol.wire.content_key import (
    BASIS_BYTES,
    MAX_DIGESTS,
    ContentKey,
    chain,
    content_key,
    content_key_problem,
)
from kv_connector.protocol.wire.messages import MAX_MESSAGE_BYTES

TOKENS = list(range(1000, 1064))
FACTS = ((0, "adapter french"), (0, "salt of a tenant"), (40, "image abc"))


def shared(one: ContentKey, other: ContentKey) -> int:
    """Returns the number of leading digests that two keys have in common."""
    pairs = zip(one.each(), other.each(), strict=False)
    return next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(map(len, (one.each(), other.each())))
    )


def test_content_key_is_equal_in_processes_with_other_hash_seeds() -> None:
    program = (
        "from kv_connector.protocol.wire.content_key import chain\n"
        f"print(chain({TOKENS}, 16, {FACTS}).digests.hex())"
    )
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found == {f"{chain(TOKENS, 16, FACTS).digests.hex()}\n"}


def test_longer_prompt_begins_with_the_key_of_its_prefix() -> None:
    whole = chain(TOKENS, 16, FACTS)
    assert whole.covered == 64
    assert chain(TOKENS[:40], 16, FACTS[:2]) == whole.up_to(40) == whole.up_to(32)
    assert whole.up_to(15).digests == b""


@pytest.mark.parametrize("changed", range(0, 64, 9))
def test_key_differs_from_the_first_changed_token_on(changed: int) -> None:
    other = [*TOKENS[:changed], 7, *TOKENS[changed + 1 :]]
    assert shared(chain(TOKENS, 16), chain(other, 16)) == changed // 16


@pytest.mark.parametrize(
    ("facts", "blocks"),
    [
        ((), 0),
        ((*FACTS[:2], (40, "image abd")), 2),
        ((*FACTS[:2], (41, "image abc")), 2),
        ((*FACTS[:2], (48, "image abc")), 2),
        (((0, "adapter french"), (0, "salt of another"), FACTS[2]), 0),
        (((0, "adapter frenchsalt of a tenant"), FACTS[2]), 0),
    ],
    ids=["no facts", "other image", "moved image", "image in the next block", "other salt", "joined words"],
)
def test_key_differs_from_the_first_changed_fact_on(facts: tuple[tuple[int, str], ...], blocks: int) -> None:
    assert shared(chain(TOKENS, 16, FACTS), chain(TOKENS, 16, facts)) == blocks


def test_keys_of_two_block_sizes_have_two_bases() -> None:
    assert chain(TOKENS, 16).basis != chain(TOKENS, 32).basis


def test_prompt_hash_names_the_basis_the_block_and_the_digest() -> None:
    key = chain(TOKENS, 16)
    hashes = {key.prompt_hash(tokens) for tokens in (16, 32, 48, 64)}
    hashes.add(msgspec.structs.replace(key, basis=bytes(BASIS_BYTES)).prompt_hash(64))
    hashes.add(chain(TOKENS, 32).prompt_hash(64))
    assert len(hashes) == 6
    assert key.up_to(32).prompt_hash(32) == key.prompt_hash(32)


@pytest.mark.parametrize("tokens", [-16, 0, 8, 80])
def test_prompt_hash_refuses_a_length_that_ends_no_block(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens end no block"):
        chain(TOKENS, 16).prompt_hash(tokens)


def test_key_of_a_million_tokens_fits_into_a_message() -> None:
    key = content_key(bytes(BASIS_BYTES), 16, [bytes(32)] * (MAX_DIGESTS + 1))
    assert key.covered == 16 * MAX_DIGESTS
    assert len(msgspec.msgpack.encode(key)) < MAX_MESSAGE_BYTES
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=ContentKey) == key
    assert content_key(bytes(BASIS_BYTES), 16, [bytes(64)] * MAX_DIGESTS).covered == 8 * MAX_DIGESTS


def test_content_key_refuses_digests_of_two_lengths() -> None:
    with pytest.raises(ValueError, match="one length"):
        content_key(bytes(BASIS_BYTES), 16, [bytes(32), bytes(16)])


@pytest.mark.parametrize("digests", [b"", bytes(33)])
def test_content_key_problem_names_digests_that_are_cut(digests: bytes) -> None:
    problem = content_key_problem(ContentKey(bytes(BASIS_BYTES), 16, 32, digests))
    assert problem == f"a content key has {len(digests)} bytes of digests of 32 bytes"
    assert content_key_problem(chain(TOKENS, 16)) is None


@pytest.mark.parametrize(
    "changed", [{"basis": b"x"}, {"tokens": 0}, {"size": 15}, {"size": 65}, {"digests": bytes((2 << 20) + 1)}]
)
def test_decoding_refuses_a_key_outside_the_limits(changed: dict[str, object]) -> None:
    fields = {"basis": bytes(BASIS_BYTES), "tokens": 16, "size": 32, "digests": bytes(64), **changed}
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ContentKey)
