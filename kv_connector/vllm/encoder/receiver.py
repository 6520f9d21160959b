"""EmbeddingReceiver: the prefill engine's side of the transfers. It fetches embeddings into its arena."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from kv_connector.control.sockets import Received
from kv_connector.engine import EventKind, TransferError
from kv_connector.engine.transfer_engine import close_or_log
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.wire.messages import clip
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.messages import CODEC, FetchRequest, Hello, Leave, Missing, Welcome
from kv_connector.vllm.encoder.session import Fences, SessionConfig, open_engine
from kv_connector.weights.wire.loop import Loop

logger = logging.getLogger("kv_connector")

# Encoder engines with a session at once. A further one replaces the longest idle. Addresses come with
# requests.
MAX_SESSIONS = 64
# Embeddings that one encoder engine sends at once. The others wait here.
MAX_FETCHES = 256


@dataclass(eq=False)
class Fetch:
    """One embedding on its way. It holds a pin of its place until no write can land there any more."""

    place: EmbeddingPlace
    deadline: float
    failure: str = ""
    """Reason of the failure. Empty: it is in flight, or complete (`place.ready`)."""


@dataclass(eq=False)
class _EncoderSession:
    address: Address
    source: Source
    peer: int
    last_used: float
    open: bool = False
    queued: list[Fetch] = field(default_factory=list)
    moving: dict[int, tuple[Fetch, int]] = field(default_factory=dict)
    """Fetches that were sent, with their counters, by number."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def fetches(self) -> list[Fetch]:
        return [*self.queued, *(fetch for fetch, _ in self.moving.values())]


