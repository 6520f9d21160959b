"""ProducerScheduler: the scheduler side of an encoder engine. It plans the saves and announces embeddings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kv_connector.protocol.actions import Address
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.messages import MAX_KEY
from kv_connector.vllm.encoder.metadata import Copy, EncoderMetadata

logger = logging.getLogger("kv_connector")


class ProducerScheduler:
    """All methods belong to the scheduler's thread."""

    def __init__(self, arena: EmbeddingArena, address: Address, row_bytes: Callable[[str], int]) -> None:
        """``row_bytes``: size of an embedding's row, by modality. It raises ValueError for an unknown one."""
        self._arena = arena
        self._address = address
        self._row_bytes = row_bytes
        self._places: dict[str, dict[str, EmbeddingPlace]] = {}
        """Places that live requests have pinned, by request id and key."""

    def plan(self, new_requests: Iterable[tuple[str, Sequence[Any]]]) -> EncoderMetadata:
        """Plans a step. ``new_requests``: ids and pictures of requests that are scheduled for the first time.

        A picture for which the arena has no room is encoded, and not announced.
        """
        for request_id, features in new_requests:
            places = self._places.setdefault(request_id, {})
            for feature in features:
                if feature.identifier not in places and len(feature.identifier) <= MAX_KEY:
                    place = self._arena.find_and_pin(feature.identifier) or self._reserve(feature)
                    if place is not None:
                        places[feature.identifier] = place
        waiting = {
            key: Copy(place.offset, place.payload, place.rows, place.nbytes, place.stamp)
            for places in self._places.values()
            for key, place in places.items()
            if not place.ready and not self._arena.saved(place)
        }
        return EncoderMetadata(self._arena.path, self._arena.nbytes, saves=waiting)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The announcements of a request that has ended, for the prefill engine: `ec_transfer_params`."""
        announced = {}
        for key, place in self._places.pop(request_id, {}).items():
            if self._arena.saved(place):
                self._arena.complete(place)
                announced[key] = {
                    "peer_host": self._address.host,
                    "peer_port": self._address.port,
                    "size_bytes": place.nbytes,
                }
            self._arena.unpin(place)
        return announced or None

    def _reserve(self, feature: Any) -> EmbeddingPlace | None:
        rows = int(feature.mm_position.get_num_embeds())
        try:
            nbytes = rows * self._row_bytes(feature.modality)
        except ValueError as error:
            logger.warning("encoder: embedding %.64s is not announced: %s", feature.identifier, error)
            return None
        if not nbytes:
            return None
        place = self._arena.reserve(feature.identifier, nbytes, rows)
        if place is None:
            logger.warning(
                "encoder: embedding %.64s is not announced: %d rows do not fit into the arena beside those "
                "in use. Set a larger ec_buffer_size",
                feature.identifier,
                rows,
            )
        return place
