"""The decision whether a prefix is loaded or computed."""

from __future__ import annotations

import pytest

from kv_connector.protocol.actions import Address
from kv_connector.vllm.scheduling.borrow_costs import BorrowCosts

LENDER, OTHER = (Address("10.0.0.2", port, prefixes=True) for port in (5700, 5800))
REMEMBER = 30.0


class Made(BorrowCosts):
    """Costs of an engine that computes a token in a millisecond."""

    def __init__(self) -> None:
        super().__init__(lambda before, tokens: tokens / 1000, REMEMBER)
        self.now = 100.0
        self.clock = lambda: self.now


@pytest.fixture
def costs() -> Made:
    return Made()


def test_unknown_costs_count_as_nothing(costs: Made) -> None:
    assert costs.pays(LENDER, 0, 1, 0)
    costs.loaded(OTHER, 1, 100.0, 100.0)
    assert costs.pays(LENDER, 0, 1, 0)


def test_engine_that_does_not_know_its_own_cost_loads(costs: Made) -> None:
    costs.loaded(LENDER, 1, 100.0, 100.0)
    assert not costs.pays(LENDER, 0, 1, 0)
    costs.compute_seconds = lambda before, tokens: None
    assert costs.pays(LENDER, 0, 1, 0)


def test_question_and_overhead_are_paid_once_and_tokens_by_the_rate_of_the_wire(costs: Made) -> None:
    costs.answered(LENDER, 0.05)
    costs.loaded(LENDER, 100, 0.07, 0.02)  # 5,000 tokens a second, and 0.05 s beside them
    # 0.1 s + tokens / 5,000 against tokens / 1,000: equal at 125 tokens.
    assert not costs.pays(LENDER, 0, 124, 0)
    assert costs.pays(LENDER, 0, 126, 0)
    assert not costs.pays(LENDER, 1000, 1124, 0)
    # With the answer in hand: equal at 62.5 tokens.
    assert not costs.pays(LENDER, 0, 62, 0, asked=True)
    assert costs.pays(LENDER, 0, 63, 0, asked=True)


def test_loads_ahead_share_the_wire(costs: Made) -> None:
    costs.loaded(LENDER, 100, 0.02, 0.02)
    assert costs.pays(LENDER, 0, 100, 399)
    assert not costs.pays(LENDER, 0, 100, 401)


def test_short_loads_do_not_hide_the_rate_of_a_long_one(costs: Made) -> None:
    costs.loaded(LENDER, 10_000, 1.0, 1.0)
    for _ in range(5):
        costs.loaded(LENDER, 1, 0.01, 0.01)
    assert costs.pays(LENDER, 0, 10_000, 0)


def test_one_slow_question_of_several_is_ignored(costs: Made) -> None:
    for seconds in (0.01, 0.01, 60.0):
        costs.answered(LENDER, seconds)
    assert costs.pays(LENDER, 0, 1000, 0)


def test_measurements_are_forgotten_so_that_a_slow_lender_is_tried_again(costs: Made) -> None:
    costs.answered(LENDER, 60.0)
    costs.now += REMEMBER - 0.1
    assert not costs.pays(LENDER, 0, 1000, 0)
    costs.now += 0.2
    assert costs.pays(LENDER, 0, 1000, 0)
    costs.answered(OTHER, 1.0)
    assert set(costs._lenders) == {OTHER}


def test_late_prefetch_is_forgotten_while_other_loads_are_measured(costs: Made) -> None:
    costs.late(LENDER, prefetch=True)
    for _ in range(2):
        assert costs.was_late_for_prefetch(LENDER)
        costs.now += REMEMBER / 2
        costs.loaded(LENDER, 100, 0.02, 0.02)
    assert not costs.was_late_for_prefetch(LENDER)
    assert not costs.was_late(LENDER)
