"""The control plane's messages: MessagePack maps, tagged by ``t``, decoded with types and limits.

Every message is one ZMQ frame. ``decode`` either returns a valid message or raises ``MalformedMessage``. It
never allocates more than the frame's own size allows. Pages never travel here.

Decode (D) connects to prefill (P). D sends LOCATE to one worker of P, which answers with DIRECTORY, the list
of its workers, or with HELLO_NAK. D then sends HELLO, RESERVE, CANCEL and RELEASE to each worker from which
it wants pages. Such a worker answers with HELLO_ACK or HELLO_NAK, SAMPLED, FAIL and CANCEL_ACK. D sends PING
and P answers with PONG. Each of the two proves that its sender is alive. Both sides may send BYE. There is no
completion message: D counts the pages that have landed.

A session is one connection with one HELLO. A message over another connection, or after BYE, belongs to no
session and is answered with BYE.

A D that is short of blocks sends DEFER before RESERVE, in a session of DEFER_PROTOCOL_VERSION. P answers with
DUE once the prompt is about to be computed.

In a session of a version above PROTOCOL_VERSION, LOCATE and HELLO name the checkpoint that D was started
from.

A D that verifies pages requests their sums in RESERVE, in a session of a version above PROTOCOL_VERSION. P
sends SUMS once all pages have arrived.

Any engine may lend the pages of a prefix to any other one, over a session of PREFIX_PROTOCOL_VERSION. The
borrower connects as D does. It sends BORROW, and the lender answers with LENT. All that follows is an
ordinary transfer, from RESERVE on, with the lender as P. An older engine refuses such a session.

RECALL and its answer RECALLED belong to no session either: an operator queries a worker of P or D for
timelines.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kv_connector.protocol.pages.layout import MAX_LAYER_PARTS, MAX_PARTS, GroupTarget, KvLayout
from kv_connector.protocol.wire.content_key import ContentKey
from kv_connector.protocol.wire.prompt_hash import PROMPT_HASH_BYTES
from kv_connector.protocol.wire.timeline import MAX_TIMELINES, Nanoseconds, Receiving, Sending

PROTOCOL_VERSION = 3

# Of sessions for prefixes, in which the engines' roles do not matter. An engine that knows only
# PROTOCOL_VERSION refuses a LOCATE or HELLO with this number, and learns no message that it cannot decode.
PREFIX_PROTOCOL_VERSION = 4

# Of sessions for prompts in which D may send DEFER. D introduces itself with this number first. An engine
# that knows only PROTOCOL_VERSION refuses it, and D repeats LOCATE with PROTOCOL_VERSION.
DEFER_PROTOCOL_VERSION = 5

# A RESERVE of 1 M tokens at block size 16 is 65,536 block ids of at most 5 bytes, times 8 groups: 2.6 MB.
MAX_MESSAGE_BYTES = 4 << 20

# Workers of one engine. One message also carries their layouts: with 80 layers (18 kB, measured) those of 230
# workers.
MAX_RANKS = 1024

# Transfers listed in one PING: 4,096 ids of 256 bytes are 1 MiB. D sends several PINGs if it has more.
MAX_WAITING = 4096

# Bytes of sums in one message: 131,072 sums. A prompt of 1 M tokens with 32 layers has 2 M sums.
MAX_SUMS_BYTES = 1 << 20

# Workers of D that one worker of P serves for one request. It has a ledger of the pages for each.
MAX_SHARES = MAX_RANKS

MAX_REGIONS = 1024  # memory regions of one worker: at most a storage for K and one for V of each layer

# identifiers are as long as a uuid; this leaves room for engines and routers that build longer ones
MAX_ID = 256
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
# Of weights (weight_version.py). Empty: the weights that the engine was started with.
Version = Annotated[str, msgspec.Meta(max_length=128)]
PromptHash = Annotated[bytes, msgspec.Meta(min_length=PROMPT_HASH_BYTES, max_length=PROMPT_HASH_BYTES)]


class MalformedMessage(ValueError):
    """A frame that is not a message of this protocol."""


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # connects as decode, accepts connections as prefill


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fact that both engines must have in common before a page may move. Only the frameworks know its
    meaning. Here it has a name for use in refusals."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    # several texts: one for each layer, for example
    value: Text | Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)]


# All pairs, in the order in which differences are reported to an operator.
Fingerprint = Annotated[tuple[Pair, ...], msgspec.Meta(max_length=64)]


def fingerprint(values: Mapping[str, str | tuple[str, ...]]) -> Fingerprint:
    """The fingerprint of these values. Raises if the other side could not decode it."""
    pairs = [{"name": name, "value": value} for name, value in values.items()]
    checked: Fingerprint = msgspec.convert(pairs, Fingerprint)
    return checked


class WireMessage(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True, omit_defaults=True):
    """Base of all messages."""


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker of an engine: its address, and the layout of its pages."""

    host: Host
    port: Port
    stage: Natural  # of the pipeline
    layout: KvLayout


Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]