class EmbeddingReceiver:
    """Fetches embeddings. Any thread may call fetch() and close()."""

    def __init__(self, config: SessionConfig, arena: EmbeddingArena) -> None:
        """Raises TransferError if a provider does not open."""
        self._config = config
        self._arena = arena
        self._engine = open_engine(config)
        self._region = self._engine.register_ranges([arena.range])[0]
        self._descriptor = self._engine.region_descriptor(self._region)
        self._fences = Fences(self._engine)
        self._sessions: dict[Address, _EncoderSession] = {}
        self._sources: dict[Source, _EncoderSession] = {}
        self._counters: dict[int, tuple[_EncoderSession, int]] = {}
        self._fenced: list[tuple[int, list[EmbeddingPlace]]] = []
        """Places whose pins end once the peer's fence is complete."""
        self.counts: Counter[str] = Counter()
        """Numbers since the start, by keys of EMBEDDING_COUNTERS."""
        self._loop = Loop("kvc-encoder", config.key, CODEC)
        self._loop.sockets.watch(self._engine.event_fd())
        self._loop.start(self)

    def fetch(self, address: Address, place: EmbeddingPlace) -> Fetch:
        """Requests the embedding for a place that was just reserved, whose pin passes to the fetch. Never
        blocks."""
        fetch = Fetch(place, time.monotonic() + self._config.timeout)
        self._loop.call(lambda: self._start(address, fetch))
        return fetch

    def close(self) -> None:
        """Ends all sessions. Blocks until no write can land in the arena. Idempotent."""
        self._loop.stop()
        close_or_log(self._engine, self._config.name)

    # --- Called by the loop

    def received(self, now: float, received: Received[object]) -> None:
        del now
        session = self._sources.get(received.source)
        if session is None:
            return
        match received.message:
            case Welcome() if not session.open:
                self._welcomed(session, received.message)
            case Missing() if received.message.fetch in session.moving:
                fetch, counter = session.moving.pop(received.message.fetch)
                self._release(counter)
                self._fail(fetch, f"encoder engine {session.address}: {received.message.reason}")
                self._arena.unpin(fetch.place)
                self._send_queued(session)
            case Missing() if session.open:
                pass  # of a fetch that is complete
            case Leave():
                self._end(session, f"it ended the session: {received.message.reason}", say=False)
            case _:
                self._end(session, "it sent a message that does not belong there")

    def readable(self, now: float) -> None:
        for event in self._engine.poll_events():
            if event.kind is EventKind.COUNTERS_REACHED and event.id in self._counters:
                session, number = self._counters[event.id]
                fetch, counter = session.moving.pop(number)
                self._release(counter)
                session.last_used = now
                self.counts["embeddings_received"] += 1
                self._arena.complete(fetch.place)
                self._arena.unpin(fetch.place)
                self._send_queued(session)
            elif event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
                for session in [s for s in self._sessions.values() if s.peer == event.id]:
                    self._end(session, str(event.error or "it has left"))

    def tick(self, now: float) -> float | None:
        for session in list(self._sessions.values()):
            if any(fetch.deadline <= now for fetch in session.fetches()):
                # A late write could land in a place that has a new owner, so the whole session ends.
                self._end(session, f"no embedding arrived within {self._config.timeout:g} s")
        retry = self._fences.retry()
        self._unpin_fenced()
        waits = [f.deadline - now for s in self._sessions.values() for f in s.fetches()]
        return min(waits if retry is None else [*waits, retry], default=None)

    # --- Sessions

    def _start(self, address: Address, fetch: Fetch) -> None:
        session = self._sessions.get(address)
        if session is None:
            try:
                session = self._dial(address)
            except Exception as error:  # whatever it is, the request must not wait for it
                self._fail(fetch, f"encoder engine {address}: {error}")
                self._arena.unpin(fetch.place)
                return
        session.queued.append(fetch)
        self._send_queued(session)

    def _dial(self, address: Address) -> _EncoderSession:
        if len(self._sessions) >= MAX_SESSIONS:
            idle = [s for s in self._sessions.values() if not s.fetches()]
            if not idle:
                raise RuntimeError(f"{MAX_SESSIONS} encoder engines are sending embeddings")
            self._end(min(idle, key=lambda s: s.last_used), "another encoder engine took its session")
        offer = self._engine.offer(str(address))
        try:
            source = self._loop.sockets.dial(address)
        except Exception:
            self._fences.fence(offer.peer)
            raise
        session = _EncoderSession(address, source, offer.peer, time.monotonic())
        self._sessions[address] = self._sources[source] = session
        hello = Hello(self._config.name, self._config.fingerprint, offer.data, self._descriptor)
        self._loop.sockets.send(source, hello)
        return session

    def _welcomed(self, session: _EncoderSession, welcome: Welcome) -> None:
        try:
            self._engine.complete(session.peer, welcome.answer)
        except TransferError as error:
            self._end(session, str(error))
            return
        session.open = True
        lane = self._engine.lane(session.peer)
        logger.info("encoder: encoder engine %s sends embeddings over %s", session.address, lane)
        self._send_queued(session)

    def _send_queued(self, session: _EncoderSession) -> None:
        while session.open and session.queued and len(session.moving) < MAX_FETCHES:
            fetch, number = session.queued[0], next(session.numbers)
            try:
                counters = self._engine.alloc_counters(1, [session.peer])
                self._engine.expect(counters.id, [1])
            except TransferError as error:
                self._end(session, str(error))
                return
            del session.queued[0]
            session.moving[number] = fetch, counters.id
            self._counters[counters.id] = session, number
            place = fetch.place
            message = FetchRequest(
                number, place.key, place.nbytes, place.rows, place.payload, counters.immediates[0]
            )
            self._loop.sockets.send(session.source, message)

    def _end(self, session: _EncoderSession, reason: str, *, say: bool = True) -> None:
        """Fails the session's fetches at once. Their places are free once the peer is fenced."""
        if say:
            self._loop.sockets.send(session.source, Leave(clip(reason)))
        self._loop.sockets.hang_up(session.source)
        del self._sessions[session.address], self._sources[session.source]
        fetches = session.fetches()
        for _, counter in session.moving.values():
            self._release(counter)
        self._fences.fence(session.peer)
        self._fenced.append((session.peer, [fetch.place for fetch in fetches]))
        for fetch in fetches:
            self._fail(fetch, f"encoder engine {session.address}: {reason}")
        self._unpin_fenced()
        logger.warning("encoder: the session with encoder engine %s ended: %s", session.address, reason)

    def _unpin_fenced(self) -> None:
        waiting = self._fenced
        self._fenced = [entry for entry in waiting if self._fences.pending(entry[0])]
        for peer, places in waiting:
            if not self._fences.pending(peer):
                for place in places:
                    self._arena.unpin(place)

    def _release(self, counter: int) -> None:
        del self._counters[counter]
        self._engine.release_counters(counter)

    def _fail(self, fetch: Fetch, reason: str) -> None:
        self.counts["embedding_fetches_failed"] += 1
        fetch.failure = clip(reason)
