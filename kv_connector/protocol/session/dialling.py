"""The decode side of membership, sans-IO: finds a prefill engine's workers and connects to them."""

from __future__ import annotations

import logging
from collections.abc import Collection

from kv_connector.protocol.actions import (
    Address,
    Complete,
    Connect,
    Deliver,
    DialFailed,
    EngineFound,
    EngineNotFound,
    HangUp,
    Inquire,
    Log,
    PeerId,
    Reply,
    SessionOver,
    Source,
)
from kv_connector.protocol.pages.layout import KvLayout
from kv_connector.protocol.session.checkpoint import with_checkpoint
from kv_connector.protocol.session.sessions import (
    REMEMBERED_OLDER,
    Peer,
    PeersAction,
    PeerState,
    Sessions,
)
from kv_connector.protocol.wire.messages import (
    DEFER_PROTOCOL_VERSION,
    PREFIX_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    Bye,
    CancelAck,
    Directory,
    Due,
    Fail,
    Fingerprint,
    Hello,
    HelloAck,
    HelloNak,
    Lent,
    Locate,
    NakReason,
    Pong,
    Role,
    Sampled,
    Sums,
    Wants,
    clip,
    id_problem,
)


class Dialling:
    """Makes the sessions with prefill engines. A method named as in PeerTable has that method's contract."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def find(self, now: float, engine: Address) -> list[PeersAction]:
        if engine in self._sessions.finding:
            return []
        return self._find(now, engine)

    def _find(self, now: float, engine: Address, older: bool = False) -> list[PeersAction]:
        if self._sessions.away:
            return [EngineNotFound(engine, f"this engine {self._sessions.away}")]
        peer = self._sessions.add(now, str(engine), Role.PREFILL)
        peer.address, peer.engines = engine, {engine: None}
        peer.finding, peer.older = True, older
        peer.give_up = now + self._sessions.timeouts.connect
        self._sessions.finding[engine] = peer.peer
        return [Inquire(peer.peer, engine)]

    def connected(self, now: float, peer_id: PeerId, source: Source) -> list[PeersAction]:
        peer, us = self._sessions.peers[peer_id], self._sessions.identity
        version, fingerprint = self._introduction(peer)
        peer.hello = Locate(us.engine_id, us.role, us.rank, version, fingerprint)
        return self._introduce(now, peer, source)

    def dial(
        self, now: float, engine: Address, address: Address, wants: Wants, layout: KvLayout
    ) -> list[PeersAction]:
        known = self._sessions.peers.get(self._sessions.by_address.get(address, -1))
        if known is not None:
            # The wants follow from the engine, so they differ only if an engine has come back in another
            # shape.
            changed = f"{address} has a session of another prefill engine, which has to end first"
            if (known.wants, known.layout) != (wants, layout):
                return [DialFailed(address, changed)]
            self._sessions.note_engine(known, engine)
            return []
        if self._sessions.away:
            return [DialFailed(address, f"this engine {self._sessions.away}")]
        peer = self._sessions.add(now, str(address), Role.PREFILL)
        peer.address, peer.engines, peer.wants, peer.layout = address, {engine: None}, wants, layout
        # HELLO is sent later. By then another search may have found the engine to be newer.
        peer.older = engine in self._sessions.older
        peer.give_up = now + self._sessions.timeouts.connect
        self._sessions.by_address[address] = peer.peer
        return [Connect(peer.peer, address, peer.name)]

    def offered(self, now: float, peer_id: PeerId, source: Source, offer: bytes) -> list[PeersAction]:
        peer = self._sessions.peers[peer_id]
        us = self._sessions.identity
        version, fingerprint = self._introduction(peer)
        peer.hello = Hello(
            engine_id=us.engine_id,
            incarnation=us.incarnation,
            role=us.role,
            rank=us.rank,
            protocol=version,
            fingerprint=fingerprint,
            layout=us.layout,
            wants=peer.wants,
            regions=us.regions,
            offer=offer,
        )
        return self._introduce(now, peer, source)

    def completed(self, now: float, peer_id: PeerId) -> list[PeersAction]:
        peer = self._sessions.peers[peer_id]
        for address in (peer.address, *peer.engines):
            self._sessions.naks.pop(str(address), None)
        return self._sessions.up(now, peer)

    def pass_over(self, now: float, peer_id: PeerId, lane: str, reason: str) -> list[PeersAction]:
        peer = self._sessions.peers.pop(peer_id)
        assert peer.address is not None
        assert peer.source is not None
        del self._sessions.by_source[peer.source]
        self._sessions.timers.clear(peer_id)
        again = self._sessions.add(now, str(peer.address), Role.PREFILL)
        again.address, again.engines = peer.address, peer.engines
        again.wants, again.layout = peer.wants, peer.layout
        again.older, again.without = peer.older, (*peer.without, lane)
        again.give_up = peer.give_up
        self._sessions.by_address[peer.address] = again.peer
        text = f"prefill peer {peer.name}: lane {lane} is passed over: {reason}"
        return [
            Log(logging.INFO, text),
            Reply(peer.source, Bye(clip(f"lane {lane} is passed over: {reason}"))),
            HangUp(peer.source),
            SessionOver(peer_id, reason),
            Connect(again.peer, peer.address, again.name, again.without),
        ]

    def set_waiting(self, now: float, waiting: Collection[tuple[str, Address]]) -> list[PeersAction]:
        lists: dict[Address, list[str]] = {}
        for transfer_id, address in waiting:
            if id_problem(transfer_id) is None:
                lists.setdefault(address, []).append(transfer_id)
        self._sessions.waiting = {address: tuple(ids) for address, ids in lists.items()}
        return self.find_waiting(now)

    def find_waiting(self, now: float) -> list[PeersAction]:
        """Locates the engines that requests wait for, except those with a session and those tried a moment
        ago."""
        actions: list[PeersAction] = []
        if not self._sessions.away:
            known = {engine for peer in self._sessions.peers.values() for engine in peer.engines}
            for address in self._sessions.waiting:
                if address not in known and address not in self._sessions.redial:
                    actions += self.find(now, address)
        return actions

    def retry(self, now: float, peer: Peer) -> list[PeersAction]:
        """Repeats an unanswered message, until the deadline ends the session."""
        if now < peer.give_up:
            return self._say_hello(now, peer)
        said = "LOCATE" if peer.finding else "HELLO"
        text = (
            f"no answer to {said} within {self._sessions.timeouts.connect:g} s: "
            f"is a prefill engine's agent listening at {peer.address}, with the same cluster key?"
        )
        return self._sessions.drop(now, peer.peer, text)

    def receive(self, now: float, peer: Peer, message: AnyMessage) -> list[PeersAction]:
        """Handles a message of a prefill engine that this side dialled."""
        if isinstance(message, HelloNak):
            return self._nak_received(now, peer, message)
        if peer.finding:
            if isinstance(message, Directory):
                return self._found(peer, message)
            return self._sessions.violation(now, peer, message)
        if isinstance(message, HelloAck):
            if message.layout != peer.layout:  # the worker restarted after its engine was found
                return self._sessions.drop(now, peer.peer, "it was restarted with other pages")
            if peer.state is PeerState.CONNECTING and not peer.engine:
                peer.engine = (message.engine_id, message.rank)
                peer.incarnation = message.incarnation
                peer.name = f"{message.engine_id}/{message.rank} at {peer.address}"
                peer.lane = message.lane
                return [Complete(peer.peer, peer.name, peer.lane, message.answer)]
            if message.incarnation != peer.incarnation:
                return self._sessions.drop(now, peer.peer, "it was restarted")
            return []  # the answer to a repeated HELLO
        if peer.state is PeerState.CONNECTING:
            return []
        if isinstance(message, Sampled | Sums | Fail | CancelAck) or (
            isinstance(message, Lent) and peer.prefixes
        ):
            return [Deliver(peer.peer, message)]
        if isinstance(message, Due) and peer.knows_defer:
            return [Deliver(peer.peer, message)]
        if isinstance(message, Pong):
            return []
        return self._sessions.violation(now, peer, message)

    def _introduce(self, now: float, peer: Peer, source: Source) -> list[PeersAction]:
        peer.source = source
        self._sessions.by_source[source] = peer.peer
        peer.backoff = self._sessions.timeouts.handshake
        return self._say_hello(now, peer)

    def _say_hello(self, now: float, peer: Peer) -> list[PeersAction]:
        assert peer.source is not None
        assert peer.hello is not None
        peer.retry = now + peer.backoff
        peer.backoff *= 2
        self._sessions.timers.set(peer.peer, min(peer.retry, peer.give_up))
        return [Reply(peer.source, peer.hello)]

    def _found(self, peer: Peer, message: Directory) -> list[PeersAction]:
        engine, hang_up = self._end_search(peer)
        if not peer.older:  # until this answer its workers get no newer HELLO
            self._sessions.older.pop(engine, None)
        self._sessions.naks.pop(str(engine), None)
        self._sessions.find_again(peer)  # has no effect if the sessions with its workers come up
        return [hang_up, EngineFound(engine, message.ranks)]

    def _nak_received(self, now: float, peer: Peer, message: HelloNak) -> list[PeersAction]:
        assert peer.address is not None
        if peer.finding and peer.knows_defer and message.reason is NakReason.INCOMPATIBLE:
            return self._find_older(now, peer)
        reason = f"{message.reason.value}: {message.message}"
        log = self._sessions.log_nak(logging.ERROR, "from", str(peer.address), reason)
        return [*log, *self._sessions.forget(peer, f"{peer.address} refused: {reason}")]

    def _find_older(self, now: float, peer: Peer) -> list[PeersAction]:
        """Repeats LOCATE with PROTOCOL_VERSION. If the versions were not the cause, the answer is the same.

        It uses another connection, because a repeated LOCATE may be refused again over this one.
        """
        engine, hang_up = self._end_search(peer)
        older = self._sessions.older
        older[engine] = None
        if len(older) > REMEMBERED_OLDER:
            del older[next(iter(older))]
        return [hang_up, *self._find(now, engine, older=True)]

    def _end_search(self, peer: Peer) -> tuple[Address, HangUp]:
        """Ends the session of a LOCATE that has its answer. Returns the engine's address, and the action that
        closes the connection."""
        assert peer.address is not None
        assert peer.source is not None
        del (
            self._sessions.peers[peer.peer],
            self._sessions.by_source[peer.source],
            self._sessions.finding[peer.address],
        )
        self._sessions.timers.clear(peer.peer)
        return peer.address, HangUp(peer.source)

    def _introduction(self, peer: Peer) -> tuple[int, Fingerprint]:
        """The protocol version and the fingerprint of LOCATE or HELLO."""
        fingerprint = self._sessions.identity.fingerprint
        if peer.older and not peer.prefixes:
            return PROTOCOL_VERSION, fingerprint  # an older engine refuses pairs that it does not know
        version = PREFIX_PROTOCOL_VERSION if peer.prefixes else DEFER_PROTOCOL_VERSION
        return version, with_checkpoint(fingerprint, self._sessions.checkpoint)
