"""Conversations through a router with two prefill and two decode engines, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from router_setup import PATIENCE, FakeEngine, client_of, metric, serve, serve_engines, within
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kv_connector.control.membership import Register
from kv_connector.control.registrar import Registrar
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import Objectives, PolicyName, RouterSettings

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ANSWER = "Because the answer of a decode engine is a part of the next turn. " * 20


async def prefill(request: Request, body: dict[str, Any]) -> Response:
    usage = {"prompt_tokens": 1000}
    params = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 640}
    message = {"role": "assistant", "content": "B"}
    choices = [{"index": 0, "message": message, "text": "B", "finish_reason": "length"}]
    return JSONResponse({"choices": choices, "usage": usage, "kv_transfer_params": params})


async def decode(request: Request, body: dict[str, Any]) -> Response:
    text = body.get("prompt") is not None
    if not body.get("stream"):
        message = {"role": "assistant", "content": ANSWER, "refusal": None}
        choice = {"text": ANSWER} if text else {"message": message}
        details = {"cached_tokens": 320}
        usage = {"prompt_tokens": 1000, "prompt_tokens_details": details}
        return JSONResponse({"choices": [{"index": 0, "finish_reason": "stop", **choice}], "usage": usage})

    async def events() -> AsyncIterator[bytes]:
        for at in range(0, len(ANSWER), 7):
            part = ANSWER[at : at + 7]
            choice = {"text": part} if text else {"delta": {"content": part}}
            yield b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, **choice}]}).encode()
        last: dict[str, Any] = {"text": ""} if text else {"delta": {}}
        end = {"choices": [{"index": 0, "finish_reason": "stop", **last}]}
        yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(end).encode()

    return StreamingResponse(events(), media_type="text/event-stream")


class Site:
    def __init__(self, p: list[FakeEngine], d: list[FakeEngine], client: httpx.AsyncClient) -> None:
        self.p, self.d, self.client = p, d, client

    async def ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[int, int]:
        """Sends a request; returns the numbers of its prefill and its decode engine."""
        before = [len(engine.bodies) for engine in (*self.p, *self.d)]
        answer = await within(self.client.post(path, json={"model": "m", **body}, headers=headers))
        assert answer.status_code == 200, answer.text
        got = [len(engine.bodies) for engine in (*self.p, *self.d)]
        new = [number for number, (a, b) in enumerate(zip(before, got, strict=True)) if b > a]
        # The router notes the end of an answer after the client has it.
        async with asyncio.timeout(PATIENCE):
            while (await self.client.get("/load")).json()["server_load"]:
                await asyncio.sleep(0.001)  # polled: there is no event to wait for
        return (new[0] if new[0] < len(self.p) else -1), new[-1] - len(self.p)

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.client.get("/status.json")).json()
        return answer


@contextlib.asynccontextmanager
async def site(prefills: int = 2, decodes: int = 2, **settings: Any) -> AsyncIterator[Site]:
    async with serve_engines([prefill] * prefills, [decode] * decodes) as (p, d, listed):
        listed["prefill"] = tuple(Endpoint.parse(f"{one.url}@10.0.0.1:{5601 + n}") for n, one in enumerate(p))
        chosen = RouterSettings(**{**listed, "policy": PolicyName.CACHE_AWARE, **settings})
        async with serve(create_app(chosen)) as url, client_of(url) as client:
            yield Site(p, d, client)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
@pytest.mark.parametrize("stream", [True, False])
async def test_router_sends_the_turns_of_a_chat_to_the_same_engines(dispatch: str, stream: bool) -> None:
    async with site(dispatch=dispatch) as s:
        chats = [[{"role": "user", "content": f"{number}: why?"}] for number in range(4)]
        places = []
        for turns in chats:
            places.append(await s.ask(CHAT, {"messages": turns, "stream": stream}))
            turns += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And?"}]
        assert len(set(places)) > 1
        for turns, place in zip(reversed(chats), reversed(places), strict=True):
            assert await s.ask(CHAT, {"messages": turns, "stream": stream}) == place
        for reason in ("cached", "least_work"):
            name = f'kv_connector_router_placements_total{{prompt="prefill",reason="{reason}"}}'
            assert await metric(s.client, name) == 4


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("stream", [True, False])
async def test_router_finds_the_answer_of_a_completion_in_the_next_prompt(stream: bool) -> None:
    """The second prompt differs from the first one within its first KiB: only the answer's KV is common."""
    async with site() as s:
        place = await s.ask("/v1/completions", {"prompt": "Why?", "stream": stream})
        await s.ask("/v1/completions", {"prompt": "Never seen", "stream": stream})
        body = {"prompt": "Why?" + ANSWER, "stream": stream}
        assert (await s.ask("/v1/completions", body))[1] == place[1]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize(
    ("headers", "body"), [({"x-session-id": "a"}, {}), ({}, {"prompt_cache_key": "a"}), ({}, {"user": "a"})]
)
async def test_router_takes_the_sessions_engines_where_all_are_equal(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    async with site() as s:
        places = set()
        for number in range(3):  # the decode engine counts 1,000 tokens for each
            messages = [{"role": "user", "content": f"{number}"}]
            places.add(await s.ask(CHAT, {"messages": messages, **body}, headers))
        assert len(places) == 1


@pytest.mark.usefixtures("unwatched")
async def test_router_counts_predicted_and_actual_hits_of_both_sides() -> None:
    async with site(1, 1) as s:
        for _ in range(2):
            await s.ask(CHAT, {"messages": [{"role": "user", "content": "x" * 4000}]})
        side = '_hit_tokens_total{side="prefill"}'
        assert await metric(s.client, f"kv_connector_router_actual{side}") == 2 * 640
        assert await metric(s.client, f"kv_connector_router_predicted{side}") == 999, (
            "not the last token, and nothing of the first"
        )
        assert await metric(s.client, f"kv_connector_router_confirmed{side}") == 640, "of the second one"
        assert await metric(s.client, 'kv_connector_router_actual_hit_tokens_total{side="decode"}') == 0


@pytest.mark.usefixtures("unwatched")
async def test_router_counts_hits_of_prompts_that_decode_engines_compute() -> None:
    registration = Address("127.0.0.1", free_ports(1)[0])
    async with site(0, 2, registration=registration, patience=0.01) as s:
        body = {"messages": [{"role": "user", "content": "x" * 4000}]}
        places = [(await s.ask(CHAT, body))[1] for _ in range(3)]
        assert len(set(places)) == 1, "the first one has the prefix"
        name = 'kv_connector_router_placements_total{prompt="decode",reason="no_prefill"}'
        assert await metric(s.client, name) == 3
        side = '_hit_tokens_total{side="decode"}'
        assert await metric(s.client, f"kv_connector_router_actual{side}") == 3 * 320
        assert await metric(s.client, f"kv_connector_router_predicted{side}") >= 1000


@pytest.mark.usefixtures("unwatched")
async def test_router_with_fewest_outstanding_takes_turns_and_records_nothing() -> None:
    async with site(policy=PolicyName.FEWEST_OUTSTANDING) as s:
        messages = [{"role": "user", "content": "x" * 4000}]
        places = [await s.ask(CHAT, {"messages": messages}) for _ in range(4)]
        assert places[0] != places[1]
        assert places[:2] == places[2:]
        text = (await s.client.get("/metrics")).text
        assert (
            'predicted_hit_tokens_total{side="prefill"} 0' in text
            or "predicted_hit_tokens_total{" not in text
        )


async def register(s: Site, address: Address, stack: contextlib.ExitStack) -> None:
    """Registers all engines, as engines that exchange prefixes."""
    engines = [(Role.PREFILL, one) for one in s.p] + [(Role.DECODE, one) for one in s.d]
    for port, (role, engine) in enumerate(engines, 5601):
        facts: dict[str, Any] = {"prefixes": "key", "borrows": True}
        message = Register(role.value, "1", role, engine.url, "10.0.0.7", port, **facts)
        registrar = Registrar(message, [address], None)
        stack.callback(registrar.close)
    async with asyncio.timeout(PATIENCE):
        while any(one["silence"] is None for one in (await s.status())["engines"]):
            await asyncio.sleep(0.01)  # each query is a request: there is no event to wait for


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
@pytest.mark.parametrize("stream", [True, False])
async def test_router_proposes_to_load_the_answer_from_the_decode_engine(
    monkeypatch: pytest.MonkeyPatch, dispatch: str, stream: bool
) -> None:
    monkeypatch.setattr("kv_connector.router.front.status._FRESH_SECONDS", 0.0)
    address = Address("127.0.0.1", free_ports(1)[0])
    with contextlib.ExitStack() as stack:
        async with site(1, 1, dispatch=dispatch, registration=address) as s:
            await register(s, address, stack)
            turns = [{"role": "user", "content": "Why?"}]
            await s.ask(CHAT, {"messages": turns, "stream": stream})
            turns += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And?"}]
            await s.ask(CHAT, {"messages": turns, "stream": stream})
            first, second = (body["kv_transfer_params"] for body in s.p[0].bodies)
            assert "prefix_from" not in first
            proposed = second["prefix_from"]
            assert (proposed["host"], proposed["port"]) == ("10.0.0.7", 5602)
            assert proposed["tokens"] == pytest.approx(len(ANSWER) / 4, rel=0.2)
            assert [body["kv_transfer_params"].get("prefix_from") for body in s.d[0].bodies] == [None, None]
            name = 'kv_connector_router_prefix_proposals_total{result="borrowed"}'
            assert await metric(s.client, name) == 1, "640 of 1,000 tokens are cached"
            borrowed = await metric(s.client, "kv_connector_router_borrowed_tokens_total")
            assert 600 < borrowed <= 640
            engines = {one["name"]: one for one in (await s.status())["engines"]}
            assert engines["prefill 1"]["cache"]["borrowed"] == {"decode 1": borrowed}
            assert "cache" not in engines["decode 1"]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("stream", [True, False])
async def test_router_without_prefill_engines_proposes_the_other_decode_engine(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("kv_connector.router.front.status._FRESH_SECONDS", 0.0)
    address = Address("127.0.0.1", free_ports(1)[0])
    goodput = {"policy": PolicyName.GOODPUT, "objectives": Objectives(1.0, 1.0)}
    with contextlib.ExitStack() as stack:
        async with site(0, 2, registration=address, patience=0.01, **goodput) as s:
            await register(s, address, stack)
            turns = [{"role": "user", "content": "Why? " * 800}]
            first = await s.ask(CHAT, {"messages": turns, "stream": stream})
            second = await s.ask(CHAT, {"messages": turns, "stream": stream})
            assert first != second, "engines take turns"
            params = [engine.bodies[0].get("kv_transfer_params") for engine in s.d]
            lender, borrower = first[1], second[1]
            assert params[lender] is None
            sent = params[borrower]
            assert sent is not None
            proposed = sent["prefix_from"]
            assert (proposed["host"], proposed["port"]) == ("10.0.0.7", 5601 + lender)
            assert proposed["tokens"] == pytest.approx(1000, rel=0.1)
            assert sent.keys() == {"prefix_from"}
            result = "unknown" if stream else "borrowed"  # the stream reports no usage
            name = f'kv_connector_router_prefix_proposals_total{{result="{result}"}}'
            assert await metric(s.client, name) == 1
            engines = {one["name"]: one for one in (await s.status())["engines"]}
            cache = engines[f"decode {borrower + 1}"].get("cache")
            assert (cache is None) == stream
            if cache is not None:
                assert cache["borrowed"] == {f"decode {lender + 1}": 320}
