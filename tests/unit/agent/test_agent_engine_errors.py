"""An operation that the transfer engine refuses fails its transfer, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agent_pairs import SOURCE, refuse, transfer, transfer_again
from agent_setup import TIMES, AgentStage, until

from kv_connector.engine import ErrorCode, TransferError
from kv_connector.protocol.wire.messages import Role


def test_writes_that_the_engine_refuses_fail_their_transfer_only(
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    transfer(prefill, decode, "before")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "arm", refuse(ErrorCode.OUT_OF_RANGE))
        prefill.expect()
        decode.reserve(prefill.address)
        prefill.compute(SOURCE)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    transfer_again(prefill, decode)


def test_a_transfer_that_cannot_be_opened_fails(sim: AgentStage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "open_transfer", refuse(ErrorCode.RESOURCES))
        prefill.expect()
        decode.reserve(prefill.address)
        prefill.compute(SOURCE)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    transfer_again(prefill, decode)


def test_nothing_is_written_after_a_transfer_was_given_up(
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are to be pushed and the first push fails. The second must not happen, because D has its
    blocks back."""
    engine = sim.engine("p")
    prefill, decode = sim.side(Role.PREFILL, engine=engine), sim.side(Role.DECODE)
    prefill.expect()
    prefill.compute(SOURCE[:2])
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    open_transfer, calls = engine.open_transfer, []

    def first_fails(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise TransferError(ErrorCode.RESOURCES, "sim", "peer", "open_transfer", "as the test wants it")
        return open_transfer(*arguments)

    monkeypatch.setattr(engine, "open_transfer", first_fails)
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.failed == ["d-t"]
    assert len(calls) == 1
    prefill.idle()
    assert not decode.pages.any()


def test_without_counters_a_request_fails(sim: AgentStage, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sim.engine("d")
    prefill, decode = sim.side(Role.PREFILL), sim.side(Role.DECODE, engine=engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "alloc_counters", refuse(ErrorCode.RESOURCES))
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    transfer_again(prefill, decode)


def test_blocks_come_back_only_when_the_fence_is_through(
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim.engine("d")
    prefill = sim.side(Role.PREFILL, timeouts=replace(TIMES, drain=0.3))
    decode = sim.side(Role.DECODE, engine=engine)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    stuck = refuse(ErrorCode.TIMEOUT)
    fence = engine.fence
    monkeypatch.setattr(engine, "fence", stuck)
    # The agent leaves with a BYE, and reports nothing about its transfer.
    monkeypatch.setattr(prefill.agent._effects.prefill, "close", lambda now: [])
    prefill.agent.close()
    until(lambda: decode.agent.live().fences == 1)
    # Other peers are served meanwhile.
    other = sim.side(Role.PREFILL, "other")
    transfer(other, decode, "u")
    tries = stuck.left[0]  # type: ignore[attr-defined]
    until(lambda: stuck.left[0] < tries - 3)  # type: ignore[attr-defined]
    assert "d-t" not in decode.received
    monkeypatch.setattr(engine, "fence", fence)
    decode.wait(received=["d-t"])
    decode.idle()
