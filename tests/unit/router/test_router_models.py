"""Requests are placed on engines that serve their model."""

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator, Collection
from typing import Any

import httpx
import pytest
from router_setup import PATIENCE, FakeEngine, answer_ok, client_of, metric, serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.control.membership import Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.bodies.fields import named
from kv_connector.router.engines.client import EngineReply
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, Side
from kv_connector.router.engines.models import longest, merged, names
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio


class Engine(FakeEngine):
    """Lists its models, and answers a request for another model as vLLM does."""

    def __init__(self, *models: str, listed: Collection[str] | None = None) -> None:
        super().__init__(self.answer)
        self.served = {*models}
        self.listed = self.served if listed is None else listed

    async def models(self, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "of": self.url} for name in self.listed]}
        )

    async def answer(self, request: Request, body: dict[str, Any]) -> Response:
        if (model := body.get("model")) not in self.served:
            if str(model).startswith("nobody-wants/"):
                self.bodies.remove(body)
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "code": 404}
            return JSONResponse({"error": error}, 404)
        return await answer_ok(request, body)

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"by": self.url})


@contextlib.asynccontextmanager
async def router(
    prefill: Collection[Engine], decode: Collection[Engine], **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a router over these engines. The router knows their lists."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in {*prefill, *decode}:
            engine.url = await stack.enter_async_context(serve(engine.app))
        endpoints: dict[str, Any] = {
            "prefill": tuple(Endpoint.parse(engine.url) for engine in prefill),
            "decode": tuple(Endpoint.parse(engine.url) for engine in decode),
        }
        app = create_app(RouterSettings(**endpoints, status_details=True, **settings))
        client = await stack.enter_async_context(client_of(await stack.enter_async_context(serve(app))))
        await until_known(client, *prefill, *decode)
        yield client


async def until_known(client: httpx.AsyncClient, *engines: Engine) -> None:
    """Waits until the router knows the engines' current lists."""
    wanted = {engine.url: sorted(engine.listed) for engine in engines}
    async with asyncio.timeout(PATIENCE):
        while True:
            told = (await client.get("/status.json")).json()["engines"]
            if all(one.get("models") == wanted.get(one["address"], one.get("models")) for one in told):
                return
            await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for


async def ask(client: httpx.AsyncClient, model: str) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "x"})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each query of the status compute a new one."""
    monkeypatch.setattr("kv_connector.router.front.status._FRESH_SECONDS", 0.0)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_two_models_behind_one_router(dispatch: str) -> None:
    prefill, decode = [Engine("a"), Engine("b")], [Engine("a"), Engine("b")]
    async with router(prefill, decode, dispatch=dispatch) as client:
        for model in ("a", "b", "b", "a", "b"):
            assert (await ask(client, model)).status_code == 200
            tokenized = await client.post("/tokenize", json={"model": model, "prompt": "x"})
            assert tokenized.json()["by"] == decode["ab".index(model)].url
        answer = (await client.get("/v1/models")).json()
        assert sorted((one["id"], one["of"]) for one in answer["data"]) == [
            ("a", decode[0].url),
            ("b", decode[1].url),
        ]
        assert answer["object"] == "list"
        assert await metric(client, "kv_connector_router_retries_total") == 0
    for engines in (prefill, decode):
        assert [[body["model"] for body in engine.bodies] for engine in engines] == [["a"] * 2, ["b"] * 3]


async def test_model_that_no_engine_has_is_404_at_once() -> None:
    prefill, decode = [Engine("a"), Engine("a")], [Engine("a"), Engine("a")]
    async with router(prefill, decode) as client:
        answer = await ask(client, "b")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "The model `b` does not exist."
        assert await metric(client, "kv_connector_router_retries_total") == 0
    assert sum(len(engine.bodies) for engine in prefill) == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_that_lists_an_adapter_it_lacks_is_replaced_by_another(side: str) -> None:
    """An adapter was unloaded after the router had read the list."""
    lacking, having = Engine("a", listed=["a", "adapter"]), Engine("a", "adapter")
    engines = {"prefill": [having], "decode": [having]} | {side: [lacking, having]}
    # Serial, because the fake decode engine does not wait for pages, as a real one does.
    async with router(**engines, dispatch="serial") as client:
        for _ in range(4):
            assert (await ask(client, "adapter")).status_code == 200
        assert await metric(client, "kv_connector_router_retries_total") == 1, "it is not asked again"
        states = (await client.get("/health")).json()[side]
        assert set(states.values()) == {"ready"}
        told = (await client.get("/status.json")).json()["engines"]
        assert next(one["models"] for one in told if one["address"] == lacking.url) == ["a"]


async def test_an_adapter_that_only_decode_engines_have_is_served_by_them_alone() -> None:
    p, d = Engine("a"), Engine("a", "adapter")
    async with router([p], [d], patience=0.05) as client:
        assert (await ask(client, "adapter")).status_code == 200
        name = 'kv_connector_router_local_prefills_total{reason="no_prefill"}'
        assert await metric(client, name) == 1
    assert not p.bodies


async def test_a_model_whose_engine_takes_no_requests_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.front.registry._PROBE_S", 0.02)
    monkeypatch.setattr("kv_connector.router.front.registry._WATCH_S", 0.02)
    a, b = Engine("a"), Engine("b")
    async with router([a, b], [a, b], patience=0.05) as client:
        b.health = no_health
        async with asyncio.timeout(PATIENCE):
            while (await client.get("/health")).json()["decode"][b.url] == "ready":
                await asyncio.sleep(0.01)
        answer = await ask(client, "b")
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert "no decode engine for the model b takes requests" in message
        assert f"{b.url} is unreachable" in message
        assert (await ask(client, "a")).status_code == 200


async def no_health(request: Request) -> Response:
    return Response(status_code=503)


async def test_an_adapter_that_is_loaded_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.engines.members._LEARN_S", 0.01)
    p, with_it, without = Engine("a"), Engine("a"), Engine("a")
    async with router([p], [without, with_it]) as client:
        for engine in (p, with_it):
            engine.served.add("adapter")
        await until_known(client, p, with_it)
        for _ in range(3):
            assert (await ask(client, "adapter")).status_code == 200
    assert (len(with_it.bodies), len(without.bodies)) == (3, 0)


async def test_engines_that_do_not_list_their_models_are_placed_as_before() -> None:
    """With --api-key the lists need a key, which a router does not have."""

    class Closed(Engine):
        async def models(self, request: Request) -> Response:
            return JSONResponse({"error": "Unauthorized"}, 401)

    p, d = Closed("a", listed=()), Closed("a", listed=())
    async with contextlib.AsyncExitStack() as stack:
        for engine in (p, d):
            engine.url = await stack.enter_async_context(serve(engine.app))
        app = create_app(RouterSettings((Endpoint.parse(p.url),), (Endpoint.parse(d.url),)))
        url = await stack.enter_async_context(serve(app))
        client = await stack.enter_async_context(client_of(url))
        assert (await ask(client, "a")).status_code == 200
        assert (await ask(client, "b")).status_code == 404
        assert (await client.get("/v1/models")).status_code == 401
    assert len(p.bodies) == 2


# --- Parts


def reply(*models: Any, status: int = 200) -> EngineReply:
    return EngineReply(
        status, "application/json", json.dumps({"data": [{"id": one} for one in models]}).encode()
    )


def test_a_list_of_models_has_a_bound() -> None:
    url = "http://h:1"
    assert names(url, reply("a", "b")) == {"a", "b"}
    assert names(url, reply(*map(str, range(1024)))) is not None
    assert names(url, reply(*map(str, range(1025)))) is None
    assert names(url, reply("x" * 1025)) is None
    assert names(url, reply(7)) is None
    assert names(url, reply("a", status=401)) is None
    assert names(url, reply()) is None
    assert names(url, EngineReply(200, "text/html", b"<html>")) is None


def test_the_model_of_a_body() -> None:
    assert named(b'{"model": "a", "messages": [{}]}') == "a"
    assert [named(body) for body in (b"", b"{}", b"[1]", b'{"model": 7}', b"\xff")] == [None] * 5


def test_a_merged_list_has_each_model_once() -> None:
    whole = json.loads(merged([reply("a", "b"), reply("b", "c")]).body)
    assert whole == {"data": [{"id": "a"}, {"id": "b"}, {"id": "c"}]}


def test_the_last_engine_of_a_model_is_known_and_another_one_is_waited_for() -> None:
    pools = {side: Pool() for side in Side}
    members = Members(pools, {}, Incidents(), suspect=3.0, dead=5.0)
    for port, models in ((1, {"a", "b"}), (2, {"a"})):
        fields = (f"d{port}", "1", Role.DECODE, f"http://h:{port}", "h", 5600)
        endpoint = members.register(0.0, Register(*fields))
        members.learnt(endpoint, frozenset(models))
        members.answered(endpoint)
    assert members.last("http://h:1") is Side.DECODE, "the other one has no b"
    assert members.last("http://h:2") is None
    members.drain("http://h:1")
    pool = pools[Side.DECODE]
    assert pool.known("b") == "b", "its engine drains"
    assert pool.known("c") is None
    assert not pool.usable(model="b")

    async def waits() -> bool:
        waiting = asyncio.ensure_future(pool.wait_usable(PATIENCE, "b"))
        await asyncio.sleep(0)
        members.learnt(Endpoint("http://h:2", "h", 5600), frozenset({"a", "b"}))
        await waiting
        return pool.usable(model="b")

    assert asyncio.run(waits())


def test_body_names_its_model_as_vllm_reads_it() -> None:
    assert named(b'\xef\xbb\xbf{"model": "a"}') == "a"
    assert named(b'{"model": "a", "mod\\u0065l": "b"}') == "b"


def test_model_that_is_a_long_list_becomes_no_objects() -> None:
    body = b'{"model":[' + b"{}," * (1 << 18) + b"{}]}"
    tracemalloc.start()
    try:
        assert named(body) is None
        assert tracemalloc.get_traced_memory()[1] < len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("status", "body", "length"),
    [
        (200, b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": 10}, {"max_model_len": 9}]}', 10),
        (200, b'{"data": [{"id": "a"}]}', None),
        (200, b'{"data": [{"id": "a", "max_model_len": "10"}]}', None),
        (200, b"[]", None),
        (404, b'{"data": [{"max_model_len": 10}]}', None),
    ],
)
def test_longest_model_is_that_with_the_most_tokens(status: int, body: bytes, length: int | None) -> None:
    assert longest(EngineReply(status, "application/json", body)) == length
