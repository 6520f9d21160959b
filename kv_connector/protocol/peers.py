"""Membership, sans-IO: who is there, since when, and whether they still are.

Requests name the address of an engine, which is that of its rank 0: D asks there with LOCATE, and DIRECTORY
says where each worker listens. A session is one control connection with one HELLO. D dials a worker, says
HELLO, and P answers HELLO_ACK or HELLO_NAK. D pings, P answers; silence makes a peer SUSPECT, then DEAD. A
session ends once, by BYE, by death, by a message that breaks the protocol, or because the same engine came
back; what follows it is a new session with a new PeerId. Whoever ends a session fences the peer:
``SessionOver`` asks for that. A D that knows P by two names has two sessions with it, which do not concern
each other.

``PeerTable`` is what a process has of it. sessions.py holds the sessions, dialling.py makes them on D,
answering.py on P.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kv_connector.protocol.actions import (
    Address,
    PeerId,
    Reply,
    Source,
)
from kv_connector.protocol.answering import Answering
from kv_connector.protocol.dialling import Dialling
from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import (
    AnyMessage,
    Bye,
    Hello,
    Locate,
    NakReason,
    Rank,
    Wants,
)
from kv_connector.protocol.sessions import (
    ASLEEP,
    CLOSING,
    Identity,
    PeerInfo,
    PeersAction,
    PeerState,
    Sessions,
)
from kv_connector.protocol.timers import Timeouts


class PeerTable:
    """All sessions of one process, on either side of the dial. Every method returns what to do, in order."""

    def __init__(self, identity: Identity, timeouts: Timeouts) -> None:
        self._sessions = Sessions(identity, timeouts)
        self._dialling = Dialling(self._sessions)
        self._answering = Answering(self._sessions)
        self._last_tick: float | None = None

    def __len__(self) -> int:
        """Sessions that are not over."""
        return len(self._sessions.peers)

    def peers(self) -> tuple[PeerInfo, ...]:
        """All sessions, in the order in which they began. The one method that any thread may call."""
        peers = list(self._sessions.peers.values())  # in one step
        return tuple(PeerInfo(p.peer, p.name, p.role, p.state, p.lane) for p in peers)

    def source(self, peer: PeerId) -> Source | None:
        """The connection of a live session."""
        known = self._sessions.peers.get(peer)
        return None if known is None else known.source

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """The workers of this engine: from now on D's may find them here."""
        self._sessions.ranks = tuple(ranks)

    def other_workers(self) -> list[tuple[str, int]]:
        """Where the other workers of this engine listen."""
        own = self._sessions.identity.rank
        return [(rank.host, rank.port) for number, rank in enumerate(self._sessions.ranks) if number != own]

    def next_deadline(self) -> float | None:
        """When tick() is due, if nothing happens before."""
        deadlines = [timers.next() for timers in (self._sessions.timers, self._sessions.redial)]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # --- Dialling (D)

    def find(self, now: float, engine: Address) -> list[PeersAction]:
        """Who are the workers of the engine at this address? One answer comes, however often it is asked."""
        return self._dialling.find(now, engine)

    def connected(self, now: float, peer_id: PeerId, source: Source) -> list[PeersAction]:
        """The connection to an engine that is being looked for is there: ask."""
        return self._dialling.connected(now, peer_id, source)

    def dial(
        self, now: float, engine: Address, address: Address, wants: Wants, layout: KvLayout
    ) -> list[PeersAction]:
        """A session with this worker of an engine is wanted, for ``wants``, if it has this layout; nothing
        happens if there is one, or one is being made."""
        return self._dialling.dial(now, engine, address, wants, layout)

    def offered(self, now: float, peer_id: PeerId, source: Source, offer: bytes) -> list[PeersAction]:
        """The connection and the engine's offer are there: say HELLO."""
        return self._dialling.offered(now, peer_id, source, offer)

    def dial_error(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """Our own side could not connect, or did not take P's answer."""
        return self.drop(now, peer_id, reason)

    def completed(self, now: float, peer_id: PeerId) -> list[PeersAction]:
        """The engine took P's answer: P can write."""
        return self._dialling.completed(now, peer_id)

    def pass_over(self, now: float, peer_id: PeerId, lane: str, reason: str) -> list[PeersAction]:
        """P took a lane that does not lead from here to P. Another session is made, without this lane, which
        was among those offered: so this ends."""
        return self._dialling.pass_over(now, peer_id, lane, reason)

    def set_waiting(self, now: float, waiting: Collection[tuple[str, Address]]) -> list[PeersAction]:
        """Transfers whose requests still queue here, and their prefill engines: the next PINGs list them.

        Sessions with these are kept up, and made anew where one ends: a prompt whose blocks P holds for us is
        held only as long as P hears so.
        """
        return self._dialling.set_waiting(now, waiting)

    def note_step(self, now: float) -> None:
        """Our engine takes a step: it is not paused, and what it waits for is worth holding. Any thread may
        call it."""
        self._sessions.last_step = now

    # --- Being dialled (P)

    def accepted(self, now: float, peer_id: PeerId, lane: str, answer: bytes) -> list[PeersAction]:
        """The engine accepted D's offer."""
        return self._answering.accepted(now, peer_id, lane, answer)

    def refused(self, now: float, peer_id: PeerId, reason: NakReason, text: str) -> list[PeersAction]:
        """The engine did not accept D's offer, or its pages do not fit."""
        return self._answering.refused(now, peer_id, reason, text)

    # --- Messages

    def receive(self, now: float, source: Source, message: AnyMessage) -> list[PeersAction]:
        """Whatever came over a connection."""
        if isinstance(message, Hello):
            return self._answering.hello(now, source, message)
        if isinstance(message, Locate):
            return self._answering.locate(source, message)
        peer = self._sessions.peers.get(self._sessions.by_source.get(source, -1))
        if peer is None:
            # A session that is over here, or was one of a process that is gone: its other end must know. (An
            # answer to BYE would be answered in turn.)
            if isinstance(message, Bye):
                return []
            return [Reply(source, Bye("there is no such session here: dial again"))]
        peer.last_seen = now
        actions = self._sessions.recovered(peer)
        if isinstance(message, Bye):
            return [*actions, *self._sessions.bye(peer, message)]
        if peer.address is not None:
            return actions + self._dialling.receive(now, peer, message)
        return actions + self._answering.receive(peer, message)

    def lost(self, now: float, source: Source, reason: str) -> list[PeersAction]:
        """The connection lost its standing, or takes no more messages."""
        peer = self._sessions.by_source.get(source)
        return [] if peer is None else self.drop(now, peer, reason)

    def drop(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """End a session from this side. Unknown ones (already over) are fine."""
        return self._sessions.drop(now, peer_id, reason)

    # --- Time and the end

    def tick(self, now: float) -> list[PeersAction]:
        """Heartbeats and deadlines. To be called once a heartbeat or more, after reading what has come in."""
        last, self._last_tick = self._last_tick, now
        if last is not None and now - last > self._sessions.timeouts.suspect:
            # This process was not running (stopped, swapped, or its interpreter was held): it was deaf,
            # which says nothing about its peers. Their silence counts from here.
            for peer in self._sessions.peers.values():
                peer.last_seen = now
        actions: list[PeersAction] = []
        while (peer_id := self._sessions.timers.pop_due(now)) is not None:
            peer = self._sessions.peers[peer_id]
            if peer.state is PeerState.CONNECTING:
                actions += self._dialling.retry(now, peer)
            else:
                actions += self._sessions.beat(now, peer)
        while self._sessions.redial.pop_due(now) is not None:
            actions += self._dialling.find_waiting(now)
        return actions

    def drain(self) -> None:
        """From now on nobody new comes in; sessions live on until leave()."""
        self._sessions.away = CLOSING

    def goodbyes(self) -> list[Reply]:
        """BYE to everybody. Sessions end with leave(), which had better come once these are out: a peer that
        sees its data links end first takes this side for broken."""
        self._sessions.away = CLOSING
        return self._sessions.byes("shutting down")

    def leave(self, now: float) -> list[PeersAction]:
        """Ends all sessions."""
        self._sessions.away = CLOSING
        return self._sessions.end_all()

    def suspend(self) -> list[PeersAction]:
        """Ends all sessions, and makes no new one until resume(): there is no memory to write to or from."""
        self._sessions.away = ASLEEP
        return [*self._sessions.byes("going to sleep"), *self._sessions.end_all()]

    def resume(self, now: float, regions: tuple[bytes, ...]) -> list[PeersAction]:
        """The memory is there again, under new descriptors: whoever is dialled or dials gets these."""
        self._sessions.identity = replace(self._sessions.identity, regions=regions)
        self._sessions.away = ""
        return self._dialling.find_waiting(now)
