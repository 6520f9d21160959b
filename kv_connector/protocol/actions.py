"""What the state machines ask their driver to do: small values, in the order in which they must be executed.

The machines (prefill.py, decode.py, peers.py) hold no socket, thread or clock. Events and the time go in as
method calls; a list of actions comes out. The agent executes them on real sockets and a TransferEngine, the
simulator in virtual time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import (
    AnyMessage,
    Cancel,
    CancelAck,
    Fail,
    Hello,
    Ping,
    Ranks,
    Release,
    Reserve,
    Role,
    Sampled,
    Wants,
)
from kv_connector.protocol.plan import Groups
from kv_connector.protocol.runs import Places

# One session with a peer, numbered by the PeerTable and never reused: a peer that comes back is a new one.
PeerId = int


@dataclass(frozen=True)
class Address:
    """Where an agent's control socket listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Outcome(enum.Enum):
    """How a transfer ended, on either side."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"  # its client left: D or P aborted its request
    RELEASED = "released"  # D needed nothing
    EXPIRED = "expired"  # nobody came for it
    STALE = "stale"  # P has other weights or another prompt, or computes anew what a part of is at D


@dataclass(frozen=True)
class Send:
    """A message to a peer; dropped if the peer is gone meanwhile."""

    peer: PeerId
    message: AnyMessage


@dataclass(frozen=True)
class Fence:
    """End the session: no write of either side may land, or read, any more. Answered by ``peer_down`` at
    once and by ``fenced`` when it is true."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Ended:
    """A transfer came to its end; for counters, and a log line unless all went as decode wanted."""

    side: Role  # PREFILL: it was to be sent; DECODE: to be received
    transfer_id: str
    peer: PeerId | None  # None: no peer was ever involved
    outcome: Outcome
    reason: str = ""  # empty where D's own request was aborted
    seconds: float = 0.0  # D: from RESERVE to the last page; P: from RESERVE to the end
    share: int = 0  # P: which of D's workers it was for
    request_id: str = ""  # empty where the request has not come


class State(enum.Enum):
    """How far a request has come, on either side. It never goes back; before, it waits for the other side."""

    # Both sides are there: pages go as they are computed. On P also where decode has said that it wants none.
    MOVING = "moving"
    DONE = "done"  # all that decode asked for is there
    FAILED = "failed"  # over without that, whatever the outcome; no page is read or written any more


@dataclass(frozen=True)
class Reached:
    """A request of this engine has come so far."""

    side: Role
    transfer_id: str
    request_id: str
    state: State
    reason: str = ""  # why it failed; empty where it was aborted here
    first_token: int = 0  # P, MOVING: decode has the tokens before this one


@dataclass(frozen=True)
class UnderWay:
    """A transfer that is not over, as operators see it."""

    side: Role
    transfer_id: str
    request_id: str  # empty where the request has not come
    peer: PeerId | None
    phase: str
    since: float | None  # RESERVE; on D, when the request asked for it. None: there was none yet
    share: int = 0  # P: which of D's workers it is for


@dataclass(frozen=True)
class Log:
    """A line for the operator, at a level of the standard library's logging."""

    level: int
    text: str


# --- Of prefill alone


class Share(NamedTuple):
    """What one of D's workers gets of a transfer: P's worker serves several where D has more of them."""

    transfer_id: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.transfer_id} for decode worker {self.number}" if self.number else self.transfer_id


@dataclass(frozen=True)
class PushedGroup:
    """Of one group, what lies at the same places of its blocks: from ``source[i]`` (P's block) to
    ``target[i]`` (D's block)."""

    groups: Groups  # P's and D's
    places: Places
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Push:
    """Add these pages to the share's writes; the first Push opens a transfer for them in the engine.

    Not to be carried out if the share has ended since (``writing`` is false): D has been told that
    nothing lands.
    """

    peer: PeerId
    share: Share
    signal_base: int | None  # None: computed already
    immediate: int  # raises D's counter, by one for each page
    groups: tuple[PushedGroup, ...]
    early_token: bool = False  # the client is likely to have its first token from P, without waiting for them


