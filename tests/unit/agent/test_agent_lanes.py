"""Lanes that only the completing side finds unusable."""

from __future__ import annotations

import logging

import pytest
from agent_pairs import SOURCE, TARGET, refuse
from agent_setup import AgentSide, AgentStage, stage, two_lanes

from kv_connector.engine import ErrorCode, TransferError
from kv_connector.protocol.wire.messages import Role


def one_refusal(side: AgentSide, code: ErrorCode) -> None:
    """The side's transfer engine refuses the first answer."""
    complete = side.agent._engine.complete

    def refusing(peer: int, answer: bytes) -> None:
        side.agent._engine.complete = complete  # type: ignore[method-assign]
        raise TransferError(code, "host", "prefill", "complete", "as the test wants it")

    side.agent._engine.complete = refusing  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("code", "allow_fallback", "lane"),
    [
        (ErrorCode.NOT_REACHABLE, False, "tcp"),
        (ErrorCode.REFUSED, True, "tcp"),
        (ErrorCode.REFUSED, False, ""),
        (ErrorCode.PEER_DOWN, True, ""),
    ],
)
def test_agent_offers_again_without_a_lane_that_does_not_lead_to_prefill(
    code: ErrorCode, allow_fallback: bool, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv_connector")
    with stage("") as made:
        prefill = made.side(Role.PREFILL, engine=two_lanes("prefill"))
        decode = made.side(
            Role.DECODE, engine=two_lanes("decode", allow_fallback), allow_fallback=allow_fallback
        )
        one_refusal(decode, code)
        decode.reserve(prefill.address)
        prefill.expect()
        prefill.compute(SOURCE)
        prefill.agent.request_finished("t", True, "")
        decode.wait(received=["d-t"])
        passed = [record.message for record in caplog.records if "lane host is passed over" in record.message]
        if not lane:
            assert decode.failed == ["d-t"]
            assert not [text for text in passed if text.startswith("prefill peer")]
            return
        assert decode.failed == []
        assert decode.holds("t", SOURCE, TARGET)
        prefill.wait(sent=["p-t"])
        decode.idle()
        assert [peer.lane for peer in decode.agent.stats().peers] == [lane]
        assert [text for text in passed if text.startswith("prefill peer prefill/0 at")] == [
            f"prefill peer prefill/0 at {prefill.address}: lane host is passed over: "
            f"{code.value} in complete over host to prefill: as the test wants it"
        ]


def test_agent_names_the_last_lane_that_does_not_lead_to_prefill(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    refuse_complete = refuse(ErrorCode.NOT_REACHABLE)
    decode.agent._engine.complete = refuse_complete  # type: ignore[method-assign]
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
