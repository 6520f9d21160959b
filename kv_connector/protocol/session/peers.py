"""Membership, sans-IO: the peers of a process, and whether they are alive.

Requests name the address of an engine, which is that of its rank 0. D sends LOCATE there, and DIRECTORY lists
the address of each worker. A session is one control connection with one HELLO. D connects to a worker and
sends HELLO, and P answers with HELLO_ACK or HELLO_NAK. D sends PINGs and P answers. Silence makes a peer
SUSPECT, then DEAD. A session ends once: by BYE, by death, by a message that breaks the protocol, or because
the same engine came back. A later session has a new PeerId. The side that ends a session fences the peer:
``SessionOver`` requests that. A D that knows P by two names has two independent sessions with it.

``PeerTable`` is the public face of a process's membership. sessions.py holds the sessions, dialling.py makes
them on D, and answering.py on P.
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
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.answering import Answering
from kv_connector.protocol.session.dialling import Dialling
from kv_connector.protocol.session.sessions import (
    ASLEEP,
    CLOSING,
    Identity,
    PeerInfo,
    PeersAction,
    PeerState,
    Sessions,
)
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import earliest
from kv_connector.protocol.wire.messages import (
    AnyMessage,
    Bye,
    Hello,
    Locate,
    NakReason,
    Rank,
    Wants,
)


class PeerTable:
    """All sessions of one process, in both roles. Every method returns the actions to execute, in order."""

    def __init__(self, identity: Identity, timeouts: Timeouts) -> None:
        self._sessions = Sessions(identity, timeouts)
        self._dialling = Dialling(self._sessions)
        self._answering = Answering(self._sessions)
        self._last_tick: float | None = None

    def __len__(self) -> int:
        """Number of sessions that are not over."""
        return len(self._sessions.peers)

    def peers(self) -> tuple[PeerInfo, ...]:
        """All sessions, in the order in which they began. Any thread may call this method, and no other."""
        peers = list(self._sessions.peers.values())  # copied in one step, because other threads change it
        return tuple(PeerInfo(p.peer, p.name, p.role, p.state, p.lane) for p in peers)

    def source(self, peer: PeerId) -> Source | None:
        """The connection of a live session, or None."""
        known = self._sessions.peers.get(peer)
        return None if known is None else known.source

    def set_ranks(self, ranks: Sequence[Rank]) -> None:
        """Sets the workers of this engine. From now on a D can locate them here."""
        self._sessions.ranks = tuple(ranks)

    def weights_replaced(self) -> None:
        """The engine has other weights than those of its checkpoint from now on. RESERVE compares
        their version, if they have one."""
        self._sessions.checkpoint = None

    def other_workers(self) -> list[tuple[str, int]]:
        """The addresses of the other workers of this engine."""
        own = self._sessions.identity.rank
        return [(rank.host, rank.port) for number, rank in enumerate(self._sessions.ranks) if number != own]

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return earliest((self._sessions.timers.next(), self._sessions.redial.next()))

    # --- Dialling (D)

    def find(self, now: float, engine: Address) -> list[PeersAction]:
        """Locates the workers of the engine at this address. The answer comes once, even after repeated
        calls."""
        return self._dialling.find(now, engine)

    def connected(self, now: float, peer_id: PeerId, source: Source) -> list[PeersAction]:
        """The connection to the engine is open: send LOCATE."""
        return self._dialling.connected(now, peer_id, source)

    def dial(
        self, now: float, engine: Address, address: Address, wants: Wants, layout: KvLayout
    ) -> list[PeersAction]:
        """Opens a session with this worker of an engine for the parts in ``wants``, if it has this layout.
        Does nothing if a session exists or is being opened."""
        return self._dialling.dial(now, engine, address, wants, layout)

    def offered(self, now: float, peer_id: PeerId, source: Source, offer: bytes) -> list[PeersAction]:
        """The connection and the transfer engine's offer are ready: send HELLO."""
        return self._dialling.offered(now, peer_id, source, offer)

    def dial_error(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """This side could not connect, or its transfer engine did not accept P's answer."""
        return self.drop(now, peer_id, reason)

    def completed(self, now: float, peer_id: PeerId) -> list[PeersAction]:
        """The transfer engine has accepted P's answer, so P can write."""
        return self._dialling.completed(now, peer_id)

    def pass_over(self, now: float, peer_id: PeerId, lane: str, reason: str) -> list[PeersAction]:
        """P chose a lane that does not lead from here to P. Opens another session without this lane. The lane
        was among the offered ones, so the repetition ends."""
        return self._dialling.pass_over(now, peer_id, lane, reason)

    def set_waiting(self, now: float, waiting: Collection[tuple[str, Address]]) -> list[PeersAction]:
        """Sets the transfers whose requests still queue here, with their prefill engines. The next PINGs list
        them.

        Sessions with these engines are kept up and opened anew when they end, because P holds a prompt's
        blocks only while PINGs list it.
        """
        return self._dialling.set_waiting(now, waiting)

    def note_step(self, now: float) -> None:
        """The engine takes a step. So it is not paused, and prompts that it waits for are worth holding. Any
        thread may call it."""
        self._sessions.last_step = now

    # --- Being dialled (P)

    def accepted(self, now: float, peer_id: PeerId, lane: str, answer: bytes) -> list[PeersAction]:
        """The transfer engine accepted D's offer."""
        return self._answering.accepted(now, peer_id, lane, answer)

    def refused(self, now: float, peer_id: PeerId, reason: NakReason, text: str) -> list[PeersAction]:
        """The transfer engine did not accept D's offer, or D's pages do not fit."""
        return self._answering.refused(now, peer_id, reason, text)

    # --- Messages

    def receive(self, now: float, source: Source, message: AnyMessage) -> list[PeersAction]:
        """Handles any message that arrived over a connection."""
        if isinstance(message, Hello):
            return self._answering.hello(now, source, message)
        if isinstance(message, Locate):
            return self._answering.locate(source, message)
        peer = self._sessions.peers.get(self._sessions.by_source.get(source, -1))
        if peer is None:
            # The session is over here, or belonged to an earlier process. Its other side must learn that. A
            # BYE is not answered, because the answer would be answered in turn.
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
        """The connection was distrusted, or accepts no more messages."""
        peer = self._sessions.by_source.get(source)
        return [] if peer is None else self.drop(now, peer, reason)

    def drop(self, now: float, peer_id: PeerId, reason: str) -> list[PeersAction]:
        """Ends a session from this side. Ignores unknown sessions, which are over already."""
        return self._sessions.drop(now, peer_id, reason)

    # --- Time and the end

    def tick(self, now: float) -> list[PeersAction]:
        """Handles heartbeats and deadlines. Call it at least once a heartbeat, after reading the arrived
        messages."""
        last, self._last_tick = self._last_tick, now
        if last is not None and now - last > self._sessions.timeouts.suspect:
            # This process was not running (stopped, swapped out, or its interpreter was held). It received
            # nothing in that time, which is no sign of silent peers. Their silence counts from now on.
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
        """Accepts no new peers from now on. Sessions live on until leave()."""
        self._sessions.away = CLOSING

    def goodbyes(self) -> list[Reply]:
        """BYE to every peer. Sessions end with leave(), which should follow once these messages are sent: a
        peer whose data links end first takes this side for broken."""
        self._sessions.away = CLOSING
        return self._sessions.byes("shutting down")

    def leave(self, now: float) -> list[PeersAction]:
        """Ends all sessions."""
        self._sessions.away = CLOSING
        return self._sessions.end_all()

    def suspend(self) -> list[PeersAction]:
        """Ends all sessions, and opens no new one until resume(): the memory can be neither written nor
        read."""
        self._sessions.away = ASLEEP
        return [*self._sessions.byes("going to sleep"), *self._sessions.end_all()]

    def resume(self, now: float, regions: tuple[bytes, ...]) -> list[PeersAction]:
        """The memory is mapped again, with new descriptors. All new sessions get these."""
        self._sessions.identity = replace(self._sessions.identity, regions=regions)
        self._sessions.away = ""
        return self._dialling.find_waiting(now)
