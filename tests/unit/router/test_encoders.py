"""Encoder engines: the requests that they get, and requests that go on without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from router_setup import (
    FakeEngine,
    Handler,
    answer_ok,
    client_of,
    metric,
    no_answer,
    nobody,
    refuse,
    serve,
    serve_engine,
    serve_engines,
    until_metric,
    within,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.router.engines.breaker import FAILURES
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams import calls

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ANNOUNCED = {"hash": {"peer_host": "10.0.0.9", "peer_port": 1, "size_bytes": 64}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGES = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}]
BODY = {"model": "m", "messages": MESSAGES, "max_tokens": 9, "n": 2, "stream": False, "logprobs": True}
FAILING = 'kv_connector_router_engines{side="encoder",state="failing"}'
UNREACHABLE = 'kv_connector_router_engines{side="encoder",state="unreachable"}'
ENCODES = 'kv_connector_router_encodes_total{outcome="%s"}'


async def encode(request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({"choices": [], "ec_transfer_params": ANNOUNCED})


async def hang(request: Request, body: dict[str, Any]) -> Response:
    return await no_answer(request)


@dataclass
class Site:
    encoders: list[FakeEngine]
    prefill: FakeEngine
    decode: FakeEngine
    client: httpx.AsyncClient

    async def chat(self, **fields: Any) -> int:
        return (await within(self.client.post(CHAT, json=BODY | fields))).status_code

    async def counts(self, outcome: str, count: float) -> None:
        assert await metric(self.client, ENCODES % outcome) == count


@asynccontextmanager
async def site(
    encoders: Sequence[Handler], urls: Sequence[str] = (), *, prefill: Handler = answer_ok, **settings: Any
) -> AsyncIterator[Site]:
    """Yields a router over fake encoder engines, one prefill engine and one decode engine.

    ``urls``: further encoder engines, before the others.
    """
    async with AsyncExitStack() as stack:
        e = [await stack.enter_async_context(serve_engine(handler)) for handler in encoders]
        (p,), (d,), engines = await stack.enter_async_context(serve_engines([prefill], [answer_ok]))
        listed = tuple(Endpoint.parse(url) for url in (*urls, *(engine.url for engine in e)))
        default: dict[str, Any] = {"encoders": listed, "dispatch": "serial", "patience": 0.05}
        chosen = RouterSettings(**{**default, **engines, **settings})
        url = await stack.enter_async_context(serve(create_app(chosen)))
        yield Site(e, p, d, await stack.enter_async_context(client_of(url)))


async def test_encoder_gets_pictures_before_the_prefill_engine_fetches_embeddings() -> None:
    at_prefill = []

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        at_prefill.append(len(engines.encoders[0].bodies))
        return await answer_ok(request, body)

    async with site([encode], prefill=prefill) as engines:
        assert await engines.chat(ec_transfer_params={"of": "the client"}) == 200
        assert at_prefill == [1]
        (body,) = engines.encoders[0].bodies
        assert body == {"model": "m", "messages": MESSAGES, "max_tokens": 1}
        assert engines.prefill.bodies[0]["ec_transfer_params"] == ANNOUNCED
        assert "ec_transfer_params" not in engines.decode.bodies[0]
        await engines.counts("encoded", 1)


async def test_encoder_gets_no_request_of_text_alone() -> None:
    async with site([encode]) as engines:
        assert await engines.chat(messages=[{"role": "user", "content": "What is it?"}]) == 200
        assert (await engines.client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert not engines.encoders[0].bodies
        assert all("ec_transfer_params" not in body for body in engines.prefill.bodies)


async def test_pictures_go_to_another_encoder_engine_if_one_fails() -> None:
    with nobody() as url:
        async with site([encode], [url]) as engines:
            assert await engines.chat() == 200
            assert engines.prefill.bodies[0]["ec_transfer_params"] == ANNOUNCED
            await engines.counts("encoded", 1)


async def test_encoder_engine_that_does_not_answer_costs_a_request_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "ENCODE_S", 0.05)
    async with site([hang]) as engines:
        assert await engines.chat() == 200
        assert "ec_transfer_params" not in engines.prefill.bodies[0]
        await engines.counts("failed", 1)
    async with site([hang]) as engines:
        for _ in range(FAILURES):
            assert await engines.chat() == 200
        await until_metric(engines.client, FAILING, 1)  # its health checks have answers
    async with site([hang, hang], require_encoder=True) as engines:
        assert await engines.chat() == 502
        assert not engines.prefill.bodies
    async with site([hang, encode]) as engines:
        for _ in range(2):  # the first choice among equal engines may be either
            assert await engines.chat() == 200
        assert [body["ec_transfer_params"] for body in engines.prefill.bodies] == [ANNOUNCED] * 2
        assert engines.encoders[0].bodies
        await engines.counts("encoded", 2)


@pytest.mark.parametrize("broken", [refuse(500, "broken"), refuse(400, "no such picture")])
async def test_prefill_engine_encodes_pictures_if_encoder_engines_fail(broken: Handler) -> None:
    async with site([broken]) as engines:
        assert await engines.chat() == 200
        assert "ec_transfer_params" not in engines.prefill.bodies[0]
        await engines.counts("failed", 1)
    async with site([broken], require_encoder=True) as engines:
        assert await engines.chat() in (400, 500)
        assert not engines.prefill.bodies


async def test_prefill_engine_encodes_pictures_that_an_encoder_engine_does_not_announce() -> None:
    async with site([answer_ok]) as engines:
        assert await engines.chat() == 200
        assert "ec_transfer_params" not in engines.prefill.bodies[0]
        await engines.counts("nothing", 1)


async def test_pictures_are_refused_without_an_encoder_engine_only_if_one_is_required() -> None:
    text = [{"role": "user", "content": "What is it?"}]
    with nobody() as url:
        async with site([], [url]) as engines:
            await until_metric(engines.client, UNREACHABLE, 1)
            assert await engines.chat() == 200
            await engines.counts("no_engine", 1)
            health = await engines.client.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded")
            assert health.json()["encoder"] == {url: "unreachable"}
        async with site([], [url], require_encoder=True) as engines:
            await until_metric(engines.client, UNREACHABLE, 1)
            answer = await within(engines.client.post(CHAT, json=BODY))
            assert answer.status_code == 503
            assert f"no encoder engine takes requests: {url} is unreachable" in answer.text
            assert not engines.prefill.bodies
            assert await engines.chat(messages=text) == 200
            assert (await engines.client.get("/health")).status_code == 503


async def test_client_that_leaves_ends_the_request_to_the_encoder_engine() -> None:
    async def hang(request: Request, _: dict[str, Any]) -> Response:
        return await engines.encoders[0].until_gone(request)

    async with site([hang]) as engines:
        asking = asyncio.create_task(engines.client.post(CHAT, json=BODY))
        await within(engines.encoders[0].arrived.wait())
        asking.cancel()
        await within(engines.encoders[0].aborted.wait())
        assert not engines.prefill.bodies


async def test_router_without_encoder_engines_shows_two_sides() -> None:
    async with site([]) as engines:
        assert await engines.chat() == 200
        assert (await engines.client.get("/health")).json().keys() == {"status", "prefill", "decode"}
        shown = (await engines.client.get("/metrics")).text
        assert 'side="encoder"' not in shown


async def test_status_page_lists_encoder_engines() -> None:
    async with site([encode]) as engines:
        listed = json.loads((await engines.client.get("/status.json")).text)["engines"]
        assert [one["name"] for one in listed if one["roles"] == ["encoder"]] == ["encoder 1"]


@pytest.mark.parametrize(
    ("encoders", "more", "words"),
    [
        (("http://p:1",), {}, "listed as an encoder engine and as another"),
        ((), {"require_encoder": True}, "--encoder"),
    ],
)
def test_settings_of_encoder_engines_are_checked(
    encoders: Sequence[str], more: dict[str, Any], words: str
) -> None:
    p, d = (Endpoint.parse(url) for url in ("http://p:1", "http://d:1"))
    with pytest.raises(ValueError, match=words):
        RouterSettings((p,), (d,), tuple(map(Endpoint.parse, encoders)), **more)
