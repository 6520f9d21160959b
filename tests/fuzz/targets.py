"""The fuzzed decoders: each one that reads external input, with its corpus of valid inputs.

A target takes any bytes and returns. An exception other than the decoder's refusal is a finding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from protocol_setup import ADVICE, P_ADDRESS, all_of, layout, pairs, recalled, reserve, worker

from kv_connector.control.membership import (
    Activity,
    BeginDrain,
    Drain,
    Draining,
    EndDrain,
    Leave,
    MembershipMessage,
    Register,
    Undrain,
    Undrained,
)
from kv_connector.control.membership import decode as decode_membership
from kv_connector.control.membership import encode as encode_membership
from kv_connector.engine import DomainConfig, EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.pages.geometry import (
    Piece,
    Place,
    Units,
    convolution_state,
    recurrent_state,
    vector_planes,
)
from kv_connector.protocol.pages.layout import GroupLayout, KvLayout, LayerLayout
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.session.mismatch import mismatch
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire import messages
from kv_connector.protocol.wire.content_key import chain
from kv_connector.protocol.wire.messages import AnyMessage, MalformedMessage, Role, fingerprint
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.failure import Failure
from kv_connector.router.requests.completion import Completion
from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.geometry import digest as tensors_digest
from kv_connector.weights.mapping.plan import Box, TensorShard, make_plan
from kv_connector.weights.wire import messages as weights
from kv_connector.weights.wire.messages import WeightMessage
from kv_connector.weights.worker.landing import Landing


@dataclass(frozen=True)
class Target:
    name: str
    corpus: tuple[bytes, ...]
    feed: Callable[[bytes], bool]
    """Returns whether the input was accepted. False: refused correctly."""
    weight: int
    """Share of a campaign's inputs, by the time that one takes."""


# A peer keeps what was imported for it until it is fenced.
REGIONS_A_PEER = 200


def divided_layout() -> KvLayout:
    """Returns the layout of a rank with some of the heads, and pages of parts: planes of K and V, and a
    state."""
    units = Units(2, 2, 4)
    conv = convolution_state(Place(1, 0, 512), [Piece("x", 2, units), Piece("B", 8, None)], 3, 2, False)
    state = recurrent_state(Place(1, 128, 512), units, (4, 4), 2)
    return KvLayout(
        (GroupLayout(64, 16, "full"), GroupLayout(4, 0, "state")),
        (
            LayerLayout("layer0", 0, "bfloat16", vector_planes(Place(0, 0, 2048), units, 16, 8, 2)),
            LayerLayout("layer1", 1, "bfloat16", conv + state),
        ),
    )


DIVIDED = divided_layout()


def protocol_messages() -> list[AnyMessage]:
    """Returns one message of each kind, and of each shape that matters."""
    version, regions, offer = messages.PROTOCOL_VERSION, (b"region" * 8,), b"offer" * 20
    pages = layout(groups=(2, 2))
    wants = all_of(pages)
    many = fingerprint({f"name{i}": tuple(f"{i} {k}" for k in range(i)) for i in range(20)})
    return [
        messages.Hello("d", "1", Role.DECODE, 0, version, pairs(), pages, wants, regions, offer),
        messages.Hello("d", "1", Role.DECODE, 0, version, many, pages, wants, regions, offer),
        messages.Hello(
            "d", "1", Role.DECODE, 0, version, pairs(), DIVIDED, all_of(DIVIDED), regions * 2, offer
        ),
        messages.HelloAck("p", "2", Role.PREFILL, 0, "tcp", pages, b"answer" * 20),
        messages.HelloNak(messages.NakReason.INCOMPATIBLE, "block sizes differ"),
        messages.Locate("d", Role.DECODE, 1, version, pairs()),
        messages.Directory("p", (worker(DIVIDED), worker(pages, stage=1))),
        reserve(),
        reserve(prompt_hash=None),
        reserve(blocks=range(300), tokens=300 * 16, more=((1, 2, 3),)),
        messages.Fail("t", 1, messages.FailCode.WRITE_ERROR, "broken", False),
        messages.Cancel("t", 1),
        messages.CancelAck("t", 1, True),
        messages.Release("t"),
        messages.Defer("t"),
        messages.Due("t"),
        messages.Borrow("t", chain(range(48), 16), 16, 16, 1000, "7#0011aabb"),
        messages.Lent("t", 0, "no such prefix"),
        messages.Ping(1, ("t", "u")),
        messages.Pong(1),
        messages.Bye("going"),
        messages.Recall("t", 9),
        recalled(),
    ]


