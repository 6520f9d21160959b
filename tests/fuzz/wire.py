"""The bytes of handshakes and frames, built by hand.

Their layouts are those of native/engine/handshake.h, and in native/providers those of tcp/wire.h. The lanes
of one machine follow {same_host,host,nvlink}/wire.h and same_host/channel.h.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

_ENGINE = struct.Struct("<IBB")
_ENGINE_MAGIC, _ENGINE_VERSION = 0x4943564B, 2
_OFFER, _ANSWER, _REGION = 1, 2, 3


def blob(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


class Reader:
    """Parses what an engine has written."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def blob(self) -> bytes:
        (length,) = self.take("<I")
        self._at += length
        return self._data[self._at - length : self._at]


def offered_link(offer: bytes) -> bytes:
    """Returns the lane's part of an engine's offer of one lane."""
    reader = Reader(offer)
    assert reader.take("<IBB") == (_ENGINE_MAGIC, _ENGINE_VERSION, _OFFER)
    reader.blob()
    assert reader.take("<B") == (1,)
    reader.blob()
    reader.take("<BB")
    return reader.blob()


def _link(kind: int, provider: str, link: bytes, *, lanes: bytes = b"") -> bytes:
    header = _ENGINE.pack(_ENGINE_MAGIC, _ENGINE_VERSION, kind) + blob(b"hostile")
    return header + lanes + blob(provider.encode()) + bytes((1, 0)) + blob(link)


def engine_offer(provider: str, link: bytes) -> bytes:
    return _link(_OFFER, provider, link, lanes=b"\x01")


def engine_answer(provider: str, link: bytes) -> bytes:
    return _link(_ANSWER, provider, link)


def region_descriptor(provider: str, rkey: int, nbytes: int) -> bytes:
    """Returns one region of one piece of memory, over one domain of one lane."""
    lane = blob(provider.encode()) + b"\x01"
    region = struct.pack("<IIQQ", 1, 0, 0, nbytes)
    memory = struct.pack("<IQQBQ", 1, 0, nbytes, 1, rkey)
    return _ENGINE.pack(_ENGINE_MAGIC, _ENGINE_VERSION, _REGION) + b"\x01" + lane + region + memory


def described_key(descriptor: bytes) -> int:
    """Returns the key of such a region."""
    return int(struct.unpack("<Q", descriptor[-8:])[0])


def immediate(slot: int, generation: int, pages: int) -> int:
    return slot << 16 | generation << 6 | pages - 1


# --- tcp

_TCP_OFFER_MAGIC, _TCP_ANSWER_MAGIC = 0x314F564B, 0x3141564B
TCP_VERSION = 4
HELLO = struct.Struct("<IHHII16s")
WELCOME = struct.Struct("<IHH16s")
_HELLO_MAGIC, _WELCOME_MAGIC = 0x3148564B, 0x3157564B

FRAME = struct.Struct("<IBBHQQQQII")  # in the order of FrameHeader
FRAME_MAGIC = 0x3146564B
WRITE, ACK, REFUSAL, MESSAGE = 1, 2, 3, 4
MAX_PAGES = 64
MESSAGE_SLOTS = 16


@dataclass(frozen=True)
class TcpOffer:
    port: int
    link: int
    dialer: bytes
    listener: bytes

    @classmethod
    def of(cls, offer: bytes) -> TcpOffer:
        reader = Reader(offered_link(offer))
        magic, version, _, link, port = reader.take("<IHHIH")
        assert (magic, version) == (_TCP_OFFER_MAGIC, TCP_VERSION)
        return cls(port, link, reader.blob(), reader.blob())

    def encode(self, address: str) -> bytes:
        head = struct.pack("<IHHIH", _TCP_OFFER_MAGIC, TCP_VERSION, 1, self.link, self.port)
        return engine_offer("tcp", head + blob(self.dialer) + blob(self.listener) + blob(address.encode()))

    def answer(self, connections: int = 1) -> bytes:
        return engine_answer(
            "tcp", struct.pack("<IHHI", _TCP_ANSWER_MAGIC, TCP_VERSION, connections, self.link)
        )

    def hello(self, index: int = 0) -> bytes:
        return HELLO.pack(_HELLO_MAGIC, TCP_VERSION, index, self.link, 0, self.dialer)

    def welcome(self) -> bytes:
        return WELCOME.pack(_WELCOME_MAGIC, TCP_VERSION, 0, self.listener)


# --- The lanes of one machine

HELLO_MESSAGE, WELCOME_MESSAGE, MEMORY, FORGET, WAKE = 1, 2, 3, 4, 5
CONTROL = struct.Struct("<IIQ16sQ")  # same_host::Message
RING_ENTRIES = 4096


def control(kind: int, memory: int = 0, nbytes: int = 0, key: int = 0, secret: bytes = bytes(16)) -> bytes:
    return CONTROL.pack(kind, memory, nbytes, secret, key)


@dataclass(frozen=True)
class SameHostLane:
    """The differences between the lanes of one machine."""

    provider: str
    magic: int
    version: int
    offer_tail: bytes  # behind the invitation
    answer_tail: bytes  # behind magic and version
    board_bytes: int

    def answer(self, tail: bytes | None = None) -> bytes:
        head = struct.pack("<II", self.magic, self.version)
        return engine_answer(self.provider, head + (self.answer_tail if tail is None else tail))


HOST = SameHostLane("host", 0x6B766368, 4, bytes(48), bytes(48), 64 + 16384 * 64)
NVLINK = SameHostLane("nvlink", 0x6B76636E, 3, bytes(8), b"", 128 + 16384 * 128)

# One direction of a link: what the receiver writes, the gate or the account, and what the sender writes. The
# offsets of the 64-bit words follow.
CHANNEL_BYTES = 64 + 64 + 64 + RING_ENTRIES * 4 + MESSAGE_SLOTS * (8 + 4096)
SEGMENT_BYTES = 2 * CHANNEL_BYTES
ADMISSION, HEAD, TAKEN, GATE, STARVED, TAIL, PUT = 0, 1, 2, 8, 9, 16, 17
LET_GO = 12  # of nvlink's account; unused by host
RING_WORD = 24
MESSAGES_WORD = RING_WORD + RING_ENTRIES // 2
MESSAGE_WORDS = (8 + 4096) // 8


@dataclass(frozen=True)
class Invitation:
    boot_id: bytes
    socket: bytes  # abstract name
    secret: bytes

    @classmethod
    def of(cls, offer: bytes, lane: SameHostLane) -> Invitation:
        magic, version, boot_id, name, secret = struct.unpack_from("<II36s28s16s", offered_link(offer))
        assert (magic, version) == (lane.magic, lane.version)
        return cls(boot_id, name.rstrip(b"\0"), secret)

    def encode(self, lane: SameHostLane, tail: bytes | None = None) -> bytes:
        head = struct.pack("<II36s28s16s", lane.magic, lane.version, self.boot_id, self.socket, self.secret)
        return engine_offer(lane.provider, head + (lane.offer_tail if tail is None else tail))


def user_message(pick: random.Random) -> bytes:
    """Returns a message that an engine accepts as its peer's user message."""
    return b"\0" + pick.randbytes(4 + pick.randrange(1, 60))
