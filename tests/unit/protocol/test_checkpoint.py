"""Engines that were started from different checkpoints refuse each other. Later weights have a version."""

from __future__ import annotations

import logging

import pytest
from protocol_setup import ADVICE, P_ADDRESS, all_of, every, layout, only, pairs, worker

from kv_connector.protocol.actions import (
    Accept,
    Address,
    Connect,
    EngineFound,
    EngineNotFound,
    Inquire,
    Log,
    Reply,
)
from kv_connector.protocol.session.checkpoint import Checkpoint, with_checkpoint, without_checkpoint
from kv_connector.protocol.session.mismatch import mismatch
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import Identity, PeersAction
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import (
    DEFER_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Directory,
    Fingerprint,
    Hello,
    HelloNak,
    Locate,
    NakReason,
    Pair,
    Role,
    decode,
    encode,
)

LENDER = Address(P_ADDRESS.host, P_ADDRESS.port, prefixes=True)
WANTS = all_of(layout())
BASE, TUNED = Checkpoint("", "3f2a"), Checkpoint("", "91bc")
QUANTISED, TUNED_QUANTISED = Checkpoint("F8_E4M3", "77d0"), Checkpoint("F8_E4M3", "02ee")
REFUSAL = (
    "weights: prefill engine has checkpoint 3f2a, decode engine has checkpoint 91bc: "
    "start both engines from the same checkpoint, or set compare_checkpoints to false on one of them"
)


def table(role: Role, checkpoint: Checkpoint | None, **changes: str) -> PeerTable:
    name = role.value
    made = PeerTable(
        Identity(name, f"{name}-1", role, 0, pairs(**changes), layout(), (b"region",), ADVICE, checkpoint),
        Timeouts(),
    )
    made.set_ranks((worker(layout()),))
    return made


class OfAnEarlierRelease(PeerTable):
    """It knows sessions with DEFER, and compares all pairs of a fingerprint."""

    def receive(self, now: float, source: bytes, message: object) -> list[PeersAction]:
        if isinstance(message, Locate | Hello) and (text := mismatch(pairs(), message.fingerprint, ADVICE)):
            return [Reply(source, HelloNak(NakReason.INCOMPATIBLE, text))]
        return super().receive(now, source, message)  # type: ignore[arg-type]


def locate(
    decoding: PeerTable, prefill: PeerTable, engine: Address = P_ADDRESS, now: float = 0.0
) -> tuple[list[Locate], list[PeersAction]]:
    """D locates P's workers. Returns its messages, and D's actions after the last answer."""
    sent: list[Locate] = []
    actions = decoding.find(now, engine)
    while inquiries := every(actions, Inquire):
        source = b"session %d" % inquiries[0].peer
        message = only(decoding.connected(now, inquiries[0].peer, source), Reply).message
        assert isinstance(message, Locate)
        assert decode(encode(message)) == message
        sent.append(message)
        answer = only(prefill.receive(now, b"from " + source, message), Reply).message
        actions = decoding.receive(now, source, decode(encode(answer)))
    return sent, actions


def hello(decoding: PeerTable, engine: Address = P_ADDRESS) -> Hello:
    connect = only(decoding.dial(0.0, engine, engine, WANTS, layout()), Connect)
    message = only(decoding.offered(0.0, connect.peer, b"dialled", b"offer"), Reply).message
    assert isinstance(message, Hello)
    return message


def test_engines_of_different_checkpoints_are_refused_before_a_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoding, prefill = table(Role.DECODE, TUNED), table(Role.PREFILL, BASE)
    sent, actions = locate(decoding, prefill)
    # D must not repeat LOCATE without its checkpoint, as it does for an older engine.
    assert [message.protocol for message in sent] == [DEFER_PROTOCOL_VERSION]
    failed = only(actions, EngineNotFound)
    assert failed.reason == f"{P_ADDRESS} refused: other_weights: {REFUSAL}"
    log = only(actions, Log)
    assert (log.level, log.text) == (logging.ERROR, f"NAK from {P_ADDRESS}: other_weights: {REFUSAL}")


def test_worker_refuses_the_hello_of_another_checkpoint() -> None:
    answer = only(table(Role.PREFILL, BASE).receive(0.0, b"d", hello(table(Role.DECODE, TUNED))), Reply)
    assert answer.message == HelloNak(NakReason.OTHER_WEIGHTS, REFUSAL)


