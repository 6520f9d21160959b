"""Prefetches: after an answer, the prefill engine loads it from the decode engine. Over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from checkpoints import BASE, TUNED
from fake_vllm import LENGTH, FakeVllm, ids_of
from router_setup import PATIENCE, client_of, serve, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stream_site import CHAT, COMPLETION, StreamReading, said

from kv_connector.control.membership import Register
from kv_connector.control.registrar import Registrar
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import PolicyName, RouterSettings
from kv_connector.router.streams.prefetches import LEAST_TOKENS, MOST_AT_ONCE, Prefetches
from kv_connector.router.streams.running import SPARE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("unwatched")]

ANSWER = 100
USER = {"role": "user", "content": "Why?"}
NAME = "kv_connector_router_answer_prefetches_total"


class Prefill(FakeVllm):
    """A prefill engine that answers a prefetch with ``loads`` tokens, once ``free`` is set."""

    def __init__(self) -> None:
        super().__init__(1)
        self.loads: int | None = ANSWER
        self.status = 200
        self.free = asyncio.Event()
        self.free.set()
        self.prefetches: list[dict[str, Any]] = []
        self.came = asyncio.Event()

    async def answer(self, request: Request, body: dict[str, Any]) -> Response:
        prefix = (body.get("kv_transfer_params") or {}).get("prefix_from") or {}
        if "prefetch" not in prefix:
            return await super().answer(request, body)
        self.bodies.remove(body)
        self.prefetches.append(body)
        self.came.set()
        await self.free.wait()
        params = None if self.loads is None else {"prefetched_tokens": self.loads}
        return JSONResponse({"choices": [], "kv_transfer_params": params}, self.status)


class Site:
    def __init__(self, p: Prefill, d: FakeVllm, client: httpx.AsyncClient) -> None:
        self.p, self.d, self.client = p, d, client
        self.registered: dict[Role, Registrar] = {}

    async def stream(self, path: str, body: dict[str, Any], name: str = "one") -> str:
        """Sends a request; returns the text of its answer, once the router has handled its end."""
        events = await StreamReading(self.client, path, {"max_tokens": ANSWER, **body}, name).end()
        await self.rest()
        return said(events)[0]

    async def rest(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while (await self.client.get("/load")).json()["server_load"]:
                await asyncio.sleep(0.001)  # polled: there is no event to wait for

    async def outcomes(self) -> dict[str, float]:
        lines = (await self.client.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith(NAME)]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}

    async def until(self, **outcomes: float) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.outcomes() != outcomes:
                await asyncio.sleep(0.001)  # polled: there is no event to wait for

    async def register(self, role: Role, **facts: Any) -> None:
        engine, port = (self.p, 5601) if role is Role.PREFILL else (self.d, 5602)
        facts = {"prefixes": "key", "borrows": True, "prefetches": True, **facts}
        message = Register(role.value, "1", role, engine.url, "10.0.0.7", port, **facts)
        if role in self.registered:
            self.registered.pop(role).close()
        self.registered[role] = Registrar(message, [self.address], None)

    address: Address


@contextlib.asynccontextmanager
async def site(
    p_facts: dict[str, Any] | None = None, d_facts: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Site]:
    p, d = Prefill(), FakeVllm(2)
    address = Address("127.0.0.1", free_ports(1)[0])
    async with serve(p.app) as p.url, serve(d.app) as d.url:
        listed = {
            "prefill": (Endpoint.parse(f"{p.url}@10.0.0.7:5601"),),
            "decode": (Endpoint.parse(d.url),),
            "registration": address,
            "policy": PolicyName.CACHE_AWARE,
            "patience": PATIENCE,
        }
        async with (
            serve(create_app(RouterSettings(**{**listed, **settings}))) as url,
            client_of(url) as client,
        ):
            made = Site(p, d, client)
            made.address = address
            await made.register(Role.PREFILL, **(p_facts or {}))
            await made.register(Role.DECODE, **(d_facts or {}))
            try:
                async with asyncio.timeout(PATIENCE):
                    while any(one["silence"] is None for one in await status(client)):
                        await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for
                yield made
            finally:
                for registrar in made.registered.values():
                    registrar.close()


async def status(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = (await client.get("/status.json")).json()["engines"]
    return engines


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_connector.router.front.status._FRESH_SECONDS", 0.0)


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_prefill_engine_loads_the_answer_of_a_chat(dispatch: str) -> None:
    async with site(dispatch=dispatch) as s:
        await s.stream(CHAT, {"messages": [USER], "cache_salt": "salt", "temperature": 0.5})
        await s.until(loaded=1)
        (body,) = s.p.prefetches
        prompt = ids_of([USER])
        assert body["prompt"][: len(prompt)] == prompt
        assert len(body["prompt"]) == len(prompt) + ANSWER
        most = body["kv_transfer_params"]["prefix_from"].pop("prefetch")
        assert ANSWER < most <= ANSWER + 256
        had = len(prompt) + ANSWER - 1
        assert body.pop("prompt")
        assert body == {
            "model": "m",
            "cache_salt": "salt",
            "max_tokens": 1,
            "kv_transfer_params": {"prefix_from": {"host": "10.0.0.7", "port": 5602, "tokens": had}},
        }
        text = (await s.client.get("/metrics")).text
        assert f"kv_connector_router_prefetched_tokens_total {ANSWER:.1f}" in text
        engines = {one["name"]: one for one in await status(s.client)}
        assert engines["prefill 1"]["cache"]["borrowed"] == {"decode 1": ANSWER}


@pytest.mark.parametrize(("loads", "proposed"), [(ANSWER, False), (0, True)])
async def test_router_proposes_no_prefix_that_the_prefill_engine_has_loaded(
    loads: int, proposed: bool
) -> None:
    async with site() as s:
        s.p.loads = loads
        answer = await s.stream(CHAT, {"messages": [USER], "max_tokens": LEAST_TOKENS})
        await s.until(**{"loaded" if loads else "declined": 1})
        turns = [USER, {"role": "assistant", "content": answer}, USER]
        assert len(ids_of(turns)) < LENGTH - 10
        body = {"messages": turns, "max_tokens": 10, "stream": False, "model": "m"}
        await within(s.client.post(CHAT, json=body))
        assert ("prefix_from" in s.p.bodies[-1]["kv_transfer_params"]) is proposed


SESSION: dict[str, Any] = {"user": "someone", "return_token_ids": True}


@pytest.mark.parametrize(
    ("path", "body", "prefetched"),
    [
        (COMPLETION, {"prompt": [5, 6, 7]}, False),
        (COMPLETION, {"prompt": [5, 6, 7], **SESSION}, True),
        (COMPLETION, {"prompt": "Why?", "user": "someone"}, True),
        (CHAT, {"messages": [USER], "max_tokens": LEAST_TOKENS - 1}, False),
        (CHAT, {"messages": [USER], "max_tokens": LEAST_TOKENS}, True),
    ],
)
async def test_answer_is_loaded_if_it_is_long_and_a_conversation_may_go_on(
    path: str, body: dict[str, Any], prefetched: bool
) -> None:
    async with site() as s:
        await s.stream(path, body)
        if prefetched:
            await s.until(loaded=1)
        assert await s.outcomes() == ({"loaded": 1} if prefetched else {})


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
WITH_IDS = [
    {"stop": ["x"]},
    {"tools": [TOOL]},
    {"logprobs": True, "top_logprobs": 2},
    {"tools": [TOOL], "logprobs": True},
    {"response_format": {"type": "json_object"}},
    {"seed": 7, "presence_penalty": 0.5},
    {"a_field_that_the_router_does_not_know": 1},
]


@pytest.mark.parametrize("more", WITH_IDS)
async def test_answer_of_a_stream_that_cannot_move_is_loaded(more: dict[str, Any]) -> None:
    """The client gets the events that it gets without prefetches."""
    body = {"messages": [USER], "max_tokens": ANSWER, **more}
    raw = []
    for prefetches in (False, True):
        async with site(prefetch_answers=prefetches) as s:
            reading = StreamReading(s.client, CHAT, body)
            await reading.end()
            raw.append(reading.raw)
            if prefetches:
                await s.until(loaded=1)
                (sent,) = s.p.prefetches
                prompt = ids_of([USER])
                assert sent["prompt"][: len(prompt)] == prompt
                assert len(sent["prompt"]) == len(prompt) + ANSWER
    assert raw[0] == raw[1]
    assert b'"token_ids":[' not in raw[1]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_answer_that_is_no_stream_is_loaded(path: str, own: bool) -> None:
    prompt = {"messages": [USER]} if path == CHAT else {"prompt": [5, 6, 7]}
    body = {**prompt, "model": "m", "user": "someone", "max_tokens": ANSWER, "return_token_ids": own}
    answers = []
    for prefetches in (False, True):
        async with site(prefetch_answers=prefetches) as s:
            answers.append((await within(s.client.post(path, json=body))).json())
            if prefetches and (own or path == CHAT):
                await s.until(loaded=1)
                (sent,) = s.p.prefetches
                ids = ids_of(body.get("messages") or body["prompt"])
                assert sent["prompt"][: len(ids)] == ids
                assert len(sent["prompt"]) == len(ids) + ANSWER
    assert answers[0] == answers[1]
    assert (answers[1]["choices"][0]["token_ids"] is not None) is own


async def test_answer_to_a_picture_is_not_loaded() -> None:
    """The token ids of all pictures are alike."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    async with site() as s:
        await s.stream(CHAT, {"messages": [{"role": "user", "content": [picture]}]})
        assert await s.outcomes() == {"unknown": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"n": 2}, {"return_token_ids": "yes"}])
