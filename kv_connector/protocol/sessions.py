"""The sessions of one process, sans-IO: their table, their heartbeats and how each ends.

dialling.py makes those of a decode engine, answering.py those of a prefill engine.
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
from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import (
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
)
from kv_connector.protocol.timers import Timeouts, Timers

# Refusals that are logged once; names come from outside.
_REMEMBERED_NAKS = 1024

# Of one engine id and rank, while a session of its last process is up: so many times it was restarted.
_REMEMBERED_PROCESSES = 64

# Why nobody new comes in.
CLOSING = "is shutting down"
ASLEEP = "is asleep"


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"


@dataclass(frozen=True)
class Identity:
    """Who this process is, as its HELLOs say."""

    engine_id: str
    incarnation: str
    role: Role
    rank: int
    fingerprint: Fingerprint
    layout: KvLayout
    regions: tuple[bytes, ...]  # TransferEngine's descriptor of each memory region
    advice: Mapping[str, str] = field(default_factory=dict)  # not sent: by a pair's name


@dataclass(frozen=True)
class PeerInfo:
    """A peer as operators see it."""

    peer: PeerId
    name: str
    role: Role  # what the peer is in this session
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
    """One session and what is known of the peer."""

    peer: PeerId
    name: str
    role: Role
    last_seen: float
    # D's side: the worker, or the engine that is being looked for (``finding``); and whose worker it is
    address: Address | None = None
    of: Address | None = None
    wants: Wants = ()
    layout: KvLayout | None = None  # that it has to have
    without: tuple[str, ...] = ()  # lanes that do not lead there
    finding: bool = False
    source: Source | None = None
    state: PeerState = PeerState.CONNECTING
    engine: tuple[str, int] | None = None  # engine id and rank, once known
    incarnation: str = ""
    lane: str = ""
    hello: Hello | Locate | None = None  # sent by D again and again until it is answered
    # P's side
    ack: HelloAck | None = None  # the answer, for a HELLO that comes again
    # D's side
    give_up: float = 0.0
    retry: float = 0.0
    backoff: float = 0.0
    next_ping: float = 0.0  # at once


@dataclass
class Caller:
    """A worker that has dialled us: its process, and the live sessions of it."""

    incarnation: str
    sessions: set[PeerId] = field(default_factory=set)
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PROCESSES))
    """Processes of the same engine id and rank, whose sessions the first one of this process has ended."""


class Sessions:
    """All sessions of one process, and what is known of their peers."""

    def __init__(self, identity: Identity, timeouts: Timeouts) -> None:
        self.identity = identity
        self.timeouts = timeouts
        self.peers: dict[PeerId, Peer] = {}
        self.by_source: dict[Source, PeerId] = {}
        self.by_address: dict[Address, PeerId] = {}
        """Workers that we dialled."""
        self.finding: dict[Address, PeerId] = {}
        """Engines that are being looked for."""
        self.callers: dict[tuple[str, int], Caller] = {}
        """By engine id and rank."""
        self.waiting: dict[Address, tuple[str, ...]] = {}
        """By prefill engine, the transfers whose requests queue here."""
        # When our engine took its last step, if it says so. One that is paused takes none, and nothing is
        # held for it meanwhile: a P that is to be paused too would wait for it.
        self.last_step = math.inf
        self.naks: dict[str, str] = {}
        """By peer, what was logged last: a refusal repeats with each request."""
        self.ranks: Ranks = ()
        """The workers of this engine."""
        self.timers: Timers[PeerId] = Timers()
        self.redial: Timers[Address] = Timers()
        """Engines that requests wait for, and that a session has ended with: when to look for them again."""
        self.away = ""
        """Why nobody new comes in."""
        self._next_peer = 1
        self._sequence = 0

    def add(self, now: float, name: str, role: Role) -> Peer:
        """A new session, which has no connection yet."""
        peer = Peer(self._next_peer, name, role, now)
        self._next_peer += 1
        self.peers[peer.peer] = peer
        return peer

    def up(self, now: float, peer: Peer) -> list[PeersAction]:
        """Marks a session that has its lane as up: messages and pages may go."""
        peer.state = PeerState.UP
        self.timers.set(peer.peer, now if peer.address is not None else now + self.timeouts.heartbeat)
        text = f"UP: {peer.role.value} peer {peer.name}, lane {peer.lane}"
        return [Log(logging.INFO, text), SessionUp(peer.peer, peer.address)]

    def drop(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """As PeerTable.drop()."""
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
        """The one place in which a session ends."""
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
            if other.of == peer.of:  # the engine may be another when it is found again
                other.of = None
        self.find_again(peer)
        if peer.source is not None:
            actions.append(HangUp(peer.source))
        if peer.finding:
            return [*actions, EngineNotFound(peer.address, reason)]
        if peer.state is PeerState.CONNECTING:
            actions.append(DialFailed(peer.address, reason))
        return [*actions, SessionOver(peer.peer, reason)]

    def find_again(self, peer: Peer) -> None:
        """Looks for the engine again, where requests wait for it: at once if the session has lasted. An
        engine that does not answer is not tried all the time."""
        if peer.of in self.waiting:
            self.redial.set(peer.of, peer.give_up)

    def end_all(self) -> list[PeersAction]:
        """Ends each session without a message."""
        actions: list[PeersAction] = []
        for peer in list(self.peers.values()):
            actions += self.forget(peer, f"this engine {self.away}")
        return actions

    def byes(self, reason: str) -> list[Reply]:
        """BYE to each peer that has a connection. Ends no session."""
        sources = [peer.source for peer in self.peers.values()]
        return [Reply(source, Bye(reason)) for source in sources if source is not None]

    def bye(self, peer: Peer, message: Bye) -> list[PeersAction]:
        """Ends a session that the peer has left."""
        text = f"BYE from {peer.role.value} peer {peer.name}: {message.reason}"
        return [Log(logging.INFO, text), *self.forget(peer, f"the peer left: {message.reason}")]

    def violation(self, now: float, peer: Peer, message: AnyMessage) -> list[PeersAction]:
        """The peer broke the protocol: the session ends, and the agent ignores its connection."""
        assert peer.source is not None
        text = f"a {peer.role.value} peer must not send {type(message).__name__}"
        source = peer.source
        return [*self.drop(now, peer.peer, text), Distrust(source, text)]

    def log_nak(self, level: int, direction: str, name: str, reason: str) -> list[PeersAction]:
        """The line of a refusal, unless it repeats the last one with this peer."""
        if self.naks.get(name) == reason:
            return []
        if len(self.naks) >= _REMEMBERED_NAKS:
            self.naks.clear()
        self.naks[name] = reason
        return [Log(level, f"NAK {direction} {name}: {reason}")]

    # --- Heartbeats

    def beat(self, now: float, peer: Peer) -> list[PeersAction]:
        """Counts the silence of a peer, and pings a prefill engine when that is due."""
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
        """Notes that the peer has sent something. A suspect peer is up again."""
        if peer.state is not PeerState.SUSPECT:
            return []
        peer.state = PeerState.UP
        return [Log(logging.INFO, f"UP: {peer.role.value} peer {peer.name} answers again, lane {peer.lane}")]

    def _ping(self, now: float, peer: Peer) -> list[PeersAction]:
        assert peer.source is not None
        paused = now - self.last_step > self.timeouts.hold
        waiting = () if paused or peer.of is None else self.waiting.get(peer.of, ())
        actions: list[PeersAction] = []
        for start in range(0, max(len(waiting), 1), MAX_WAITING):
            self._sequence += 1
            actions.append(Reply(peer.source, Ping(self._sequence, waiting[start : start + MAX_WAITING])))
        return actions