def test_lender_of_another_checkpoint_is_refused() -> None:
    _, actions = locate(table(Role.DECODE, TUNED), table(Role.PREFILL, BASE), LENDER)
    assert only(actions, EngineNotFound).reason.endswith(REFUSAL)
    answer = table(Role.PREFILL, BASE).receive(0.0, b"d", hello(table(Role.DECODE, TUNED), LENDER))
    assert only(answer, Reply).message == HelloNak(NakReason.OTHER_WEIGHTS, REFUSAL)


FITTING = {
    "same": (BASE, BASE),
    "prefill unknown": (None, TUNED),
    "decode unknown": (BASE, None),
    "both unknown": (None, None),
    "one quantised": (QUANTISED, BASE),
    "both quantised": (QUANTISED, QUANTISED),
}


@pytest.mark.parametrize("engine", [P_ADDRESS, LENDER], ids=["prompts", "prefixes"])
@pytest.mark.parametrize(("ours", "theirs"), FITTING.values(), ids=FITTING)
def test_checkpoints_that_may_be_the_same_are_accepted(
    ours: Checkpoint | None, theirs: Checkpoint | None, engine: Address
) -> None:
    decoding, prefill = table(Role.DECODE, theirs), table(Role.PREFILL, ours)
    _, actions = locate(decoding, prefill, engine)
    assert only(actions, EngineFound).ranks == (worker(layout()),)
    only(prefill.receive(0.0, b"d", hello(decoding, engine)), Accept)


def test_quantised_checkpoints_of_two_models_are_refused() -> None:
    _, actions = locate(table(Role.DECODE, TUNED_QUANTISED), table(Role.PREFILL, QUANTISED))
    assert "has checkpoint 77d0, decode engine has checkpoint 02ee" in only(actions, EngineNotFound).reason


def test_another_model_is_refused_for_its_configuration_first() -> None:
    sent, actions = locate(table(Role.DECODE, TUNED, model="other"), table(Role.PREFILL, BASE))
    assert [message.protocol for message in sent] == [DEFER_PROTOCOL_VERSION, PROTOCOL_VERSION]
    assert "incompatible: model: prefill engine has llama" in only(actions, EngineNotFound).reason


@pytest.mark.parametrize("replaced", [(True, False), (False, True), (True, True)])
def test_replaced_weights_are_no_longer_those_of_the_checkpoint(replaced: tuple[bool, bool]) -> None:
    """Versions decide then, at RESERVE. So two engines that took the same version work together."""
    decoding, prefill = table(Role.DECODE, TUNED), table(Role.PREFILL, BASE)
    only(locate(decoding, prefill)[1], EngineNotFound)
    for side, has in zip((prefill, decoding), replaced, strict=True):
        if has:
            side.weights_replaced()
    only(locate(decoding, prefill, now=1.0)[1], EngineFound)
    only(prefill.receive(1.0, b"d", hello(decoding)), Accept)


def test_prefill_engine_of_an_earlier_release_gets_no_checkpoint() -> None:
    prefill = OfAnEarlierRelease(table(Role.PREFILL, None)._sessions.identity, Timeouts())
    prefill.set_ranks((worker(layout()),))
    decoding = table(Role.DECODE, TUNED)
    sent, actions = locate(decoding, prefill)
    assert [message.protocol for message in sent] == [DEFER_PROTOCOL_VERSION, PROTOCOL_VERSION]
    assert sent[-1].fingerprint == pairs()
    only(actions, EngineFound)
    only(prefill.receive(0.0, b"d", hello(decoding)), Accept)


def test_decode_engine_of_an_earlier_release_is_accepted() -> None:
    prefill = table(Role.PREFILL, BASE)
    message = Locate("d", Role.DECODE, 0, DEFER_PROTOCOL_VERSION, pairs())
    assert isinstance(only(prefill.receive(0.0, b"d", message), Reply).message, Directory)


@pytest.mark.parametrize("value", ["3f2a", (), ("", "3f2a", "more")], ids=["text", "empty", "more facts"])
def test_checkpoint_in_the_form_of_a_later_release_is_unknown(value: str | tuple[str, ...]) -> None:
    fingerprint: Fingerprint = (*pairs(), Pair("weights", value))
    assert without_checkpoint(fingerprint) == (pairs(), None)
    message = Locate("d", Role.DECODE, 0, DEFER_PROTOCOL_VERSION, fingerprint)
    assert isinstance(only(table(Role.PREFILL, BASE).receive(0.0, b"d", message), Reply).message, Directory)


@pytest.mark.parametrize("checkpoint", [None, BASE, QUANTISED])
def test_checkpoint_is_the_same_after_its_way_in_a_fingerprint(checkpoint: Checkpoint | None) -> None:
    assert without_checkpoint(with_checkpoint(pairs(), checkpoint)) == (pairs(), checkpoint)
