"""ConsumerScheduler: the scheduler side of a prefill engine. It fetches announced embeddings before a request
is scheduled, and has them loaded."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kv_connector.protocol.actions import Address
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.messages import MAX_KEY
from kv_connector.vllm.encoder.metadata import Copy, EncoderMetadata, Loaded
from kv_connector.vllm.encoder.receiver import Fetch

logger = logging.getLogger("kv_connector")

# The receiver ends a fetch at its deadline. If its thread has failed, the scheduler ends the wait so much
# later.
_GRACE_S = 5.0


class Fetcher(Protocol):
    def fetch(self, address: Address, place: EmbeddingPlace) -> Fetch: ...


class BadAnnouncement(ValueError):
    """An announcement cannot be used. The engine encodes the picture itself."""


@dataclass(frozen=True)
class AnnouncedEmbedding:
    """The place of one embedding at its encoder engine, as a request names it."""

    address: Address
    nbytes: int


def parse_announcement(announced: Any, rows: int) -> AnnouncedEmbedding:
    """Raises BadAnnouncement."""
    if not isinstance(announced, Mapping):
        raise BadAnnouncement(f"it must be an object, not {announced!r:.100}")
    host, port, nbytes = (announced.get(name) for name in ("peer_host", "peer_port", "size_bytes"))
    if not isinstance(host, str) or not 0 < len(host) <= 255:
        raise BadAnnouncement(f"peer_host must be an address, not {host!r:.100}")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise BadAnnouncement(f"peer_port must be a port, not {port!r:.100}")
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0 or nbytes % rows:
        raise BadAnnouncement(f"size_bytes must be a multiple of {rows} rows, not {nbytes!r:.100}")
    return AnnouncedEmbedding(Address(host, port), nbytes)


@dataclass(eq=False)
class _Ticket:
    """One request's wait for one embedding."""

    announcement: AnnouncedEmbedding | None
    """None: the engine encodes the picture itself."""
    since: float
    place: EmbeddingPlace | None = None
    """The place that this ticket has pinned."""
    fetch: Fetch | None = None
    """The fetch that fills the place."""
    failed: bool = False
    """Whether the request has failed because of this embedding."""


