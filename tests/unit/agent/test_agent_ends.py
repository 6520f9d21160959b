"""Transfers that end early: aborted, released, expired, or of another prompt."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from agent_pairs import SOURCE, TARGET
from agent_setup import TIMES, AgentSide, AgentStage, until

from kv_connector.protocol.actions import Outcome


@pytest.mark.parametrize(
    ("aborted", "outcome", "code", "level"),
    [
        (True, Outcome.CANCELLED, "prefill_aborted", logging.INFO),
        (False, Outcome.FAILED, "write_error", logging.WARNING),
    ],
)
def test_a_prompt_that_ends_early_fails_decode_and_counts_as_what_it_is(
    pair: tuple[AgentSide, AgentSide],
    caplog: pytest.LogCaptureFixture,
    aborted: bool,
    outcome: Outcome,
    code: str,
    level: int,
) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.report_failures(lambda *failure: told.append(failure))
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:1])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    prefill.agent.request_finished("t", False, "its end", aborted=aborted)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.wait(sent=["p-t"])
    prefill.idle()
    decode.idle()
    peer = f"prefill/0 at {prefill.address}"
    lines = {
        f"transfer t of request d-t from {peer} over sim: {outcome.value}: {code}: its end",
        f"transfer t of request p-t to decode/0 over sim: {outcome.value}: its end",
    }
    until(lambda: lines <= {record.getMessage() for record in caplog.records if record.levelno == level})
    # A client that is still connected has to learn the reason for its error.
    until(lambda: told == [("t", f"{code}: its end")])
    assert prefill.agent.stats().sent == {outcome: 1}
    assert decode.agent.stats().received == {outcome: 1}


def test_an_abort_of_decode_is_not_a_failure(
    pair: tuple[AgentSide, AgentSide], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair
    told: list[tuple[str, str]] = []
    decode.agent.report_failures(lambda *failure: told.append(failure))
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute(SOURCE[:2])
    until(lambda: prefill.agent.live().engine_transfers == 1)
    decode.agent.cancel("d-t")
    decode.wait(received=["d-t"])
    assert decode.failed == []
    decode.idle()
    # Nothing lands in the blocks any more, although P continues to compute.
    decode.pages[:] = 0
    prefill.compute(SOURCE[2:], first=2)
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    assert not decode.pages.any()
    prefill.idle()
    assert prefill.agent.stats().sent == {Outcome.CANCELLED: 1}
    assert decode.agent.stats().received == {Outcome.CANCELLED: 1}
    assert told == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_prompt_is_not_loaded_and_prefill_is_free_at_once(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    decode.reserve(prefill.address, prompt_hash=bytes(16))
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.agent.request_finished("t", True, "")
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().sent == {Outcome.RELEASED: 1}


def test_a_prompt_without_a_hash_is_known_by_its_transfer_alone(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect(prompt_hash=None)
    decode.reserve(prefill.address, prompt_hash=None)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", True, "")
    decode.wait(received=["d-t"])
    prefill.wait(sent=["p-t"])
    assert decode.failed == []
    assert decode.holds("t", SOURCE, TARGET)


def test_a_release_frees_the_prompt(pair: tuple[AgentSide, AgentSide]) -> None:
    prefill, decode = pair
    prefill.expect()
    prefill.agent.request_finished("t", True, "")
    decode.agent.release("t", prefill.address)
    prefill.wait(sent=["p-t"])
    assert prefill.agent.stats().sent == {Outcome.RELEASED: 1}


def test_unrequested_prompt_expires_unless_decode_reports_it_as_waiting(sim: AgentStage) -> None:
    prefill, decode = sim.pair(replace(TIMES, hold=3.0, heartbeat=0.1))
    decode.agent.set_waiting([("kept", prefill.address)])
    until(lambda: decode.agent.live().peers == 1)
    for name in ("kept", "lost"):
        prefill.expect(name)
        prefill.agent.request_finished(name, True, "")
    prefill.wait(sent=["p-lost"])
    assert "p-kept" not in prefill.sent
    decode.agent.set_waiting([])
    prefill.wait(sent=["p-kept"])
    assert prefill.agent.stats().sent == {Outcome.EXPIRED: 2}


def test_a_reserve_without_a_request_fails(sim: AgentStage) -> None:
    prefill, decode = sim.pair(replace(TIMES, orphan=0.2))
    decode.reserve(prefill.address)
    decode.wait(received=["d-t"])
    assert decode.failed == ["d-t"]
    prefill.idle()
