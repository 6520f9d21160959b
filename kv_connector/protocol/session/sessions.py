"""The sessions of one process, sans-IO: their table, their heartbeats and how each ends.

dialling.py makes the sessions of a decode engine, answering.py those of a prefill engine.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_connector.protocol.actions import (
    Accept,
    Address,
    Complete,
    Connect,
    Deliver,
    DialFailed,
    Distrust,
    EngineFound,
    EngineNotFound,
    HangUp,
    Inquire,
    Log,
    PeerId,
    Reply,
    SessionOver,
    SessionUp,
    Source,
)
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.messages import (
    MAX_WAITING,
    AnyMessage,
    Bye,
    Fingerprint,
    Hello,
    HelloAck,
    Locate,
    Ping,
    Ranks,
    Role,
    Wants,
    clip,
    for_prefixes,
    knows_defer,
)

# Refusals that are logged once. Their names come from outside, so their number is limited.
_REMEMBERED_NAKS = 1024

# Engines of older releases that are remembered, the latest ones. Requests name the addresses, so their number
# is limited. An engine that is forgotten is dialled with the newer version, which it refuses. It is located
# again for the next request.
REMEMBERED_OLDER = 1024

# Addresses under which D has found the engine of one session, the latest ones. Requests name the addresses,
# so their number is limited. Routers name an engine by one address each, or by a few.
REMEMBERED_ADDRESSES = 64

# Processes of one engine id and rank that are remembered while a session of the last one is up. Each restart
# adds one.
_REMEMBERED_PROCESSES = 64

# Why no new peer is accepted.
CLOSING = "is shutting down"
ASLEEP = "is asleep"


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"


@dataclass(frozen=True)
class Identity:
    """The identity of this process, as its HELLOs contain it."""

    engine_id: str
    incarnation: str
    role: Role
    rank: int
    fingerprint: Fingerprint
    layout: KvLayout
    regions: tuple[bytes, ...]  # TransferEngine's descriptor of each memory region
    # not sent: the operator's remedy, by a pair's name
    advice: Mapping[str, str] = field(default_factory=dict)
    # the checkpoint that this process was started from; None: unknown
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class PeerInfo:
    """A peer as shown to operators."""

    peer: PeerId
    name: str
    role: Role  # the peer's role in this session
    state: PeerState
    lane: str


PeersAction = (
    Connect
    | Inquire
    | Accept
    | Complete
    | Reply
    | SessionUp
    | SessionOver
    | DialFailed
    | EngineFound
    | EngineNotFound
    | HangUp
    | Distrust
    | Deliver
    | Log
)


@dataclass
class Peer:
    """One session and the facts known about the peer."""

    peer: PeerId
    name: str
    role: Role
    last_seen: float
    # On D: the worker, or the engine that is being located (``finding``); and the worker's engine, by each
    # address under which D has found it.
    address: Address | None = None
    engines: dict[Address, None] = field(default_factory=dict)
    wants: Wants = ()
    layout: KvLayout | None = None  # the layout that the peer must have
    without: tuple[str, ...] = ()  # lanes that do not lead to the peer
    finding: bool = False
    older: bool = False  # the engine was found to know only PROTOCOL_VERSION; prefixes have another version
    source: Source | None = None
    state: PeerState = PeerState.CONNECTING
    engine: tuple[str, int] | None = None  # engine id and rank, once known
    incarnation: str = ""
    lane: str = ""
    hello: Hello | Locate | None = None  # sent by D repeatedly until it is answered
    # On P:
    ack: HelloAck | None = None  # the answer to a HELLO, sent again if it is repeated
    # On D:
    give_up: float = 0.0
    retry: float = 0.0
    backoff: float = 0.0
    next_ping: float = 0.0  # at once

    @property
    def prefixes(self) -> bool:
        """Whether it is a session for prefixes. On P, the first HELLO shows it."""
        if self.address is not None:
            return self.address.prefixes
        return self.hello is not None and for_prefixes(self.hello)

    @property
    def knows_defer(self) -> bool:
        """Whether DEFER and DUE may be sent in it. The HELLO shows it on both sides."""
        return self.hello is not None and knows_defer(self.hello)


@dataclass
class Caller:
    """A worker that has connected to this side: its process and its live sessions."""

    incarnation: str
    sessions: set[PeerId] = field(default_factory=set)
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PROCESSES))
    """Earlier processes of the same engine id and rank, whose sessions this process ended with its first
    HELLO."""


class Sessions:
    """All sessions of one process, and the facts known about their peers."""

    def __init__(self, identity: Identity, timeouts: Timeouts) -> None:
        self.identity = identity
        self.timeouts = timeouts
        self.peers: dict[PeerId, Peer] = {}
        self.by_source: dict[Source, PeerId] = {}
        self.by_address: dict[Address, PeerId] = {}
        """Workers that this side dialled."""
        self.finding: dict[Address, PeerId] = {}
        """Engines that are being located."""
        self.older: dict[Address, None] = {}
        """The latest engines that refused DEFER_PROTOCOL_VERSION, until they answer LOCATE with it."""
        self.callers: dict[tuple[str, int], Caller] = {}
        """Workers that have dialled this side, by engine id and rank."""
        self.waiting: dict[Address, tuple[str, ...]] = {}
        """Transfers whose requests queue here, by prefill engine."""
        # When the engine took its last step, if it reports steps. A paused engine takes none, and nothing is
        # held for it meanwhile: a P that is also to be paused would wait for it.
        self.last_step = math.inf
        self.naks: dict[str, str] = {}
        """The last refusal that was logged, by peer. A refusal repeats with each request."""
        self.ranks: Ranks = ()
        """The workers of this engine."""
        self.checkpoint = identity.checkpoint
        """The checkpoint whose weights this engine has. None: unknown, or later weights."""
        self.timers: Timers[PeerId] = Timers()
        self.redial: Timers[Address] = Timers()
        """When to locate an engine again that requests wait for and whose session has ended."""
        self.away = ""
        """Why no new peer is accepted, or ""."""
        self._next_peer = 1
        self._sequence = 0

    def add(self, now: float, name: str, role: Role) -> Peer:
        """Adds a session that has no connection yet."""
        peer = Peer(self._next_peer, name, role, now)
        self._next_peer += 1
        self.peers[peer.peer] = peer
        return peer

    def up(self, now: float, peer: Peer) -> list[PeersAction]:
        """Marks a session that has its lane as up. From now on it carries messages and pages."""
        peer.state = PeerState.UP
        self.timers.set(peer.peer, now if peer.address is not None else now + self.timeouts.heartbeat)
        text = f"UP: {peer.role.value} peer {peer.name}, lane {peer.lane}"
        return [
            Log(logging.INFO, text),
            SessionUp(peer.peer, peer.address, peer.incarnation, peer.knows_defer),
        ]

    def drop(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """Does the same as PeerTable.drop()."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return []
        actions: list[PeersAction] = [
            Log(logging.WARNING, f"DEAD: {peer.role.value} peer {peer.name}: {reason}")
        ]
        if peer.source is not None:
            actions.append(Reply(peer.source, Bye(clip(reason))))
        return actions + self.forget(peer, reason)

    def forget(self, peer: Peer, reason: str) -> list[PeersAction]:
        """Ends a session. No other method does."""
        del self.peers[peer.peer]
        self.timers.clear(peer.peer)
        actions: list[PeersAction] = []
        if peer.source is not None:
            del self.by_source[peer.source]
        if peer.address is None:
            assert peer.engine is not None
            caller = self.callers[peer.engine]
            caller.sessions.discard(peer.peer)
            if not caller.sessions:
                del self.callers[peer.engine]
            return [SessionOver(peer.peer, reason)]
        del (self.finding if peer.finding else self.by_address)[peer.address]
        for other in self.peers.values():
            for engine in peer.engines:  # it may be another one when it is found again
                other.engines.pop(engine, None)
        self.find_again(peer)
        if peer.source is not None:
            actions.append(HangUp(peer.source))
        if peer.finding:
            return [*actions, EngineNotFound(peer.address, reason)]
        if peer.state is PeerState.CONNECTING:
            actions.append(DialFailed(peer.address, reason))
        return [*actions, SessionOver(peer.peer, reason)]

    def note_engine(self, peer: Peer, engine: Address) -> None:
        """Notes a further address of the engine of D's session. The oldest one that no request waits for is
        forgotten if there are too many."""
        peer.engines[engine] = None
        if len(peer.engines) > REMEMBERED_ADDRESSES:
            idle = (one for one in peer.engines if one != engine and one not in self.waiting)
            del peer.engines[next(idle, next(iter(peer.engines)))]

    def find_again(self, peer: Peer) -> None:
        """Locates the engine again if requests wait for it, at once if the session has lasted. An engine that
        does not answer is not tried all the time."""
        for engine in peer.engines:
            if engine in self.waiting:
                self.redial.set(engine, peer.give_up)

    def end_all(self) -> list[PeersAction]:
        """Ends each session without a message."""
        actions: list[PeersAction] = []
        for peer in list(self.peers.values()):
            actions += self.forget(peer, f"this engine {self.away}")
        return actions

    def byes(self, reason: str) -> list[Reply]:
        """A BYE for each peer that has a connection. Ends no session."""
        sources = [peer.source for peer in self.peers.values()]
        return [Reply(source, Bye(reason)) for source in sources if source is not None]

    def bye(self, peer: Peer, message: Bye) -> list[PeersAction]:
        """Ends a session that the peer has left."""
        text = f"BYE from {peer.role.value} peer {peer.name}: {message.reason}"
        return [Log(logging.INFO, text), *self.forget(peer, f"the peer left: {message.reason}")]

    def violation(self, now: float, peer: Peer, message: AnyMessage) -> list[PeersAction]:
        """The peer broke the protocol. Ends the session, and the agent ignores its connection."""
        assert peer.source is not None
        text = f"a {peer.role.value} peer must not send {type(message).__name__}"
        source = peer.source
        return [*self.drop(now, peer.peer, text), Distrust(source, text)]

    def log_nak(self, level: int, direction: str, name: str, reason: str) -> list[PeersAction]:
        """The log line of a refusal, unless it repeats the last one with this peer."""
        if self.naks.get(name) == reason:
            return []
        if len(self.naks) >= _REMEMBERED_NAKS:
            self.naks.clear()
        self.naks[name] = reason
        return [Log(level, f"NAK {direction} {name}: {reason}")]

    # --- Heartbeats

    def beat(self, now: float, peer: Peer) -> list[PeersAction]:
        """Measures the silence of a peer, and sends a due PING to a prefill engine."""
        silence = now - peer.last_seen
        if silence >= self.timeouts.dead:
            return self.drop(now, peer.peer, f"silent for {silence:.1f} s")
        actions: list[PeersAction] = []
        if silence >= self.timeouts.suspect and peer.state is PeerState.UP:
            peer.state = PeerState.SUSPECT
            text = f"SUSPECT: {peer.role.value} peer {peer.name} is silent for {silence:.1f} s"
            actions.append(Log(logging.WARNING, text))
        wake = now + self.timeouts.heartbeat
        if peer.address is not None:
            if now >= peer.next_ping:
                peer.next_ping = now + self.timeouts.heartbeat
                actions += self._ping(now, peer)
            wake = peer.next_ping
        limit = self.timeouts.dead if peer.state is PeerState.SUSPECT else self.timeouts.suspect
        self.timers.set(peer.peer, min(wake, peer.last_seen + limit))
        return actions

    def recovered(self, peer: Peer) -> list[PeersAction]:
        """Records that the peer has sent a message. A suspect peer is up again."""
        if peer.state is not PeerState.SUSPECT:
            return []
        peer.state = PeerState.UP
        return [Log(logging.INFO, f"UP: {peer.role.value} peer {peer.name} answers again, lane {peer.lane}")]

    def _ping(self, now: float, peer: Peer) -> list[PeersAction]:
        assert peer.source is not None
        paused = now - self.last_step > self.timeouts.hold
        engines = () if paused else peer.engines
        waiting = [transfer_id for engine in engines for transfer_id in self.waiting.get(engine, ())]
        actions: list[PeersAction] = []
        for start in range(0, max(len(waiting), 1), MAX_WAITING):
            self._sequence += 1
            actions.append(
                Reply(peer.source, Ping(self._sequence, tuple(waiting[start : start + MAX_WAITING])))
            )
        return actions
