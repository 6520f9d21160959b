"""Preemption: when the call returns, nothing reads the blocks."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from agent_pairs import SOURCE, TARGET, hold, refuse, transfer_again
from agent_setup import PATIENCE, TIMES, AgentSide, AgentStage, until

from kv_connector.engine import ErrorCode
from kv_connector.protocol.wire.messages import Role


def test_preemption_returns_when_nothing_reads_the_blocks(sim: AgentStage) -> None:
    prefill = sim.side(Role.PREFILL, engine=sim.engine("slow", max_delay_us=100_000))
    decode = sim.side(Role.DECODE)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.preempt(["t", "unknown"])
    prefill.pages[:] = 99  # the block belongs to another request now
    # The prompt is computed again in other blocks. Only pages that were not sent are sent.
    prefill.compute((5, 6, 7))
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    assert decode.holds("t", (1, 2, 7), TARGET)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().pages_pushed == 6


def test_preemption_waits_for_layers_that_are_still_being_computed(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE, forward=False)
    until(lambda: prefill.agent.live().engine_transfers == 1)
    preempting = threading.Thread(target=prefill.agent.preempt, args=(["t"],))
    preempting.start()
    preempting.join(0.05)
    assert preempting.is_alive()
    prefill.agent.signal.store(2)
    preempting.join(PATIENCE)
    assert not preempting.is_alive()
    decode.wait(received=["d-t"])  # all pages were sent
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])


def test_preempted_writes_that_do_not_drain_are_fenced(
    sim: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sim.engine("p")
    prefill = sim.side(Role.PREFILL, engine=engine, timeouts=replace(TIMES, drain=0.3))
    decode = sim.side(Role.DECODE)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    monkeypatch.setattr(engine, "quiesce", refuse(ErrorCode.TIMEOUT))
    prefill.agent.preempt(["t"])
    assert engine.stats().transfers_open == 0  # the blocks belong to no transfer any more
    until(lambda: engine.stats().peers == 0)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    transfer_again(prefill, decode)


def test_preemption_waits_for_an_agent_that_is_busy(sim: AgentStage) -> None:
    """Waits longer than any timeout, because blocks that are still being read must not be written for another
    request."""
    drain = 0.02
    prefill = sim.side(Role.PREFILL, timeouts=replace(TIMES, drain=drain))
    idle = hold(prefill)
    preempting = threading.Thread(target=prefill.agent.preempt, args=(["t"],))
    preempting.start()
    preempting.join(10 * drain)
    assert preempting.is_alive()
    idle.set()
    preempting.join(PATIENCE)
    assert not preempting.is_alive()