def membership_messages() -> list[MembershipMessage]:
    return [
        Register("p", "1", Role.BOTH, "http://10.0.0.1:8100", "10.0.0.1", 5600, True),
        Register("p", "1", Role.PREFILL, "http://h:1", "h", 1, activity=Activity({"tcp": 2}, 3, 1 << 40)),
        Register(
            "p", "1", Role.PREFILL, "http://h:1", "h", 1, prefixes="0" * 32, borrows=True, prefetches=True
        ),
        Register(
            "p", "1", Role.PREFILL, "http://h:1", "h", 1, checkpoint=Checkpoint("F8_E4M3", "0011223344556677")
        ),
        Leave("p", "1"),
        Drain("http://10.0.0.1:8100"),
        Drain("http://10.0.0.1:8100", unless_last=True),
        Draining(3),
        Draining(3, last=Role.DECODE),
        BeginDrain(),
        Undrain("http://10.0.0.1:8100"),
        Undrained(None),
        Undrained(True),
        EndDrain(),
    ]


def feed_protocol(data: bytes) -> bool:
    try:
        message = messages.decode(data)
    except MalformedMessage:
        return False
    # An accepted message can be sent on with the same meaning.
    assert messages.decode(messages.encode(message)) == message
    if isinstance(message, messages.Hello):
        mismatch(pairs(), message.fingerprint, ADVICE)
        # It may name regions that it does not have: the pages are wrong enough.
        PrefillMachine(DIVIDED, Timeouts()).admit(1, message.layout, message.wants, messages.MAX_REGIONS)
    if isinstance(message, messages.Directory):
        DecodeMachine(DIVIDED, Timeouts()).engine_found(0.0, P_ADDRESS, message.ranks)
    return True


def feed_membership(data: bytes) -> bool:
    try:
        message = decode_membership(data)
    except MalformedMessage:
        return False
    assert decode_membership(encode_membership(message)) == message
    return True


TENSORS = (Tensor("w", "float32", (4, 2)), Tensor("b", "bfloat16", (4,)))
GEOMETRY = Geometry(
    (Parameter("w", "bfloat16", 8), Parameter("b", "bfloat16", 6, round=1)),
    (Write(0, 0, (0, 0), (4, 2), 0, (2, 1)), Write(1, 1, (0,), (4,), 0, (1,))),
    (Constant(1, (2,), 4, (1,), 0.0),),
)


def weight_messages() -> list[WeightMessage]:
    digest = tensors_digest(TENSORS)
    return [
        weights.Describe(TENSORS),
        weights.Described(GEOMETRY),
        weights.Join("run", 0, "trainer/0", digest, b"offer" * 20),
        weights.Joined(b"answer" * 20, b"region" * 8, (0, 256), "tcp"),
        weights.Begin("v1", b"plan", 1, (1, 1), 24),
        weights.Begun("v1", 7, 1),
        weights.Ready("v1"),
        weights.Dropped("v1", "rank 1 is gone"),
        weights.Applied("v1"),
        weights.NotApplied("v1", "a kernel failed", True),
        weights.Refused("busy"),
        weights.Ping(True),
        weights.Leave("done"),
        weights.WorkersAre((weights.WorkerAddress("10.0.0.1", 5801),)),
        weights.Apply("v1"),
        weights.Ask(),
        weights.State("v1", "v2", "v1", 2, 24, "why", True),
    ]


