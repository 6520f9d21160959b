"""EmbeddingSender: the encoder engine's side of the transfers. It answers FETCH with one counted write."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import zmq

from kv_connector.control.sockets import Received
from kv_connector.engine import Event, EventKind, TransferError
from kv_connector.engine.transfer_engine import close_or_log
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.session.mismatch import mismatch
from kv_connector.protocol.wire.messages import clip
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.messages import CODEC, PROTOCOL, FetchRequest, Hello, Leave, Missing, Welcome
from kv_connector.vllm.encoder.session import ADVICE, Fences, SessionConfig, open_engine
from kv_connector.weights.wire.loop import Loop

logger = logging.getLogger("kv_connector")

# Prefill engines that hold a session at once. A further one replaces the longest idle.
MAX_SESSIONS = 64
# Embeddings in flight to one prefill engine. Each is pinned in the arena. It is four times the receiver's
# limit, because the receiver counts an embedding before its write ends here.
MAX_WRITES = 1024


@dataclass(eq=False)
class _PrefillSession:
    name: str
    source: Source
    peer: int
    target: int
    """The prefill engine's arena, as a region of this transfer engine."""
    last_used: float
    writes: dict[int, _Write] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Write:
    session: _PrefillSession
    place: EmbeddingPlace
    deadline: float


class EmbeddingSender:
    """Sends embeddings of an arena. Call start() once and close() once. Any thread may call both."""

    def __init__(self, config: SessionConfig, arena: EmbeddingArena) -> None:
        """Raises TransferError if a provider does not open."""
        self._config = config
        self._arena = arena
        self._engine = open_engine(config)
        self._region = self._engine.register_ranges([arena.range])[0]
        self._loop = Loop("kvc-encoder", config.key, CODEC)
        self._fences = Fences(self._engine)
        self._sessions: dict[Source, _PrefillSession] = {}
        self._writes: dict[int, _Write] = {}
        self.counts: Counter[str] = Counter()
        """Numbers since the start, by keys of EMBEDDING_COUNTERS."""

    def start(self, address: Address) -> Address:
        """Binds the control socket and starts the thread. Raises zmq.ZMQError."""
        try:
            bound = self._loop.sockets.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self._loop.sockets.watch(self._engine.event_fd())
        self._loop.start(self)
        return bound

    def close(self) -> None:
        """Ends all sessions. Blocks until no write is in flight. Idempotent."""
        self._loop.stop()
        close_or_log(self._engine, self._config.name)

    # --- Called by the loop

    def received(self, now: float, received: Received[object]) -> None:
        source, message = received.source, received.message
        session = self._sessions.get(source)
        match message:
            case Hello():
                self._greet(now, source, message)
            case FetchRequest() if session is not None:
                session.last_used = now
                if (reason := self._write(now, session, message)) is not None:
                    self._loop.sockets.send(source, Missing(message.fetch, clip(reason)))
            case FetchRequest():
                self._loop.sockets.send(source, Leave("no session: send HELLO first"))
            case Leave() | None if session is not None:
                self._end(session, "" if message is None else message.reason)
            case _:
                pass  # no session, or a message that only a prefill engine receives

    def readable(self, now: float) -> None:
        del now
        for event in self._engine.poll_events():
            if event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
                for session in [s for s in self._sessions.values() if s.peer == event.id]:
                    self._end(session, str(event.error or "it has left"))
            else:
                self._ended(event)

    def tick(self, now: float) -> float | None:
        for session in {w.session for w in self._writes.values() if w.deadline <= now}:
            if session.source in self._sessions:
                self._end(session, f"an embedding was not received within {self._config.timeout:g} s")
        retry = self._fences.retry()
        waits = [w.deadline - now for w in self._writes.values() if w.session.source in self._sessions]
        return min(waits if retry is None else [*waits, retry], default=None)

    # --- Sessions

    def _greet(self, now: float, source: Source, hello: Hello) -> None:
        problem = None
        if hello.protocol != PROTOCOL:
            problem = f"encoder protocol {hello.protocol} instead of {PROTOCOL}: run the same release"
        elif source in self._sessions:
            problem = "a second HELLO in one session"
        else:
            problem = mismatch(hello.fingerprint, self._config.fingerprint, ADVICE)
        if problem is None:
            problem = self._make_room()
        if problem is None:
            problem = self._open(now, source, hello)
        if problem is not None:
            logger.warning("encoder: prefill engine %s was refused: %s", hello.name, problem)
            self._loop.sockets.send(source, Leave(clip(problem)))

    def _make_room(self) -> str | None:
        if len(self._sessions) < MAX_SESSIONS:
            return None
        idle = [session for session in self._sessions.values() if not session.writes]
        if not idle:
            return f"{MAX_SESSIONS} prefill engines are receiving embeddings"
        self._end(min(idle, key=lambda session: session.last_used), "another prefill engine took its session")
        return None

    def _open(self, now: float, source: Source, hello: Hello) -> str | None:
        try:
            shaken = self._engine.accept(hello.name, hello.offer)
        except TransferError as error:
            return str(error)
        try:
            target = self._engine.import_region(shaken.peer, hello.region)
        except (TransferError, ValueError) as error:
            self._fences.fence(shaken.peer)
            return str(error)
        self._sessions[source] = _PrefillSession(hello.name, source, shaken.peer, target, now)
        lane = self._engine.lane(shaken.peer)
        logger.info("encoder: prefill engine %s receives embeddings over %s", hello.name, lane)
        self._loop.sockets.send(source, Welcome(shaken.data))
        return None

    def _end(self, session: _PrefillSession, reason: str) -> None:
        """The writes of the session end with their own events, at the latest once the peer is fenced."""
        del self._sessions[session.source]
        self._loop.sockets.send(session.source, Leave(clip(reason)))
        self._fences.fence(session.peer)
        logger.info("encoder: the session with prefill engine %s ended: %s", session.name, reason)

    # --- Writes

    def _write(self, now: float, session: _PrefillSession, fetch: FetchRequest) -> str | None:
        """Writes the embedding, or returns why not."""
        if len(session.writes) >= MAX_WRITES:
            return f"{MAX_WRITES} embeddings are in flight to this prefill engine"
        place = self._arena.find_and_pin(fetch.key)
        if place is None:
            return "the embedding was evicted, or was never encoded here"
        problem = None
        if not place.ready:
            problem = "the embedding is not complete"
        elif place.nbytes != fetch.nbytes:
            problem = f"the embedding has {place.nbytes} bytes, {fetch.nbytes} were requested"
        elif place.rows != fetch.rows:
            # A client may have used its own id for another picture. Rows of another width would end the
            # prefill engine.
            problem = f"the embedding has {place.rows} rows, {fetch.rows} were requested"
        else:
            try:
                transfer = self._engine.write_one(
                    session.peer,
                    self._region,
                    place.payload,
                    session.target,
                    fetch.offset,
                    place.nbytes,
                    fetch.immediate,
                )
            except TransferError as error:
                problem = str(error)
        if problem is not None:
            self._arena.unpin(place)
            return problem
        write = _Write(session, place, now + self._config.timeout)
        self._writes[transfer] = session.writes[transfer] = write
        return None

    def _ended(self, event: Event) -> None:
        write = self._writes.pop(event.id, None)
        if write is None:
            return
        del write.session.writes[event.id]
        self._arena.unpin(write.place)
        if event.kind is EventKind.TRANSFER_DONE:
            self.counts["embeddings_sent"] += 1
        elif write.session.source in self._sessions:
            # The receiver's counter may or may not be raised, so MISSING would be wrong.
            self._end(write.session, f"a write failed: {event.error}")
