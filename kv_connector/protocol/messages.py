"""The control plane's messages: MessagePack maps, tagged by ``t``, decoded with types and limits.

Every message is one ZMQ frame. ``decode`` either returns a valid message or raises ``MalformedMessage``; it
never allocates more than the frame's own size allows. Pages never travel here.

Who speaks: decode (D) dials prefill (P). D asks one worker of P with LOCATE, which answers DIRECTORY or
HELLO_NAK: who the workers are. To each that it wants something of, D sends HELLO, RESERVE, CANCEL, RELEASE;
it answers HELLO_ACK or HELLO_NAK, SAMPLED, FAIL, CANCEL_ACK. D sends PING, P answers PONG: either proves the
other alive. Both may send BYE. There is no completion message: D counts what has landed.

A session is one connection with one HELLO: what arrives over another connection, or after BYE, belongs to no
session and is answered by BYE.

RECALL, to which RECALLED answers, belongs to none: an operator asks a worker of P or D for timelines.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kv_connector.protocol.layout import MAX_LAYER_PARTS, MAX_PARTS, GroupTarget, KvLayout
from kv_connector.protocol.prompt_hash import PROMPT_HASH_BYTES
from kv_connector.protocol.timeline import MAX_TIMELINES, Nanoseconds, Receiving, Sending

PROTOCOL_VERSION = 3

# A RESERVE of 1 M tokens at block size 16 is 65,536 block ids of at most 5 bytes, times 8 groups: 2.6 MB.
MAX_MESSAGE_BYTES = 4 << 20

# Workers of one engine. Their layouts are in one message, too: of 80 layers (18 kB, measured) those of 230.
MAX_RANKS = 1024

# Transfers listed in one PING: 4,096 ids of 256 bytes are 1 MiB. D sends several PINGs where it has more.
MAX_WAITING = 4096

# Workers of D that one worker of P serves for one request: it has a ledger of the pages for each.
MAX_SHARES = MAX_RANKS

MAX_REGIONS = 1024  # of memory, of one worker: at most a storage for K and one for V of each layer

MAX_ID = 256  # identifiers are uuid-sized; this leaves room for engines and routers that build their own
MAX_TEXT = 1024  # a few lines for an operator
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Shares = Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARES)]
ShareNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARES)]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Blob = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
# Of weights (version.py); empty: what the engine was started with.
Version = Annotated[str, msgspec.Meta(max_length=128)]
PromptHash = Annotated[bytes, msgspec.Meta(min_length=PROMPT_HASH_BYTES, max_length=PROMPT_HASH_BYTES)]


class MalformedMessage(ValueError):
    """A frame that is no message of this protocol."""


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # dials as decode, is dialled as prefill


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that both engines must have alike before a page may move. What it is only the frameworks
    know: here it has a name, so that a refusal can say it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    value: Text | Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)]  # several: one a layer, say


# All of them, in the order in which an operator is told of differences.
Fingerprint = Annotated[tuple[Pair, ...], msgspec.Meta(max_length=64)]


def fingerprint(values: Mapping[str, str | tuple[str, ...]]) -> Fingerprint:
    """Raises where the other side would not read it."""
    pairs = [{"name": name, "value": value} for name, value in values.items()]
    checked: Fingerprint = msgspec.convert(pairs, Fingerprint)
    return checked


class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages."""


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of an engine: where it listens, and what it keeps of each prompt."""

    host: Host
    port: Port
    stage: Natural  # of the pipeline
    layout: KvLayout


Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class Locate(Message, frozen=True, tag="locate"):
    """D asks an engine for its workers, and introduces itself as it will to each of them."""

    engine_id: Id
    role: Role
    rank: Natural
    protocol: Natural  # PROTOCOL_VERSION
    fingerprint: Fingerprint


class Directory(Message, frozen=True, tag="directory"):
    """P's workers, by rank. The first is the one that was asked."""

    engine_id: Id
    ranks: Ranks


# Of each of D's layers, the parts that are wanted of one worker of P, by their numbers.
Wants = Annotated[
    tuple[Annotated[tuple[UInt32, ...], msgspec.Meta(max_length=MAX_LAYER_PARTS)], ...],
    msgspec.Meta(max_length=MAX_PARTS),
]


