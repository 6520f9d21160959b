"""The actions that the state machines request of their driver: small values, executed in their order.

The machines (prefill_machine.py, decode_machine.py, peers.py) hold no socket, thread or clock. Events and the
time go in as method calls, and a list of actions comes out. The agent executes the actions on real sockets
and a TransferEngine, the simulator in virtual time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.plans.plan import Groups
from kv_connector.protocol.plans.runs import Places
from kv_connector.protocol.wire.content_key import ContentKey
from kv_connector.protocol.wire.messages import (
    AnyMessage,
    Borrow,
    Cancel,
    CancelAck,
    Defer,
    Due,
    Fail,
    Hello,
    LendOutcome,
    Lent,
    Ping,
    Ranks,
    Release,
    Reserve,
    Role,
    Sampled,
    Sums,
    Wants,
)

# One session with a peer. The PeerTable numbers the sessions and never reuses a number, so a peer that comes
# back has a new one.
PeerId = int


@dataclass(frozen=True)
class Address:
    """The address on which an agent's control socket listens."""

    host: str
    port: int
    prefixes: bool = False
    """Whether this names the sessions for prefixes with that agent. They are apart from those for prompts,
    because an older engine knows only the latter."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Outcome(enum.Enum):
    """The outcome of a transfer, on either side."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the client left: D or P aborted its request
    RELEASED = "released"  # D needed no pages
    EXPIRED = "expired"  # no peer requested it in time
    STALE = "stale"  # P has other weights or another prompt, or recomputes a prompt of which D has a part


@dataclass(frozen=True)
class Send:
    """Send a message to a peer. The message is dropped if the peer is gone."""

    peer: PeerId
    message: AnyMessage


@dataclass(frozen=True)
class Fence:
    """End the session, so that no write of either side may land or read any more.

    ``peer_down`` answers at once, and ``fenced`` once the fence is complete.
    """

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Ended:
    """A transfer has ended. Counted, and logged unless it ended as decode wanted."""

    side: Role  # PREFILL: a transfer to be sent; DECODE: one to be received
    transfer_id: str
    peer: PeerId | None  # None: no peer was ever involved
    outcome: Outcome
    reason: str = ""  # empty if D's own request was aborted
    seconds: float = 0.0  # in D from RESERVE to the last page, in P from RESERVE to the end
    share: int = 0  # in P: the number of the decode worker's share
    request_id: str = ""  # empty if the request has not arrived
    prefix_tokens: int = 0  # in D: tokens of a borrowed prefix that were to be loaded. 0: it was a prompt


class State(enum.Enum):
    """The state of a request, on either side. It never goes back. Without a state, the request waits for the
    other side."""

    # Both sides are present, and pages are sent as they are computed. In P also if decode has reported that
    # it needs none.
    MOVING = "moving"
    DONE = "done"  # all requested pages have arrived
    FAILED = "failed"  # over without them, whatever the outcome; no page is read or written any more


@dataclass(frozen=True)
class Reached:
    """A request of this engine has reached this state."""

    side: Role
    transfer_id: str
    request_id: str
    state: State
    reason: str = ""  # why it failed; empty if it was aborted here
    first_token: int = 0  # in P, MOVING: decode has the tokens before this one


@dataclass(frozen=True)
class UnderWay:
    """A transfer that is not over, as shown to operators."""

    side: Role
    transfer_id: str
    request_id: str  # empty if the request has not arrived
    peer: PeerId | None
    phase: str
    # the time of RESERVE; in D, the time at which the request wanted its pages. None: no reservation yet
    since: float | None
    share: int = 0  # in P: the number of the decode worker's share


@dataclass(frozen=True)
class Log:
    """A log line for the operator, at a level of the standard library's logging."""

    level: int
    text: str


# --- Of sums, on either side