async def test_engine_gets_no_request_for_token_ids_that_the_router_cannot_use(
    more: dict[str, Any], stream: bool
) -> None:
    async with site() as s:
        body = {"messages": [USER], "model": "m", "max_tokens": ANSWER, "stream": stream, **more}
        await within(s.client.post(CHAT, json=body))
        await s.rest()
        assert s.d.bodies[-1].get("return_token_ids") == more.get("return_token_ids")
        assert await s.outcomes() == {"unknown": 1}


async def test_answer_whose_token_ids_the_engine_hides_is_counted() -> None:
    """vLLM hides them if the client wants no reasoning."""
    async with site() as s:
        s.d.hides = True
        for stream in (False, True):
            body = {"messages": [USER], "model": "m", "max_tokens": ANSWER, "stream": stream}
            await within(s.client.post(CHAT, json=body))
        await s.until(unknown=2)


async def test_request_of_no_conversation_has_no_token_ids() -> None:
    async with site() as s:
        await within(s.client.post(COMPLETION, json={"prompt": "Why?", "model": "m", "max_tokens": ANSWER}))
        assert "return_token_ids" not in s.d.bodies[-1]


async def test_token_ids_for_prefetches_leave_room_for_streams_that_can_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = len(json.dumps(ids_of([USER])))
    monkeypatch.setattr("kv_connector.router.streams.moves.MOST_IDS", SPARE + length)
    async with site() as s:
        await s.stream(CHAT, {"messages": [USER], "stop": ["x"]})
        await s.until(unknown=1)
        await s.stream(CHAT, {"messages": [USER]})
        await s.until(unknown=1, loaded=1)