def feed_weights(data: bytes) -> bool:
    try:
        message = weights.CODEC.decode(data)
    except MalformedMessage:
        return False
    assert weights.CODEC.decode(weights.CODEC.encode(message)) == message
    for slots in (0, 2):
        # A worker that one sender has joined.
        landing = Landing(5.0, slots=slots)
        landing.receive(0.0, b"asks", weights.Describe(TENSORS))
        landing.recorded(tensors_digest(TENSORS), weights.Described(GEOMETRY), 24)
        landing.receive(0.0, b"sends", weights.Join("run", 0, "t", tensors_digest(TENSORS), b""))
        landing.accepted(b"sends", 1, weights.Joined(b"", b"", (0, 256), "tcp"))
        landing.receive(0.0, b"sends", message)
    if isinstance(message, weights.Described):
        with contextlib.suppress(ValueError):
            message.geometry.in_few_rounds()
            whole = [
                TensorShard(number, Box((0,) * len(t.shape), t.shape)) for number, t in enumerate(TENSORS)
            ]
            make_plan(TENSORS, [whole], [message.geometry], 0)
    return True


def feed_completion(data: bytes) -> bool:
    try:
        completion = Completion.decode(data)
    except Failure:
        return False
    completion.local_reason()
    content = completion.prefill_body("t", serial=False)
    assert isinstance(content, bytes), "in pieces are long bodies alone"
    body = msgspec.json.decode(content)
    assert body["max_tokens"] == 1
    assert body["kv_transfer_params"]["transfer_id"] == "t"
    return True


def feed_endpoint(data: bytes) -> bool:
    try:
        Endpoint.parse(data.decode(errors="replace"))
    except ValueError:
        return False
    return True


PYTHON_TARGETS = (
    Target("protocol", tuple(map(messages.encode, protocol_messages())), feed_protocol, 70),
    Target("membership", tuple(map(encode_membership, membership_messages())), feed_membership, 20),
    Target("weights", tuple(map(weights.CODEC.encode, weight_messages())), feed_weights, 20),
    Target(
        "completion",
        (
            b'{"prompt": [1, 2, 3], "max_tokens": 7, "n": 2, "stream": true}',
            b'{"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}',
            b'{"prompt": ["a", "b"], "kv_transfer_params": {"remote_host": "x"}, "echo": true}',
        ),
        feed_completion,
        6,
    ),
    Target("endpoint", (b"http://10.0.0.1:8100@[::1]:5600", b"https://host:1"), feed_endpoint, 3),
)


@contextlib.contextmanager
def native_targets(lanes: Sequence[str] = ("tcp", "host", "sim")) -> Iterator[tuple[Target, ...]]:
    """Yields the handshake decoders of the native engine: offers, answers and region descriptors."""
    with contextlib.ExitStack() as stack:
        yield tuple(target for lane in lanes for target in _native(stack, lane))


def _native(stack: contextlib.ExitStack, lane: str) -> Iterator[Target]:
    def engine(name: str) -> TransferEngine:
        domain = DomainConfig(lane, fabric=f"fuzz {lane}")
        return stack.enter_context(TransferEngine(EngineConfig(name, (domain,))))

    ours, theirs = engine("ours"), engine("theirs")
    memory = bytearray(1 << 16)
    descriptor = theirs.region_descriptor(theirs.register_buffer(memory))

    def connect() -> tuple[bytes, int, bytes]:
        """Returns a valid handshake: the offer, the peer that it made, the answer."""
        offer = theirs.offer("ours")
        answer = ours.accept("theirs", offer.data)
        theirs.complete(offer.peer, answer.data)
        return offer.data, answer.peer, answer.data

    offer, peer, answer = connect()
    imported = 0

    def feed_offer(data: bytes) -> bool:
        try:
            accepted = ours.accept("fuzz", data).peer
        except TransferError:
            return False
        ours.fence(accepted, 10.0)
        return True

    def feed_answer(data: bytes) -> bool:
        offered = ours.offer("fuzz").peer
        try:
            ours.complete(offered, data)
        except TransferError:
            return False
        finally:
            with contextlib.suppress(TransferError):  # a refused peer may be forgotten already
                ours.fence(offered, 10.0)
        return True

    def feed_region(data: bytes) -> bool:
        nonlocal peer, imported
        try:
            ours.import_region(peer, data)
        except TransferError:
            return False
        imported += 1
        if imported % REGIONS_A_PEER == 0:
            ours.fence(peer, 10.0)
            _, peer, _ = connect()
        return True

    yield Target(f"{lane} offer", (offer,), feed_offer, 1)
    yield Target(f"{lane} answer", (answer,), feed_answer, 1)
    yield Target(f"{lane} region", (descriptor,), feed_region, 1)