class Locate(WireMessage, frozen=True, tag="locate"):
    """D requests the addresses of an engine's workers, and introduces itself as it later does to each of
    them."""

    engine_id: Id
    role: Role
    rank: Natural
    protocol: Natural  # PROTOCOL_VERSION, PREFIX_PROTOCOL_VERSION or DEFER_PROTOCOL_VERSION
    fingerprint: Fingerprint


class Directory(WireMessage, frozen=True, tag="directory"):
    """P's workers, by rank. The first one is the worker that answered."""

    engine_id: Id
    ranks: Ranks


# The parts wanted of one worker of P, by number, for each of D's layers.
Wants = Annotated[
    tuple[Annotated[tuple[UInt32, ...], msgspec.Meta(max_length=MAX_LAYER_PARTS)], ...],
    msgspec.Meta(max_length=MAX_PARTS),
]


class Hello(WireMessage, frozen=True, tag="hello"):
    """D introduces itself, with the bytes of TransferEngine.offer() and the descriptors of its memory
    regions."""

    engine_id: Id
    incarnation: Id  # new at each boot
    role: Role
    rank: Natural
    protocol: Natural  # as in LOCATE
    fingerprint: Fingerprint
    layout: KvLayout
    wants: Wants
    regions: Annotated[tuple[Blob, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    offer: Blob


def for_prefixes(introduction: Locate | Hello) -> bool:
    """Whether a worker introduces itself for a session for prefixes."""
    return introduction.protocol == PREFIX_PROTOCOL_VERSION


def knows_defer(introduction: Locate | Hello) -> bool:
    """Whether DEFER and DUE may be sent in the session for which a worker introduces itself."""
    return introduction.protocol == DEFER_PROTOCOL_VERSION


class HelloAck(WireMessage, frozen=True, tag="hello_ack"):
    """P accepts, with the bytes of TransferEngine.accept(). ``lane``: the provider that its writes will use.

    ``layout``: P's current layout. The one in the directory may be that of an earlier process at this
    address.
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
    # D was started from another checkpoint. Only a D whose fingerprint names its checkpoint gets this.
    OTHER_WEIGHTS = "other_weights"


class HelloNak(WireMessage, frozen=True, tag="hello_nak"):
    """P refuses. ``message`` says what to do."""

    reason: NakReason
    message: Text


class Reserve(WireMessage, frozen=True, tag="reserve"):
    """D has blocks and a counter ready and wants the prompt's pages.

    The counter behind ``immediate`` is raised once for each run of bytes that the two layouts' Plan makes of
    the parts wanted in HELLO. ``shares`` workers of D send RESERVE to this worker of P for the transfer, each
    for its own share. This RESERVE is for number ``share``. P's pages are free once all shares are served.
    ``attempt`` distinguishes repeated tries under one transfer id.
    """

    transfer_id: Id
    attempt: UInt32
    prompt_tokens: Natural
    first_token: Natural  # D has the tokens before this one
    prompt_hash: PromptHash | None  # None: D has none; P refuses that if it has one
    groups: Annotated[tuple[GroupTarget, ...], msgspec.Meta(max_length=64)]
    immediate: UInt32
    deadline_ms: Natural  # from receipt; P gives up at that time
    share: ShareNumber = 0
    shares: Shares = 1
    wants_sampled: bool = False  # D waits for SAMPLED
    wants_sums: bool = False  # D waits for SUMS; not in a session of PROTOCOL_VERSION
    weights: Version = ""  # the version that D serves; the pages must have the same one


class Sampled(WireMessage, frozen=True, tag="sampled"):
    """The token that P sampled behind the prompt, for a D that continues with it. A client may have it
    already. None: P has no token."""

    transfer_id: Id
    attempt: UInt32
    token: UInt32 | None


class Sums(WireMessage, frozen=True, tag="sums"):
    """Sums of the pages that P has written for the attempt, from byte ``first`` on, in the order of
    page_sums.py. If P has none, ``reason`` explains why.
    """

    transfer_id: Id
    attempt: UInt32
    first: Natural
    sums: Annotated[bytes, msgspec.Meta(max_length=MAX_SUMS_BYTES)]
    reason: Text = ""


class FailCode(enum.Enum):
    UNKNOWN_TRANSFER = "unknown_transfer"  # no such request arrived in time
    # The prompt's client left, or decode gave the transfer up earlier. D's transfer is cancelled, too.
    PREFILL_ABORTED = "prefill_aborted"
    PROMPT_MISMATCH = "prompt_mismatch"  # D computes the prompt itself, and each of its workers sends RELEASE
    INCOMPATIBLE = "incompatible"  # the RESERVE does not fit the layouts
    WRITE_ERROR = "write_error"  # requested pages were not computed, or not written
    DUPLICATE = "duplicate"  # the transfer already serves another request
    DRAINING = "draining"
    EXPIRED = "expired"  # the hold time or the deadline passed, or P slept meanwhile
    STALE = "stale"  # P has other weights than D, or recomputes a prompt of which D has a part


class Fail(WireMessage, frozen=True, tag="fail"):
    """P will not complete the transfer. ``quiesced``: none of its writes can land. If it is false, D must
    fence."""

    transfer_id: Id
    attempt: UInt32
    code: FailCode
    message: Text
    quiesced: bool


class Cancel(WireMessage, frozen=True, tag="cancel"):
    """D no longer wants the share. P stops, drains and answers with CANCEL_ACK."""

    transfer_id: Id
    attempt: UInt32
    share: ShareNumber = 0


class CancelAck(WireMessage, frozen=True, tag="cancel_ack"):
    """P has stopped. ``drained``: no page of the transfer is in flight. If it is false, P does not know, and
    D must fence."""

    transfer_id: Id
    attempt: UInt32
    drained: bool


class Release(WireMessage, frozen=True, tag="release"):
    """D needs no pages of this transfer. P may free its blocks, as far as the share is concerned."""

    transfer_id: Id
    share: ShareNumber = 0


class Defer(WireMessage, frozen=True, tag="defer"):
    """D is short of blocks, and takes none for this transfer while its prompt waits at P.

    One worker of D sends it for all, and waits for DUE.
    """

    transfer_id: Id


class Due(WireMessage, frozen=True, tag="due"):
    """The prompt is about to be computed, or P has nothing to wait for: D may send RESERVE. P waits for no
    answer."""

    transfer_id: Id


class Borrow(WireMessage, frozen=True, tag="borrow"):
    """The borrower requests the pages of a prompt's leading tokens, under a new transfer id."""

    transfer_id: Id
    content: ContentKey
    first_token: Natural  # the borrower has the tokens before this one
    multiple: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # the borrower can use multiples of these tokens
    deadline_ms: Natural  # from receipt; the borrower waits no longer for LENT
    weights: Version = ""  # the version that the borrower serves; the pages must have the same one


class LendOutcome(enum.Enum):
    """The outcome of the request for a prefix."""

    LENT = "lent"
    NOT_CACHED = "not_cached"  # the lender has no more tokens than the borrower
    BUSY = "busy"  # the lender lends or is asked for as much as it may
    PAUSED = "paused"
    WEIGHTS = "weights"  # the lender has other weights
    UNLIKE = "unlike"  # the lender's blocks are hashed in another way, or cannot be lent
    CLOSING = "closing"
    FAILED = "failed"  # the request or its answer was not usable
    # Outcomes that the borrower knows by itself:
    UNREACHABLE = "unreachable"  # no session with the lender
    SILENT = "silent"  # no answer in time
    SKIPPED = "skipped"  # not sent: the lender was silent or unlike, or too many lenders are being located


class Lent(WireMessage, frozen=True, tag="lent"):
    """The lender has the first ``tokens`` tokens, and holds their pages for RESERVE. 0: it lends nothing, for
    this reason."""

    transfer_id: Id
    tokens: Natural
    reason: Text = ""
    outcome: LendOutcome = LendOutcome.LENT


class Ping(WireMessage, frozen=True, tag="ping"):
    """D's heartbeat. It lists the transfers that still wait in D's queue, so that P holds their blocks."""

    sequence: Natural
    waiting: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_WAITING)] = ()


