"""Messages by which ranks form a group."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ranks import settings_of

from kv_connector.moe import wire
from kv_connector.moe.fault import GroupError


def hello(rank: int, /, ranks: int = 2, **more: Any) -> wire.Hello:
    changed = {key: more.pop(key) for key in list(more) if key in wire.Facts.__struct_fields__}
    fields: dict[str, Any] = {
        "release": "1.0",
        "rank": rank,
        "facts": wire.Facts.of(settings_of(rank, ranks, **changed)),
        "machine": "boot/1/2",
        "pid": 100 + rank,
        "uid": 1000,
        "name": bytes(16),
        "secret": bytes(32),
    }
    return wire.Hello(**(fields | more))


def read(*hellos: wire.Hello, ranks: int = 2) -> list[wire.Hello]:
    return wire.read_hellos([wire.encode(one) for one in hellos], ranks)


def test_hellos_that_agree_are_read_in_rank_order() -> None:
    assert read(hello(0), hello(1)) == [hello(0), hello(1)]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden", 128, "rank 1 has hidden=128, rank 0 has hidden=64. Set the same value on all ranks."),
        ("top_k", 2, "rank 1 has top_k=2, rank 0 has top_k=4"),
        ("experts", 16, "rank 1 has experts=16"),
        ("max_tokens", 8, "rank 1 has max_tokens=8"),
        ("row_bytes", 8, "rank 1 has row_bytes=8"),
        ("slots", 2, "rank 1 has slots=2"),
        ("timeout", 2.5, "rank 1 has timeout=2.5"),
        ("uid", 0, "rank 1 runs as user 0, rank 0 as user 1000"),
        ("machine", "other", "rank 1 is on another machine than rank 0"),
        ("rank", 0, "place 1 of the exchange has the message of rank 0"),
        ("release", "0.9", "rank 1 has kv-connector 0.9, rank 0 has 1.0"),
        ("problem", "no memory", "rank 1: no memory"),
    ],
)
def test_read_hellos_names_the_rank_and_the_field_that_differ(field: str, value: Any, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        read(hello(0), hello(1, **{field: value}))


def test_read_hellos_names_memory_of_another_kind() -> None:
    gpu = msgspec.structs.replace(hello(1), facts=wire.Facts.of(settings_of(1, 2, device=0)))
    with pytest.raises(GroupError, match="rank 1 has memory=gpu, rank 0 has memory=host"):
        read(hello(0), gpu)


def test_device_ordinals_may_differ() -> None:
    assert wire.Facts.of(settings_of(0, 2, device=0)) == wire.Facts.of(settings_of(1, 2, device=1))


def test_release_is_named_when_its_hello_has_other_fields() -> None:
    other = msgspec.msgpack.encode({"type": "hello", "release": "9.9", "news": [1, 2]})
    with pytest.raises(GroupError, match=r"rank 1 has kv-connector 9.9, rank 0 has 1.0"):
        wire.read_hellos([wire.encode(hello(0)), other], 2)


def test_number_of_ranks_in_the_exchange_is_compared() -> None:
    with pytest.raises(GroupError, match="3 ranks exchange messages, the setting ranks is 2"):
        wire.read_hellos([b""] * 3, 2)


def test_outcomes_report_the_problems_of_all_ranks() -> None:
    messages = [wire.encode(wire.FormingOutcome(problem)) for problem in ("", "first", "second")]
    with pytest.raises(GroupError, match=r"^rank 1: first; rank 2: second$"):
        wire.read_outcomes(messages, 3)
    wire.read_outcomes(messages[:1] * 3, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 8},
        {"rank": -1},
        {"pid": 0},
        {"name": bytes(15)},
        {"secret": bytes(33)},
        {"problem": "x" * 1025},
        {"release": "x" * 65},
        {"more": 1},
    ],
)
def test_fields_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(hello(0), builtin_types=(bytes,)) | change
    with pytest.raises(GroupError, match="rank 1 sent a malformed message"):
        wire.read_hellos([wire.encode(hello(0)), msgspec.msgpack.encode(fields)], 2)


def test_long_messages_are_refused_and_long_texts_cut() -> None:
    with pytest.raises(ValueError, match="a message of 8193 bytes"):
        wire.decode(bytes(8193), wire.FormingOutcome)
    problem = wire.bounded("é" * 5000)
    assert len(problem) == wire.MAX_TEXT
    assert problem.endswith("...")
    assert wire.decode(wire.encode(hello(0, problem=problem)), wire.Hello).problem == problem


@given(st.binary(max_size=200))
def test_decode_raises_value_error_alone(data: bytes) -> None:
    for kind in (wire.Hello, wire.FormingOutcome, wire.Introduction, wire.HelloRelease):
        try:
            wire.decode(data, kind)
        except ValueError:
            continue
