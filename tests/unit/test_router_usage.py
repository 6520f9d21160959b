"""`usage` in the answer: cached tokens are P's prefix-cache hits, not what D got from P."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from router_setup import PATIENCE, Handler, Stream, cluster, serve, serve_engine, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.router.app import create_app
from kv_connector.router.endpoint import Endpoint
from kv_connector.router.settings import Settings

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
async def test_cached_tokens_are_ps_where_p_names_them(params: object, cached: int) -> None:
    async with cluster(prefill(params), decode) as (_, _, client):
        assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(cached)


async def test_an_answer_without_cached_tokens_gets_none() -> None:
    async def without(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse(answer(None))

    async with cluster(prefill({"remote_prefill_cached_tokens": 32}), without) as (_, _, client):
        assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(None)


async def test_the_last_event_of_a_stream_waits_for_ps_count() -> None:
    released = asyncio.Event()

    async def late(request: Request, body: dict[str, Any]) -> Response:
        await within(released.wait())
        return await prefill({"remote_prefill_cached_tokens": 32})(request, body)

    stream, events = Stream(), [{"choices": [{"text": TEXT}]}, {"choices": [], "usage": usage(99)}]
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


async def test_an_engine_that_computes_the_whole_prompt_counts_itself() -> None:
    async with serve_engine(decode) as both:
        endpoint = Endpoint.parse(f"{both.url}@10.0.0.1:5601")
        settings = Settings(prefill=(endpoint,), decode=(endpoint,))
        async with (
            serve(create_app(settings)) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
        ):
            assert (await client.post("/v1/completions", json=REQUEST)).json() == answer(99)
            assert len(both.bodies) == 1
