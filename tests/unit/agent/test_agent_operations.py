"""The information about agents that operators see: different keys, slow transfers, timings, phases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from agent_setup import PATIENCE, TIMES, AgentStage, stage, until

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.protocol.wire.messages import Role


@pytest.fixture
def agents() -> Iterator[AgentStage]:
    with stage("sim") as agents:
        yield agents


@pytest.mark.parametrize("keys", ["another", "none"])
def test_peer_without_the_key_fails_only_its_own_requests_with_the_reason(
    agents: AgentStage, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = ClusterKey.generate()
    prefill = agents.side(Role.PREFILL, key=key)
    decode = agents.side(Role.DECODE, key=key)
    # A wrong key is never answered. An agent without a key gets the reason once ZMQ has closed the
    # connection, however long that takes.
    connect = 0.5 if keys == "another" else 2 * PATIENCE
    stranger = agents.side(
        Role.DECODE,
        "stranger",
        key=ClusterKey.generate() if keys == "another" else None,
        timeouts=replace(TIMES, handshake=0.1, connect=connect),
    )
    stranger.reserve(prefill.address, transfer="stolen")
    stranger.wait(received=["d-stolen"])
    assert stranger.failed == ["d-stolen"]
    words = "with the same cluster key?" if keys == "another" else "only one of the two"
    until(lambda: words in caplog.text)
    assert prefill.agent.live().peers == 0
    assert prefill.agent.stats().malformed_messages == 0
    decode.reserve(prefill.address)
    prefill.expect()
    prefill.compute((1, 2, 3))
    prefill.agent.request_finished("t", True)
    decode.wait(received=["d-t"])
    assert decode.holds("t", (1, 2, 3), (11, 12, 13))


def test_phases_show_what_a_request_waits_for(agents: AgentStage) -> None:
    prefill, decode = agents.pair()
    prefill.expect("early")
    until(lambda: prefill.agent.phases() == {"prefill waiting": 1})
    decode.reserve(prefill.address, transfer="late")
    until(lambda: decode.agent.phases() == {"decode reserved": 1})
    until(lambda: prefill.agent.phases() == {"prefill waiting": 1, "prefill orphan": 1})
    decode.agent.cancel("d-late")
    prefill.agent.request_finished("early", False, "aborted")
    prefill.idle()
    decode.idle()
    assert prefill.agent.phases() == decode.agent.phases() == {}


def test_a_transfer_that_takes_long_is_named_once(
    agents: AgentStage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("loop.effects", "reports.slow_transfers"):
        monkeypatch.setattr(f"kv_connector.agent.{module}.SLOW_S", 0.1)
    prefill, decode = agents.pair(replace(TIMES, heartbeat=0.05))
    decode.reserve(prefill.address)
    prefill.expect()
    prefill.compute((1, 2))
    words = "SLOW: transfer t of request d-t from prefill/0 at"
    until(lambda: words in caplog.text)
    line = next(text for text in caplog.text.splitlines() if words in text)
    assert "lane sim: reserved for" in line
    assert "4 of 6 pages have arrived" in line
    until(lambda: "SLOW: transfer t of request p-t to decode/0, lane sim: active for" in caplog.text)
    prefill.compute((3,), first=2)
    prefill.agent.request_finished("t", True)
    decode.wait(received=["d-t"])
    assert caplog.text.count(words) == 1


def test_completed_transfers_are_timed_by_lane(agents: AgentStage) -> None:
    prefill, decode = agents.pair()
    decode.reserve(prefill.address)
    prefill.expect()
    prefill.compute((1, 2, 3))
    prefill.agent.request_finished("t", True)
    prefill.wait(sent=["p-t"])
    decode.wait(received=["d-t"])
    prefill.idle()
    (sent,), (received,) = prefill.agent.take_timings(), decode.agent.take_timings()
    assert (sent.side, sent.lane, sent.nbytes) == (Role.PREFILL, "sim", 6 * 64)
    assert 0.0 <= sent.first_push_seconds <= sent.seconds
    assert (received.side, received.lane) == (Role.DECODE, "sim")
    assert received.seconds > 0
    assert prefill.agent.take_timings() == []


def test_an_agent_is_not_idle_before_the_last_request_is_reported(
    agents: AgentStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machines and the transfer engine have finished the request, and its report is about to be made."""
    prefill, decode = agents.pair()
    reporting, go_on = threading.Event(), threading.Event()

    def report(request_id: str) -> None:
        reporting.set()
        assert go_on.wait(PATIENCE)
        sent(request_id)

    sent = prefill.agent._ledger.sent
    monkeypatch.setattr(prefill.agent._ledger, "sent", report)
    prefill.expect()
    decode.reserve(prefill.address)
    prefill.compute((1, 2, 3))
    prefill.agent.request_finished("t", True)
    assert reporting.wait(PATIENCE)
    live = prefill.agent.live()
    assert live.prefill_requests == live.engine_transfers == live.commands == 0
    assert not live.idle
    go_on.set()
    prefill.idle()
    assert prefill.sent == ["p-t"]
