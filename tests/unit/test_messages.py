"""The control plane's messages: what is on the wire, and that nothing on it can do harm."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol_setup import HASH, compatibility, layout, reserve

from kv_connector.protocol.messages import (
    MAX_ID,
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    AnyMessage,
    Bye,
    Cancel,
    CancelAck,
    Compatibility,
    Fail,
    FailCode,
    Hello,
    HelloAck,
    HelloNak,
    MalformedMessage,
    NakReason,
    Ping,
    Pong,
    Redirect,
    Release,
    Role,
    clip,
    decode,
    encode,
    id_problem,
)
from kv_connector.protocol.mismatch import incompatibility

MESSAGES: list[AnyMessage] = [
    Hello(
        "d0",
        "boot-1",
        Role.DECODE,
        0,
        compatibility().digest(),
        compatibility(),
        layout(),
        (b"region",),
        b"offer",
    ),
    HelloAck("p0", "boot-2", Role.PREFILL, 0, "host", b"answer"),
    HelloNak(NakReason.INCOMPATIBLE, "start both engines with the same --block-size"),
    Redirect("10.0.0.2", 5601),
    reserve(),
    Fail("t", 7, FailCode.WRITE_ERROR, "the link broke", quiesced=False),
    Cancel("t", 7),
    CancelAck("t", 7, drained=True),
    Release("t"),
    Ping(5, ("t", "u")),
    Pong(5),
    Bye("shutting down"),
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
    """The fields that a second implementation has to get right, spelled out."""
    assert msgpack.unpackb(encode(reserve(blocks=(11, 0, 13)))) == {
        "t": "reserve",
        "transfer_id": "t",
        "attempt": 1,
        "prompt_tokens": 48,
        "first_token": 0,
        "prompt_hash": HASH,
        "groups": [{"first": 0, "blocks": [11, 0, 13]}],
        "immediate": 100,
        "deadline_ms": 300_000,
    }


def test_a_frame_of_another_implementation_is_read() -> None:
    frame = msgpack.packb({"transfer_id": "t", "attempt": 3, "drained": False, "t": "cancel_ack"})
    assert decode(frame) == CancelAck("t", 3, drained=False)


@settings(deadline=None)
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
@example(b"\x82\xa1t\xa3bye\xa6reason\xa2\xff\xfe")  # no UTF-8
def test_random_bytes_are_malformed_and_nothing_worse(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(frame)


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.text(max_size=2000))
@example("\ud800")
def test_clipped_text_can_be_sent(text: str) -> None:
    message = decode(encode(Bye(clip(text))))
    assert isinstance(message, Bye)
    assert len(message.reason) <= MAX_TEXT


@settings(deadline=None)
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


def test_the_digest_changes_with_every_field() -> None:
    base = compatibility()
    assert compatibility().digest() == base.digest()
    for field in Compatibility.__struct_fields__:
        value = getattr(base, field)
        other = value + 1 if isinstance(value, int) else value + value
        assert compatibility(**{field: other}).digest() != base.digest(), field


def test_every_difference_is_named_with_what_to_do() -> None:
    text = incompatibility(compatibility(), compatibility(block_sizes=(32,), dtype="float16"))
    assert text is not None
    assert "dtype: prefill has bfloat16, decode has float16: start both engines with the same --dtype" in text
    assert (
        "block_sizes: prefill has (16,), decode has (32,): start both engines with the same --block-size"
        in text
    )
    for field in Compatibility.__struct_fields__:
        value = getattr(compatibility(), field)
        other = value + 1 if isinstance(value, int) else value + value
        problem = incompatibility(compatibility(), compatibility(**{field: other}))
        assert problem is not None
        assert problem.startswith(f"{field}: prefill has")
    assert incompatibility(compatibility(), compatibility()) is None


def test_long_lists_show_their_first_difference() -> None:
    names = tuple(f"layer{i}" for i in range(80))
    other = (*names[:70], "mtp", *names[71:])
    text = incompatibility(compatibility(layer_names=names), compatibility(layer_names=other))
    assert text is not None
    assert text.startswith("layer_names[70]: prefill has layer70, decode has mtp:")
    scales = tuple((0.5, 0.25) for _ in names)
    other_scales = (*scales[:70], (1.0, 1.0), *scales[71:])
    text = incompatibility(compatibility(kv_scales=scales), compatibility(kv_scales=other_scales))
    assert text is not None
    assert text.startswith("kv_scales[70]: prefill has (0.5, 0.25), decode has (1.0, 1.0): load the same")
    heads = tuple(i / 64 for i in range(64))  # per-head scales
    text = incompatibility(
        compatibility(kv_scales=(heads,) * 80),
        compatibility(kv_scales=((*heads[:9], 0.1, *heads[10:]),) * 80),
    )
    assert text is not None
    assert text.startswith("kv_scales[0][9]: prefill has 0.140625, decode has 0.1:")
    fewer = incompatibility(compatibility(layer_names=names), compatibility(layer_names=names[:79]))
    assert fewer is not None
    assert fewer.startswith("layer_names: prefill has 80 entries, decode has 79 entries:")
