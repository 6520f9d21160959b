"""The forecast of what an engine still has to compute."""

from __future__ import annotations

import pytest

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.router.engines.backlog import Backlog, Work
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import Pool
from kv_connector.router.engines.workload import Cost, Workload


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    return Backlog(clock)


def test_prompts_are_computed_one_after_the_other(backlog: Backlog, clock: Clock) -> None:
    assert backlog.left() == 0.0
    first, second = Work(1000, 2.0), Work(500, 1.0)
    backlog.add(first)
    clock.now += 0.5
    backlog.add(second)
    assert backlog.left() == pytest.approx(2.5)
    assert backlog.tokens == 1500
    clock.now += 1.0
    backlog.remove(first)
    assert backlog.left() == pytest.approx(1.0), "the second is begun when the first has ended"
    clock.now += 0.25
    assert backlog.left() == pytest.approx(0.75)
    backlog.remove(second)
    backlog.remove(second)
    assert (backlog.left(), backlog.tokens) == (0.0, 0)


def test_prompt_that_takes_longer_than_forecast_does_not_shorten_the_others(
    backlog: Backlog, clock: Clock
) -> None:
    late, behind = Work(10, 1.0), Work(20, 3.0)
    backlog.add(late)
    backlog.add(behind)
    clock.now += 60.0
    assert backlog.left() == pytest.approx(3.0)
    assert backlog.tokens == 30


def test_one_that_ends_out_of_turn_leaves_the_oldest_as_it_is(backlog: Backlog, clock: Clock) -> None:
    oldest, behind = Work(10, 2.0), Work(10, 5.0)
    backlog.add(oldest)
    backlog.add(behind)
    clock.now += 1.0
    backlog.remove(behind)
    assert backlog.left() == pytest.approx(1.0)


def test_unreported_prompt_ends_as_forecast(backlog: Backlog, clock: Clock) -> None:
    silent, reported = Work(100, 2.0, reported=False), Work(10, 1.0)
    backlog.add(silent)
    backlog.add(reported)
    clock.now += 1.5
    assert (backlog.left(), backlog.tokens) == (pytest.approx(1.5), 110)
    clock.now += 1.0
    assert (backlog.left(), backlog.tokens) == (pytest.approx(0.5), 10)
    backlog.remove(silent)  # its answer is complete by now
    assert backlog.left() == pytest.approx(0.5)


def test_step_has_a_chunk_of_each_prompt(backlog: Backlog, clock: Clock) -> None:
    backlog.add(Work(1000, 2.0, reported=False))
    backlog.add(Work(50, 1.0))
    assert (backlog.in_a_step(256), backlog.in_a_step(10)) == (306, 20)
    clock.now += 3.5
    assert backlog.in_a_step(256) == 50, "the first is taken to be over"


def test_unreported_prompt_is_computed_beside_the_prompts_behind_it(backlog: Backlog, clock: Clock) -> None:
    works = [Work(1000, 1.0, reported=False) for _ in range(3)]
    for work in works:
        backlog.add(work)
    clock.now += 2.5
    assert backlog.tokens == 1000, "one after the other"
    assert backlog.in_a_step(256) == 3 * 256
    backlog.remove(works[0])  # its answer is complete
    assert backlog.in_a_step(256) == 2 * 256
    clock.now += 0.6
    assert backlog.in_a_step(256) == 0


def test_work_sent_by_other_routers_counts_and_fades(clock: Clock) -> None:
    workload = Workload(clock)
    cost = Cost(step=0.005, token=0.001, pair=0.0)

    def left() -> tuple[float, int]:
        return workload.wait(cost), workload.in_a_step(cost, 200)

    assert left() == (0.0, 0)
    workload.backlog.add(Work(300, 0.3))
    workload.hear(WorkloadReport(1, 1, 0, waiting=1300))
    assert left() == (pytest.approx(1.3), 1200), "of how many prompts theirs are, nobody says"
    clock.now += 0.4
    assert left() == (pytest.approx(0.6), 800)
    clock.now += 60.0
    assert left() == (0.0, 200), "this router's own is reported"
    workload.hear(WorkloadReport(1, 1, 0, waiting=200))
    assert left() == (0.0, 200), "a part of it is computed"
    workload.hear(None)
    assert left() == (0.0, 200)


def test_a_cost_is_that_of_steps_tokens_and_pairs() -> None:
    cost = Cost.of(PromptCost(step_ns=5_000_000, token_ns=20_000, pair_ps=1_000_000))
    assert cost.seconds(1000, 0, 1000) == pytest.approx(0.005 + 0.02 + 0.5)
    assert cost.seconds(1000, 500, 400) == pytest.approx(3 * 0.005 + 0.02 + 1.0)


def test_a_lease_has_its_work_until_it_is_computed() -> None:
    pool = Pool([Endpoint.parse("http://h:1")])
    endpoint = pool.fewest()
    workload = pool.workload(endpoint)
    assert workload is not None
    backlog = workload.backlog
    with pool.lease(endpoint, Work(7, 1.0)) as lease:
        assert backlog.tokens == 7
        lease.prompt_computed()
        assert (backlog.tokens, pool.outstanding(endpoint)) == (0, 1)
    assert pool.outstanding(endpoint) == 0
    with pool.lease(endpoint, Work(7, 1.0)):
        pass
    assert backlog.tokens == 0, "a request that ends before has none any more"
    assert pool.workload(Endpoint.parse("http://h:2")) is None
