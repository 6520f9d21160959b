"""The scheduler sides of encoder disaggregation, and the copies of their workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_connector.agent.settings import SettingsError
from kv_connector.protocol.actions import Address
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.consumer import ConsumerScheduler
from kv_connector.vllm.encoder.metadata import Loaded
from kv_connector.vllm.encoder.producer import ProducerScheduler
from kv_connector.vllm.encoder.receiver import Fetch
from kv_connector.vllm.encoder.settings import parse_encoder_settings
from kv_connector.vllm.encoder.worker import EncoderWorker

ENCODER = Address("10.0.0.1", 14579)
WIDTH = 8
DTYPE = torch.bfloat16
ROW = WIDTH * DTYPE.itemsize
TIMEOUT = 10.0


def feature(key: str, rows: int = 4, offset: int = 0, *, picture: bool = True) -> Any:
    position = SimpleNamespace(offset=offset, length=rows, get_num_embeds=lambda: rows)
    return SimpleNamespace(identifier=key, mm_position=position, modality="image", data=picture)


def announced(rows: int = 4, **fields: Any) -> dict[str, Any]:
    return {"peer_host": ENCODER.host, "peer_port": ENCODER.port, "size_bytes": rows * ROW, **fields}


def request(name: str, *features: Any, params: Any = None) -> Any:
    if params is None:
        params = {f.identifier: announced(f.mm_position.length) for f in features}
    return SimpleNamespace(request_id=name, mm_features=features, ec_transfer_params=params)


class FakeFetcher:
    """Keeps the fetches of which a test decides."""

    def __init__(self, arena: EmbeddingArena) -> None:
        self.arena = arena
        self.fetches: list[Fetch] = []
        self.addresses: list[Address] = []

    def fetch(self, address: Address, place: EmbeddingPlace) -> Fetch:
        self.addresses.append(address)
        self.fetches.append(Fetch(place, deadline=1e9))
        return self.fetches[-1]

    def arrive(self, fetch: Fetch, content: bytes = b"") -> None:
        place = fetch.place
        memoryview(self.arena.memory)[place.payload : place.payload + len(content)] = content
        self.arena.complete(place)
        self.arena.unpin(place)

    def fail(self, fetch: Fetch) -> None:
        fetch.failure = "the encoder engine is gone"

    def fenced(self, fetch: Fetch) -> None:
        self.arena.unpin(fetch.place)


class Consumer:
    def __init__(self, nbytes: int = 1 << 16, workers: int = 1) -> None:
        self.arena = EmbeddingArena("prefill", nbytes)
        self.fetcher = FakeFetcher(self.arena)
        self.now = 0.0
        self.scheduler = ConsumerScheduler(
            self.arena,
            self.fetcher,
            row_unit=DTYPE.itemsize,
            timeout=TIMEOUT,
            workers=workers,
            has_input=lambda f: f.data,
            clock=lambda: self.now,
        )

    def pins(self) -> int:
        return sum(place.pins for place in self.arena._places.values())


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


def test_request_waits_for_its_embeddings(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    r = request("r", feature("a"), feature("b", offset=10))
    assert not scheduler.available(r, 0)
    assert not scheduler.available(r, 0)
    assert fetcher.addresses == [ENCODER, ENCODER]
    fetcher.arrive(fetcher.fetches[0])
    assert not scheduler.available(r, 0)
    assert scheduler.available(r, 4) is False  # the second is still in flight
    fetcher.arrive(fetcher.fetches[1])
    assert scheduler.available(r, 0)
    assert scheduler.has("a")
    scheduler.finished("r")
    assert consumer.pins() == 0


def test_computed_pictures_and_text_are_not_fetched(consumer: Consumer) -> None:
    assert consumer.scheduler.available(request("r", feature("a")), 4)
    assert consumer.scheduler.available(request("s"), 0)
    assert consumer.scheduler.available(request("t", feature("a"), params={}), 0)
    assert consumer.scheduler.available(request("u", feature("a", rows=0)), 0) is True
    assert consumer.fetcher.fetches == []


def test_equal_pictures_are_fetched_once(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    first, second = request("r", feature("a"), feature("a", offset=9)), request("s", feature("a"))
    assert not scheduler.available(first, 0)
    assert not scheduler.available(second, 0)
    scheduler.plan()
    fetcher.arrive(fetcher.fetches[0])
    for r in (first, second, request("t", feature("a"))):
        assert scheduler.available(r, 0)
    assert len(fetcher.fetches) == 1


def test_failed_fetch_has_the_picture_encoded_here(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    waiting = [request("r", feature("a")), request("s", feature("a"))]
    assert not any(scheduler.available(r, 0) for r in waiting)
    fetcher.fail(fetcher.fetches[0])
    scheduler.plan()
    assert all(scheduler.available(r, 0) for r in waiting)
    assert not scheduler.has("a")
    later = request("t", feature("a"))
    assert not scheduler.available(later, 0)  # the place is not fenced yet
    fetcher.fenced(fetcher.fetches[0])
    assert not scheduler.available(later, 0)
    fetcher.arrive(fetcher.fetches[1])
    assert scheduler.available(later, 0)
    assert scheduler.take_unavailable() == set()


def test_fetch_that_fails_at_once_has_the_picture_encoded_here(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(address: Address, place: EmbeddingPlace) -> Fetch:
        failed = Fetch(place, deadline=1e9, failure="no route")
        consumer.arena.unpin(place)
        return failed

    monkeypatch.setattr(consumer.fetcher, "fetch", fetch)
    assert consumer.scheduler.available(request("r", feature("a")), 0)
    assert consumer.arena.find("a") is None


def test_failed_fetch_ends_the_wait_for_a_picture_that_is_in_the_prompt_twice(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    r = request("r", feature("a"), feature("a", offset=9))
    assert not scheduler.available(r, 4)  # the first is in the prefix cache
    fetcher.fail(fetcher.fetches[0])
    fetcher.fenced(fetcher.fetches[0])
    scheduler.plan()
    assert all(scheduler.available(r, 4) for _ in range(3))
    assert len(fetcher.fetches) == 1
    assert scheduler.available(r, 13)
    assert consumer.pins() == 0


def test_place_that_is_never_fenced_delays_a_request_once(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    assert not scheduler.available(request("r", feature("a")), 0)
    fetcher.fail(fetcher.fetches[0])
    scheduler.finished("r")
    later = request("t", feature("a"))
    assert not scheduler.available(later, 0)
    consumer.now = TIMEOUT + 1
    assert scheduler.available(later, 0)


def test_request_without_its_picture_fails_by_name(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    r = request("r", feature("a", picture=False))
    assert not scheduler.available(r, 0)
    fetcher.fail(fetcher.fetches[0])
    assert not scheduler.available(r, 0)
    assert scheduler.take_unavailable() == {"r"}
    assert not scheduler.available(r, 0)  # vLLM may schedule once more before it ends the request
    assert scheduler.take_unavailable() == set()
    assert "request r failed: embedding a is not available, and it has no picture: the encoder" in caplog.text


def test_silent_transfer_thread_does_not_stop_a_request(consumer: Consumer) -> None:
    r = request("r", feature("a"))
    assert not consumer.scheduler.available(r, 0)
    consumer.now = 1e9 + 6
    assert consumer.scheduler.available(r, 0)


def test_full_arena_makes_requests_wait_until_the_timeout() -> None:
    consumer = Consumer(nbytes=512)
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    first, second = request("r", feature("a")), request("s", feature("b"))
    assert not scheduler.available(first, 0)
    assert not scheduler.available(second, 0)
    fetcher.arrive(fetcher.fetches[0])
    assert scheduler.available(first, 0)
    assert not scheduler.available(second, 0)  # the first request has not loaded it
    consumer.now = TIMEOUT + 1
    assert scheduler.available(second, 0)
    scheduler.finished("r")
    third = request("t", feature("c"))
    assert not scheduler.available(third, 0)
    assert [f.place.key for f in fetcher.fetches] == ["a", "c"]


@pytest.mark.parametrize(
    "wrong",
    [
        "no object",
        announced(peer_host=""),
        announced(peer_host="h" * 256),
        announced(peer_host=7),
        announced(peer_port=0),
        announced(peer_port=True),
        announced(peer_port="80"),
        announced(size_bytes=0),
        announced(size_bytes=-64),
        announced(size_bytes=4 * ROW + 1),
        announced(size_bytes=4),  # one byte for a row, of a type with two
        announced(size_bytes=1 << 40),
        announced(size_bytes=True),
        {},
    ],
)
def test_unusable_announcement_has_the_picture_encoded_here(consumer: Consumer, wrong: Any) -> None:
    assert consumer.scheduler.available(request("r", feature("a"), params={"a": wrong}), 0)
    assert consumer.fetcher.fetches == []


def test_params_that_are_no_object_have_the_picture_encoded_here(consumer: Consumer) -> None:
    assert consumer.scheduler.available(request("r", feature("a"), params="text"), 0)
    assert consumer.fetcher.fetches == []


@pytest.mark.parametrize("key", ["a", "k" * 513])
def test_request_with_neither_picture_nor_announcement_fails(consumer: Consumer, key: str) -> None:
    params = {"b" if len(key) == 1 else key: announced()}
    assert not consumer.scheduler.available(request("r", feature(key, picture=False), params=params), 0)
    assert consumer.scheduler.take_unavailable() == {"r"}


def test_picture_that_is_not_announced_is_logged(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    assert consumer.scheduler.available(request("r", feature("a"), params={"b": announced()}), 0)
    assert "embedding a is encoded here: no encoder engine has announced it" in caplog.text


def test_key_beyond_the_limit_is_not_fetched(consumer: Consumer) -> None:
    assert consumer.scheduler.available(request("r", feature("k" * 513)), 0)
    assert consumer.fetcher.fetches == []


def test_same_id_for_pictures_of_different_sizes_fails_the_request(consumer: Consumer) -> None:
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    assert not scheduler.available(request("r", feature("a", rows=4)), 0)
    fetcher.arrive(fetcher.fetches[0])
    assert not scheduler.available(request("s", feature("a", rows=5), params={}), 0)
    assert scheduler.take_unavailable() == {"s"}


@pytest.mark.parametrize("workers", [1, 2])
def test_loaded_place_is_kept_until_all_workers_have_it(workers: int) -> None:
    consumer = Consumer(workers=workers)
    scheduler, fetcher = consumer.scheduler, consumer.fetcher
    assert not scheduler.available(request("r", feature("a")), 0)
    fetcher.arrive(
        fetcher.fetches[0], torch.arange(4 * WIDTH, dtype=DTYPE).view(torch.uint8).numpy().tobytes()
    )
    scheduler.load("a")
    scheduler.load("a")
    scheduler.load("b")  # this engine encodes it
    metadata = scheduler.plan()
    assert [*metadata.loads] == ["a"]
    assert scheduler.plan().loads == {}
    scheduler.finished("r")
    for _ in range(workers):
        assert consumer.pins() == 1
        worker = EncoderWorker(DTYPE, torch.device("cpu"), saves=False)
        cache: dict[str, torch.Tensor] = {}
        worker.load(metadata, cache)
        assert torch.equal(cache["a"], torch.arange(4 * WIDTH, dtype=DTYPE).view(4, WIDTH))
        loaded = worker.take_loaded()
        assert loaded is not None
        assert worker.take_loaded() is None
        scheduler.loaded(loaded)
    assert consumer.pins() == 0
    assert loaded is not None
    scheduler.loaded(loaded)  # a repeated report changes nothing
    memoryview(consumer.arena.memory)[:] = bytes(consumer.arena.nbytes)
    assert cache["a"].sum() > 0  # a copy


def test_reports_of_workers_add_up() -> None:
    from collections import Counter

    both = Loaded(Counter({1: 1})).aggregate(Loaded(Counter({1: 1, 2: 1})))
    assert isinstance(both, Loaded)
    assert both.workers == {1: 2, 2: 1}


def embedding(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.full((rows, WIDTH), seed, dtype=DTYPE)


class Producer:
    def __init__(self, nbytes: int = 1 << 16, *, saves: bool = True) -> None:
        self.arena = EmbeddingArena("encoder", nbytes)
        self.scheduler = ProducerScheduler(self.arena, ENCODER, self.row_bytes)
        self.worker = EncoderWorker(DTYPE, torch.device("cpu"), saves=saves)
        self.cache: dict[str, torch.Tensor] = {}

    @staticmethod
    def row_bytes(modality: str) -> int:
        if modality != "image":
            raise ValueError(f"no width of {modality}")
        return ROW

    def step(self, *new: tuple[str, list[Any]], encodes: dict[str, torch.Tensor] | None = None) -> None:
        metadata = self.scheduler.plan(new)
        self.worker.save_cached(metadata, self.cache)
        for key, value in (encodes or {}).items():
            self.cache[key] = value
            self.worker.save(self.cache, key)

    def content(self, key: str) -> torch.Tensor:
        place = self.arena.find(key)
        assert place is not None
        assert place.ready
        view = memoryview(self.arena.memory)[place.payload : place.payload + place.nbytes]
        return torch.frombuffer(view, dtype=DTYPE).view(place.rows, -1)


def test_encoded_pictures_are_announced() -> None:
    e = Producer()
    e.step(("r", [feature("a"), feature("b", rows=3)]), encodes={"a": embedding(1)})
    e.step(encodes={"b": embedding(2, 3)})
    assert e.scheduler.finished("r") == {"a": announced(4), "b": announced(3)}
    assert torch.equal(e.content("a"), embedding(1))
    assert torch.equal(e.content("b"), embedding(2, 3))


def test_picture_of_an_earlier_step_is_saved_from_the_cache() -> None:
    e = Producer()
    e.cache["a"] = embedding(1)  # its place was evicted since
    e.step(("r", [feature("a")]))
    assert e.scheduler.finished("r") == {"a": announced()}


def test_picture_in_the_arena_is_not_saved_again() -> None:
    e = Producer()
    e.step(("r", [feature("a")]), encodes={"a": embedding(1)})
    e.scheduler.finished("r")
    assert e.scheduler.plan([("s", [feature("a")])]).saves == {}
    assert e.scheduler.finished("s") == {"a": announced()}


def test_aborted_request_announces_nothing_and_frees_its_places() -> None:
    e = Producer(nbytes=512)
    e.step(("r", [feature("a")]))
    assert e.scheduler.finished("r") is None
    assert len(e.arena) == 0
    e.step(("s", [feature("b")]), encodes={"a": embedding(1), "b": embedding(2)})
    assert e.scheduler.finished("s") == {"b": announced()}
    assert torch.equal(e.content("b"), embedding(2))


@pytest.mark.parametrize(
    "wrong", [embedding(1, 5), torch.zeros(4, WIDTH, dtype=torch.float32), torch.zeros(4, 9, dtype=DTYPE)]
)
def test_embedding_of_another_shape_is_not_announced(wrong: torch.Tensor) -> None:
    e = Producer()
    e.step(("r", [feature("a")]), encodes={"a": wrong})
    assert e.scheduler.finished("r") is None


def test_pictures_that_do_not_fit_are_not_announced() -> None:
    e = Producer(nbytes=512)
    video = feature("v")
    video.modality = "video"
    pictures = [feature("a"), feature("b"), feature("k" * 513), feature("z", rows=0), video]
    e.step(("r", pictures), encodes={f.identifier: embedding(1) for f in pictures})
    assert e.scheduler.finished("r") == {"a": announced()}


def test_other_ranks_save_nothing() -> None:
    e = Producer(saves=False)
    e.step(("r", [feature("a")]), encodes={"a": embedding(1)})
    assert e.scheduler.finished("r") is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"control_prt": 1}, "unknown field `control_prt`"),
        ({"routers": ["a:1"]}, "unknown field `routers`"),
        ({"fetch_timeout": 0}, "fetch_timeout must be"),
        ({"fetch_timeout": "5"}, "fetch_timeout must be"),
        ({"control_host": "a name"}, "control_host 'a name' is a name"),
        ({"providers": ["nvlink"]}, "nvlink cannot move"),
    ],
)
def test_wrong_setting_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named.replace("`", ".")):
        parse_encoder_settings(config)


def test_default_settings_need_no_key_on_one_host() -> None:
    settings = parse_encoder_settings({})
    link = settings.link("engine", "10.0.0.7", ())
    assert (link.providers, link.data_host, link.timeout) == (("host", "tcp"), "127.0.0.1", 10.0)
    assert settings.address("10.0.0.7", 14579) == Address("127.0.0.1", 14579)
    with pytest.raises(SettingsError, match="ec_port"):
        settings.address("10.0.0.7", 65536)
