"""The prefill side of membership, sans-IO: answers the workers of decode engines that connect."""

from __future__ import annotations

import logging

from kv_connector.protocol.actions import (
    Accept,
    Deliver,
    PeerId,
    Reply,
    Source,
)
from kv_connector.protocol.session.checkpoint import checkpoint_mismatch, without_checkpoint
from kv_connector.protocol.session.mismatch import SAME_RELEASE, mismatch
from kv_connector.protocol.session.sessions import (
    Caller,
    Peer,
    PeersAction,
    Sessions,
)
from kv_connector.protocol.wire.messages import (
    DEFER_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    Borrow,
    Cancel,
    Defer,
    Directory,
    Hello,
    HelloAck,
    HelloNak,
    Locate,
    NakReason,
    Ping,
    Pong,
    Release,
    Reserve,
    Role,
    clip,
    for_prefixes,
)


class Answering:
    """Makes the sessions with decode engines. A method named as in PeerTable has that method's contract."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def hello(self, now: float, source: Source, hello: Hello) -> list[PeersAction]:
        """Handles the HELLO of a decode worker, or its repetition."""
        engine = (hello.engine_id, hello.rank)
        name = f"{hello.engine_id}/{hello.rank}"
        speaker = self._sessions.peers.get(self._sessions.by_source.get(source, -1))
        if speaker is not None and (speaker.address is not None or speaker.engine != engine):
            return self._sessions.violation(now, speaker, hello)
        if speaker is not None and speaker.hello == hello:
            speaker.last_seen = now
            return [] if speaker.ack is None else [Reply(source, speaker.ack)]
        before = self._sessions.callers.get(engine)
        refusal = self._refusal(hello)
        if refusal is None and before is not None and hello.incarnation in before.replaced:
            text = (
                f"two decode engines have engine_id {hello.engine_id}: leave engine_id out of their settings"
            )
            refusal = NakReason.INCOMPATIBLE, text
        if refusal is not None:
            return self._nak(source, name, *refusal)
        actions: list[PeersAction] = []
        caller = Caller(hello.incarnation)
        if before is not None and before.incarnation != hello.incarnation:
            caller.replaced.extend([*before.replaced, before.incarnation])
            for peer_id in sorted(before.sessions):
                actions += self._sessions.drop(now, peer_id, "the engine restarted")
        elif before is not None:
            # Another session of the same process matters here only if the new session replaces it.
            caller = before
            for known in [self._sessions.peers[peer_id] for peer_id in sorted(before.sessions)]:
                if known is speaker or now - known.last_seen >= self._sessions.timeouts.suspect:
                    actions += self._sessions.drop(now, known.peer, "the engine dialled again")
        peer = self._sessions.add(now, name, Role.DECODE)
        peer.source, peer.engine, peer.incarnation, peer.hello = source, engine, hello.incarnation, hello
        self._sessions.by_source[source] = peer.peer
        self._sessions.callers[engine] = caller
        caller.sessions.add(peer.peer)
        return [*actions, Accept(peer.peer, name, hello)]

    def accepted(self, now: float, peer_id: PeerId, lane: str, answer: bytes) -> list[PeersAction]:
        peer = self._sessions.peers[peer_id]
        us = self._sessions.identity
        peer.lane = lane
        peer.ack = HelloAck(us.engine_id, us.incarnation, us.role, us.rank, lane, us.layout, answer)
        assert peer.source is not None
        return [*self._sessions.up(now, peer), Reply(peer.source, peer.ack)]

    def refused(self, now: float, peer_id: PeerId, reason: NakReason, text: str) -> list[PeersAction]:
        peer = self._sessions.peers[peer_id]
        assert peer.source is not None
        return [*self._nak(peer.source, peer.name, reason, text), *self._sessions.forget(peer, text)]

    def locate(self, source: Source, message: Locate) -> list[PeersAction]:
        """Answers a decode worker that requests the addresses of this engine's workers."""
        refusal = self._refusal(message)
        if refusal is not None:
            return self._nak(source, f"{message.engine_id}/{message.rank}", *refusal)
        if not self._sessions.ranks:
            return []  # this engine is starting, and D will repeat the request
        return [Reply(source, Directory(self._sessions.identity.engine_id, self._sessions.ranks))]

    def receive(self, peer: Peer, message: AnyMessage) -> list[PeersAction]:
        """Handles a message of a decode worker that has a session."""
        assert peer.source is not None
        if isinstance(message, Ping):
            actions: list[PeersAction] = [Reply(peer.source, Pong(message.sequence))]
            return [*actions, Deliver(peer.peer, message)] if message.waiting else actions
        if isinstance(message, Reserve | Cancel | Release) or (isinstance(message, Borrow) and peer.prefixes):
            return [Deliver(peer.peer, message)]
        if isinstance(message, Defer) and peer.knows_defer:
            return [Deliver(peer.peer, message)]
        return self._sessions.violation(peer.last_seen, peer, message)

    def _refusal(self, hello: Hello | Locate) -> tuple[NakReason, str] | None:
        us = self._sessions.identity
        if self._sessions.away:
            return NakReason.DRAINING, f"prefill engine {us.engine_id} {self._sessions.away}"
        prefixes = for_prefixes(hello)
        if us.role is Role.DECODE and not prefixes:
            text = f"{us.engine_id} is a decode engine: give the router the address of a prefill engine"
            return NakReason.WRONG_ROLE, text
        if hello.role is Role.PREFILL and not prefixes:
            text = f"{hello.engine_id} is a prefill engine: start it as a decode engine to receive pages"
            return NakReason.WRONG_ROLE, text
        if hello.protocol not in (PROTOCOL_VERSION, DEFER_PROTOCOL_VERSION) and not prefixes:
            versions = f"prefill engine has {PROTOCOL_VERSION}, decode engine has {hello.protocol}"
            return NakReason.INCOMPATIBLE, f"protocol: {versions}: {SAME_RELEASE}"
        fingerprint, checkpoint = without_checkpoint(hello.fingerprint)
        problem = mismatch(us.fingerprint, fingerprint, us.advice)
        if problem is not None:
            return NakReason.INCOMPATIBLE, problem
        # D repeats LOCATE without its checkpoint after INCOMPATIBLE.
        problem = checkpoint_mismatch(self._sessions.checkpoint, checkpoint)
        if problem is not None:
            return NakReason.OTHER_WEIGHTS, problem
        return None

    def _nak(self, source: Source, name: str, reason: NakReason, text: str) -> list[PeersAction]:
        text = clip(text)
        log = self._sessions.log_nak(logging.WARNING, "to", f"decode peer {name}", f"{reason.value}: {text}")
        return [*log, Reply(source, HelloNak(reason, text))]
