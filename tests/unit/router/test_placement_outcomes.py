"""The outcome of a request decides what the router learns of it: an engine counts for what it has done."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from router_setup import PATIENCE, answer_ok, refuse, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from test_dispatch import dispatching, outstanding

from kv_connector.control.membership import PromptCost, WorkloadReport
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import TEXT_SIDES, Side
from kv_connector.router.failure import Failure
from kv_connector.router.placement.cache_aware import CacheAware
from kv_connector.router.placement.goodput import Goodput
from kv_connector.router.placement.policy import FewestOutstanding
from kv_connector.router.placement.session_engines import session_of
from kv_connector.router.requests.completion import Completion
from kv_connector.router.settings import Objectives, PolicyName
from kv_connector.router.streams.calls import Call
from kv_connector.router.streams.dispatch import Dispatcher

pytestmark = pytest.mark.anyio

LONG = "All happy families are alike. " * 200  # 1,500 tokens at 4 bytes each
# Patient, so that a slow prefill engine's report is awaited.
AWARE = {"policy": PolicyName.CACHE_AWARE, "patience": PATIENCE}


async def counted(request: Request, body: dict[str, Any]) -> Response:
    """Answers as an engine that counts 700 tokens in the prompt, of which it had none."""
    usage = {"prompt_tokens": 700}
    params = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 0}
    return JSONResponse({"choices": [{"text": "ok"}], "kv_transfer_params": params, "usage": usage})


async def ask(dispatcher: Dispatcher, prompt: str = LONG, headers: dict[str, str] | None = None) -> None:
    call = Call("/v1/completions", {"x-request-id": "r", **(headers or {})}, "r")
    body = json.dumps({"prompt": prompt}).encode()
    async with dispatcher.open(Completion.decode(body), call) as answer:
        async for _ in answer.chunks:
            pass


def has(dispatcher: Dispatcher) -> set[str]:
    """Returns the URLs of the engines that have the prompt, as far as the router knows."""
    prompt = Completion.decode(json.dumps({"prompt": LONG}).encode()).prompt("/v1/completions")
    matches = dispatcher.parts.members.index.matches(prompt)
    holders = matches[-1][0] if matches else 0  # an engine with more of the prompt has less of it, too
    pools = dispatcher.parts.pools.values()
    known = {endpoint.url: pool.workload(endpoint) for pool in pools for endpoint in pool.endpoints}
    found = {url for url, workload in known.items() if workload and workload.cache.bit & holders}
    assert len(found) == holders.bit_count(), "the index has an engine that no pool has"
    return found


def recent(dispatcher: Dispatcher, side: Side) -> list[float]:
    """Returns the tokens that each engine of a side was given lately, the least first."""
    members, now = dispatcher.parts.pools[side].choices(), time.monotonic()
    return sorted(0.0 if one.recent is None else one.recent.tokens(now) for one in members)


def about(*tokens: int) -> Any:
    """Equals recent tokens of the last 10 s: they halve every minute."""
    return pytest.approx(tokens, rel=0.15, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, CacheAware),
        ({"policy": PolicyName.FEWEST_OUTSTANDING}, FewestOutstanding),
        ({"objectives": Objectives(1.0, 1.0)}, Goodput),
    ],
)
async def test_policy_is_cache_aware_unless_another_is_named_or_objectives_are_set(
    settings: dict[str, Any], policy: type
) -> None:
    async with dispatching([], [], **settings) as (dispatcher, _, _):
        assert type(dispatcher.parts.policy) is policy


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
@pytest.mark.parametrize("status", [400, 500])
async def test_prompt_that_a_prefill_engine_refuses_leaves_no_trace(dispatch: str, status: int) -> None:
    async def wait(request: Request, _: dict[str, Any]) -> Response:
        return await d[0].until_gone(request)

    refusing = [refuse(status, "too long")] * 2
    async with dispatching(refusing, [wait], dispatch=dispatch, **AWARE) as (dispatcher, _, d):
        with pytest.raises(Failure, match="too long"):
            await ask(dispatcher)
        assert has(dispatcher) == set()
        assert recent(dispatcher, Side.PREFILL) == about(0, 0)
        assert recent(dispatcher, Side.DECODE) == about(0)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_prompt_that_a_decode_engine_refuses_counts_for_the_prefill_engine(dispatch: str) -> None:
    async def refuse_later(request: Request, body: dict[str, Any]) -> Response:
        async with asyncio.timeout(PATIENCE):
            while dispatcher.parts.pools[Side.PREFILL].outstanding(Endpoint.parse(p[0].url)):
                await asyncio.sleep(0.001)  # polled: there is no event to wait for
        return await refuse(400, "too long")(request, body)

    async with dispatching([counted], [refuse_later], dispatch=dispatch, **AWARE) as (dispatcher, p, _):
        with pytest.raises(Failure, match="too long"):
            await ask(dispatcher)
        assert has(dispatcher) == {p[0].url}
        assert recent(dispatcher, Side.PREFILL) == about(700)
        assert recent(dispatcher, Side.DECODE) == about(0)


async def test_retried_prompt_counts_only_where_it_was_served() -> None:
    async with dispatching([counted], [refuse(500, "broken"), counted], **AWARE) as (dispatcher, p, d):
        await ask(dispatcher)
        assert d[0].bodies
        assert has(dispatcher) == {p[0].url, d[1].url}
        assert recent(dispatcher, Side.DECODE) == about(0, 700)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_cancelled_prompt_leaves_no_trace(dispatch: str) -> None:
    async def hang(request: Request, _: dict[str, Any]) -> Response:
        return await p[0].until_gone(request)

    async with dispatching([hang], [hang], dispatch=dispatch, **AWARE) as (dispatcher, p, _):
        asking = asyncio.create_task(ask(dispatcher))
        await within(p[0].arrived.wait())
        assert recent(dispatcher, Side.PREFILL) == about(1500), "the next placement sees it at once"
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await dispatcher.close()
        assert outstanding(dispatcher) == 0
        assert has(dispatcher) == set()
        for side in TEXT_SIDES:
            assert recent(dispatcher, side) == about(0)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_engines_own_count_of_a_prompt_replaces_the_forecast(dispatch: str) -> None:
    async with dispatching([counted], [counted], dispatch=dispatch, **AWARE) as (dispatcher, p, d):
        await ask(dispatcher)
        assert has(dispatcher) == {p[0].url, d[0].url}
        for side in TEXT_SIDES:
            assert recent(dispatcher, side) == about(700)


async def test_local_prefill_counts_for_the_decode_engine() -> None:
    async with dispatching([], [counted], policy=PolicyName.CACHE_AWARE) as (dispatcher, _, d):
        await ask(dispatcher)
        assert has(dispatcher) == {d[0].url}
        assert recent(dispatcher, Side.DECODE) == about(1500), "the answer was not read"


async def test_serial_dispatch_credits_the_decode_engine_that_served() -> None:
    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        # The placement's decode engine has more to do by now, so another one loads the pages.
        pool = dispatcher.parts.pools[Side.DECODE]
        pool.acquire(Endpoint.parse(d[0].url))
        return await counted(request, body)

    async with dispatching([prefill], [counted] * 2, **AWARE) as (dispatcher, p, d):
        await ask(dispatcher, headers={"x-session-id": "s"})
        served = next(engine.url for engine in d if engine.bodies)
        assert served == d[1].url
        assert has(dispatcher) == {p[0].url, served}
        assert recent(dispatcher, Side.DECODE) == about(0, 700)
        session = session_of({"x-session-id": "s"}, {})
        assert dispatcher.parts.caches.sessions.engines(session)[1] == Endpoint.parse(served)


async def test_prompt_counts_for_no_more_tokens_than_the_engine_accepts() -> None:
    async def hang(request: Request, _: dict[str, Any]) -> Response:
        return await p[0].until_gone(request)

    async with dispatching([hang], [answer_ok], **AWARE) as (dispatcher, p, d):
        for engine in (*p, *d):
            dispatcher.parts.members.learnt(Endpoint.parse(engine.url), None, 1000)
        asking = asyncio.create_task(ask(dispatcher, "x " * 500_000))
        await within(p[0].arrived.wait())
        assert recent(dispatcher, Side.PREFILL) == about(1000)
        assert dispatcher.parts.pools[Side.PREFILL].choices()[0].workload.backlog.uncached == 1000
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await dispatcher.close()


async def test_work_of_placed_prompts_is_counted_by_the_side_that_computes_them() -> None:
    cost = PromptCost(step_ns=0, token_ns=1_000_000, pair_ps=0)  # a token takes 1 ms
    load = WorkloadReport(step_tokens=4096, prompt_tokens=4096, cache_tokens=100_000, prompt=cost)
    async with dispatching([answer_ok], [answer_ok], **AWARE) as (dispatcher, _, _):
        for pool in dispatcher.parts.pools.values():
            for endpoint in pool.endpoints:
                workload = pool.workload(endpoint)
                assert workload is not None
                workload.hear(load)
        counted = dispatcher.parts.metrics.registry.get_sample_value
        name = "kv_connector_router_prompt_work_seconds_total"
        assert counted(name, {"side": "prefill"}) == 0
        await ask(dispatcher)
        assert counted(name, {"side": "prefill"}) == pytest.approx(len(LONG) / 4 * 1e-3, rel=0.1)
        assert counted(name, {"side": "decode"}) == 0