@dataclass(frozen=True)
class SummedPages:
    """Pages of several layers in the same blocks of this engine. Each page gets a sum, layer by layer.

    The page of a layer in a block consists of ``runs`` of bytes, at ``offset + block * stride + run`` in the
    layer's region.
    """

    layers: tuple[tuple[int, int], ...]
    """Region and offset of each layer."""
    blocks: tuple[int, ...]
    stride: int
    runs: tuple[int, ...]
    run_bytes: int


# --- Of the prefill side


class Share(NamedTuple):
    """The part of a transfer that one decode worker receives. One worker of P serves several if D has more
    workers."""

    transfer_id: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id} for decode worker {self.number}" if self.number else self.transfer_id


@dataclass(frozen=True)
class PushedGroup:
    """Pages of one group at the same places of their blocks: from P's block ``source[i]`` to D's block
    ``target[i]``."""

    groups: Groups  # P's group and D's group
    places: Places
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Push:
    """Add these pages to the share's writes. The first Push opens a native transfer for them.

    Do not execute it if the share has ended since (``writing`` is false): D has a report that nothing lands.
    """

    peer: PeerId
    share: Share
    signal_base: int | None  # None: computed already
    immediate: int  # raises D's counter by one for each page
    groups: tuple[PushedGroup, ...]
    early_token: bool = False  # the client probably gets its first token from P, before these pages arrive


@dataclass(frozen=True)
class Seal:
    """No pages follow. The transfer engine reports the transfer's end once all pages have arrived."""

    share: Share


@dataclass(frozen=True)
class CancelWrites:
    """Post nothing more of this share. The transfer engine reports its end once it has drained."""

    share: Share


@dataclass(frozen=True)
class SumPages:
    """Sum these pages. ``pages_summed`` of the machine answers."""

    owner: Share | int  # in P the share whose pages have arrived, in D the attempt
    pages: tuple[SummedPages, ...]


@dataclass(frozen=True)
class FinishedSending:
    """Nothing reads the request's blocks any more."""

    request_id: str


# --- Of the decode side


@dataclass(frozen=True)
class FindEngine:
    """Find the workers of the engine at this address. ``engine_found`` or ``engine_not_found`` answers."""

    engine: Address


@dataclass(frozen=True)
class Dial:
    """Open a session with this worker of the engine for the parts in ``wants``, if it has this layout.
    ``peer_up`` or ``dial_failed`` answers."""

    engine: Address
    address: Address
    wants: Wants
    layout: KvLayout


@dataclass(frozen=True)
class OpenCounter:
    """Allocate a counter that reports when it has reached ``writes``. ``counter_opened`` answers.

    Only ``peers`` may raise it. The whole request has one counter, because nothing waits for a single layer
    or for one of several sources. An engine has 65,536 counters. One for each of 94 layers would use them up
    in 697 requests.
    """

    peers: tuple[PeerId, ...]
    request_id: str
    writes: int


@dataclass(frozen=True)
class CloseCounter:
    """Free the request's counter. Later immediates for it are stale."""

    request_id: str


@dataclass(frozen=True)
class FinishedReceiving:
    """Nothing can land in the request's blocks any more. If it ``failed``, pages are missing.

    ``sampled``: the token that prefill sampled behind the prompt, if it was requested and has arrived.
    ``stale``: the transfer ended with Outcome.STALE, which is no fault. D then computes the prompt.
    """

    request_id: str
    failed: bool
    sampled: int | None = None
    stale: bool = False


@dataclass(frozen=True)
class PromptDue:
    """A deferred load waits for nothing any more: it may take blocks as soon as the engine has them."""

    transfer_id: str


@dataclass(frozen=True)
class CorruptPage:
    """A page that differs from P's, or the part of it that one worker of P has written."""

    peer: PeerId
    layer: str
    block: int  # of D
    first_token: int
    tokens: int  # 0: a row, without tokens

    def __str__(self) -> str:
        last = self.first_token + self.tokens - 1
        tokens = f" (tokens {self.first_token} to {last})" if self.tokens else ""
        return f"layer {self.layer}, block {self.block}{tokens}"


