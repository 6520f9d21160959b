"""`usage` in the answer: cached tokens are the prefill engine's prefix-cache hits, not the received pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_setup import PATIENCE, FedStream, Handler, client_of, cluster, serve, serve_engine, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

TEXT = 'the text says {"cached_tokens": 5, "prompt_tokens": 6}'


def usage(cached: int | None) -> dict[str, Any]:
    details = {"audio_tokens": None, "cached_tokens": cached}
    return {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": details}


def answer(cached: int | None) -> dict[str, Any]:
    return {"choices": [{"text": TEXT}], "usage": usage(cached)}


def prefill(params: object) -> Handler:
    async def handler(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({**answer(32), "kv_transfer_params": params})

    return handler


async def decode(request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse(answer(99))


REQUEST = {"prompt": "hello"}


@pytest.mark.parametrize(
    ("params", "cached"),
    [
        ({"remote_prefill_cached_tokens": 32}, 32),
        ({"remote_prefill_cached_tokens": 0}, 0),
        ({"remote_prefill_cached_tokens": "many"}, 99),
        ({}, 99),
        (None, 99),
    ],
)
async def test_cached_tokens_come_from_prefill_when_it_reports_them(params: object, cached: int) -> None:
    async with cluster(prefill(params), decode) as (_, _, client):
        assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(cached)


async def test_an_answer_without_cached_tokens_gets_none() -> None:
    async def without(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse(answer(None))

    async with cluster(prefill({"remote_prefill_cached_tokens": 32}), without) as (_, _, client):
        assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(None)


async def test_last_event_of_a_stream_waits_for_the_prefill_count() -> None:
    released = asyncio.Event()

    async def late(request: Request, body: dict[str, Any]) -> Response:
        await within(released.wait())
        return await prefill({"remote_prefill_cached_tokens": 32})(request, body)

    stream, events = FedStream(), [{"choices": [{"text": TEXT}]}, {"choices": [], "usage": usage(99)}]
    first, last = (b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    stream.queue.put_nowait(first)
    async with (
        cluster(late, stream) as (_, _, client),
        client.stream("POST", "/v1/completions", json={**REQUEST, "stream": True}) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line)
        assert json.loads((await within(anext(lines))).removeprefix("data: ")) == events[0]
        for chunk in (last, b"data: [DONE]\n\n", None):
            stream.queue.put_nowait(chunk)
        released.set()
        counted = json.loads((await within(anext(lines))).removeprefix("data: "))
        assert counted == {"choices": [], "usage": usage(32)}
        assert await within(anext(lines)) == "data: [DONE]"


# --- Each API's fields: the decode engine's usage if 99 of 100 tokens came from the prefill engine, and one
# engine's usage with 32 cached tokens


def messages_usage(cached: int, **more: int) -> dict[str, Any]:
    created = {"cache_creation_input_tokens": 1}  # stays as the decode engine counted it
    counts = {"input_tokens": 99 - cached, "output_tokens": 5, "cache_read_input_tokens": cached}
    return counts | created | more


def responses_usage(cached: int, turns: list[int]) -> dict[str, Any]:
    details: dict[str, Any] = {"cached_tokens": cached, "cache_write_tokens": 1}
    details |= {"input_tokens_per_turn": [100], "cached_tokens_per_turn": turns}
    return {"input_tokens": 100, "input_tokens_details": details, "output_tokens": 5, "total_tokens": 105}


# A tool's input, an object of any fields.
INPUT = {"cached_tokens": 99, "usage": {"cache_read_input_tokens": 99, "input_tokens": 1}, "a": 1.50}
TOOL = {"type": "tool_use", "id": "t", "name": "f", "input": INPUT}
MESSAGE = {"type": "message", "content": [{"type": "text", "text": TEXT}, TOOL]}
RESPONSE = {"object": "response", "output": [{"type": "function_call", "arguments": json.dumps(INPUT)}]}
CHOICES = {"choices": [{"message": {"content": TEXT}}]}

WHOLE = [
    ("chat/completions", CHOICES | {"usage": usage(99)}, CHOICES | {"usage": usage(32)}),
    ("messages", MESSAGE | {"usage": messages_usage(98)}, MESSAGE | {"usage": messages_usage(32)}),
    ("messages", MESSAGE | {"usage": {"input_tokens": 100}}, MESSAGE | {"usage": {"input_tokens": 100}}),
    (
        "responses",
        RESPONSE | {"usage": responses_usage(99, [99])},
        RESPONSE | {"usage": responses_usage(32, [32])},
    ),
    (
        "responses",
        RESPONSE | {"usage": responses_usage(99, [])},
        RESPONSE | {"usage": responses_usage(32, [])},
    ),
    ("responses", RESPONSE | {"usage": None}, RESPONSE | {"usage": None}),
]


def ids_of(cases: list[tuple[str, Any, Any]]) -> list[str]:
    return [f"{path.partition('/')[0]}-{number}" for number, (path, _, _) in enumerate(cases)]


@pytest.mark.parametrize(("path", "said", "told"), WHOLE, ids=ids_of(WHOLE))
async def test_a_whole_answer_counts_as_one_engines(path: str, said: object, told: object) -> None:
    """Nothing else in the answer changes."""

    async def handler(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse(said)

    async with cluster(prefill({"remote_prefill_cached_tokens": 32}), handler) as (_, _, client):
        reply = await client.post(f"/v1/{path}", json={"model": "m"})
        assert reply.text == bytes(JSONResponse(told).body).decode()


STARTED: dict[str, Any] = {"type": "message_start", "message": {"type": "message", "content": []}}
PARTIAL = {"type": "input_json_delta", "partial_json": json.dumps(INPUT)}
STREAMED = [
    (
        "messages",
        [
            STARTED | {"message": STARTED["message"] | {"usage": messages_usage(98)}},
            {"type": "content_block_delta", "delta": PARTIAL},
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": messages_usage(98)},
            {"type": "message_stop"},
        ],
        [
            STARTED | {"message": STARTED["message"] | {"usage": messages_usage(32)}},
            {"type": "content_block_delta", "delta": PARTIAL},
            {"type": "message_delta", "delta": {"stop_reason": None}, "usage": messages_usage(32)},
            {"type": "message_stop"},
        ],
    ),
    (
        "responses",
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": TEXT},
            {"type": "response.in_progress", "response": RESPONSE | {"usage": responses_usage(99, [])}},
            {"type": "response.completed", "response": RESPONSE | {"usage": responses_usage(99, [99])}},
        ],
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": TEXT},
            {"type": "response.in_progress", "response": RESPONSE | {"usage": responses_usage(32, [])}},
            {"type": "response.completed", "response": RESPONSE | {"usage": responses_usage(32, [32])}},
        ],
    ),
]


def named(event: dict[str, Any]) -> bytes:
    """Returns the event as vLLM writes it."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


