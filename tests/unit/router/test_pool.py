"""Pool: which engine gets a request, and what a request holds of its engine."""

from __future__ import annotations

import asyncio

import pytest
from router_setup import within

from kv_connector.router.engines.backlog import Work
from kv_connector.router.engines.breaker import FAILURES, Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import EngineLost, NoEngine, Pool

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
    pool.set_usable(A, True, weights="1", models=frozenset({"base"}))
    pool.set_usable(B, True, weights="2", models=frozenset({"base", "adapter"}))
    assert pool.fewest(model="adapter") == B
    assert pool.fewest(weights="1") == A
    assert pool.known("adapter") == "adapter"
    assert pool.known("another") is None
    assert pool.models() == {"base", "adapter"}
    with pytest.raises(NoEngine) as none:
        pool.fewest(model="another")
    assert none.value.model == "another"


def test_partner_serves_the_same_weight_version_if_an_engine_does() -> None:
    prefill, decode = Pool(), Pool()
    prefill.set_usable(A, True, weights="2")
    decode.set_usable(B, True, weights="1")
    decode.set_usable(C, True, weights="2")
    assert decode.partner(prefill, A, ()) == C
    with decode.lease(C), decode.lease(C):
        assert decode.partner(prefill, A, ()) == C, "whatever it has in hand"
    decode.set_usable(C, False, weights="2")
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
