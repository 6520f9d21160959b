"""Pool: which engine gets a request, and what a request holds of its engine."""

from __future__ import annotations

import asyncio

import pytest
from checkpoints import BASE, QUANTISED, TUNED
from router_prompts import prompt
from router_setup import within

from kv_connector.control.membership import WorkloadReport
from kv_connector.protocol.session.checkpoint import Weights
from kv_connector.router.bodies.prompt import PREFIX_BYTES
from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.breaker import FAILURES, Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import EngineLost, Member, NoEngine, Pool
from kv_connector.router.engines.recent_work import RecentWork
from kv_connector.router.engines.workload import Workload

A, B, C = (Endpoint.parse(f"http://h:{port}") for port in (1, 2, 3))


def test_fewest_outstanding_wins_and_equals_take_turns() -> None:
    pool = Pool([A, B, C])
    leases = [pool.acquire(pool.fewest()) for _ in range(4)]
    assert [lease.endpoint for lease in leases] == [A, B, C, A]
    leases[1].release()
    assert pool.fewest() == B
    assert [pool.outstanding(engine) for engine in (A, B, C)] == [2, 0, 1]


def test_avoided_engine_is_used_if_no_other_takes_requests() -> None:
    pool = Pool([A, B])
    assert pool.fewest({A}) == B
    pool.set_usable(B, False)
    assert pool.fewest({A}) == A
    pool.set_usable(A, False)
    with pytest.raises(NoEngine) as none:
        pool.fewest()
    assert none.value.pool is pool


def test_failing_engine_is_used_last() -> None:
    pool, breaker = Pool([A]), Breaker()
    for _ in range(FAILURES):
        breaker.failed(0.0)
    pool.set_usable(B, True, breaker=breaker)
    assert [pool.fewest(), pool.fewest({A})] == [A, B]
    assert not pool.takes(B)
    assert not pool.failing()
    pool.remove(A, lost=False)
    assert pool.fewest() == B
    assert pool.failing()


def test_engines_are_chosen_by_model_and_weight_version() -> None:
    pool = Pool()
    pool.set_usable(A, True, weights=Weights("1"), models=frozenset({"base"}))
    pool.set_usable(B, True, weights=Weights("2"), models=frozenset({"base", "adapter"}))
    assert pool.fewest(model="adapter") == B
    assert pool.fewest(weights=Weights("1")) == A
    assert pool.known("adapter") == "adapter"
    assert pool.known("another") is None
    assert pool.models() == {"base", "adapter"}
    with pytest.raises(NoEngine) as none:
        pool.fewest(model="another")
    assert none.value.model == "another"


def test_weights_fit_those_of_one_version_whose_checkpoints_do_not_differ() -> None:
    base = Weights("", BASE)
    assert base.fits(Weights("", BASE))
    assert not base.fits(Weights("", TUNED))
    assert not base.fits(Weights("1", BASE))
    for other in (Weights(), Weights("", QUANTISED)):
        assert base.fits(other)
        assert other.fits(base)
    pool = Pool()
    pool.set_usable(A, True, weights=base)
    pool.set_usable(B, True, weights=Weights("", TUNED))
    assert pool.fewest(weights=Weights("", TUNED)) == B
    pool.set_usable(B, True)
    assert {one.endpoint for one in pool.choices(weights=base)} == {A, B}


def test_partner_serves_the_same_weight_version_if_an_engine_does() -> None:
    prefill, decode = Pool(), Pool()
    prefill.set_usable(A, True, weights=Weights("2"))
    decode.set_usable(B, True, weights=Weights("1"))
    decode.set_usable(C, True, weights=Weights("2"))
    assert decode.partner(prefill, A, ()) == C
    with decode.lease(C), decode.lease(C):
        assert decode.partner(prefill, A, ()) == C, "whatever it has in hand"
    decode.set_usable(C, False, weights=Weights("2"))
    assert decode.partner(prefill, A, ()) == B


def test_engine_that_has_gone_is_not_acquired() -> None:
    pool = Pool([A])
    pool.remove(A, lost=False)
    with pytest.raises(NoEngine):
        pool.acquire(A)


def test_lease_holds_its_prompt_in_the_backlog_until_it_is_computed() -> None:
    pool = Pool([A])
    workload = pool.workload(A)
    assert workload is not None
    with pool.lease(A, Work(tokens=700, seconds=60.0)) as lease:
        assert workload.backlog.tokens == 700
        lease.prompt_computed()
        assert workload.backlog.tokens == 0
        assert pool.outstanding(A) == 1
    assert pool.outstanding(A) == 0


