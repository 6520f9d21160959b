"""EmbeddingArena: a bounded store of embeddings in host memory. The transfer engine and the workers share it.

Each embedding has one contiguous place, so that one write fills it. A place begins with a header. The worker
that saves an embedding stores the place's stamp there once all bytes are in place.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from kv_connector.engine import MemoryRange
from kv_connector.engine.transfer_engine import SharedMemory

HEADER_BYTES = 256
_ALIGNMENT = 256
# One search for a place looks at every embedding. With 4,096 of them it takes about as long as a scheduler's
# other work for one request. An arena of 1 GB has 1,000 pictures of 1 MB.
MAX_EMBEDDINGS = 4096

_STAMP = struct.Struct("<Q")
_offset = attrgetter("offset")


@dataclass(eq=False)
class EmbeddingPlace:
    """The place of one embedding. Only the arena changes it."""

    key: str
    offset: int
    """Offset of the header in the arena, in bytes."""
    nbytes: int
    """Size of the embedding without its header."""
    rows: int
    """Rows of the embedding, one for each placeholder token that it replaces."""
    stamp: int
    """Different for each place that the arena has ever had."""
    ready: bool = False
    """Whether the embedding is complete."""
    pins: int = 0
    """Users because of whom the place is kept."""

    @property
    def payload(self) -> int:
        """Offset of the embedding in the arena, in bytes."""
        return self.offset + HEADER_BYTES

    @property
    def end(self) -> int:
        return self.payload + -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


class EmbeddingArena:
    """Any thread may call any method. No method blocks for longer than a search."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = max(nbytes, HEADER_BYTES + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        self.memory = SharedMemory(name, self.nbytes)
        self.range = MemoryRange(self.memory.address, self.nbytes, self.memory.fd)
        self.path = f"/proc/{os.getpid()}/fd/{self.memory.fd}"
        """A file that workers of the same user on this host can map, while this process lives."""
        self._view = memoryview(self.memory)
        self._lock = threading.Lock()
        self._places: OrderedDict[str, EmbeddingPlace] = OrderedDict()  # least recently used first
        self._by_offset: list[EmbeddingPlace] = []  # the same places
        # An embedding of an earlier place may be where a header is. It does not look like a random number.
        self._stamps = secrets.randbits(62)
        self._refused = self.nbytes + 1
        """Places of so many bytes have found no room since the last pin ended."""
        self.pinned = 0
        """Embeddings that are kept because of a pin."""

    def find(self, key: str) -> EmbeddingPlace | None:
        """The place of an embedding, which becomes the most recently used."""
        with self._lock:
            place = self._places.get(key)
            if place is not None:
                self._places.move_to_end(key)
            return place

    def find_and_pin(self, key: str) -> EmbeddingPlace | None:
        with self._lock:
            place = self._places.get(key)
            if place is not None:
                self._places.move_to_end(key)
                self.pinned += not place.pins
                place.pins += 1
            return place

    def reserve(self, key: str, nbytes: int, rows: int = 1) -> EmbeddingPlace | None:
        """A new place with one pin. Evicts embeddings that no user has pinned, least recently used first.

        None: the embedding does not fit beside those that are in use.
        """
        place = EmbeddingPlace(key, 0, nbytes, rows, 0)
        with self._lock:
            assert key not in self._places
            if place.end >= self._refused:
                return None
            offset = self._gap(place.end, self._by_offset)
            if offset is None:
                offset = self._evict_for(place.end)
            if offset is None:
                self._refused = place.end
                return None
            self._stamps += 1
            place.offset, place.stamp, place.pins = offset, self._stamps, 1
            self._places[key] = place
            insort(self._by_offset, place, key=_offset)
            self.pinned += 1
            return place

    def unpin(self, place: EmbeddingPlace) -> bool:
        """Ends one user's interest. Returns whether that removed the place, because it is not complete."""
        with self._lock:
            place.pins -= 1
            self.pinned -= not place.pins
            if not place.pins:
                self._refused = self.nbytes + 1
            if place.pins or place.ready or self._places.get(place.key) is not place:
                return False
            self._remove(place)
            return True

    def complete(self, place: EmbeddingPlace) -> None:
        """The embedding is in its place."""
        with self._lock:
            place.ready = True

    def saved(self, place: EmbeddingPlace) -> bool:
        """Whether a worker has stored the embedding and then its stamp."""
        return load_stamp(self._view, place.offset) == place.stamp

    def __len__(self) -> int:
        return len(self._places)

    def _gap(self, nbytes: int, places: Sequence[EmbeddingPlace]) -> int | None:
        """The lowest offset with so many free bytes if the arena has these places, in order."""
        if len(places) >= MAX_EMBEDDINGS:
            return None
        free = 0
        for place in places:
            if place.offset - free >= nbytes:
                return free
            free = place.end
        return free if self.nbytes - free >= nbytes else None

    def _evict_for(self, nbytes: int) -> int | None:
        """Evicts embeddings until so many bytes are free, and returns their offset. Evicts none if that
        cannot succeed."""
        kept = [place for place in self._by_offset if place.pins or not place.ready]
        if self._gap(nbytes, kept) is None:
            return None
        full = len(self._by_offset) >= MAX_EMBEDDINGS
        for place in list(self._places.values()):
            if place.ready and not place.pins:
                index = self._remove(place)
                # Only the bytes around the victim can have become enough. A search of the whole arena for
                # each victim would take seconds.
                around = self._by_offset[max(index - 1, 0) : index + 1]
                start = around[0].end if index else 0
                end = around[-1].offset if index < len(self._by_offset) else self.nbytes
                if end - start >= nbytes:
                    return start
                if full and (offset := self._gap(nbytes, self._by_offset)) is not None:
                    return offset
                full = False
        return None

    def _remove(self, place: EmbeddingPlace) -> int:
        """Returns the place's former index by offset."""
        del self._places[place.key]
        index = bisect_left(self._by_offset, place.offset, key=_offset)
        del self._by_offset[index]
        return index


def load_stamp(view: memoryview, offset: int) -> int:
    """The stamp in the header at ``offset``."""
    return int(_STAMP.unpack_from(view, offset)[0])


def store_stamp(view: memoryview, offset: int, stamp: int) -> None:
    """Marks the embedding whose header is at ``offset`` as saved. Called by the worker after its copy."""
    _STAMP.pack_into(view, offset, stamp)
