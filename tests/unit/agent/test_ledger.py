"""Waiting for reports of the agent's thread."""

import threading
from collections.abc import Callable

import pytest

from kv_connector.agent.reports.ledger import Ledger, PrefixStats, Reports
from kv_connector.protocol.actions import (
    Ended,
    Outcome,
    PrefixAnswered,
    PrefixDecided,
    PrefixRequested,
    PromptDue,
    Reached,
    State,
)
from kv_connector.protocol.prefill.lending import MAX_QUESTIONS
from kv_connector.protocol.wire.content_key import chain
from kv_connector.protocol.wire.messages import LendOutcome, Role

LIMIT = 30.0


def prefill(state: State, reason: str = "") -> Reached:
    return Reached(Role.PREFILL, "t", "p", state, reason)


NEWS: list[Callable[[Ledger], None]] = [
    lambda ledger: ledger.sent("p"),
    lambda ledger: ledger.load_ended("d", failed=True),
    lambda ledger: ledger.reached(prefill(State.MOVING)),
    lambda ledger: ledger.news(PromptDue("t")),
]


@pytest.mark.parametrize("report", NEWS, ids=["sent", "received", "reserved", "due"])
def test_news_ends_the_wait(report: Callable[[Ledger], None]) -> None:
    ledger = Ledger()
    waiter = threading.Thread(target=ledger.await_news, args=(2 * LIMIT,))
    waiter.start()
    report(ledger)
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_wait_ends_at_once_for_present_news_and_not_for_taken_news() -> None:
    ledger = Ledger()
    ledger.sent("p")
    ledger.await_news(LIMIT)
    assert ledger.take_reports().finished_sending == {"p"}
    waiter = threading.Thread(target=ledger.await_news, args=(2 * LIMIT,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "there is nothing to take, and the wait has ended"
    ledger.load_ended("d", failed=False)
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_the_wait_ends_by_itself() -> None:
    Ledger().await_news(0.001)


def test_a_state_is_kept_until_its_end_is_taken() -> None:
    ledger = Ledger()
    assert ledger.state("p") is None
    ledger.reached(prefill(State.MOVING))
    assert ledger.take_reserved() == {"t"}
    assert ledger.state("p") is State.MOVING
    ledger.reached(prefill(State.FAILED, "the peer left"))
    assert ledger.take_reports() == Reports()  # its engine still computes it
    assert (ledger.state("p"), ledger.failure("p")) == (State.FAILED, "the peer left")
    ledger.sent("p")
    assert ledger.take_reports().finished_sending == {"p"}
    assert (ledger.state("p"), ledger.failure("p"), ledger.states) == (None, "", 0)


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_forgetting_a_request_leaves_no_state(side: Role) -> None:
    ledger = Ledger()
    ledger.reached(Reached(side, "t", "r", State.MOVING))
    ledger.reached(Reached(side, "t", "r", State.FAILED, "cancelled"))
    if side is Role.PREFILL:
        ledger.sent("r")
    else:
        ledger.load_ended("r", failed=True)
    for _ in range(2):
        ledger.forget("r")
        assert (ledger.states, ledger.take_reports(), ledger.take_reserved()) == (0, Reports(), set())


@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_request_forgotten_before_its_end_is_kept_until_then_and_not_reported(side: Role) -> None:
    ledger = Ledger()
    ledger.reached(Reached(side, "t", "r", State.MOVING, first_token=32))
    assert ledger.first_token("r") == 32
    ledger.forget("r")
    assert ledger.state("r") is State.MOVING, "it is not over"
    ledger.reached(Reached(side, "t", "r", State.FAILED, "cancelled"))
    assert ledger.state("r") is State.FAILED
    if side is Role.PREFILL:
        ledger.sent("r")
    else:
        ledger.load_ended("r", failed=True)
    assert (ledger.states, ledger.take_reports(), ledger.take_reserved()) == (0, Reports(), set())
    ledger.load_ended("r", failed=True)  # a new request with the same name
    assert ledger.take_reports().finished_recving == {"r"}


def test_ledger_keeps_news_of_prefixes_until_they_are_taken() -> None:
    ledger = Ledger()
    key = chain(range(32), 16)
    requests = [PrefixRequested(f"t{number}", key, 0, 16) for number in range(MAX_QUESTIONS + 1)]
    for request in requests:
        ledger.news(request)
    ledger.news(PrefixAnswered("u", 32, LendOutcome.LENT, 0.5))
    ledger.await_news(60.0)  # returns at once
    assert ledger.take_prefix_requests() == requests[1:]  # the first one has no answer in time
    assert ledger.take_prefix_answers() == {"u": 32}
    assert (ledger.take_prefix_requests(), ledger.take_prefix_answers()) == ([], {})


def test_ledger_counts_prefixes() -> None:
    ledger = Ledger()
    ledger.news(PrefixAnswered("a", 32, LendOutcome.LENT, 0.5))
    ledger.news(PrefixAnswered("b", 0, LendOutcome.PAUSED, 0.25))
    ledger.news(PrefixDecided(LendOutcome.LENT, 16))
    ledger.news(PrefixDecided(LendOutcome.BUSY, 0))
    ledger.prefix_loaded(Ended(Role.DECODE, "a", 1, Outcome.COMPLETED, seconds=2.0, prefix_tokens=32))
    counted = ledger.stats((), 0, 0, 0).prefixes
    assert counted == PrefixStats(
        borrow={LendOutcome.LENT: 1, LendOutcome.PAUSED: 1},
        lend={LendOutcome.LENT: 1, LendOutcome.BUSY: 1},
        tokens_borrowed=32,
        tokens_lent=16,
        answer_seconds=0.75,
        load_seconds=2.0,
    )
