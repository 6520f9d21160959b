"""Dispatcher: how often a request is tried, with which engines, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from checkpoints import BASE, TUNED
from router_setup import FakeEngine, Handler, answer_ok, refuse, serve_engines, within
from starlette.requests import Request
from starlette.responses import Response

from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.session.checkpoint import Checkpoint, Weights
from kv_connector.router.bodies.prompt import PREFIX_BYTES
from kv_connector.router.engines.client import EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Side
from kv_connector.router.failure import Failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.policy import Placement
from kv_connector.router.requests.completion import Completion
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.calls import Call
from kv_connector.router.streams.dispatch import ATTEMPTS, MODELS_PATH, Dispatcher

pytestmark = pytest.mark.anyio

HEADERS = {"x-request-id": "request"}
CALL = Call("/v1/completions", HEADERS, "request")
REQUEST = b'{"prompt": "x"}'


@contextlib.asynccontextmanager
async def dispatching(
    prefill: Sequence[Handler], decode: Sequence[Handler], *, ended: int = 0, **settings: Any
) -> AsyncIterator[tuple[Dispatcher, list[FakeEngine], list[FakeEngine]]]:
    """A dispatcher, its prefill engines and its decode engines. Default dispatch here: serial.

    ``ended``: further decode engines, which have ended unnoticed.
    """
    async with serve_engines(prefill, decode) as (p, d, engines), EngineClient() as client:
        if ended:
            gone = [Endpoint.parse(f"http://127.0.0.1:{port}") for port in free_ports(ended)]
            engines["decode"] = (*engines["decode"], *gone)
        # With a registration address, a side may have no engine.
        default = {"registration": Address("127.0.0.1", 0), "dispatch": "serial", "patience": 0.05}
        chosen = RouterSettings(**{**engines, **default, **settings})
        dispatcher = Dispatcher(chosen, client, Metrics(), Incidents(), Spans.to(None))
        try:
            yield dispatcher, p, d
        finally:
            await dispatcher.close()


async def answer(dispatcher: Dispatcher) -> bytes:
    async with dispatcher.open(Completion.decode(REQUEST), CALL) as begun:
        return b"".join([chunk async for chunk in begun.chunks])


def outstanding(dispatcher: Dispatcher) -> int:
    pools = dispatcher.parts.pools.values()
    return sum(pool.unfinished(engine) for pool in pools for engine in pool.endpoints)


async def test_request_whose_engines_fail_is_tried_a_bounded_number_of_times() -> None:
    broken = [refuse(500, "broken")] * (ATTEMPTS + 2)
    async with dispatching(broken, [answer_ok]) as (dispatcher, p, d):
        with pytest.raises(Failure, match="broken"):
            await answer(dispatcher)
        assert sorted(len(engine.bodies) for engine in p) == [0, 0, *[1] * ATTEMPTS]
        assert not d[0].bodies
        assert outstanding(dispatcher) == 0


@pytest.mark.parametrize("dispatch", ["serial", "concurrent"])
async def test_engines_that_no_longer_listen_cost_no_attempt(dispatch: str) -> None:
    ended = ATTEMPTS + 1
    async with dispatching([answer_ok], [answer_ok], ended=ended, dispatch=dispatch) as (dispatcher, p, d):
        # The engines that have ended have fewer requests.
        pool, running = dispatcher.parts.pools[Side.DECODE], Endpoint.parse(d[0].url)
        with pool.lease(running):
            assert json.loads(await answer(dispatcher))["choices"][0]["text"] == "ok"
        assert [engine for engine in pool.endpoints if pool.takes(engine)] == [running]  # all were tried
        if dispatch == "serial":  # otherwise a request may be cancelled before the prefill engine reads it
            assert len(p[0].bodies) == ended + 1


async def test_prefill_engine_keeps_the_prompt_until_a_decode_engine_has_loaded_it() -> None:
    async def load(request: Request, body: dict[str, Any]) -> Response:
        kept.append((len(cache), cache.can_drop))
        return await answer_ok(request, body)

    kept: list[tuple[int, bool]] = []
    async with dispatching([answer_ok], [load]) as (dispatcher, p, _):
        workload = dispatcher.parts.pools[Side.PREFILL].workload(Endpoint.parse(p[0].url))
        assert workload is not None
        cache = workload.cache
        body = json.dumps({"prompt": "x" * 3 * PREFIX_BYTES}).encode()
        async with dispatcher.open(Completion.decode(body), CALL) as begun:
            assert [chunk async for chunk in begun.chunks]
        assert kept == [(3, False)]
        assert cache.can_drop


async def test_request_that_an_engine_refuses_is_not_tried_again() -> None:
    async with dispatching([refuse(400, "too long")] * 2, [answer_ok]) as (dispatcher, p, _):
        with pytest.raises(Failure, match="too long"):
            await answer(dispatcher)
        assert sum(len(engine.bodies) for engine in p) == 1


async def test_retry_avoids_the_engine_that_failed() -> None:
    async with dispatching([answer_ok], [refuse(500, "broken"), answer_ok]) as (dispatcher, _, d):
        # The engine that fails has fewer requests.
        with dispatcher.parts.pools[Side.DECODE].lease(Endpoint.parse(d[1].url)):
            assert json.loads(await answer(dispatcher))["choices"][0]["text"] == "ok"
        assert d[0].bodies


async def test_decode_engine_computes_the_prompt_if_no_prefill_engine_takes_requests() -> None:
    async with dispatching([], [answer_ok]) as (dispatcher, _, d):
        await answer(dispatcher)
        assert "kv_transfer_params" not in d[0].bodies[0]
    async with dispatching([], [answer_ok], require_prefill=True) as (dispatcher, _, d):
        with pytest.raises(Failure, match="no prefill engine takes requests") as raised:
            await answer(dispatcher)
        assert raised.value.status == 503
        assert not d[0].bodies


async def test_request_without_a_decode_engine_is_refused() -> None:
    async with dispatching([answer_ok], []) as (dispatcher, _, _):
        with pytest.raises(Failure, match="no decode engine takes requests: none is known") as raised:
            await answer(dispatcher)
        assert raised.value.status == 503


async def test_client_that_leaves_ends_the_requests_to_both_engines() -> None:
    async def hang(request: Request, _: dict[str, Any]) -> Response:
        return await p[0].until_gone(request)

    async def hang_too(request: Request, _: dict[str, Any]) -> Response:
        return await d[0].until_gone(request)

    async with dispatching([hang], [hang_too], dispatch="concurrent") as (dispatcher, p, d):
        asking = asyncio.create_task(answer(dispatcher))
        for engine in (*p, *d):
            await within(engine.arrived.wait())
        asking.cancel()
        for engine in (*p, *d):
            await within(engine.aborted.wait())
        with pytest.raises(asyncio.CancelledError):
            await asking
        await dispatcher.close()
        assert outstanding(dispatcher) == 0


async def test_forwarded_request_goes_to_another_decode_engine_if_one_fails() -> None:
    async with dispatching([], [answer_ok] * 2) as (dispatcher, _, d):
        dispatcher.parts.pools[Side.DECODE].set_usable(Endpoint.parse("http://127.0.0.1:1"), True)
        bodies = set()
        for _ in range(3):
            reply = await dispatcher.forward("GET", Call(MODELS_PATH, HEADERS, "r"), b"")
            bodies.add(json.loads(reply.body)["engine"])
        assert bodies == {engine.url for engine in d}


# --- Checkpoints


def serve_checkpoints(pools: Any, checkpoints: dict[Endpoint, Checkpoint]) -> None:
    for pool in pools.values():
        for endpoint in pool.endpoints:
            pool.set_usable(endpoint, True, weights=Weights("", checkpoints[endpoint]))


@pytest.mark.parametrize("dispatch", ["serial", "concurrent"])
async def test_request_reaches_no_two_engines_of_different_checkpoints(dispatch: str) -> None:
    async with dispatching([answer_ok] * 2, [answer_ok] * 2, dispatch=dispatch) as (dispatcher, p, d):
        pools = dispatcher.parts.pools
        half = {
            endpoint: checkpoint
            for side in (Side.PREFILL, Side.DECODE)
            for endpoint, checkpoint in zip(pools[side].endpoints, (BASE, TUNED), strict=True)
        }
        serve_checkpoints(pools, half)
        (first, _), (_, second) = pools[Side.PREFILL].endpoints, pools[Side.DECODE].endpoints
        # The engines with the fewest requests have different checkpoints.
        with pools[Side.PREFILL].lease(first), pools[Side.DECODE].lease(second):
            await answer(dispatcher)
        assert [len(engine.bodies) for engine in (*p, *d)] in ([1, 0, 1, 0], [0, 1, 0, 1])


async def test_decode_engine_with_a_cached_prompt_and_another_checkpoint_is_not_used() -> None:
    async with (
        dispatching([answer_ok], [answer_ok] * 2) as (dispatcher, _, __),
        contextlib.AsyncExitStack() as stack,
    ):
        pools = dispatcher.parts.pools
        (prefill,), (other, like) = pools[Side.PREFILL].endpoints, pools[Side.DECODE].endpoints
        serve_checkpoints(pools, {prefill: BASE, other: TUNED, like: BASE})
        placement = Placement(prefill, other, "cached", decode_cached=900)
        lease = await dispatcher._lease_partner(stack, placement, CALL, ())
        assert lease.endpoint == like


async def test_decode_engine_of_another_checkpoint_computes_the_prompt_when_alone() -> None:
    async def drain_like(request: Request, body: dict[str, Any]) -> Response:
        dispatcher.parts.pools[Side.DECODE].set_usable(like, False, weights=Weights("", BASE))
        return await answer_ok(request, body)

    async with dispatching([drain_like], [answer_ok] * 2) as (dispatcher, p, d):
        pools = dispatcher.parts.pools
        (prefill,), (like, other) = pools[Side.PREFILL].endpoints, pools[Side.DECODE].endpoints
        serve_checkpoints(pools, {prefill: BASE, like: BASE, other: TUNED})
        assert json.loads(await answer(dispatcher))["choices"][0]["text"] == "ok"
        await dispatcher.close()
        assert len(p[0].bodies) == 1
        (body,), disowned = d[1].bodies, [str(one.get("model")) for one in d[0].bodies]
        assert not body.get("kv_transfer_params")
        # The engine that is drained has a session with the prefill engine, which need not hold the prompt.
        assert len(disowned) == 1
        assert "nobody" in disowned[0]
        assert outstanding(dispatcher) == 0


async def test_prefill_engine_is_notified_by_a_decode_engine_of_its_checkpoint() -> None:
    async with dispatching([answer_ok], [answer_ok] * 2) as (dispatcher, _, d):
        pools = dispatcher.parts.pools
        (prefill,), (other, like) = pools[Side.PREFILL].endpoints, pools[Side.DECODE].endpoints
        serve_checkpoints(pools, {prefill: BASE, other: TUNED, like: BASE})
        for _ in range(2):
            await dispatcher.parts.holds.release_hold("transfer", prefill, CALL)
        assert [len(engine.bodies) for engine in d] == [0, 2]


async def test_request_is_placed_by_checkpoint_while_the_router_retries() -> None:
    async with dispatching([answer_ok] * 2, [answer_ok] * 2) as (dispatcher, _, __):
        pools = dispatcher.parts.pools
        (p1, p2), (d1, d2) = pools[Side.PREFILL].endpoints, pools[Side.DECODE].endpoints
        serve_checkpoints(pools, {p1: BASE, p2: TUNED, d1: BASE, d2: TUNED})
        placement = await dispatcher._place(Completion.decode(REQUEST), CALL, (d1,))
        assert (placement.prefill, placement.decode) == (p2, d2)
