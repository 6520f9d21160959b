"""The router's spans: one for each request, and one for each engine, which gets the span's context."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import invoke
from otlp import ENVIRONMENT, SpanReceiver
from router_setup import answer_ok, cluster, until_metric, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kv_connector.cli.main import app
from kv_connector.router.observe.spans import Spans, SpansError

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
BODY = {"model": "m", "prompt": "hello", "max_tokens": 4}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanReceiver]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with SpanReceiver().serving() as receiver:
        yield receiver


async def stream(request: Request, body: dict[str, Any]) -> Response:
    async def events() -> Any:
        yield b'data: {"choices": []}\n\n'
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def refuse(request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({"error": "no"}, status_code=400)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_a_request_is_one_trace_and_engines_get_their_own_context(
    dispatch: str, receiver: SpanReceiver
) -> None:
    settings = {"dispatch": dispatch, "otlp_traces_endpoint": receiver.endpoint}
    async with cluster(answer_ok, stream, **settings) as (p, d, client):
        answer = await client.post("/v1/completions", json=BODY | {"stream": True}, headers=HEADERS)
        assert answer.status_code == 200
    spans = receiver.of(TRACE)
    assert set(spans) == {"POST /v1/completions", "prefill", "decode"}
    server = spans["POST /v1/completions"]
    assert server.parent == PARENT
    assert server.service == "kv-connector-router"
    assert server.attributes["kv.request_id"] == "mine"
    params = p.bodies[0]["kv_transfer_params"]
    assert server.attributes["kv.transfer_id"] == params["transfer_id"]
    for side, engine in (("prefill", p), ("decode", d)):
        span = spans[side]
        assert span.parent == server.id
        assert not span.failed
        assert span.attributes["kv.side"] == side
        assert span.attributes["url.full"] == engine.url
        assert engine.headers[0]["traceparent"] == f"00-{TRACE}-{span.id}-01"
        assert server.begin <= span.begin <= span.end <= server.end


async def test_a_request_without_a_context_begins_a_trace(receiver: SpanReceiver) -> None:
    async with cluster(answer_ok, answer_ok, otlp_traces_endpoint=receiver.endpoint) as (p, _, client):
        await client.post("/v1/completions", json=BODY)
    (server,) = [span for span in receiver.spans if span.name.startswith("POST")]
    assert server.parent == ""
    assert p.headers[0]["traceparent"].startswith(f"00-{server.trace}-")


async def test_an_engine_that_refuses_is_a_failed_span(receiver: SpanReceiver) -> None:
    async with cluster(answer_ok, refuse, otlp_traces_endpoint=receiver.endpoint) as (_, _, client):
        answer = await client.post("/v1/completions", json=BODY, headers=HEADERS)
        assert answer.status_code == 400
    spans = receiver.of(TRACE)
    assert spans["POST /v1/completions"].failed
    assert spans["decode"].failed
    assert not spans["prefill"].failed


async def test_a_client_that_leaves_cancels_spans_and_fails_none(receiver: SpanReceiver) -> None:
    async def hold(request: Request, body: dict[str, Any]) -> Response:
        return await d.until_gone(request)

    async with cluster(hold, hold, otlp_traces_endpoint=receiver.endpoint) as (p, d, client):
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=HEADERS))
        await within(p.arrived.wait())
        await within(d.arrived.wait())
        asking.cancel()
        await until_metric(
            client, 'kv_connector_router_requests_total{route="/v1/completions",status="499"}', 1
        )
    spans = receiver.of(TRACE)
    assert set(spans) == {"POST /v1/completions", "prefill", "decode"}
    assert not any(span.failed for span in spans.values())
    assert all(spans[side].attributes["kv.cancelled"] for side in ("prefill", "decode"))


async def test_without_an_endpoint_engines_get_the_clients_context() -> None:
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        await client.post("/v1/completions", json=BODY, headers=HEADERS)
    assert p.headers[0]["traceparent"] == d.headers[0]["traceparent"] == HEADERS["traceparent"]


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SpansError, match=r"kv-connector\[otel\]"):
        Spans.to("http://127.0.0.1:1/v1/traces")
    Spans.to(None).close()


def test_an_unknown_protocol_is_refused_before_the_router_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
    engines = ("--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200")
    status, output = invoke(app, "router", *engines, "--otlp-traces-endpoint", "http://127.0.0.1:1")
    assert status == 2
    assert "http/protobuf" in output