class Pong(WireMessage, frozen=True, tag="pong"):
    sequence: Natural


class Bye(WireMessage, frozen=True, tag="bye"):
    """The session is over. A transfer that has not ended with its own message is fenced and fails."""

    reason: Text = ""


class Recall(WireMessage, frozen=True, tag="recall"):
    """An operator queries the newest ``limit`` timelines of transfers whose id, or whose request's id,
    contains ``text``. 0: only the time."""

    text: Text = ""
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMELINES)] = 0


class Recalled(WireMessage, frozen=True, tag="recalled"):
    """The timelines that a worker has kept, the newest first, as many as fit into a message."""

    engine_id: Id
    rank: Natural
    role: Role
    host: Text  # equal on workers that share a clock
    now: Nanoseconds  # the worker's clock at the answer
    kept: Natural  # number of transfers whose timelines are kept; 0: off
    lost: Natural  # steps of the transfer engine that were not recorded for lack of room
    layers: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PARTS)]
    # the other workers of its engine
    others: Annotated[tuple[tuple[Host, Port], ...], msgspec.Meta(max_length=MAX_RANKS)]
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
    | Sums
    | Fail
    | Cancel
    | CancelAck
    | Release
    | Defer
    | Due
    | Borrow
    | Lent
    | Ping
    | Pong
    | Bye
    | Recall
    | Recalled
)


def clip(text: str) -> str:
    """``text`` in the form that a message may carry: at most MAX_TEXT characters, all of them UTF-8."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def id_problem(identifier: str) -> str | None:
    """The reason why ``identifier`` cannot be an Id, or None. Transfer ids come from outside, with a
    request."""
    if not 1 <= len(identifier) <= MAX_ID:
        return f"a transfer id has 1 to {MAX_ID} characters, this one {len(identifier)}"
    if clip(identifier) != identifier:
        return "a transfer id must be valid Unicode"
    return None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions that msgspec raises for bytes that are not JSON or MessagePack, do not have the expected
shape, or are nested too deeply."""


def encode(message: AnyMessage) -> bytes:
    """The frame for a message. Raises ValueError if the other side could not decode it."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        name = type(message).__name__
        raise ValueError(f"{name} of {len(frame)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return frame


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message in ``frame``. Raises MalformedMessage with the reason for any other bytes."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(frame)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        message: AnyMessage = _decoder.decode(frame)
    except UNREADABLE as error:
        raise MalformedMessage(str(error)) from error
    return message
