"""Embeddings between an encoder engine's sender and a prefill engine's receiver, and the ends of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import pytest
import zmq

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Received
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.actions import Address
from kv_connector.protocol.session.fingerprint import engine_fingerprint
from kv_connector.vllm.encoder import receiver as receiver_module
from kv_connector.vllm.encoder import sender as sender_module
from kv_connector.vllm.encoder.arena import EmbeddingArena, EmbeddingPlace
from kv_connector.vllm.encoder.messages import CODEC, FetchRequest, Hello, Leave, Missing, Welcome
from kv_connector.vllm.encoder.receiver import EmbeddingReceiver, Fetch
from kv_connector.vllm.encoder.sender import EmbeddingSender
from kv_connector.vllm.encoder.session import SessionConfig
from kv_connector.weights.wire.loop import Loop

PATIENCE_S = 60.0
ARENA = 1 << 20
PRINT = engine_fingerprint("vllm 0.32", "model", "bfloat16")
PATIENT = SessionConfig("test", PRINT, timeout=PATIENCE_S)
HURRIED = replace(PATIENT, timeout=0.2)
LOOPBACK = Address("127.0.0.1", 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def content(key: str, nbytes: int) -> bytes:
    return (key.encode() * nbytes)[:nbytes]


class Encoder:
    def __init__(self, config: SessionConfig = PATIENT, address: Address = LOOPBACK) -> None:
        self.arena = EmbeddingArena("encoder", ARENA)
        self.sender = EmbeddingSender(config, self.arena)
        self.address = self.sender.start(address)

    def encode(self, key: str, nbytes: int) -> EmbeddingPlace:
        place = self.arena.reserve(key, nbytes)
        assert place is not None
        memoryview(self.arena.memory)[place.payload : place.payload + nbytes] = content(key, nbytes)
        self.arena.complete(place)
        self.arena.unpin(place)
        return place


class Prefill:
    def __init__(self, config: SessionConfig = PATIENT) -> None:
        self.arena = EmbeddingArena("prefill", ARENA)
        self.receiver = EmbeddingReceiver(config, self.arena)

    def fetch(self, address: Address, key: str, nbytes: int) -> Fetch:
        place = self.arena.reserve(key, nbytes)
        assert place is not None
        return self.receiver.fetch(address, place)

    def received(self, fetch: Fetch) -> bytes:
        until(lambda: fetch.place.ready or bool(fetch.failure))
        assert fetch.failure == ""
        place = fetch.place
        return bytes(memoryview(self.arena.memory)[place.payload : place.payload + place.nbytes])

    def failure(self, fetch: Fetch) -> str:
        """The reason of the failure, once the place is free again."""
        until(lambda: bool(fetch.failure) and self.arena.find(fetch.place.key) is None)
        assert not fetch.place.ready
        return fetch.failure


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def encoder(stack: ExitStack, config: SessionConfig = PATIENT, address: Address = LOOPBACK) -> Encoder:
    made = Encoder(config, address)
    stack.callback(made.sender.close)
    return made


def prefill(stack: ExitStack, config: SessionConfig = PATIENT) -> Prefill:
    made = Prefill(config)
    stack.callback(made.receiver.close)
    return made


@pytest.mark.parametrize("lane", ["host", "tcp"])
def test_embeddings_arrive_complete(stack: ExitStack, lane: str) -> None:
    config = replace(PATIENT, providers=(lane,))
    e, p = encoder(stack, config), prefill(stack, config)
    sizes = {f"picture{number}": 1 + 3001 * number for number in range(12)}
    for key, nbytes in sizes.items():
        e.encode(key, nbytes)
    fetches = {key: p.fetch(e.address, key, nbytes) for key, nbytes in sizes.items()}
    for key, fetch in fetches.items():
        assert p.received(fetch) == content(key, sizes[key])
    until(lambda: all(place.pins == 0 for place in map(e.arena.find, sizes) if place))
    assert all(fetch.place.pins == 0 for fetch in fetches.values())


def test_evicted_embedding_fails_its_fetch_only(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("kept", 100)
    lost, kept = p.fetch(e.address, "evicted", 100), p.fetch(e.address, "kept", 100)
    assert "evicted, or was never encoded" in p.failure(lost)
    assert p.received(kept) == content("kept", 100)


def test_embedding_of_another_size_is_not_written(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("picture", 100)
    assert "100 bytes, 101 were requested" in p.failure(p.fetch(e.address, "picture", 101))


def test_embedding_of_other_rows_is_not_written(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("picture", 100)
    place = p.arena.reserve("picture", 100, rows=2)
    assert place is not None
    assert "1 rows, 2 were requested" in p.failure(p.receiver.fetch(e.address, place))


def test_incomplete_embedding_is_not_written(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    place = e.arena.reserve("picture", 100)
    assert place is not None
    assert "not complete" in p.failure(p.fetch(e.address, "picture", 100))
    assert place.pins == 1


def test_session_after_the_encoder_engine_restarted(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("a", 100)
    p.received(p.fetch(e.address, "a", 100))
    e.sender.close()
    until(lambda: not p.receiver._sessions)
    again = encoder(stack, address=e.address)
    again.encode("b", 100)
    assert p.received(p.fetch(e.address, "b", 100)) == content("b", 100)
    assert p.arena.find("a") is not None  # what has arrived stays


class Silent(EmbeddingSender):
    """Keeps each FETCH instead of writing, and does not read LEAVE."""

    def __init__(self, config: SessionConfig, arena: EmbeddingArena) -> None:
        super().__init__(config, arena)
        self.kept: list[Callable[[], str | None]] = []

    def received(self, now: float, received: Received[object]) -> None:
        if not isinstance(received.message, Leave):
            super().received(now, received)

    def _write(self, now: float, session: sender_module._PrefillSession, fetch: FetchRequest) -> str | None:
        write = super()._write
        self.kept.append(lambda: write(now, session, fetch))
        return None


def silent(stack: ExitStack) -> tuple[Silent, EmbeddingArena, Address]:
    arena = EmbeddingArena("encoder", ARENA)
    sender = Silent(PATIENT, arena)
    address = sender.start(LOOPBACK)
    stack.callback(sender.close)
    return sender, arena, address


def test_fetches_beyond_the_limit_of_a_session_wait(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_FETCHES", 3)
    sender, arena, address = silent(stack)
    p = prefill(stack)
    fetches = [p.fetch(address, f"picture{number}", 100) for number in range(5)]
    for fetch in fetches:
        source = arena.reserve(fetch.place.key, 100)
        assert source is not None
        arena.complete(source)
    for sent in range(5):
        until(lambda sent=sent: len(sender.kept) == min(sent + 3, 5))  # type: ignore[misc]
        sender._loop.call(sender.kept[sent]).result(PATIENCE_S)
        p.received(fetches[sent])


def test_encoder_engine_bounds_its_writes(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "MAX_WRITES", 0)
    e, p = encoder(stack), prefill(stack)
    e.encode("picture", 100)
    assert "are in flight to this prefill engine" in p.failure(p.fetch(e.address, "picture", 100))


def test_death_of_the_encoder_engine_fails_its_fetches_at_once(stack: ExitStack) -> None:
    sender, _, address = silent(stack)
    p = prefill(stack)  # its timeout is as long as the test's patience
    fetch = p.fetch(address, "picture", 100)
    until(lambda: bool(sender.kept))
    sender.close()
    assert str(address) in p.failure(fetch)


def test_write_after_the_deadline_lands_nowhere(stack: ExitStack) -> None:
    sender, arena, address = silent(stack)
    p = prefill(stack, HURRIED)
    source = arena.reserve("picture", 100)
    assert source is not None
    arena.complete(source)
    memoryview(arena.memory)[source.payload : source.payload + 100] = content("x", 100)
    fetch = p.fetch(address, "picture", 100)
    assert "no embedding arrived within 0.2 s" in p.failure(fetch)
    owner = p.arena.reserve("other", 100)
    assert owner is not None
    assert owner.payload == fetch.place.payload
    until(lambda: bool(sender.kept))
    sender._loop.call(sender.kept[0]).result(PATIENCE_S)
    until(lambda: source.pins == 1)  # its owner's: the late write has ended
    place = memoryview(p.arena.memory)[owner.payload : owner.payload + 100]
    assert bytes(place) == bytes(100)


def test_address_where_no_process_answers(stack: ExitStack) -> None:
    p = prefill(stack, HURRIED)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as nothing:
        port = nothing.bind_to_random_port("tcp://127.0.0.1")
        assert "within 0.2 s" in p.failure(p.fetch(Address("127.0.0.1", port), "picture", 100))


@pytest.mark.parametrize("address", [Address("no such host", 5), Address("127.0.0.1\0", 5)])
def test_address_that_cannot_be_dialled_fails_at_once(stack: ExitStack, address: Address) -> None:
    p = prefill(stack)
    assert p.failure(p.fetch(address, "picture", 100))


def test_engine_of_another_model_is_refused_by_name(stack: ExitStack) -> None:
    other = replace(PATIENT, fingerprint=engine_fingerprint("vllm 0.32", "another", "bfloat16"))
    e, p = encoder(stack), prefill(stack, other)
    failure = p.failure(p.fetch(e.address, "picture", 100))
    assert "serve the same model on the encoder engine and the prefill engine" in failure


def test_engine_with_another_key_gets_nothing(stack: ExitStack) -> None:
    e = encoder(stack, replace(PATIENT, key=ClusterKey.generate()))
    p = prefill(stack, replace(HURRIED, key=ClusterKey.generate()))
    e.encode("picture", 100)
    assert "within 0.2 s" in p.failure(p.fetch(e.address, "picture", 100))


def test_death_of_the_prefill_engine_frees_what_it_was_sent(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("picture", 100)
    p.received(p.fetch(e.address, "picture", 100))
    p.receiver.close()
    until(lambda: not e.sender._sessions)
    assert e.sender._writes == {}


@pytest.mark.parametrize("side", ["encoder", "prefill"])
def test_sessions_beyond_the_limit_replace_idle_ones(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    module = sender_module if side == "encoder" else receiver_module
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    encoders = [encoder(stack) for _ in range(1 if side == "encoder" else 4)]
    prefills = [prefill(stack) for _ in range(4 if side == "encoder" else 1)]
    for e in encoders:
        e.encode("picture", 100)
        for number, p in enumerate(prefills):
            key = f"{e.address} {number}"
            e.encode(key, 100)
            assert p.received(p.fetch(e.address, key, 100)) == content(key, 100)
    assert max(len(e.sender._sessions) for e in encoders) <= 2
    assert max(len(p.receiver._sessions) for p in prefills) <= 2


class Stranger:
    """A peer that speaks the protocol by hand."""

    def __init__(self, stack: ExitStack, address: Address) -> None:
        self.answers: list[object] = []
        self.engine = TransferEngine(receiver_module.open_engine(PATIENT).config)
        stack.callback(self.engine.close)
        self.arena = EmbeddingArena("stranger", ARENA)
        self.region = self.engine.register_ranges([self.arena.range])[0]
        self.loop = Loop("stranger", None, CODEC)
        self.source = self.loop.sockets.dial(address)
        self.loop.start(self)
        stack.callback(self.loop.stop)

    def received(self, now: float, received: Received[object]) -> None:
        self.answers.append(received.message)

    def readable(self, now: float) -> None: ...

    def tick(self, now: float) -> float | None:
        return None

    def ask(self, message: object) -> object:
        before = len(self.answers)
        self.loop.call(lambda: self.loop.sockets.send(self.source, message)).result(PATIENCE_S)
        until(lambda: len(self.answers) > before)
        return self.answers[-1]

    def greet(self) -> Hello:
        offer = self.engine.offer("encoder")
        self.peer = offer.peer
        return Hello("stranger", PRINT, offer.data, self.engine.region_descriptor(self.region))


def test_encoder_engine_answers_wrong_messages_with_a_reason(stack: ExitStack) -> None:
    e = encoder(stack)
    e.encode("picture", 100)
    stranger = Stranger(stack, e.address)
    fetch = FetchRequest(0, "picture", 100, 1, ARENA - 50, 0)
    assert isinstance(stranger.ask(fetch), Leave)
    hello = stranger.greet()
    bad = stranger.ask(msgspec.structs.replace(hello, protocol=2))
    assert isinstance(bad, Leave)
    assert "protocol 2" in bad.reason
    for field, value in (("offer", b"?"), ("region", b"?")):
        assert isinstance(stranger.ask(msgspec.structs.replace(stranger.greet(), **{field: value})), Leave)
    welcome = stranger.ask(stranger.greet())
    assert isinstance(welcome, Welcome)
    stranger.engine.complete(stranger.peer, welcome.answer)
    outside = stranger.ask(fetch)
    assert isinstance(outside, Missing)
    assert "OUT_OF_RANGE" in outside.reason
    twice = stranger.ask(stranger.greet())
    assert isinstance(twice, Leave)
    assert "second HELLO" in twice.reason
    place = e.arena.find("picture")
    assert place is not None
    assert place.pins == 0


def test_encoder_engine_survives_bytes_that_are_no_message(stack: ExitStack) -> None:
    e, p = encoder(stack), prefill(stack)
    e.encode("picture", 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(f"tcp://{e.address}")
        raw.send(b"\xff" * 100)
        until(lambda: e.sender._loop.sockets.malformed == 1)
    assert p.received(p.fetch(e.address, "picture", 100)) == content("picture", 100)
