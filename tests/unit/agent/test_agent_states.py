"""The state of a request, as an adapter queries it from the agent."""

from __future__ import annotations

import pytest
from agent_pairs import SOURCE, TARGET, transfer
from agent_setup import AgentSide, until

from kv_connector.protocol.actions import State


def test_state_of_a_request_is_available_at_any_time(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    until(lambda: prefill.agent.live().prefill_requests == 1)
    assert prefill.agent.state("p-t") is decode.agent.state("d-t") is None
    decode.reserve(prefill.address)
    until(lambda: prefill.agent.state("p-t") is State.MOVING)
    assert decode.agent.state("d-t") is State.MOVING
    prefill.compute(SOURCE)
    until(lambda: decode.agent.state("d-t") is not State.MOVING)
    assert decode.agent.state("d-t") is State.DONE
    assert decode.holds("t", SOURCE[:2], TARGET[:2])
    assert prefill.agent.state("p-t") is State.MOVING  # its engine still computes it
    prefill.agent.request_finished("t", True, "")
    until(lambda: prefill.agent.state("p-t") is State.DONE)
    for side, request in ((prefill, "p-t"), (decode, "d-t")):
        side.agent.forget(request)
        side.idle()  # the command has been executed
        assert side.agent.state(request) is None
    assert prefill.sent == decode.received == []  # forgotten requests leave no report
    assert prefill.agent.take_reserved() == set()


def test_adapter_with_a_callback_receives_each_state(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    told: list[State] = []
    prefill.agent.report_reached(lambda reached: told.append(reached.state))
    transfer(prefill, decode)
    assert told == [State.MOVING, State.DONE]


def test_reservation_is_known_once_the_agent_has_caught_up(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    decode.reserve(prefill.address)
    until(lambda: prefill.agent.phases() == {"prefill orphan": 1})
    prefill.expect()
    assert prefill.agent.catch_up(10.0)
    assert prefill.agent.state("p-t") is State.MOVING
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])


def test_failure_has_its_reason_on_both_sides(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.cancel("d-t")
    # The state is known before P's engine has finished, which need not compute the rest.
    until(lambda: prefill.agent.state("p-t") is State.FAILED)
    assert prefill.agent.failure("p-t") == "the decode engine cancelled the transfer"
    until(lambda: decode.agent.state("d-t") is State.FAILED)
    assert decode.agent.failure("d-t") == ""  # the aborting side knows the reason
    prefill.agent.request_finished("t", False, "nobody wants it")
    prefill.wait(sent=["p-t"])
    assert prefill.agent.state("p-t") is None  # forgotten with its report


def test_a_request_that_the_agent_cannot_take_has_failed(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.report_failures(lambda *failure: told.append(failure))

    def broken(*_: object) -> None:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(decode.agent._effects.decode, "reserve", broken)
    decode.reserve(prefill.address)
    until(lambda: decode.agent.state("d-t") is State.FAILED)
    why = decode.agent.failure("d-t")
    assert "as the test wants it" in why
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    until(lambda: told == [("t", why)])
