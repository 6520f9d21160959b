"""Engines whose requests fail: they are taken out of use, get trials, and are never taken out by one client
alone.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from router_setup import (
    PATIENCE,
    FakeEngine,
    Handler,
    answer_ok,
    client_of,
    refuse,
    serve,
    serve_engines,
    within,
)
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kv_connector.router.engines.breaker import FAILURES, Breaker
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def routed(
    prefill: Sequence[Handler], decode: Sequence[Handler], **settings: Any
) -> AsyncIterator[tuple[list[FakeEngine], list[FakeEngine], httpx.AsyncClient]]:
    async with (
        serve_engines(prefill, decode) as (p, d, listed),
        serve(create_app(RouterSettings(**listed, **settings))) as url,
        client_of(url) as client,
    ):
        yield p, d, client


async def ask(client: httpx.AsyncClient, prompt: str = "x") -> int:
    return (await client.post("/v1/completions", json={"prompt": prompt})).status_code


async def states(client: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = (await client.get("/health")).json()
    return found


def asked(engine: FakeEngine) -> int:
    """Returns how many client requests the engine got."""
    return sum(body["prompt"] == "x" for body in engine.bodies)


async def break_if_poisoned(request: Request, body: dict[str, Any]) -> Response:
    async def broken() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionError

    if body["prompt"] == "poison":
        return StreamingResponse(broken(), media_type="application/json")
    return await answer_ok(request, body)


async def test_an_engine_that_fails_at_once_gets_two_percent_of_the_requests() -> None:
    async with routed([answer_ok], [refuse(500, "broken"), *[answer_ok] * 3]) as (_, d, client):
        began = time.monotonic()
        for _ in range(20):
            assert await asyncio.gather(*(ask(client) for _ in range(10))) == [200] * 10
        # The three failures, or as many of the first ten requests as came before them, and the trials. A busy
        # machine has time for more of these.
        trials = sum(time.monotonic() - began >= after for after in (2, 6, 14, 30))
        assert asked(d[0]) <= 3 + max(2, trials)
        assert (await states(client))["decode"][d[0].url] == "failing"


async def test_one_good_engine_of_four_serves() -> None:
    async with routed([answer_ok], [*[refuse(500, "broken")] * 3, answer_ok]) as (_, d, client):
        answers = [await ask(client) for _ in range(100)]
        assert sum(status != 200 for status in answers) <= FAILURES
        assert all(asked(engine) <= FAILURES + 2 for engine in d[:3])


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_one_request_that_breaks_connections_takes_no_engine_out(dispatch: str) -> None:
    async with routed([break_if_poisoned] * 3, [break_if_poisoned] * 3, dispatch=dispatch) as (_, _, client):
        assert await ask(client, "poison") == 502
        found = await states(client)
        assert {*found["prefill"].values(), *found["decode"].values()} == {"ready"}
        assert await ask(client) == 200


async def test_engines_errors_are_the_answer_when_all_engines_fail() -> None:
    async with routed([answer_ok], [refuse(500, "broken")]) as (_, d, client):
        for _ in range(FAILURES + 2):
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert (response.status_code, response.json()["error"]["message"]) == (500, "broken")
        d[0].handler = answer_ok
        assert await ask(client) == 200
        assert (await states(client))["decode"] == {d[0].url: "ready"}


async def test_health_503_takes_an_engine_out_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.front.registry._PROBE_S", 0.02)
    monkeypatch.setattr("kv_connector.router.front.registry._WATCH_S", 0.02)
    release = asyncio.Event()

    async def hold(request: Request, body: dict[str, Any]) -> Response:
        await within(release.wait())
        return await answer_ok(request, body)

    async def dead(request: Request) -> Response:
        return Response(status_code=503)

    async with routed([answer_ok], [hold]) as (_, d, client):
        asking = asyncio.create_task(ask(client))
        await within(d[0].arrived.wait())
        d[0].health = dead
        async with asyncio.timeout(PATIENCE):
            while (await states(client))["decode"][d[0].url] != "unreachable":
                await asyncio.sleep(0.01)  # each query is a request
        release.set()
        assert await asking == 200, "what it has goes on"
        d[0].health = d[0].models
        assert await ask(client) == 200


# --- The breaker alone


def failed(times: int) -> Breaker:
    breaker = Breaker()
    for _ in range(times):
        breaker.failed(0.0)
    return breaker


def test_a_success_starts_the_count_anew() -> None:
    breaker = failed(FAILURES - 1)
    breaker.succeeded(0.0)
    breaker.failed(0.0)
    assert not breaker.open
    assert failed(FAILURES).open


def test_over_half_within_ten_seconds_open_it() -> None:
    breaker = Breaker()
    for now in range(9):
        breaker.succeeded(now)
        breaker.failed(now, unsure=True)
    assert not breaker.open
    breaker.failed(9, unsure=True)
    assert breaker.open
    steady = Breaker()
    for now in range(0, 200, 5):
        steady.failed(now, unsure=True)
        steady.succeeded(now)
        steady.failed(now, unsure=True)
    assert not steady.open, "ten in ten seconds are a sample, six are not"


def test_a_failure_behind_the_beginning_of_an_answer_is_one_outcome() -> None:
    breaker = Breaker()
    for now in range(9):
        breaker.succeeded(now)
        breaker.failed(now, begun=True)
    assert not breaker.open
    breaker.succeeded(9)
    breaker.failed(9, begun=True)
    assert breaker.open


def test_pauses_between_trials_double_up_to_thirty_seconds() -> None:
    breaker, trials = failed(FAILURES), []
    for tick in range(1000):
        now = tick * 0.2
        breaker.tick(now)
        if breaker.trial:
            breaker.taken()
            breaker.failed(now)
            trials.append(now)
    assert not breaker.trial
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(trials)]
    assert round(trials[0]) == 2
    assert pauses[:5] == [4, 8, 16, 30, 30]


def test_a_trial_is_kept_until_a_request_takes_it() -> None:
    breaker = failed(FAILURES)
    for now in (0.0, 2.0, 100.0):
        breaker.tick(now)
    assert breaker.trial
    breaker.taken()
    assert not breaker.trial
    breaker.succeeded(101.0)
    assert not breaker.open
    for _ in range(FAILURES):
        breaker.failed(102.0)
    breaker.tick(104.0)
    assert breaker.trial, "the pause is the first one again"
