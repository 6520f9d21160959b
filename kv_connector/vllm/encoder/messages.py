"""Messages between an encoder engine and a prefill engine: MessagePack over the control sockets."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kv_connector.control.sockets import Codec, codec_of
from kv_connector.protocol.wire.messages import Blob, Fingerprint, Id, Natural, Text, UInt32, WireMessage

PROTOCOL = 1

# A HELLO carries two blobs of at most 64 KiB and a fingerprint.
_MAX_BYTES = 256 << 10

MAX_KEY = 512
"""Longest key of an embedding, in characters. vLLM's hashes have 64. A client may set longer ones."""

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY)]
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Hello(WireMessage, frozen=True, tag="hello"):
    """From a prefill engine: requests a session. WELCOME or LEAVE answers."""

    name: Id
    fingerprint: Fingerprint
    offer: Blob  # of its transfer engine
    region: Blob  # descriptor of its arena
    protocol: Natural = PROTOCOL


class Welcome(WireMessage, frozen=True, tag="welcome"):
    answer: Blob  # to the offer


class FetchRequest(WireMessage, frozen=True, tag="fetch"):
    """From a prefill engine: requests one embedding. One write answers, or MISSING."""

    fetch: Natural  # counts the session's fetches
    key: Key
    nbytes: Size
    rows: Size
    offset: Natural  # in the prefill engine's arena
    immediate: UInt32  # of the counter that the write raises by one


class Missing(WireMessage, frozen=True, tag="missing"):
    """From an encoder engine: it has not written, and will not write, the embedding of this fetch."""

    fetch: Natural
    reason: Text


class Leave(WireMessage, frozen=True, tag="leave"):
    """From either side: the session is over."""

    reason: Text


EncoderMessage = Hello | Welcome | FetchRequest | Missing | Leave

CODEC: Codec[EncoderMessage] = codec_of(EncoderMessage, _MAX_BYTES)
