"""Membership, sans-IO: who is there, since when, and whether they still are.

Requests name the address of an engine, which is that of its rank 0: D asks there with LOCATE, and DIRECTORY
says where each worker listens. A session is one control connection with one HELLO. D dials a worker, says
HELLO, and P answers HELLO_ACK or HELLO_NAK. D pings, P answers; silence makes a peer SUSPECT, then DEAD. A
session ends once, by BYE, by death, by a message that breaks the protocol, or because the same engine came
back; what follows it is a new session with a new PeerId. Whoever ends a session fences the peer:
``SessionOver`` asks for that. A D that knows P by two names has two sessions with it, which do not concern
each other.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    PROTOCOL_VERSION,
    AnyMessage,
    Bye,
    Cancel,
    CancelAck,
    Directory,
    Fail,
    Fingerprint,
    Hello,
    HelloAck,
    HelloNak,
    Locate,
    NakReason,
    Ping,
    Pong,
    Rank,
    Ranks,
    Release,
    Reserve,
    Role,
    Sampled,
    Wants,
    clip,
    id_problem,
)
from kv_connector.protocol.mismatch import SAME_RELEASE, mismatch
from kv_connector.protocol.timers import Timeouts, Timers

# Refusals that are logged once; names come from outside.
_REMEMBERED_NAKS = 1024

# Of one engine id and rank, while a session of its last process is up: so many times it was restarted.
_REMEMBERED_PROCESSES = 64

# Why nobody new comes in.
_CLOSING = "is shutting down"
_ASLEEP = "is asleep"


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
class _Peer:
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
class _Caller:
    """A worker that has dialled us: its process, and the live sessions of it."""

    incarnation: str
    sessions: set[PeerId] = field(default_factory=set)
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_PROCESSES))
    """Processes of the same engine id and rank, whose sessions the first one of this process has ended."""


class PeerTable:
    """All sessions of one process, on either side of the dial. Every method returns what to do, in order."""

    def __init__(self, identity: Identity, timeouts: Timeouts) -> None:
        self._identity = identity
        self._timeouts = timeouts
        self._peers: dict[PeerId, _Peer] = {}
        self._by_source: dict[Source, PeerId] = {}
        self._by_address: dict[Address, PeerId] = {}  # workers that we dialled
        self._finding: dict[Address, PeerId] = {}  # engines
        self._callers: dict[tuple[str, int], _Caller] = {}  # by engine id and rank
        self._waiting: dict[Address, tuple[str, ...]] = {}
        # When our engine took its last step, if it says so. One that is paused takes none, and nothing is
        # held for it meanwhile: a P that is to be paused too would wait for it.
        self.last_step = math.inf
        self._naks: dict[str, str] = {}  # by peer, what was logged last: a refusal repeats with each request
        self._ranks: Ranks = ()
        self._timers: Timers[PeerId] = Timers()
        # Engines that requests wait for, and that a session has ended with: when to look for them again.
        self._redial: Timers[Address] = Timers()
        self._next_peer = 1
        self._sequence = 0
        self._last_tick: float | None = None
        self._away = ""  # why nobody new comes in

    def __len__(self) -> int:
        """Sessions that are not over."""
        return len(self._peers)

    def peers(self) -> tuple[PeerInfo, ...]:
        """All sessions, in the order in which they began. The one method that any thread may call."""
        peers = list(self._peers.values())  # in one step
        return tuple(PeerInfo(p.peer, p.name, p.role, p.state, p.lane) for p in peers)

    def source(self, peer: PeerId) -> Source | None:
        """The connection of a live session."""
        known = self._peers.get(peer)
        return None if known is None else known.source

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """The workers of this engine: from now on D's may find them here."""
        self._ranks = tuple(ranks)

    def other_workers(self) -> list[tuple[str, int]]:
        """Where the other workers of this engine listen."""
        own = self._identity.rank
        return [(rank.host, rank.port) for number, rank in enumerate(self._ranks) if number != own]

    def next_deadline(self) -> float | None:
        """When tick() is due, if nothing happens before."""
        deadlines = [timers.next() for timers in (self._timers, self._redial)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # --- Dialling (D)

    def find(self, now: float, engine: Address) -> list[PeersAction]:
        """Who are the workers of the engine at this address? One answer comes, however often it is asked."""
        if engine in self._finding:
            return []
        if self._away:
            return [EngineNotFound(engine, f"this engine {self._away}")]
        peer = self._add(now, str(engine), Role.PREFILL)
        peer.address = peer.of = engine
        peer.finding = True
        peer.give_up = now + self._timeouts.connect
        self._finding[engine] = peer.peer
        return [Inquire(peer.peer, engine)]

    def connected(self, now: float, peer_id: PeerId, source: Source) -> list[PeersAction]:
        """The connection to an engine that is being looked for is there: ask."""
        peer, us = self._peers[peer_id], self._identity
        peer.hello = Locate(us.engine_id, us.role, us.rank, PROTOCOL_VERSION, us.fingerprint)
        return self._introduce(now, peer, source)

    def dial(
        self, now: float, engine: Address, address: Address, wants: Wants, layout: KvLayout
    ) -> list[PeersAction]:
        """A session with this worker of an engine is wanted, for ``wants``, if it has this layout; nothing
        happens if there is one, or one is being made."""
        known = self._peers.get(self._by_address.get(address, -1))
        if known is not None:
            # What is wanted of a worker follows from its engine, so that one has come back in another shape.
            changed = f"{address} has a session of another prefill engine, which has to end first"
            if (known.wants, known.layout) != (wants, layout):
                return [DialFailed(address, changed)]
            known.of = engine
            return []
        if self._away:
            return [DialFailed(address, f"this engine {self._away}")]
        peer = self._add(now, str(address), Role.PREFILL)
        peer.address, peer.of, peer.wants, peer.layout = address, engine, wants, layout
        peer.give_up = now + self._timeouts.connect
        self._by_address[address] = peer.peer
        return [Connect(peer.peer, address, peer.name)]

    def offered(self, now: float, peer_id: PeerId, source: Source, offer: bytes) -> list[PeersAction]:
        """The connection and the engine's offer are there: say HELLO."""
        peer = self._peers[peer_id]
        us = self._identity
        peer.hello = Hello(
            engine_id=us.engine_id,
            incarnation=us.incarnation,
            role=us.role,
            rank=us.rank,
            protocol=PROTOCOL_VERSION,
            fingerprint=us.fingerprint,
            layout=us.layout,
            wants=peer.wants,
            regions=us.regions,
            offer=offer,
        )
        return self._introduce(now, peer, source)

    def dial_error(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """Our own side could not connect, or did not take P's answer."""
        return self.drop(now, peer_id, reason)

    def completed(self, now: float, peer_id: PeerId) -> list[PeersAction]:
        """The engine took P's answer: P can write."""
        peer = self._peers[peer_id]
        for address in (peer.address, peer.of):
            self._naks.pop(str(address), None)
        return self._up(now, peer)

    def pass_over(self, now: float, peer_id: PeerId, lane: str, reason: str) -> list[PeersAction]:
        """P took a lane that does not lead from here to P. Another session is made, without this lane, which
        was among those offered: so this ends."""
        peer = self._peers.pop(peer_id)
        assert peer.address is not None
        assert peer.source is not None
        del self._by_source[peer.source]
        self._timers.clear(peer_id)
        again = self._add(now, str(peer.address), Role.PREFILL)
        again.address, again.of, again.wants, again.layout = peer.address, peer.of, peer.wants, peer.layout
        again.without = (*peer.without, lane)
        again.give_up = peer.give_up
        self._by_address[peer.address] = again.peer
        text = f"prefill peer {peer.name}: lane {lane} is passed over: {reason}"
        return [
            Log(logging.INFO, text),
            Reply(peer.source, Bye(clip(f"lane {lane} is passed over: {reason}"))),
            HangUp(peer.source),
            SessionOver(peer_id, reason),
            Connect(again.peer, peer.address, again.name, again.without),
        ]

    def set_waiting(self, now: float, waiting: Collection[tuple[str, Address]]) -> list[PeersAction]:
        """Transfers whose requests still queue here, and their prefill engines: the next PINGs list them.

        Sessions with these are kept up, and made anew where one ends: a prompt whose blocks P holds for us is
        held only as long as P hears so.
        """
        lists: dict[Address, list[str]] = {}
        for transfer_id, address in waiting:
            if id_problem(transfer_id) is None:
                lists.setdefault(address, []).append(transfer_id)
        self._waiting = {address: tuple(ids) for address, ids in lists.items()}
        return self._find_waiting(now)

    # --- Being dialled (P)

    def accepted(self, now: float, peer_id: PeerId, lane: str, answer: bytes) -> list[PeersAction]:
        """The engine accepted D's offer."""
        peer = self._peers[peer_id]
        us = self._identity
        peer.lane = lane
        peer.ack = HelloAck(us.engine_id, us.incarnation, us.role, us.rank, lane, us.layout, answer)
        assert peer.source is not None
        return [*self._up(now, peer), Reply(peer.source, peer.ack)]

    def refused(self, now: float, peer_id: PeerId, reason: NakReason, text: str) -> list[PeersAction]:
        """The engine did not accept D's offer, or its pages do not fit."""
        peer = self._peers[peer_id]
        assert peer.source is not None
        return [*self._nak(peer.source, peer.name, reason, text), *self._forget(peer, text)]

    # --- Messages

    def receive(self, now: float, source: Source, message: AnyMessage) -> list[PeersAction]:
        """Whatever came over a connection."""
        if isinstance(message, Hello):
            return self._hello(now, source, message)
        if isinstance(message, Locate):
            return self._locate(source, message)
        peer = self._peers.get(self._by_source.get(source, -1))
        if peer is None:
            # A session that is over here, or was one of a process that is gone: its other end must know. (An
            # answer to BYE would be answered in turn.)
            if isinstance(message, Bye):
                return []
            return [Reply(source, Bye("there is no such session here: dial again"))]
        peer.last_seen = now
        actions = self._recovered(peer)
        if isinstance(message, Bye):
            return [*actions, *self._bye(peer, message)]
        if peer.address is not None:
            return actions + self._from_prefill(now, peer, message)
        return actions + self._from_decode(peer, message)

    def lost(self, now: float, source: Source, reason: str) -> list[PeersAction]:
        """The connection lost its standing, or takes no more messages."""
        peer = self._by_source.get(source)
        return [] if peer is None else self.drop(now, peer, reason)

    def drop(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """End a session from this side. Unknown ones (already over) are fine."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return []
        actions: list[PeersAction] = [
            Log(logging.WARNING, f"DEAD: {peer.role.value} peer {peer.name}: {reason}")
        ]
        if peer.source is not None:
            actions.append(Reply(peer.source, Bye(clip(reason))))
        return actions + self._forget(peer, reason)

    # --- Time and the end

    def tick(self, now: float) -> list[PeersAction]:
        """Heartbeats and deadlines. To be called once a heartbeat or more, after reading what has come in."""
        last, self._last_tick = self._last_tick, now
        if last is not None and now - last > self._timeouts.suspect:
            # This process was not running (stopped, swapped, or its interpreter was held): it was deaf,
            # which says nothing about its peers. Their silence counts from here.
            for peer in self._peers.values():
                peer.last_seen = now
        actions: list[PeersAction] = []
        while (peer_id := self._timers.pop_due(now)) is not None:
            peer = self._peers[peer_id]
            actions += (
                self._connecting(now, peer) if peer.state is PeerState.CONNECTING else self._beat(now, peer)
            )
        while self._redial.pop_due(now) is not None:
            actions += self._find_waiting(now)
        return actions

    def drain(self) -> None:
        """From now on nobody new comes in; sessions live on until leave()."""
        self._away = _CLOSING

    def farewells(self) -> list[Reply]:
        """BYE to everybody. Sessions end with leave(), which had better come once these are out: a peer that
        sees its data links end first takes this side for broken."""
        self._away = _CLOSING
        return self._byes("shutting down")

    def leave(self, now: float) -> list[PeersAction]:
        """Ends all sessions."""
        self._away = _CLOSING
        return self._forget_all()

    def sleep(self) -> list[PeersAction]:
        """Ends all sessions, and makes no new one until wake(): there is no memory to write to or from."""
        self._away = _ASLEEP
        return [*self._byes("going to sleep"), *self._forget_all()]

    def wake(self, now: float, regions: tuple[bytes, ...]) -> list[PeersAction]:
        """The memory is there again, under new descriptors: whoever is dialled or dials gets these."""
        self._identity = replace(self._identity, regions=regions)
        self._away = ""
        return self._find_waiting(now)

    # --- Steps

    def _byes(self, reason: str) -> list[Reply]:
        sources = [peer.source for peer in self._peers.values()]
        return [Reply(source, Bye(reason)) for source in sources if source is not None]

    def _forget_all(self) -> list[PeersAction]:
        actions: list[PeersAction] = []
        for peer in list(self._peers.values()):
            actions += self._forget(peer, f"this engine {self._away}")
        return actions

    def _find_waiting(self, now: float) -> list[PeersAction]:
        """Looks for the engines that requests wait for, but those with sessions, or tried a moment ago."""
        actions: list[PeersAction] = []
        if not self._away:
            known = {peer.of for peer in self._peers.values()}
            for address in self._waiting:
                if address not in known and address not in self._redial:
                    actions += self.find(now, address)
        return actions

    def _find_again(self, peer: _Peer) -> None:
        """At once if it has lasted; one that comes to nothing is not tried all the time."""
        if peer.of in self._waiting:
            self._redial.set(peer.of, peer.give_up)

    def _add(self, now: float, name: str, role: Role) -> _Peer:
        peer = _Peer(self._next_peer, name, role, now)
        self._next_peer += 1
        self._peers[peer.peer] = peer
        return peer

    def _forget(self, peer: _Peer, reason: str) -> list[PeersAction]:
        """The one place in which a session ends."""
        del self._peers[peer.peer]
        self._timers.clear(peer.peer)
        actions: list[PeersAction] = []
        if peer.source is not None:
            del self._by_source[peer.source]
        if peer.address is None:
            assert peer.engine is not None
            caller = self._callers[peer.engine]
            caller.sessions.discard(peer.peer)
            if not caller.sessions:
                del self._callers[peer.engine]
            return [SessionOver(peer.peer, reason)]
        del (self._finding if peer.finding else self._by_address)[peer.address]
        for other in self._peers.values():
            if other.of == peer.of:  # the engine may be another when it is found again
                other.of = None
        self._find_again(peer)
        if peer.source is not None:
            actions.append(HangUp(peer.source))
        if peer.finding:
            return [*actions, EngineNotFound(peer.address, reason)]
        if peer.state is PeerState.CONNECTING:
            actions.append(DialFailed(peer.address, reason))
        return [*actions, SessionOver(peer.peer, reason)]

    def _up(self, now: float, peer: _Peer) -> list[PeersAction]:
        peer.state = PeerState.UP
        self._timers.set(peer.peer, now if peer.address is not None else now + self._timeouts.heartbeat)
        text = f"UP: {peer.role.value} peer {peer.name}, lane {peer.lane}"
        return [Log(logging.INFO, text), SessionUp(peer.peer, peer.address)]

    def _introduce(self, now: float, peer: _Peer, source: Source) -> list[PeersAction]:
        peer.source = source
        self._by_source[source] = peer.peer
        peer.backoff = self._timeouts.handshake
        return self._say_hello(now, peer)

    def _say_hello(self, now: float, peer: _Peer) -> list[PeersAction]:
        assert peer.source is not None
        assert peer.hello is not None
        peer.retry = now + peer.backoff
        peer.backoff *= 2
        self._timers.set(peer.peer, min(peer.retry, peer.give_up))
        return [Reply(peer.source, peer.hello)]

    def _connecting(self, now: float, peer: _Peer) -> list[PeersAction]:
        if now < peer.give_up:
            return self._say_hello(now, peer)
        said = "LOCATE" if peer.finding else "HELLO"
        text = (
            f"no answer to {said} within {self._timeouts.connect:g} s: "
            f"is a prefill engine's agent listening at {peer.address}, with the same cluster key?"
        )
        return self.drop(now, peer.peer, text)

    def _beat(self, now: float, peer: _Peer) -> list[PeersAction]:
        silence = now - peer.last_seen
        if silence >= self._timeouts.dead:
            return self.drop(now, peer.peer, f"silent for {silence:.1f} s")
        actions: list[PeersAction] = []
        if silence >= self._timeouts.suspect and peer.state is PeerState.UP:
            peer.state = PeerState.SUSPECT
            text = f"SUSPECT: {peer.role.value} peer {peer.name} is silent for {silence:.1f} s"
            actions.append(Log(logging.WARNING, text))
        wake = now + self._timeouts.heartbeat
        if peer.address is not None:
            if now >= peer.next_ping:
                peer.next_ping = now + self._timeouts.heartbeat
                actions += self._ping(now, peer)
            wake = peer.next_ping
        limit = self._timeouts.dead if peer.state is PeerState.SUSPECT else self._timeouts.suspect
        self._timers.set(peer.peer, min(wake, peer.last_seen + limit))
        return actions

    def _ping(self, now: float, peer: _Peer) -> list[PeersAction]:
        assert peer.source is not None
        paused = now - self.last_step > self._timeouts.hold
        waiting = () if paused or peer.of is None else self._waiting.get(peer.of, ())
        actions: list[PeersAction] = []
        for start in range(0, max(len(waiting), 1), MAX_WAITING):
            self._sequence += 1
            actions.append(Reply(peer.source, Ping(self._sequence, waiting[start : start + MAX_WAITING])))
        return actions

    def _recovered(self, peer: _Peer) -> list[PeersAction]:
        if peer.state is not PeerState.SUSPECT:
            return []
        peer.state = PeerState.UP
        return [Log(logging.INFO, f"UP: {peer.role.value} peer {peer.name} answers again, lane {peer.lane}")]

    def _bye(self, peer: _Peer, message: Bye) -> list[PeersAction]:
        text = f"BYE from {peer.role.value} peer {peer.name}: {message.reason}"
        return [Log(logging.INFO, text), *self._forget(peer, f"the peer left: {message.reason}")]

    def _from_prefill(self, now: float, peer: _Peer, message: AnyMessage) -> list[PeersAction]:
        if isinstance(message, HelloNak):
            return self._nak_received(peer, message)
        if peer.finding:
            if isinstance(message, Directory):
                return self._found(peer, message)
            return self._violation(now, peer, message)
        if isinstance(message, HelloAck):
            if message.layout != peer.layout:  # it came up after its engine was found
                return self.drop(now, peer.peer, "it was restarted with other pages")
            if peer.state is PeerState.CONNECTING and not peer.engine:
                peer.engine = (message.engine_id, message.rank)
                peer.incarnation = message.incarnation
                peer.name = f"{message.engine_id}/{message.rank} at {peer.address}"
                peer.lane = message.lane
                return [Complete(peer.peer, peer.name, peer.lane, message.answer)]
            if message.incarnation != peer.incarnation:
                return self.drop(now, peer.peer, "it was restarted")
            return []  # the answer to a repeated HELLO
        if peer.state is PeerState.CONNECTING:
            return []
        if isinstance(message, Sampled | Fail | CancelAck):
            return [Deliver(peer.peer, message)]
        if isinstance(message, Pong):
            return []
        return self._violation(now, peer, message)

    def _from_decode(self, peer: _Peer, message: AnyMessage) -> list[PeersAction]:
        assert peer.source is not None
        if isinstance(message, Ping):
            actions: list[PeersAction] = [Reply(peer.source, Pong(message.sequence))]
            return [*actions, Deliver(peer.peer, message)] if message.waiting else actions
        if isinstance(message, Reserve | Cancel | Release):
            return [Deliver(peer.peer, message)]
        return self._violation(peer.last_seen, peer, message)

    def _violation(self, now: float, peer: _Peer, message: AnyMessage) -> list[PeersAction]:
        assert peer.source is not None
        text = f"a {peer.role.value} peer must not send {type(message).__name__}"
        source = peer.source
        return [*self.drop(now, peer.peer, text), Distrust(source, text)]

    def _found(self, peer: _Peer, message: Directory) -> list[PeersAction]:
        assert peer.address is not None
        assert peer.source is not None
        del self._peers[peer.peer], self._by_source[peer.source], self._finding[peer.address]
        self._timers.clear(peer.peer)
        self._naks.pop(str(peer.address), None)
        self._find_again(peer)  # if we get on with its workers, nothing comes of this
        return [HangUp(peer.source), EngineFound(peer.address, message.ranks)]

    def _nak_received(self, peer: _Peer, message: HelloNak) -> list[PeersAction]:
        assert peer.address is not None
        reason = f"{message.reason.value}: {message.message}"
        log = self._log_nak(logging.ERROR, "from", str(peer.address), reason)
        return [*log, *self._forget(peer, f"{peer.address} refused: {reason}")]

    def _nak(self, source: Source, name: str, reason: NakReason, text: str) -> list[PeersAction]:
        text = clip(text)
        log = self._log_nak(logging.WARNING, "to", f"decode peer {name}", f"{reason.value}: {text}")
        return [*log, Reply(source, HelloNak(reason, text))]

    def _log_nak(self, level: int, direction: str, name: str, reason: str) -> list[PeersAction]:
        if self._naks.get(name) == reason:
            return []
        if len(self._naks) >= _REMEMBERED_NAKS:
            self._naks.clear()
        self._naks[name] = reason
        return [Log(level, f"NAK {direction} {name}: {reason}")]

    def _hello(self, now: float, source: Source, hello: Hello) -> list[PeersAction]:
        engine = (hello.engine_id, hello.rank)
        name = f"{hello.engine_id}/{hello.rank}"
        speaker = self._peers.get(self._by_source.get(source, -1))
        if speaker is not None and (speaker.address is not None or speaker.engine != engine):
            return self._violation(now, speaker, hello)
        if speaker is not None and speaker.hello == hello:
            speaker.last_seen = now
            return [] if speaker.ack is None else [Reply(source, speaker.ack)]
        before = self._callers.get(engine)
        refusal = self._refusal(hello)
        if refusal is None and before is not None and hello.incarnation in before.replaced:
            text = (
                f"two decode engines have engine_id {hello.engine_id}: leave engine_id out of their settings"
            )
            refusal = NakReason.INCOMPATIBLE, text
        if refusal is not None:
            return self._nak(source, name, *refusal)
        actions: list[PeersAction] = []
        caller = _Caller(hello.incarnation)
        if before is not None and before.incarnation != hello.incarnation:
            caller.replaced.extend([*before.replaced, before.incarnation])
            for peer_id in sorted(before.sessions):
                actions += self.drop(now, peer_id, "the engine restarted")
        elif before is not None:
            # Another session of the same process concerns this one only if it is what this one replaces.
            caller = before
            for known in [self._peers[peer_id] for peer_id in sorted(before.sessions)]:
                if known is speaker or now - known.last_seen >= self._timeouts.suspect:
                    actions += self.drop(now, known.peer, "the engine dialled again")
        peer = self._add(now, name, Role.DECODE)
        peer.source, peer.engine, peer.incarnation, peer.hello = source, engine, hello.incarnation, hello
        self._by_source[source] = peer.peer
        self._callers[engine] = caller
        caller.sessions.add(peer.peer)
        return [*actions, Accept(peer.peer, name, hello)]

    def _locate(self, source: Source, message: Locate) -> list[PeersAction]:
        refusal = self._refusal(message)
        if refusal is not None:
            return self._nak(source, f"{message.engine_id}/{message.rank}", *refusal)
        if not self._ranks:
            return []  # we are starting, and will know it when D asks again
        return [Reply(source, Directory(self._identity.engine_id, self._ranks))]

    def _refusal(self, hello: Hello | Locate) -> tuple[NakReason, str] | None:
        us = self._identity
        if self._away:
            return NakReason.DRAINING, f"prefill engine {us.engine_id} {self._away}"
        if us.role is Role.DECODE:
            text = f"{us.engine_id} is a decode engine: give the router the address of a prefill engine"
            return NakReason.WRONG_ROLE, text
        if hello.role is Role.PREFILL:
            text = f"{hello.engine_id} is a prefill engine: start it as a decode engine to receive pages"
            return NakReason.WRONG_ROLE, text
        if hello.protocol != PROTOCOL_VERSION:
            versions = f"prefill has {PROTOCOL_VERSION}, decode has {hello.protocol}"
            return NakReason.INCOMPATIBLE, f"protocol: {versions}: {SAME_RELEASE}"
        problem = mismatch(us.fingerprint, hello.fingerprint, us.advice)
        if problem is not None:
            return NakReason.INCOMPATIBLE, problem
        return None
