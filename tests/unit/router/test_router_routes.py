"""Routes beside OpenAI's completions: Anthropic's messages, responses, and the router's own."""

import asyncio
import json
import logging
from typing import Any

import pytest
from router_setup import (
    FakeEngine,
    FedStream,
    answer_ok,
    client_of,
    cluster,
    metric,
    serve,
    serve_engine,
    until_metric,
    within,
)
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.observe.metrics import KEEP_SECONDS, Metrics
from kv_connector.router.requests.responses_api import ResponsesRequest
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "name": "f", "parameters": {}}


# --- Prefill on one engine, decode on another


@pytest.mark.parametrize(
    ("path", "request_body", "for_p"),
    [
        (
            "/v1/messages",
            {"messages": [], "max_tokens": 3000, "thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"max_tokens": 1, "stream": False},
        ),
        (
            "/v1/responses",
            {"input": "hello", "max_output_tokens": 7, "tools": [FUNCTION]},
            {"max_output_tokens": 1, "stream": False, "store": False},
        ),
        ("/v1/responses", {"input": "hello"}, {"max_output_tokens": 1, "stream": False, "store": False}),
    ],
)
async def test_prefill_gets_one_token_and_decode_gets_the_request(
    path: str, request_body: dict[str, Any], for_p: dict[str, Any]
) -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        answer = await client.post(path, json=request_body | {"kv_transfer_params": {"remote_host": "evil"}})
        assert answer.status_code == 200
        (to_p,), (to_d,) = p.bodies, d.bodies
        assert to_p.pop("kv_transfer_params")["do_remote_decode"] is True
        assert to_d.pop("kv_transfer_params")["remote_host"] == "10.0.0.1"
        assert to_p == request_body | for_p
        assert to_d == request_body
        await until_metric(client, f'kv_connector_router_requests_total{{route="{path}",status="200"}}', 1)


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({"input": "x", "background": True}, "stored_response"),
        ({"input": "x", "previous_response_id": "resp_1"}, "stored_response"),
        ({"input": "x", "tools": [FUNCTION, {"type": "web_search_preview"}]}, "engine_tools"),
        ({"input": "x", "tools": [{"type": "mcp", "server_label": "s"}]}, "engine_tools"),
        ({"input": "x", "tools": ["what"]}, "engine_tools"),
    ],
)
async def test_response_that_cannot_be_shared_is_prefilled_by_decode(
    request_body: dict[str, Any], reason: str
) -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        assert (await client.post("/v1/responses", json=request_body)).status_code == 200
        assert not p.bodies
        assert d.bodies == [request_body]
        assert await metric(client, f'kv_connector_router_local_prefills_total{{reason="{reason}"}}') == 1


async def test_a_response_over_ranks_is_fetched_from_the_one_that_computed_it() -> None:
    """vLLM gives a response to any rank. Only the prefill engine's answer names the rank."""
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        settings = RouterSettings(
            prefill=tuple(Endpoint.parse(f"{p.url}@10.0.0.1:{port}") for port in (5600, 5602)),
            decode=(Endpoint.parse(d.url),),
        )
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as client,
        ):
            assert (await client.post("/v1/responses", json={"input": "x"})).status_code == 200
            assert (await client.post("/v1/messages", json={"messages": []})).status_code == 200
    assert [body["kv_transfer_params"].get("from") for body in d.bodies] == ["p", None]


@pytest.mark.parametrize("tools", [None, [], [FUNCTION], [{"type": "custom", "name": "c"}], "no list"])
def test_tools_that_the_client_calls_do_not_matter(tools: object) -> None:
    assert ResponsesRequest({"input": "x", "tools": tools}).local_reason() is None


# --- Streams of named events


async def test_a_message_that_fails_before_its_first_word_goes_to_another_engine() -> None:
    beginning = b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n'
    error = b'event: error\ndata: {"type": "error", "error": {"type": "internal_error", "message": "no"}}\n\n'
    answer = beginning + b'event: message_stop\ndata: {"type": "message_stop"}\n\n'

    async def fail(request: Request, body: dict[str, Any]) -> Response:
        return StreamingResponse(iter([beginning, error]), media_type="text/event-stream")

    async def work(request: Request, body: dict[str, Any]) -> Response:
        return StreamingResponse(iter([answer]), media_type="text/event-stream")

    async with serve_engine(answer_ok) as p, serve_engine(fail) as bad, serve_engine(work) as good:
        endpoints = tuple(Endpoint.parse(engine.url) for engine in (bad, good))
        app = create_app(RouterSettings(prefill=(Endpoint.parse(p.url),), decode=endpoints))
        async with serve(app) as url, client_of(url) as client:
            got = await client.post("/v1/messages", json={"messages": [], "stream": True})
            assert (got.status_code, got.content) == (200, answer)
            assert await metric(client, "kv_connector_router_retries_total") == 1