@pytest.mark.parametrize(("path", "said", "told"), STREAMED, ids=ids_of(STREAMED))
@pytest.mark.parametrize("apart", [True, False])
async def test_a_streams_events_count_as_one_engines(
    path: str, said: list[dict[str, Any]], told: list[dict[str, Any]], apart: bool
) -> None:
    """Nothing else in the events changes."""

    async def handler(request: Request, body: dict[str, Any]) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            for chunk in map(named, said) if apart else [b"".join(map(named, said))]:
                yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async with cluster(prefill({"remote_prefill_cached_tokens": 32}), handler) as (_, _, client):
        reply = await client.post(f"/v1/{path}", json={"model": "m", "stream": True})
        assert reply.content == b"".join(map(named, told))


async def test_usage_without_cached_tokens_does_not_wait_for_prefill() -> None:
    told = asyncio.Event()

    async def late(request: Request, body: dict[str, Any]) -> Response:
        await within(told.wait())
        return await prefill({"remote_prefill_cached_tokens": 32})(request, body)

    stream = FedStream()
    started = named(STARTED | {"message": {"usage": {"input_tokens": 100, "output_tokens": 0}}})
    text = named({"type": "content_block_delta", "delta": {"text": TEXT}})
    for chunk in (started, text):
        stream.queue.put_nowait(chunk)
    async with (
        cluster(late, stream, patience=2 * PATIENCE) as (_, _, client),
        client.stream("POST", "/v1/messages", json={"model": "m", "stream": True}) as response,
    ):
        said, chunks = b"", response.aiter_bytes()
        while said != started + text:
            said += await within(anext(chunks))
        told.set()
        stream.queue.put_nowait(None)


async def test_an_engine_that_computes_the_whole_prompt_counts_itself() -> None:
    async with serve_engine(decode) as both:
        endpoint = Endpoint.parse(f"{both.url}@10.0.0.1:5601")
        settings = RouterSettings(prefill=(endpoint,), decode=(endpoint,))
        async with (
            serve(create_app(settings)) as url,
            client_of(url) as client,
        ):
            assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(99)
            assert len(both.bodies) == 1


async def test_written_tokens_come_from_prefill_when_it_reports_them() -> None:
    """The decode engine writes none of the received tokens to its prefix cache."""

    async def p(request: Request, body: dict[str, Any]) -> Response:
        details = {"cached_tokens": 32, "cache_write_tokens": 64}
        params = {"remote_prefill_cached_tokens": 32}
        return JSONResponse({"usage": {"input_tokens_details": details}, "kv_transfer_params": params})

    async def d(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse(
            {"usage": {"input_tokens_details": {"cached_tokens": 99, "cache_write_tokens": 0}}}
        )

    async with cluster(p, d) as (_, _, client):
        answer = (await client.post("/v1/responses", json={"input": "x"})).json()
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 32, "cache_write_tokens": 64}
