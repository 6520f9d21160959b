"""The arena of embeddings: places never overlap, pins hold, the least recently used embedding goes first."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from kv_connector.vllm.encoder import arena as arena_module
from kv_connector.vllm.encoder.arena import HEADER_BYTES, EmbeddingArena, EmbeddingPlace, store_stamp

SLOT = HEADER_BYTES + 256


def complete(arena: EmbeddingArena, key: str, nbytes: int = 256) -> EmbeddingPlace:
    place = arena.reserve(key, nbytes)
    assert place is not None
    arena.complete(place)
    arena.unpin(place)
    return place


def test_arena_evicts_the_least_recently_used() -> None:
    arena = EmbeddingArena("a", 3 * SLOT)
    for key in "abc":
        complete(arena, key)
    assert arena.find("a") is not None
    complete(arena, "d")
    assert [key for key in "abcd" if arena.find(key)] == ["a", "c", "d"]


def test_arena_keeps_pinned_and_incomplete_places() -> None:
    arena = EmbeddingArena("a", 3 * SLOT)
    complete(arena, "a")
    pinned = arena.find_and_pin("a")
    assert pinned is not None
    incomplete = arena.reserve("b", 256)
    assert incomplete is not None
    complete(arena, "c")
    assert arena.reserve("d", 2 * SLOT - HEADER_BYTES) is None
    assert arena.unpin(incomplete)
    assert arena.find("b") is None
    assert not arena.unpin(pinned)
    assert arena.reserve("d", 3 * SLOT - HEADER_BYTES) is not None


def test_arena_refuses_what_never_fits_without_evicting() -> None:
    arena = EmbeddingArena("a", 2 * SLOT)
    complete(arena, "a")
    assert arena.reserve("b", 2 * SLOT) is None
    assert arena.find("a") is not None


def test_arena_bounds_the_number_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "MAX_EMBEDDINGS", 2)
    arena = EmbeddingArena("a", 10 * SLOT)
    for key in "abc":
        complete(arena, key)
    assert [key for key in "abc" if arena.find(key)] == ["b", "c"]


def test_arena_stamp_of_an_earlier_place_does_not_count() -> None:
    arena = EmbeddingArena("a", SLOT)
    first = complete(arena, "a")
    store_stamp(memoryview(arena.memory), first.offset, first.stamp)
    assert arena.saved(first)
    second = complete(arena, "b")
    assert second.offset == first.offset
    assert not arena.saved(second)


def test_arena_bytes_of_an_embedding_are_no_stamp() -> None:
    arena = EmbeddingArena("a", 8 * SLOT)
    words = memoryview(arena.memory).cast("B").cast("Q")
    for number in range(len(words)):
        words[number] = 1
    place = arena.reserve("a", 256)
    assert place is not None
    assert not arena.saved(place)


def test_arena_evicts_none_if_the_rest_is_in_use() -> None:
    arena = EmbeddingArena("a", 3 * SLOT)
    for key in "abc":
        complete(arena, key)
    pinned = arena.find_and_pin("b")
    assert pinned is not None
    assert arena.reserve("d", 2 * SLOT - HEADER_BYTES) is None
    assert all(arena.find(key) for key in "abc")
    arena.unpin(pinned)
    assert arena.reserve("d", 2 * SLOT - HEADER_BYTES) is not None


def test_arena_searches_a_few_times_for_a_place_that_evicts_many(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    search = EmbeddingArena._gap

    def counted(arena: EmbeddingArena, nbytes: int, places: Sequence[EmbeddingPlace]) -> int | None:
        searches.append(nbytes)
        return search(arena, nbytes, places)

    monkeypatch.setattr(EmbeddingArena, "_gap", counted)
    arena = EmbeddingArena("a", 200 * SLOT)
    keys = [f"k{number}" for number in range(200)]
    for key in keys:
        complete(arena, key)
    random.Random(1).shuffle(keys)
    for key in keys:
        arena.find(key)
    searches.clear()
    assert arena.reserve("large", 100 * SLOT) is not None
    assert len(searches) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_arena_places_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    arena = EmbeddingArena("a", 40 * SLOT)
    live: dict[str, EmbeddingPlace] = {}
    pinned: list[EmbeddingPlace] = []
    for number in range(400):
        if pinned and chance.random() < 0.5:
            arena.unpin(pinned.pop(chance.randrange(len(pinned))))
            continue
        place = arena.reserve(f"k{number}", chance.randint(1, 12 * 256))
        if place is not None:
            if chance.random() < 0.7:
                arena.complete(place)
            live[place.key] = place
            pinned.append(place)
        live = {key: kept for key, kept in live.items() if arena.find(key) is kept}
        assert all(kept.key in live for kept in pinned)
        assert arena.pinned == len(pinned)
        spans = sorted((kept.offset, kept.end) for kept in live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= arena.nbytes
