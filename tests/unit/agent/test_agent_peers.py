"""Peers that shut down, fall silent, come back or do not fit."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

import pytest
from agent_pairs import SOURCE, transfer
from agent_setup import IMPATIENT, LIVELY, TIMES, AgentSide, AgentStage, acquaint, stage, until
from protocol_setup import layout, pairs

from kv_connector.protocol.actions import Address
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.protocol.wire.messages import Role


def test_a_prefill_engine_that_shuts_down_ends_its_transfers_at_once(
    pair: tuple[AgentSide, AgentSide], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.close()
    prefill.agent.close()
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: decode.agent.live().peers == 0)
    decode.idle()

    # The lines depend on what was read first: P's messages or the end of its links.
    def logged(line: str) -> bool:
        return line in caplog.text or "the peer ended the link" in caplog.text

    until(lambda: logged("draining: the prefill engine is shutting down"))
    until(lambda: logged(f"BYE from prefill peer prefill/0 at {prefill.address}"))


def test_a_decode_engine_that_shuts_down_frees_the_prompts(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.close()
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    until(lambda: prefill.agent.live().peers == 0)
    prefill.idle()


def mute(side: AgentSide) -> None:
    """The process hangs: it sends nothing any more, and receives nothing."""
    side.agent._control.send = lambda source, message: True  # type: ignore[method-assign]
    side.agent._control.receive = lambda: []  # type: ignore[method-assign]


def test_a_prefill_engine_that_falls_silent_is_declared_dead(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.side(Role.PREFILL), sim.side(Role.DECODE, timeouts=IMPATIENT)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    mute(prefill)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    decode.idle()
    until(lambda: f"DEAD: prefill peer prefill/0 at {prefill.address}: silent for" in caplog.text)


def test_a_decode_engine_that_falls_silent_frees_the_prompts(sim: AgentStage) -> None:
    prefill = sim.side(Role.PREFILL, timeouts=IMPATIENT)
    decode = sim.side(Role.DECODE, timeouts=LIVELY)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    mute(decode)
    until(lambda: prefill.agent.live().peers == 0)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()


def test_a_restarted_prefill_engine_is_found_at_its_old_address(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode, "before")
    # It ends without a message, as a killed process does. D sends its next messages to the new process, which
    # answers that it knows no such session.
    prefill.agent._effects.peers.leave = lambda now: []  # type: ignore[method-assign]
    prefill.agent.close()
    again = sim.side(Role.PREFILL, port=prefill.address.port)
    until(lambda: decode.agent.live().peers == 0)
    transfer(again, decode, "after")


def test_a_restarted_decode_engine_replaces_its_old_self(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.pair()
    transfer(prefill, decode, "before")
    again = sim.side(Role.DECODE)
    transfer(prefill, again, "after")
    until(lambda: "DEAD: decode peer decode/0: the engine restarted" in caplog.text)
    assert prefill.agent.live().peers == 1


def test_ranks_on_several_hosts_find_each_other(sim: AgentStage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kv_connector")
    prefill, decode = (
        [
            sim.side(role, host=f"127.0.0.{rank + 1}", rank=rank, ranks=2, pages=layout(holder=(rank, 2)))
            for rank in range(2)
        ]
        for role in (Role.PREFILL, Role.DECODE)
    )
    engine = prefill[0].address  # the only address in the requests
    # Each rank has its own pages. Only the rank of the same number on the other side can have them.
    for sides in (prefill, decode):
        acquaint(sides)
    for p in prefill:
        p.expect()
    for d in decode:
        d.reserve(engine)
    for rank, (p, d) in enumerate(zip(prefill, decode, strict=True)):
        p.pages[:] = rank + 1
        p.compute(SOURCE, forward=False)
        p.agent.signal.store(2)
        p.agent.request_finished("t", True, "")
        d.wait(received=["d-t"])
        p.wait(sent=["p-t"])
        assert d.failed == []
        assert (d.pages[:, 11:14] == rank + 1).all()
        assert f"UP: prefill peer prefill/{rank} at {p.address}, lane sim" in caplog.text
        assert p.agent.live().peers == 1


def test_every_rank_of_another_topology_is_refused_at_once(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    patient = replace(TIMES, connect=1000.0, transfer=1000.0)
    prefill, two = sim.side(Role.PREFILL), pairs(ranks="2")
    for rank in range(2):
        decode = sim.side(Role.DECODE, fingerprint=two, rank=rank, timeouts=patient)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
        assert decode.failed == ["d-t"]
    reason = "ranks: prefill engine has 1, decode engine has 2: give both sides as many ranks"
    assert caplog.text.count(f"NAK from {prefill.address}: incompatible: {reason}") == 2


def test_address_without_a_listener_fails_the_request(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    decode = sim.side(Role.DECODE, timeouts=replace(TIMES, handshake=0.1, connect=0.3))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = Address("127.0.0.1", probe.getsockname()[1])
        decode.reserve(nobody)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: f"is a prefill engine's agent listening at {nobody}, " in caplog.text)
    decode.idle()


@pytest.mark.parametrize(
    ("changes", "words", "naks"),
    [
        (
            {"fingerprint": pairs(block_sizes=("32",))},
            "incompatible: block_sizes: prefill engine has (16), decode engine has (32): give both",
            1,
        ),
        (
            {"pages": layout(page=32)},
            "does not fit: layer layer0: part page: bytes a run: prefill engine has 64, decode engine has 32",
            0,
        ),
    ],
    ids=["block size", "layout"],
)
def test_engine_that_does_not_fit_gets_the_reason_and_affects_no_other_engine(
    sim: AgentStage, changes: dict[str, Any], words: str, naks: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sim.pair()
    stranger = sim.side(Role.DECODE, "stranger", **changes)
    for name in ("t", "u"):
        stranger.reserve(prefill.address, transfer=name)
        stranger.wait(received=[f"d-{name}"])
    assert stranger.failed == ["d-t", "d-u"]
    until(lambda: words in caplog.text)
    assert caplog.text.count(f"NAK from {prefill.address}") == naks
    stranger.idle()
    transfer(prefill, decode)


def test_engines_of_different_checkpoints_work_together_once_both_take_a_version(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = sim.side(Role.PREFILL, checkpoint=Checkpoint("", "3f2a"))
    decode = sim.side(Role.DECODE, checkpoint=Checkpoint("", "91bc"))
    for side in (prefill, decode):  # as SGLang names the weights that it was started with
        side.agent.set_weights("default", of_checkpoint=True)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: "other_weights: weights: prefill engine has checkpoint 3f2a, decode" in caplog.text)
    for side in (prefill, decode):
        side.agent.set_weights("v1")
        side.idle()  # a busy machine would take a peer's message first
    decode.failed.clear()
    transfer(prefill, decode, "u")


def test_engine_that_forgets_its_checkpoint_works_with_one_of_another(sim: AgentStage) -> None:
    """Its weights were updated without a version."""
    prefill = sim.side(Role.PREFILL, checkpoint=Checkpoint("", "3f2a"))
    decode = sim.side(Role.DECODE, checkpoint=Checkpoint("", "91bc"))
    prefill.agent.forget_checkpoint()
    prefill.idle()  # a busy machine would take a peer's message first
    transfer(prefill, decode)


def test_two_engines_of_one_role_get_the_reason_for_their_refusal(
    sim: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    decode, other = sim.side(Role.DECODE), sim.side(Role.DECODE, "other")
    decode.reserve(other.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    words = "wrong_role: other is a decode engine: give the router the address of a prefill engine"
    until(lambda: words in caplog.text)


def test_decode_gets_the_reason_when_no_lane_is_common(caplog: pytest.LogCaptureFixture) -> None:
    with stage("sim") as one, stage("tcp") as two:
        prefill, decode = one.side(Role.PREFILL), two.side(Role.DECODE)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
        assert decode.failed == ["d-t"]
        until(lambda: "refused: no_lane" in caplog.text)
        decode.idle()
        prefill.idle()


def test_engines_of_both_roles_send_to_each_other(sim: AgentStage) -> None:
    one, two = sim.side(Role.BOTH, "one"), sim.side(Role.BOTH, "two")
    transfer(one, two, "there")
    transfer(two, one, "back")
    assert one.agent.live().peers == two.agent.live().peers == 2