class Hello(Message, frozen=True, tag="hello"):
    """D introduces itself, with TransferEngine.offer()'s bytes and the descriptors of its memory regions."""

    engine_id: Id
    incarnation: Id  # new at each boot
    role: Role
    rank: Natural
    protocol: Natural  # PROTOCOL_VERSION
    fingerprint: Fingerprint
    layout: KvLayout
    wants: Wants
    regions: Annotated[tuple[Blob, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    offer: Blob


class HelloAck(Message, frozen=True, tag="hello_ack"):
    """P accepts, with TransferEngine.accept()'s bytes. ``lane``: the provider that its writes will take.

    ``layout``: what D takes from elsewhere may be of a process that was here before.
    """

    engine_id: Id
    incarnation: Id
    role: Role
    rank: Natural
    lane: Text
    layout: KvLayout
    answer: Blob


class NakReason(enum.Enum):
    INCOMPATIBLE = "incompatible"  # the message names what differs
    WRONG_ROLE = "wrong_role"
    NO_LANE = "no_lane"  # no provider leads from P to D, or the preferred one is forbidden
    DRAINING = "draining"
    PROTOCOL = "protocol"


class HelloNak(Message, frozen=True, tag="hello_nak"):
    """P refuses; ``message`` says what to do."""

    reason: NakReason
    message: Text


class Reserve(Message, frozen=True, tag="reserve"):
    """D has blocks and a counter ready and wants the prompt's pages.

    The counter behind ``immediate`` is to be raised once for each run of bytes that the two layouts' Plan
    makes of what HELLO wants. ``shares`` workers of D ask this worker of P for the transfer, each for its
    own share, and P's pages are free once all are served; this is number ``share``. ``attempt`` separates
    repeated tries under one transfer id.
    """

    transfer_id: Id
    attempt: UInt32
    prompt_tokens: Natural
    first_token: Natural  # D holds the tokens before this one
    prompt_hash: PromptHash | None  # None: D has none; P refuses that if it has one
    groups: Annotated[tuple[GroupTarget, ...], msgspec.Meta(max_length=64)]
    immediate: UInt32
    deadline_ms: Natural  # from receipt; P gives up then
    share: ShareNumber = 0
    shares: Shares = 1
    wants_sampled: bool = False  # SAMPLED is waited for
    weights: Version = ""  # that D serves, and the pages must be of


class Sampled(Message, frozen=True, tag="sampled"):
    """The token that P sampled behind the prompt, for a D that is to go on with it: a client may have it
    already. None: P has none to tell."""

    transfer_id: Id
    attempt: UInt32
    token: UInt32 | None


class FailCode(enum.Enum):
    UNKNOWN_TRANSFER = "unknown_transfer"  # no such request arrived in time
    # The prompt's client left, or decode gave the transfer up before: D's transfer is cancelled, too.
    PREFILL_ABORTED = "prefill_aborted"
    PROMPT_MISMATCH = "prompt_mismatch"  # D computes its own, and each of its workers says RELEASE
    INCOMPATIBLE = "incompatible"  # the RESERVE does not fit the layouts
    WRITE_ERROR = "write_error"  # pages that were asked for are not computed, or not written
    DUPLICATE = "duplicate"  # the transfer is already going to another request
    DRAINING = "draining"
    EXPIRED = "expired"  # the hold time or the deadline passed, or P slept meanwhile
    STALE = "stale"  # P has other weights than D, or computes anew what a part of is at D


class Fail(Message, frozen=True, tag="fail"):
    """P will not complete the transfer. ``quiesced``: none of its writes can land; else D must fence."""

    transfer_id: Id
    attempt: UInt32
    code: FailCode
    message: Text
    quiesced: bool


class Cancel(Message, frozen=True, tag="cancel"):
    """D no longer wants the share: P stops, drains and answers CANCEL_ACK."""

    transfer_id: Id
    attempt: UInt32
    share: ShareNumber = 0


class CancelAck(Message, frozen=True, tag="cancel_ack"):
    """``drained``: nothing of the transfer is in flight. False: P cannot tell; D must fence."""

    transfer_id: Id
    attempt: UInt32
    drained: bool


class Release(Message, frozen=True, tag="release"):
    """D needs nothing of this transfer: P may free its blocks, as far as the share is concerned."""

    transfer_id: Id
    share: ShareNumber = 0


class Ping(Message, frozen=True, tag="ping"):
    """D's heartbeat. It lists the transfers that still wait in D's queue, so that P holds their blocks."""

    sequence: Natural
    waiting: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class Pong(Message, frozen=True, tag="pong"):
    sequence: Natural


class Bye(Message, frozen=True, tag="bye"):
    """The session is over. What has not ended with its own message by now is fenced and fails."""

    reason: Text = ""


class Recall(Message, frozen=True, tag="recall"):
    """An operator asks for the newest ``limit`` timelines of transfers whose id, or that of their request,
    has ``text`` in it. 0: for the time alone."""

    text: Text = ""
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMELINES)] = 0


class Recalled(Message, frozen=True, tag="recalled"):
    """The timelines that a worker has kept, the newest first, as far as a message has room."""

    engine_id: Id
    rank: Natural
    role: Role
    host: Text  # the same on workers that share a clock
    now: Nanoseconds  # its clock, as it answers
    kept: Natural  # of how many transfers timelines are kept; 0: it is off
    lost: Natural  # steps of the transfer engine that were not noted, as there was no room
    layers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PARTS)]
    others: Annotated[tuple[tuple[Host, Port], ...], msgspec.Meta(max_length=MAX_RANKS)]  # of its engine
    sent: Annotated[tuple[Sending, ...], msgspec.Meta(max_length=MAX_TIMELINES)]
    received: Annotated[tuple[Receiving, ...], msgspec.Meta(max_length=MAX_TIMELINES)]


AnyMessage = (
    Locate
    | Directory
    | Hello
    | HelloAck
    | HelloNak
    | Reserve
    | Sampled
    | Fail
    | Cancel
    | CancelAck
    | Release
    | Ping
    | Pong
    | Bye
    | Recall
    | Recalled
)


def clip(text: str) -> str:
    """``text`` as a message may carry it: at most MAX_TEXT characters, all of them UTF-8."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def id_problem(identifier: str) -> str | None:
    """Why ``identifier`` cannot be an Id, or None. Transfer ids come from outside, with a request."""
    if not 1 <= len(identifier) <= MAX_ID:
        return f"a transfer id has 1 to {MAX_ID} characters, this one {len(identifier)}"
    if clip(identifier) != identifier:
        return "a transfer id must be valid Unicode"
    return None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One frame for the wire; ValueError where the other side would not read it."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ValueError(f"{name} of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return frame


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in ``frame``; raises MalformedMessage with the reason, whatever the bytes are."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(frame)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        message: AnyMessage = _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    return message