async def test_broken_decode_stream_of_named_events_ends_with_a_named_error_event() -> None:
    stream = FedStream()
    first = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'
    async with cluster(answer_ok, stream) as (_, d, client):
        stream.queue.put_nowait(first)
        async with client.stream("POST", "/v1/messages", json={"messages": [], "stream": True}) as answer:
            chunks = answer.aiter_raw()
            assert await within(anext(chunks)) == first
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            stream.queue.put_nowait(RuntimeError("the engine broke"))
            last = b"".join([chunk async for chunk in chunks])
        name, _, data = last.partition(b"\n")
        assert name == b"event: error"
        told = json.loads(data.removeprefix(b"data: "))
        assert told["type"] == "error"
        assert told["error"]["type"] == "api_error"
        assert d.url in told["error"]["message"]
        await until_metric(client, 'kv_connector_router_requests_total{route="/v1/messages",status="502"}', 1)


# --- Answered by one decode engine, or by the router


async def test_tokens_of_messages_are_counted_by_a_decode_engine() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        answer = await client.post("/v1/messages/count_tokens", json={"messages": []})
        assert answer.json() == {"echo": {"messages": []}}


async def test_the_description_has_the_routes_that_are_served() -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        described = (await client.get("/openapi.json")).json()
        served = ("/v1/responses", "/v1/models")  # and not /sleep
        assert described == {"openapi": "3.1.0", "paths": {path: {"post": {}} for path in served}}


@pytest.mark.parametrize("path", ["/openapi.json", "/v1/models"])
async def test_head_of_a_route_that_engines_answer_has_no_body(path: str) -> None:
    async with cluster(answer_ok, answer_ok) as (_, _, client):
        answer = await client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("text", [b"", b"nonsense", b"[]", b"{}", b'{"paths": 7}', b"\xff", b"[" * 100_000])
async def test_description_that_describes_no_routes_gets_502(text: bytes) -> None:
    class Odd(FakeEngine):
        async def describe(self, request: Request) -> Response:
            return Response(text, media_type="application/json")

    odd = Odd(answer_ok)
    async with serve(odd.app) as odd.url:
        engines = (Endpoint.parse(odd.url),)
        async with serve(create_app(RouterSettings(engines, engines))) as url, client_of(url) as client:
            answer = await client.get("/openapi.json")
            assert answer.status_code == 502
            assert "does not describe its routes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_is_answered_as_health_is(method: str) -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        answer = await client.request(method, "/ping")
        assert answer.status_code == 200
        found = {"status": "ready", "prefill": {p.url: "ready"}, "decode": {d.url: "ready"}}
        assert answer.json() == found


async def test_the_load_is_the_requests_under_way_here() -> None:
    async def decode(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(answer_ok, decode) as (_, d, client):
        assert (await client.get("/load")).json() == {"server_load": 0}
        asking = asyncio.create_task(client.post("/v1/responses", json={"input": "x"}))
        await within(d.arrived.wait())
        assert (await client.get("/load")).json() == {"server_load": 1}
        asking.cancel()
        await within(d.aborted.wait())


# --- Metrics


def test_failures_of_engines_long_gone_are_forgotten() -> None:
    metrics = Metrics()

    def told() -> set[str]:
        (found,) = metrics.failures.collect()
        return {sample.labels["engine"] for sample in found.samples}

    for engine in ("a", "b"):
        metrics.failures.labels("decode", engine).inc()
    metrics.prune(0.0, {"a", "b"})
    metrics.prune(1.0, {"a"})
    metrics.prune(KEEP_SECONDS, {"a"})
    assert told() == {"a", "b"}, "what killed it is still to be seen"
    metrics.prune(KEEP_SECONDS + 1, {"a"})
    assert told() == {"a"}
    metrics.failures.labels("decode", "b").inc()
    metrics.prune(KEEP_SECONDS + 2, {"a", "b"})
    metrics.prune(3 * KEEP_SECONDS, {"a"})
    assert told() == {"a", "b"}, "it was back in between"
