"""Time limits of requests: first token, idle streams, and whole requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from command_line import invoke, one_line
from router_setup import PATIENCE, FedStream, answer_ok, cluster, no_answer, streaming, until_metric, within
from starlette.requests import Request
from starlette.responses import Response

from kv_connector.cli.main import app
from kv_connector.router.failure import Failure
from kv_connector.router.front.app import DONE
from kv_connector.router.front.deadline import Deadline
from kv_connector.router.settings import RequestTimeouts

pytestmark = pytest.mark.anyio

TIMED_OUT = 'kv_connector_router_requests_total{route="/v1/completions",status="504"}'
FAILED = "kv_connector_router_failures_total"
SOON = 0.05
EVENT = b'data: {"choices": []}\n\n'
BODY = {"prompt": "x", "stream": True}


@contextlib.asynccontextmanager
async def hanging(**timeouts: float) -> AsyncIterator[tuple[Any, Any, httpx.AsyncClient]]:
    """Yields two engines that do not answer, and a client of their router."""

    async def hang(request: Request, _: dict[str, Any]) -> Response:
        return await p.until_gone(request)

    async def hang_too(request: Request, _: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(hang, hang_too, timeouts=RequestTimeouts(**timeouts), patience=SOON) as (p, d, client):
        yield p, d, client


@pytest.mark.parametrize(
    ("timeouts", "stream", "why"),
    [
        ({"first_token": SOON}, True, "no token arrived within 0.05 s (--first-token-timeout)"),
        ({"request": SOON}, True, "the answer was not complete within 0.05 s (--request-timeout)"),
        ({"request": SOON, "first_token": 3600}, False, "was not complete within 0.05 s"),
        ({"request": SOON, "first_token": SOON / 2}, False, "was not complete within 0.05 s"),
    ],
)
async def test_request_without_an_answer_in_time_gets_504_and_ends_at_both_engines(
    timeouts: dict[str, float], stream: bool, why: str
) -> None:
    async with hanging(**timeouts) as (p, d, client):
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == 504
        assert why in answer.json()["error"]["message"]
        for engine in (p, d):
            if engine.arrived.is_set():  # not on a machine that is slower than the limit
                await within(engine.aborted.wait())
        await until_metric(client, TIMED_OUT, 1)
        assert FAILED + "{" not in (await client.get("/metrics")).text


@pytest.mark.parametrize("stream", [True, 1, "yes"])  # vLLM reads each as true
async def test_stream_that_stops_ends_with_an_error_event(stream: bool | int | str) -> None:
    streams = FedStream()
    timeouts = RequestTimeouts(first_token=3600, idle=SOON, request=3600)
    async with cluster(answer_ok, streams, timeouts=timeouts) as (_, _, client):
        streams.queue.put_nowait(EVENT)
        async with client.stream("POST", "/v1/completions", json=BODY | {"stream": stream}) as answer:
            assert answer.status_code == 200
            said = b"".join([chunk async for chunk in answer.aiter_bytes()])
        assert said.startswith(EVENT)
        assert b"the next token did not arrive within 0.05 s (--idle-timeout)" in said
        assert b'"code":504' in said
        assert said.endswith(DONE)
        await within(streams.aborted.wait())
        await until_metric(client, TIMED_OUT, 1)


async def test_deadline_limits_the_next_event_only_while_it_is_awaited() -> None:
    deadline = Deadline(RequestTimeouts(first_token=3600, idle=7200, request=10_000), streamed=True)
    now = asyncio.get_running_loop().time
    async with deadline.guard():
        assert 0 < due(deadline) - now() <= 3600
        for _ in range(2):
            deadline.received()
            assert 7200 < due(deadline) - now() <= 10_000
            deadline.waiting()
            assert 3600 < due(deadline) - now() <= 7200


async def test_deadline_of_the_whole_request_ends_a_stream_that_goes_on() -> None:
    deadline = Deadline(RequestTimeouts(idle=3600, request=SOON), streamed=True)

    async def stream() -> None:
        async with deadline.guard():
            while True:
                deadline.received()
                deadline.waiting()
                await asyncio.sleep(0)

    with pytest.raises(Failure, match="--request-timeout") as raised:
        await stream()
    assert raised.value.status == 504


async def test_deadline_without_limits_is_none() -> None:
    deadline = Deadline(RequestTimeouts(), streamed=True)
    async with deadline.guard():
        deadline.received()
        deadline.waiting()
        assert deadline._scope.when() is None


@pytest.mark.parametrize("stream", [False, True])
async def test_complete_answer_has_no_limit_while_the_prefill_engine_ends(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Deadline] = []
    released = asyncio.Event()

    def make(timeouts: RequestTimeouts, *, streamed: bool) -> Deadline:
        made.append(Deadline(timeouts, streamed=streamed))
        return made[-1]

    async def answer_when_released(request: Request, body: dict[str, Any]) -> Response:
        await within(released.wait())
        return await answer_ok(request, body)

    monkeypatch.setattr("kv_connector.router.front.app.Deadline", make)
    timeouts = RequestTimeouts(first_token=3600, idle=3600, request=3600)
    decode = streaming(EVENT, DONE) if stream else answer_ok
    async with cluster(answer_when_released, decode, timeouts=timeouts, patience=PATIENCE) as (_, _, client):
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert answer.status_code == 200
        (deadline,) = made
        assert deadline._scope.when() is None
        released.set()
        await until_metric(client, TIMED_OUT.replace("504", "200"), 1)


async def test_timeout_of_another_cause_is_not_the_deadline() -> None:
    async def fail() -> None:
        async with Deadline(RequestTimeouts(request=3600), streamed=True).guard():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        await fail()


def due(deadline: Deadline) -> float:
    when = deadline._scope.when()
    assert when is not None
    return when


async def test_forwarded_request_without_an_answer_in_time_gets_504() -> None:
    async with cluster(answer_ok, answer_ok, timeouts=RequestTimeouts(request=SOON)) as (_, d, client):
        d.app.routes[:] = [route for route in d.app.routes if getattr(route, "path", "") != "/tokenize"]
        d.app.add_route("/tokenize", no_answer, methods=["POST"])
        answer = await client.post("/tokenize", json={"prompt": "x"})
        assert answer.status_code == 504


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "soon"])
def test_timeout_that_is_no_time_is_refused(value: str) -> None:
    engines = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    status, output = invoke(app, "router", *engines, f"--idle-timeout={value}")
    assert status == 2
    assert "--idle-timeout" in one_line(output)