class ConsumerScheduler:
    """All methods belong to the scheduler's thread."""

    def __init__(
        self,
        arena: EmbeddingArena,
        fetcher: Fetcher,
        *,
        row_unit: int,
        timeout: float,
        workers: int,
        has_input: Callable[[Any], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``row_unit``: a row has a multiple of so many bytes. ``workers``: workers that report each load.

        ``has_input``: whether this engine could encode a picture itself.
        """
        self._arena = arena
        self._fetcher = fetcher
        self._row_unit = row_unit
        self._timeout = timeout
        self._workers = workers
        self._has_input = has_input
        self._clock = clock
        self._tickets: dict[str, dict[str, _Ticket]] = {}
        """Tickets of live requests, by request id and key."""
        self._fetches: dict[str, Fetch] = {}
        """Fetches in flight by key, which further requests join."""
        self._unavailable: set[str] = set()
        self._loads: dict[str, Copy] = {}
        """Loads of the next step by key."""
        self._loading: dict[int, tuple[EmbeddingPlace, int]] = {}
        """Pinned places of loads, and the workers that have not reported them, by number."""
        self._numbers = itertools.count()

    def available(self, request: Any, computed: int) -> bool:
        """Whether the request can be scheduled: each embedding is here, or this engine encodes the picture.

        False: a fetch is in flight, or the request has failed. A wait ends after twice the timeout.
        """
        needed = [
            feature
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > computed
        ]
        # A prompt can have a picture twice. The ticket ends with the last one. If it ended with the first,
        # each call would make a new ticket, and the wait would never end.
        keys = {feature.identifier for feature in needed}
        for key in self._tickets.get(request.request_id, {}).keys() - keys:
            self._close(request.request_id, key)
        ready = True
        for feature in needed:
            if not self._one_available(request, feature, int(feature.mm_position.get_num_embeds())):
                ready = False
        return ready

    def has(self, key: str) -> bool:
        place = self._arena.find(key)
        return place is not None and place.ready

    def take_unavailable(self) -> set[str]:
        """Requests that have failed since the last call, because an embedding cannot be obtained."""
        failed, self._unavailable = self._unavailable, set()
        return failed

    def load(self, key: str) -> None:
        """Has the embedding loaded in the next step, if it is here."""
        if key in self._loads:
            return
        place = self._arena.find_and_pin(key)
        if place is None:
            return
        if not place.ready:
            self._arena.unpin(place)
            return
        number = next(self._numbers)
        self._loads[key] = Copy(place.offset, place.payload, place.rows, place.nbytes, number)
        self._loading[number] = place, self._workers

    def plan(self) -> EncoderMetadata:
        loads, self._loads = self._loads, {}
        self._fetches = {k: f for k, f in self._fetches.items() if not f.place.ready and not f.failure}
        return EncoderMetadata(self._arena.path, self._arena.nbytes, loads=loads)

    def loaded(self, loaded: Loaded) -> None:
        """Workers have finished these loads. Places are free once all workers have."""
        for number, workers in loaded.workers.items():
            if number in self._loading:
                place, missing = self._loading.pop(number)
                if missing > workers:
                    self._loading[number] = place, missing - workers
                else:
                    self._arena.unpin(place)

    def finished(self, request_id: str) -> None:
        for key in list(self._tickets.get(request_id, ())):
            self._close(request_id, key)
        self._tickets.pop(request_id, None)
        self._unavailable.discard(request_id)

    # --- One embedding

    def _one_available(self, request: Any, feature: Any, rows: int) -> bool:
        key = feature.identifier
        if not rows:
            return True
        ticket = self._tickets.get(request.request_id, {}).get(key)
        if ticket is None:
            ticket = _Ticket(None, self._clock())
            self._tickets.setdefault(request.request_id, {})[key] = ticket
            params = request.ec_transfer_params
            announced = params.get(key) if isinstance(params, Mapping) and len(key) <= MAX_KEY else None
            if announced is None and params and not self.has(key):
                # Without its picture the request fails here: a worker that cannot encode it ends the engine.
                # vLLM refuses requests that have neither their pictures nor parameters.
                return self._give_up(request, feature, ticket, "no encoder engine has announced it")
            try:
                ticket.announcement = None if announced is None else self._checked(announced, rows)
            except BadAnnouncement as error:
                return self._give_up(request, feature, ticket, f"its announcement is not usable: {error}")
        if ticket.failed:
            return False
        place = self._arena.find(key)
        if place is not None and place.rows != rows:
            self._fail(
                request,
                ticket,
                f"embedding {key:.64} has {place.rows} rows, and the prompt has {rows} placeholders for it. "
                "Give different pictures different ids",
            )
            return False
        if ticket.announcement is None:
            return True
        failure = self._progress(ticket, ticket.announcement, key, rows)
        if failure:
            return self._give_up(request, feature, ticket, failure)
        return ticket.place is not None and ticket.place.ready

    def _checked(self, announced: Any, rows: int) -> AnnouncedEmbedding:
        announcement = parse_announcement(announced, rows)
        if announcement.nbytes % (rows * self._row_unit):
            raise BadAnnouncement(f"size_bytes {announcement.nbytes} is not {rows} rows of this model's type")
        if announcement.nbytes > self._arena.nbytes:
            raise BadAnnouncement(
                f"size_bytes {announcement.nbytes} exceeds the arena of {self._arena.nbytes}. Set a larger "
                "ec_buffer_size"
            )
        return announcement

    def _progress(self, ticket: _Ticket, announcement: AnnouncedEmbedding, key: str, rows: int) -> str:
        """Does what can be done for a ticket. Returns the reason of its failure, or an empty text."""
        if ticket.place is None:
            late = self._clock() - ticket.since > self._timeout
            place = self._arena.find_and_pin(key)
            if place is None:
                place = self._arena.reserve(key, announcement.nbytes, rows)
                if place is None:
                    return (
                        "the arena is full of embeddings in use. Set a larger ec_buffer_size" if late else ""
                    )
                # Pinned for the ticket, too, before the transfer thread can end the fetch.
                self._arena.find_and_pin(key)
                ticket.fetch = self._fetches[key] = self._fetcher.fetch(announcement.address, place)
            elif not place.ready:
                fetch = self._fetches.get(key)
                if fetch is None or fetch.place is not place or fetch.failure:
                    self._arena.unpin(place)  # no pin keeps it for longer than its failed fetch
                    return "an earlier fetch of it does not end" if late else ""
                ticket.fetch = fetch
            ticket.place = place
        if ticket.place.ready:
            return ""
        assert ticket.fetch is not None
        if not ticket.fetch.failure and self._clock() > ticket.fetch.deadline + _GRACE_S:
            return "the transfer thread does not answer"
        return ticket.fetch.failure

    def _give_up(self, request: Any, feature: Any, ticket: _Ticket, reason: str) -> bool:
        """Has the picture encoded here, or fails the request. Returns whether it can be scheduled."""
        if ticket.place is not None:
            self._arena.unpin(ticket.place)
        ticket.place = ticket.announcement = None
        key = feature.identifier
        if not self._has_input(feature):
            self._fail(
                request, ticket, f"embedding {key:.64} is not available, and it has no picture: {reason}"
            )
            return False
        logger.warning(
            "encoder: request %s: embedding %.64s is encoded here: %s", request.request_id, key, reason
        )
        return True

    def _fail(self, request: Any, ticket: _Ticket, reason: str) -> None:
        ticket.failed = True
        self._unavailable.add(request.request_id)
        logger.error("encoder: request %s failed: %s", request.request_id, reason)

    def _close(self, request_id: str, key: str) -> None:
        ticket = self._tickets.get(request_id, {}).pop(key, None)
        if ticket is not None and ticket.place is not None:
            self._arena.unpin(ticket.place)