@dataclass(frozen=True)
class PagesChecked:
    """The pages of a transfer were compared with the sums of P. Counted, and logged unless all are equal."""

    transfer_id: str
    request_id: str
    pages: int  # compared
    corrupt: int  # of them, those that differ
    first: CorruptPage | None  # of those
    unverified: tuple[tuple[PeerId, str], ...]  # sources without a check, with the reasons

    @property
    def problem(self) -> str:
        """The reason why its pages are not used."""
        return f"{self.corrupt} of {self.pages} pages differ from the prefill engine's: {self.first}"


# --- Of prefixes


@dataclass(frozen=True)
class PrefixRequested:
    """A borrower requests a prefix. The engine's scheduler looks it up, and answers with lend()."""

    transfer_id: str
    content: ContentKey
    first_token: int  # the borrower has the tokens before this one
    multiple: int  # the answer must be a multiple of these tokens


@dataclass(frozen=True)
class PrefixAnswered:
    """The lender holds the pages of the first ``tokens`` tokens for this transfer. 0: the prompt is to be
    computed."""

    transfer_id: str
    tokens: int
    outcome: LendOutcome
    seconds: float  # since the request


@dataclass(frozen=True)
class PrefixDecided:
    """This engine has answered a borrower. Counted."""

    outcome: LendOutcome
    tokens: int  # lent beyond those that the borrower has


# --- Of sessions

# Names one control connection. The owner of the sockets assigns it. A connection that broke and came back has
# another name.
Source = bytes


@dataclass(frozen=True)
class Connect:
    """Open a control connection and create an offer of the transfer engine. ``offered`` or ``dial_error``
    answers."""

    peer: PeerId
    address: Address
    name: str
    without: tuple[str, ...] = ()
    """Lanes that the offer leaves out, because they do not lead to this worker."""


@dataclass(frozen=True)
class Inquire:
    """Open a control connection without an offer. ``connected`` or ``dial_error`` answers."""

    peer: PeerId
    address: Address


@dataclass(frozen=True)
class Accept:
    """Let the transfer engine accept D's offer, and import D's regions. ``accepted`` or ``refused``
    answers."""

    peer: PeerId
    name: str
    hello: Hello


@dataclass(frozen=True)
class Complete:
    """Give P's answer to the transfer engine. ``completed``, ``pass_over`` or ``dial_error`` answers."""

    peer: PeerId
    name: str
    lane: str
    answer: bytes


@dataclass(frozen=True)
class Reply:
    """Send a message on a connection, whether or not it has a session."""

    source: Source
    message: AnyMessage


@dataclass(frozen=True)
class SessionUp:
    """The session can carry requests. ``address``: the address that was dialled. None if the peer dialled."""

    peer: PeerId
    address: Address | None
    incarnation: str = ""  # of the peer's process
    knows_defer: bool = False  # whether DEFER and DUE may be sent in it


@dataclass(frozen=True)
class SessionOver:
    """The session has ended. Notify the request machines, fence the peer, and notify them again."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class DialFailed:
    """No session with the worker at this address could be made."""

    address: Address
    reason: str


@dataclass(frozen=True)
class EngineFound:
    """The workers of the engine at this address, by rank."""

    engine: Address
    ranks: Ranks


@dataclass(frozen=True)
class EngineNotFound:
    """No engine answers at this address, or it refuses this engine."""

    engine: Address
    reason: str


@dataclass(frozen=True)
class HangUp:
    """Close a connection that this side dialled."""

    source: Source


@dataclass(frozen=True)
class Distrust:
    """The sender broke the protocol. Read nothing more from this connection."""

    source: Source
    reason: str


RequestMessage = (
    Reserve | Cancel | Release | Sampled | Sums | Fail | CancelAck | Defer | Due | Borrow | Lent | Ping
)
"""A message about requests, not about the session."""


@dataclass(frozen=True)
class Deliver:
    """Pass a message of a live session to the request machines."""

    peer: PeerId
    message: RequestMessage
