"""The control plane's messages: the content of frames, and the handling of hostile ones."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from protocol_setup import ADVICE, HASH, all_of, layout, pairs, recalled, reserve, worker

from kv_connector.protocol.session.mismatch import SAME_RELEASE, mismatch
from kv_connector.protocol.wire.content_key import chain
from kv_connector.protocol.wire.messages import (
    MAX_ID,
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    PROTOCOL_VERSION,
    AnyMessage,
    Borrow,
    Bye,
    Cancel,
    CancelAck,
    Defer,
    Directory,
    Due,
    Fail,
    FailCode,
    Hello,
    HelloAck,
    HelloNak,
    Lent,
    Locate,
    MalformedMessage,
    NakReason,
    Ping,
    Pong,
    Recall,
    Release,
    Role,
    clip,
    decode,
    encode,
    fingerprint,
    id_problem,
)

MESSAGES: list[AnyMessage] = [
    Hello(
        "d0",
        "boot-1",
        Role.DECODE,
        0,
        PROTOCOL_VERSION,
        pairs(),
        layout(),
        all_of(layout()),
        (b"region",),
        b"offer",
    ),
    HelloAck("p0", "boot-2", Role.PREFILL, 0, "host", layout(), b"answer"),
    HelloNak(NakReason.INCOMPATIBLE, "start both engines with the same --block-size"),
    Locate("d0", Role.DECODE, 0, PROTOCOL_VERSION, pairs()),
    Directory("p0", (worker(layout()), worker(layout(groups=(1,)), stage=1))),
    reserve(),
    reserve(prompt_hash=None),
    Fail("t", 7, FailCode.WRITE_ERROR, "the link broke", quiesced=False),
    Cancel("t", 7),
    CancelAck("t", 7, drained=True),
    Release("t"),
    Defer("t"),
    Due("t"),
    Borrow("t", chain(range(48), 16), 16, 16, 1000, "7#0011aabb"),
    Lent("t", 32),
    Lent("t", 0, "no such prefix"),
    Ping(5, ("t", "u")),
    Pong(5),
    Bye("shutting down"),
    Recall("7d0f", 3),
    recalled(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_frames_are_plain_message_pack(message: AnyMessage) -> None:
    """Another implementation of MessagePack reads the same fields and values, by name."""
    seen = msgpack.unpackb(encode(message), strict_map_key=True)
    expected = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert msgpack.unpackb(msgpack.packb(expected)) == seen
    assert seen["t"] == type(message).__struct_config__.tag


def test_reserve_on_the_wire() -> None:
    """The fields that a second implementation has to encode, in full."""
    assert msgpack.unpackb(encode(reserve(blocks=(11, 0, 13)))) == {
        "t": "reserve",
        "transfer_id": "t",
        "attempt": 1,
        "prompt_tokens": 48,
        "first_token": 0,
        "prompt_hash": HASH,
        "groups": [{"first": 0, "blocks": [11, 0, 13], "needed": 0}],
        "immediate": 100,
        "deadline_ms": 300_000,
    }


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_prompt_hash_is_whole_or_absent(length: int) -> None:
    fields = msgpack.unpackb(encode(reserve(prompt_hash=None)))
    assert fields["prompt_hash"] is None
    fields["prompt_hash"] = bytes(length)
    with pytest.raises(MalformedMessage, match=r"prompt_hash"):
        decode(msgpack.packb(fields))


def test_a_frame_of_another_implementation_is_read() -> None:
    frame = msgpack.packb({"transfer_id": "t", "attempt": 3, "drained": False, "t": "cancel_ack"})
    assert decode(frame) == CancelAck("t", 3, drained=False)


@given(st.binary(max_size=512))
@example(b"")
@example(b"\x81\xa1t\xa5hello")
@example(b"\x91" * 100_000)  # nested a hundred thousand deep
@example(b"\xdd\xff\xff\xff\xff")  # an array that claims 4 billion entries
@example(b"\xdf\xff\xff\xff\xff\xa1t")
@example(b"\xc6\xff\xff\xff\xff")
@example(msgpack.packb({"t": "ping", "sequence": -1}))
@example(msgpack.packb({"t": "ping", "sequence": 2**60}))
@example(msgpack.packb({"t": "ping", "sequence": True}))
@example(msgpack.packb({"t": "ping", "sequence": 1, "waiting": [""]}))
@example(msgpack.packb({"t": "ping", "sequence": 1, "waiting": ["x"] * 5000}))
@example(msgpack.packb({"t": "pong", "sequence": 1, "extra": 1}))
@example(b"\x82\xa1t\xa3bye\xa6reason\xa2\xff\xfe")  # not UTF-8
def test_random_bytes_are_malformed_and_nothing_worse(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(frame)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_read_or_malformed(message: AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    try:
        seen = decode(bytes(frame))
    except MalformedMessage:
        return
    assert decode(encode(seen)) == seen


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(MalformedMessage, match="exceed the limit"):
        decode(b"\x00" * (MAX_MESSAGE_BYTES + 1))


def test_the_largest_reserve_fits_the_limit() -> None:
    """A million tokens in blocks of 16, eight groups, block ids that need five bytes each."""
    blocks = [1 << 24] * 65_536
    frame = encode(reserve(blocks=blocks, more=[blocks] * 7))
    assert len(frame) <= MAX_MESSAGE_BYTES
    decode(frame)


@given(st.text(max_size=2000))
@example("\ud800")
def test_clipped_text_can_be_sent(text: str) -> None:
    message = decode(encode(Bye(clip(text))))
    assert isinstance(message, Bye)
    assert len(message.reason) <= MAX_TEXT


@given(st.text(max_size=400))
@example("\udfff")
def test_an_accepted_id_can_be_sent_and_a_refused_one_cannot(identifier: str) -> None:
    try:
        sent = decode(encode(Release(identifier)))
    except (MalformedMessage, UnicodeEncodeError):
        assert id_problem(identifier) is not None
    else:
        assert id_problem(identifier) is None
        assert sent == Release(identifier)
    assert id_problem("x" * MAX_ID) is None


@pytest.mark.parametrize(
    "values",
    [
        {"": "x"},
        {"n" * 65: "x"},
        {"name": "x" * (MAX_TEXT + 1)},
        {"name": ("x" * (MAX_TEXT + 1),)},
        {"name": ("",) * 4097},
        {f"name{i}": "x" for i in range(65)},
    ],
    ids=["no name", "long name", "long value", "long entry", "many entries", "many pairs"],
)
def test_a_fingerprint_is_bounded_on_both_sides(values: dict[str, str | tuple[str, ...]]) -> None:
    with pytest.raises(msgspec.ValidationError):
        fingerprint(values)
    hello = msgspec.to_builtins(MESSAGES[0], builtin_types=(bytes,))
    hello["fingerprint"] = [{"name": name, "value": value} for name, value in values.items()]
    with pytest.raises(MalformedMessage, match=r"fingerprint"):
        decode(msgpack.packb(hello))


def test_the_largest_fingerprint_of_a_framework_fits_the_limit() -> None:
    """The facts about each layer of a model of a thousand layers, in five pairs."""
    hello = MESSAGES[0]
    assert isinstance(hello, Hello)
    entries = tuple(f"{i} {'x' * 100}" for i in range(1000))
    large = fingerprint({f"name{i}": entries for i in range(5)})
    decode(encode(msgspec.structs.replace(hello, fingerprint=large)))


def test_a_fingerprint_on_the_wire() -> None:
    hello = msgpack.unpackb(encode(MESSAGES[0]))
    assert hello["protocol"] == PROTOCOL_VERSION
    assert hello["fingerprint"][1:4] == [
        {"name": "model", "value": "llama"},
        {"name": "dtype", "value": "bfloat16"},
        {"name": "block_sizes", "value": ["16"]},
    ]


def test_every_difference_is_named_with_what_to_do_in_the_order_of_prefill() -> None:
    assert mismatch(pairs(), pairs(dtype="float16", block_sizes=("32",)), ADVICE) == (
        "dtype: prefill engine has bfloat16, decode engine has float16: give both sides the same dtype; "
        "block_sizes: prefill engine has (16), decode engine has (32): give both sides the same block size"
    )
    for pair in pairs():
        other = pair.value + pair.value if isinstance(pair.value, tuple) else pair.value + "x"
        problem = mismatch(pairs(), pairs(**{pair.name: other}), ADVICE)
        assert problem is not None
        assert problem.startswith(f"{pair.name}: prefill engine has ")
    assert mismatch(pairs(), pairs(), ADVICE) is None


def test_only_names_and_values_are_compared() -> None:
    assert mismatch(pairs(), tuple(reversed(pairs())), ADVICE) is None


def test_a_name_that_one_side_lacks_is_a_difference() -> None:
    """Its advice would be misleading, because the other side's release does not compare this pair."""
    ours, theirs = fingerprint({"model": "llama", "dtype": "u8"}), fingerprint({"model": "llama", "x": "1"})
    assert mismatch(ours, theirs, ADVICE) == (
        f"dtype: prefill engine has u8, decode engine has nothing: {SAME_RELEASE}; "
        f"x: prefill engine has nothing, decode engine has 1: {SAME_RELEASE}"
    )


def test_long_lists_show_their_first_difference() -> None:
    names = tuple(f"layer{i}" for i in range(80))
    other = (*names[:70], "mtp", *names[71:])
    text = mismatch(pairs(layers=names), pairs(layers=other), ADVICE)
    assert text is not None
    assert text.startswith(
        "layers[70]: prefill engine has layer70, decode engine has mtp: serve the same layers"
    )
    fewer = mismatch(pairs(layers=names), pairs(layers=names[:79]), ADVICE)
    assert fewer is not None
    assert fewer.startswith("layers: prefill engine has 80 entries, decode engine has 79 entries:")
