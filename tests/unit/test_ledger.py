"""Waiting for what the agent's thread reports."""

import threading
from collections.abc import Callable

import pytest

from kv_connector.agent.ledger import Ledger

LIMIT = 30.0
NEWS: list[Callable[[Ledger], None]] = [
    lambda ledger: ledger.sent("p"),
    lambda ledger: ledger.received("d", failed=True),
    lambda ledger: ledger.reserved("t"),
]


@pytest.mark.parametrize("report", NEWS, ids=["sent", "received", "reserved"])
def test_news_ends_the_wait(report: Callable[[Ledger], None]) -> None:
    ledger = Ledger()
    waiter = threading.Thread(target=ledger.await_news, args=(2 * LIMIT,))
    waiter.start()
    report(ledger)
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_what_is_there_already_is_not_waited_for_and_what_was_taken_is() -> None:
    ledger = Ledger()
    ledger.sent("p")
    ledger.await_news(LIMIT)
    assert ledger.take_reports().finished_sending == {"p"}
    waiter = threading.Thread(target=ledger.await_news, args=(2 * LIMIT,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "there is nothing to take, and the wait has ended"
    ledger.received("d", failed=False)
    waiter.join(LIMIT)
    assert not waiter.is_alive()


def test_the_wait_ends_by_itself() -> None:
    Ledger().await_news(0.001)
