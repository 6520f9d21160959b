"""Malformed messages and impossible requests cost their sender alone."""

from __future__ import annotations

import pytest
import zmq
from agent_pairs import transfer, transfer_again
from agent_setup import AgentSide, until

from kv_connector.protocol.requests import ComputedPages, GroupPages
from kv_connector.protocol.session.sessions import PeerState
from kv_connector.protocol.wire.messages import Release, encode


def test_a_malformed_message_costs_its_sender_only(
    pair: tuple[AgentSide, AgentSide], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    transfer(prefill, decode, "before")
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://{prefill.address}")
    stranger.send(b"garbage")
    until(lambda: prefill.agent.stats().malformed_messages == 1)
    stranger.send(encode(Release("t")))
    transfer(prefill, decode)
    stranger.close(linger=0)
    context.term()
    until(lambda: "malformed message from 127.0.0.1" in caplog.text)
    assert [peer.state for peer in prefill.agent.stats().peers] == [PeerState.UP]


def test_an_error_in_one_message_does_not_stop_the_agent(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair

    def broken(*_: object) -> None:
        raise ZeroDivisionError("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "release", broken)
        decode.agent.release("t", prefill.address)
        until(lambda: "ZeroDivisionError: as the test wants it" in caplog.text)
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "reserve", broken)
        decode.reserve(prefill.address, transfer="y")
        decode.wait(received=["d-y"])
        assert decode.failed == ["d-y"]
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects.prefill, "expect", broken)
        prefill.expect("x")
        until(lambda: prefill.agent.live().commands == 0)
    with monkeypatch.context() as patch:
        patch.setattr(decode.agent._effects.decode, "reserve", broken)
        decode.reserve(prefill.address, transfer="x")
        decode.wait(received=["d-x"])
        assert decode.failed == ["d-y", "d-x"]
    with monkeypatch.context() as patch:
        patch.setattr(prefill.agent._effects, "tick", broken)
        prefill.agent.request_finished("nobody", True, "")
        until(lambda: "unexpected error" in caplog.text)
    transfer_again(prefill, decode)


def test_a_reserve_that_no_message_can_carry_fails(
    pair: tuple[AgentSide, AgentSide], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    transfer(prefill, decode, "before")
    with monkeypatch.context() as patch:
        patch.setattr("kv_connector.protocol.wire.messages.MAX_MESSAGE_BYTES", 100)
        decode.reserve(prefill.address)
        decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    transfer_again(prefill, decode)


def test_pages_outside_of_the_memory_are_refused(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address)
    blocks = ComputedPages("t", 0, (GroupPages(0, (1, 2, 1_000_000)),))
    prefill.agent.pages_computed(blocks)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