def test_engine_is_unfinished_while_pages_are_to_be_fetched_from_it() -> None:
    pool = Pool([A])
    lease = pool.acquire(A)
    with lease.owing():
        with lease.owing():
            lease.release()
            assert (pool.outstanding(A), pool.unfinished(A)) == (0, 1)
        assert pool.unfinished(A) == 1
    assert pool.unfinished(A) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [True, False])
async def test_request_ends_with_its_engine_only_if_the_engine_is_lost(lost: bool) -> None:
    pool = Pool([A])
    lease, started, answered = pool.acquire(A), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        async with lease.alive():
            started.set()
            await answered.wait()

    waiting = asyncio.create_task(wait())
    await within(started.wait())
    pool.remove(A, lost=lost)
    if lost:
        with pytest.raises(EngineLost):
            await within(waiting)
        with pytest.raises(EngineLost):
            await within(wait())
    else:
        answered.set()
        await within(waiting)
        await within(wait())


@pytest.mark.anyio
async def test_wait_for_an_engine_ends_when_one_of_the_model_joins() -> None:
    pool = Pool([A])
    pool.set_usable(A, True, models=frozenset({"base"}))
    waiting = asyncio.create_task(pool.wait_usable(60.0, "adapter"))
    await asyncio.sleep(0)
    pool.set_usable(B, True, models=frozenset({"base"}))
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.set_usable(B, True, models=frozenset({"adapter"}))
    await within(waiting)
    await pool.wait_usable(0.0, "another")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[Clock, Pool, Member]:
    """A pool of one engine, whose recent work is known."""
    clock, pool = Clock(), Pool()
    pool.set_usable(A, True, Workload(clock))
    member = pool.choices()[0]
    member.recent = RecentWork(0.0, 0.0)
    return clock, pool, member


def given(member: Member, now: float) -> float:
    assert member.recent is not None
    return member.recent.tokens(now)


def test_lease_counts_as_recent_work_until_the_engine_refuses() -> None:
    clock, pool, member = watched()
    lease = pool.acquire(A, Work(tokens=700, seconds=0.0))
    assert given(member, 0.0) == 700
    clock.now = 60.0
    assert given(member, 60.0) == 350
    lease.release()
    assert given(member, 60.0) == 0
    lease.counted(900)
    assert given(member, 60.0) == 0, "it has no outcome that counts"


def test_lease_counts_as_recent_work_after_a_computed_prompt() -> None:
    clock, pool, member = watched()
    lease = pool.acquire(A, Work(tokens=700, seconds=0.0), 1000)
    assert (given(member, 0.0), member.context) == (1000, 1000), "a decode engine's work is its context"
    clock.now = 60.0
    lease.counted(600)
    assert (given(member, 60.0), member.context) == (300, 600)
    lease.prompt_computed()
    lease.release()
    lease.counted(400)
    assert (given(member, 60.0), member.context) == (200, 0)


def test_recent_work_of_an_engine_that_pauses_is_forgotten() -> None:
    _, pool, member = watched()
    early = pool.acquire(A, Work(tokens=700, seconds=0.0))
    pool.set_usable(A, True)
    assert member.recent is not None
    pool.set_usable(A, False)
    pool.set_usable(A, True)
    assert member.recent is None, "the next placement begins it at its peers' level"
    member.recent = RecentWork(500.0, 0.0)
    early.release()
    assert given(member, 0.0) == 500, "the request was not part of that level"


def test_lease_remembers_what_the_engine_was_expected_to_have() -> None:
    _, pool, member = watched()
    member.workload.cache.prompt_computed(prompt("ab"))
    lease = pool.acquire(A, prompt=prompt("abc"))
    member.workload.cache.prompt_computed(prompt("abc"))
    assert lease.expected == 2 * PREFIX_BYTES


def test_caches_filled_adds_the_share_of_each_engine_that_reports_its_cache() -> None:
    pool = Pool([A, B, C])
    for engine, room in ((A, 1000), (B, 500)):
        workload = pool.workload(engine)
        assert workload is not None
        workload.hear(WorkloadReport(step_tokens=64, prompt_tokens=64, cache_tokens=room))
    leases = [
        pool.acquire(engine, context=tokens) for engine, tokens in ((A, 300), (A, 200), (B, 80), (C, 9))
    ]
    assert pool.caches_filled() == 0, "requests that wait for a prefill engine fill no cache"
    for lease in leases:
        for _ in range(2):
            lease.prompt_computed()
    leases[2].counted(100)
    assert pool.caches_filled() == pytest.approx(0.7)
    for lease in leases:
        lease.release()
    assert pool.caches_filled() == 0