@dataclass(frozen=True)
class Seal:
    """No pages follow: the engine reports the transfer's end once all have arrived."""

    share: Share


@dataclass(frozen=True)
class CancelWrites:
    """Post nothing more of this share; the engine reports its end once it has drained."""

    share: Share


@dataclass(frozen=True)
class FinishedSending:
    """Nothing reads the request's blocks any more."""

    request_id: str


# --- Of decode alone


@dataclass(frozen=True)
class FindEngine:
    """Who are the workers of the engine at this address? ``engine_found`` or ``engine_not_found`` answers."""

    engine: Address


@dataclass(frozen=True)
class Dial:
    """A session with this worker of the engine is needed, for what is wanted of it, while it has this layout:
    ``peer_up`` or ``dial_failed`` answers."""

    engine: Address
    address: Address
    wants: Wants
    layout: KvLayout


@dataclass(frozen=True)
class OpenCounter:
    """Allocate a counter, to report when it has reached ``writes``; ``counter_opened`` answers.

    Only ``peers`` may raise it. One for the whole request: nobody waits for a single layer, or for one of
    several sources, and an engine has 65,536 counters, which one for each of 94 layers would use up in 697
    requests.
    """

    peers: tuple[PeerId, ...]
    request_id: str
    writes: int


@dataclass(frozen=True)
class CloseCounter:
    """Free the request's counter: later immediates for it are stale."""

    request_id: str


@dataclass(frozen=True)
class FinishedReceiving:
    """Nothing can land in the request's blocks any more; if it ``failed``, they lack their pages.

    ``sampled``: the token that prefill sampled behind the prompt, if it was asked for and has said it.
    ``stale``: it failed as Outcome.STALE says, which is nobody's fault: D is to compute the prompt.
    """

    request_id: str
    failed: bool
    sampled: int | None = None
    stale: bool = False


# --- Of sessions

# Names one control connection, given by the owner of the sockets. One that broke and came back is another.
Source = bytes


@dataclass(frozen=True)
class Connect:
    """Open a control connection and make an offer of the engine: ``offered`` or ``dial_error`` answers."""

    peer: PeerId
    address: Address
    name: str
    without: tuple[str, ...] = ()
    """Lanes that the offer leaves out: they do not lead to this worker."""


@dataclass(frozen=True)
class Inquire:
    """Open a control connection, without an offer: ``connected`` or ``dial_error`` answers."""

    peer: PeerId
    address: Address


@dataclass(frozen=True)
class Accept:
    """Let the engine accept D's offer and import its regions: ``accepted`` or ``refused`` answers."""

    peer: PeerId
    name: str
    hello: Hello


@dataclass(frozen=True)
class Complete:
    """Give P's answer to the engine: ``completed``, ``pass_over`` or ``dial_error`` answers."""

    peer: PeerId
    name: str
    lane: str
    answer: bytes


@dataclass(frozen=True)
class Reply:
    """A message on a connection, whether or not it has a session."""

    source: Source
    message: AnyMessage


@dataclass(frozen=True)
class SessionUp:
    """Requests can flow. ``address``: what was dialled; None where the peer dialled us."""

    peer: PeerId
    address: Address | None


@dataclass(frozen=True)
class SessionOver:
    """No more messages from or to this peer: tell the request machines, fence it, and tell them again."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class DialFailed:
    """The address led to no session."""

    address: Address
    reason: str


@dataclass(frozen=True)
class EngineFound:
    """Who the workers of the engine at this address are, by rank."""

    engine: Address
    ranks: Ranks


@dataclass(frozen=True)
class EngineNotFound:
    """There is none at this address, or it refuses us."""

    engine: Address
    reason: str


@dataclass(frozen=True)
class HangUp:
    """Close a connection that we dialled."""

    source: Source


@dataclass(frozen=True)
class Distrust:
    """The sender broke the protocol: nothing more from this connection is to be read."""

    source: Source
    reason: str


@dataclass(frozen=True)
class Deliver:
    """A message of a live session for the request machines."""

    peer: PeerId
    message: Reserve | Cancel | Release | Sampled | Fail | CancelAck | Ping