async def test_answers_that_next_turns_write_otherwise_are_not_loaded() -> None:
    async with site() as s:
        hits = {}
        for number in range(7):
            messages = [{"role": "user", "content": f"{number}"}]
            had = len(ids_of(messages))
            answer = await s.stream(CHAT, {"messages": messages, "max_tokens": LEAST_TOKENS})
            messages += [{"role": "assistant", "content": answer}, USER]
            await s.stream(CHAT, {"messages": messages, "max_tokens": 1})
            transfer_id = s.d.bodies[-1]["kv_transfer_params"]["transfer_id"]
            hits[transfer_id] = len(ids_of(messages)), had
        assert "rewritten" not in await s.outcomes()
        s.registered[Role.DECODE].add_hits(hits)
        async with asyncio.timeout(PATIENCE):
            while "rewritten" not in await s.outcomes():
                await s.stream(CHAT, {"messages": [USER]})


async def test_answer_that_thinks_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn repeats it without its reasoning."""
    monkeypatch.setattr("fake_vllm.Detokenizer.text", lambda *_, **__: "a thought</think>")
    async with site() as s:
        await s.stream(CHAT, {"messages": [USER]})
        assert await s.outcomes() == {}


Facts = dict[str, Any]


@pytest.mark.parametrize(
    ("p_facts", "d_facts"),
    [
        ({"prefetches": False}, {}),
        ({"prefixes": ""}, {"prefixes": ""}),
        ({"prefixes": "other"}, {}),
        ({}, {"keeps_answers": False}),
        ({"checkpoint": BASE}, {"checkpoint": TUNED}),
    ],
)
async def test_engines_that_exchange_no_prefixes_get_no_prefetch(p_facts: Facts, d_facts: Facts) -> None:
    async with site(p_facts, d_facts) as s:
        await s.stream(CHAT, {"messages": [USER]})
        assert await s.outcomes() == {}
        await s.stream(CHAT, {"messages": [USER], "stop": ["x"]})
        assert "return_token_ids" not in s.d.bodies[-1], "the router does not use them"


async def test_engine_does_not_load_from_itself() -> None:
    """A stream may have moved to its own prefill engine."""
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2)]
    pools = {side: Pool() for side in Side}
    for pool in pools.values():
        for one in engines:
            pool.set_usable(one, True, prefixes="key", prefetches=True)
    absent: Any = None
    prefetches = Prefetches(pools, absent, absent, absent, PATIENCE)
    assert prefetches.able(*engines)
    assert not prefetches.able(engines[0], engines[0])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_draining_engine_gets_and_lends_no_prefetch(role: Role) -> None:
    async with site() as s:
        s.d.limits = (5, s.d.limits[1])
        reading = StreamReading(s.client, CHAT, {"messages": [USER], "max_tokens": ANSWER})
        await reading.until(3)
        await s.register(role, draining=True)
        async with asyncio.timeout(PATIENCE):
            while "draining" not in [one["state"] for one in await status(s.client)]:
                await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for
        s.d.go.set()
        await reading.end()
        await s.rest()
        assert await s.outcomes() == {}


@pytest.mark.parametrize("settings", [{"prefetch_answers": False}, {"policy": PolicyName.FEWEST_OUTSTANDING}])
async def test_router_without_prefetches_sends_none(settings: dict[str, Any]) -> None:
    async with site(**settings) as s:
        await s.stream(CHAT, {"messages": [USER]})
        assert not s.p.prefetches
        assert await s.outcomes() == {}


async def test_prefill_engine_has_few_prefetches_at_once() -> None:
    async with site() as s:
        s.p.free.clear()
        for number in range(MOST_AT_ONCE + 2):
            await s.stream(CHAT, {"messages": [{"role": "user", "content": f"{number}"}]}, f"r{number}")
        await s.until(busy=2)
        s.p.free.set()
        await s.until(busy=2, loaded=MOST_AT_ONCE)
        await s.stream(CHAT, {"messages": [USER]})
        await s.until(busy=2, loaded=MOST_AT_ONCE + 1)


def refuse(p: Prefill) -> None:
    p.status = 503


def break_off(p: Prefill) -> None:
    async def broken(_: Request, __: dict[str, Any]) -> Response:
        raise RuntimeError("a broken engine")

    answer = p.answer

    async def handler(request: Request, body: dict[str, Any]) -> Response:
        prefix = (body.get("kv_transfer_params") or {}).get("prefix_from") or {}
        return await (broken if "prefetch" in prefix else answer)(request, body)

    p.handler = handler


def be_older(p: Prefill) -> None:
    p.loads = None


@pytest.mark.parametrize(
    ("change", "outcome"), [(refuse, "failed"), (break_off, "failed"), (be_older, "declined")]
)
async def test_failed_prefetch_costs_the_next_turn_nothing(
    change: Callable[[Prefill], None], outcome: str
) -> None:
    async with site() as s:
        change(s.p)
        await s.stream(CHAT, {"messages": [USER]})
        await s.until(**{outcome: 1})
        assert await s.stream(CHAT, {"messages": [USER]})
        states = [one["state"] for one in await status(s.client)]
        assert states == ["ready", "ready"], "its failure is no engine's fault that requests notice"


async def test_prefetch_without_an_answer_ends_in_time() -> None:
    async with site(patience=0.05) as s:
        s.p.free.clear()
        await s.stream(CHAT, {"messages": [USER]})
        await s.until(failed=1)
        s.p.free.set()


async def test_router_that_ends_cancels_its_prefetches() -> None:
    async with site(patience=600) as s:
        s.p.free.clear()
        await s.stream(CHAT, {"messages": [USER]})
        await within(s.p.came.wait())
    s.p.free.set()
