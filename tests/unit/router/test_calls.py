"""Calls: the outcome of each request to an engine, and which engine it counts against."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from router_setup import Handler, nobody, refuse, serve_engine, streaming, within
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kv_connector.control.membership import Register
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.breaker import FAILURES
from kv_connector.router.engines.client import EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, MemberStatus, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.failure import Failure
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.requests.early_token import EarlyToken
from kv_connector.router.streams.calls import Call, Calls, EngineError, EngineFailure

pytestmark = pytest.mark.anyio

CALL = Call("/v1/completions", {}, "request")
TOKEN = b'data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
DONE = b"data: [DONE]\n\n"


def answering(body: bytes) -> Handler:
    async def handler(request: Request, _: dict[str, Any]) -> Response:
        return Response(body, media_type="application/json")

    return handler


class Site:
    """Calls to one prefill and one decode engine."""

    def __init__(self, client: EngineClient, prefill: Endpoint, decode: Endpoint) -> None:
        self.prefill, self.decode = prefill, decode
        self.pools = {side: Pool() for side in Side}
        engines = {Side.PREFILL: [prefill], Side.DECODE: [decode]}
        self.members = Members(self.pools, engines, Incidents(), suspect=3.0, dead=5.0)
        self.incidents = Incidents()
        self.calls = Calls(client, self.members, Metrics(), self.incidents, Spans.to(None))

    def state(self, side: Side) -> MemberStatus:
        (state,) = self.members.states()[side].values()
        return state

    async def load(self, stack: AsyncExitStack) -> bytes:
        """The whole answer of a request whose prompt the prefill engine computes."""
        with self.pools[Side.DECODE].lease(self.decode) as lease:
            answer = await self.calls.load("t", self.prefill, lease, b"{}", CALL, stack)
            return b"".join([chunk async for chunk in answer.chunks])


@contextlib.asynccontextmanager
async def site(prefill: Handler, decode: Handler) -> AsyncIterator[Site]:
    async with serve_engine(prefill) as p, serve_engine(decode) as d, EngineClient() as client:
        yield Site(client, Endpoint.parse(p.url), Endpoint.parse(d.url))


UNUSED = answering(b"{}")


async def test_prefill_answer_has_parameters_and_tokens_of_the_transfer() -> None:
    body = b'{"kv_transfer_params":{"a":1},"usage":{"prompt_tokens":7}}'
    async with site(answering(body), UNUSED) as s:
        with s.pools[Side.PREFILL].lease(s.prefill) as lease:
            computed = await s.calls.prefill(lease, b"{}", CALL)
    assert (computed.params, computed.tokens) == ({"a": 1}, 7)


@pytest.mark.parametrize(("status", "blamed"), [(400, False), (500, True)])
async def test_refusal_counts_against_the_engine_from_status_500_on(status: int, blamed: bool) -> None:
    async with site(refuse(status, "no"), UNUSED) as s:
        for _ in range(FAILURES):
            with s.pools[Side.PREFILL].lease(s.prefill) as lease, pytest.raises(Failure) as raised:
                await s.calls.prefill(lease, b"{}", CALL)
            assert raised.value.status == status
            assert isinstance(raised.value, EngineError) is blamed
        assert s.state(Side.PREFILL) is (MemberStatus.FAILING if blamed else MemberStatus.READY)


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b'{"x":' + b"[" * 100_000])
async def test_unreadable_prefill_answer_is_a_failure_of_the_engine(body: bytes) -> None:
    async with site(answering(body), UNUSED) as s:
        with s.pools[Side.PREFILL].lease(s.prefill) as lease, pytest.raises(EngineFailure) as raised:
            await s.calls.prefill(lease, b"{}", CALL)
        assert raised.value.blamed == {Side.PREFILL: s.prefill}
        assert [one.what for one in s.incidents.latest()] == ["sent an unreadable answer"]


async def test_engine_that_takes_no_connection_gets_no_further_requests() -> None:
    with nobody() as url:
        async with EngineClient() as client:
            s = Site(client, Endpoint.parse(url), Endpoint.parse("http://127.0.0.1:1"))
            with s.pools[Side.PREFILL].lease(s.prefill) as lease, pytest.raises(EngineFailure) as raised:
                await s.calls.whole(Side.PREFILL, lease, "GET", b"", CALL)
            assert raised.value.blamed == {Side.PREFILL: s.prefill}
            assert s.state(Side.PREFILL) is MemberStatus.UNREACHABLE
            assert not s.pools[Side.PREFILL].usable()


async def test_early_token_is_passed_on_before_the_prefill_engine_has_ended() -> None:
    end, loop = asyncio.Event(), asyncio.get_running_loop()
    accepted: asyncio.Future[None] = loop.create_future()
    early: asyncio.Future[EarlyToken | None] = loop.create_future()
    async with site(streaming(TOKEN, USAGE, DONE, end), UNUSED) as s:
        with s.pools[Side.PREFILL].lease(s.prefill) as lease:
            task = asyncio.create_task(s.calls.prefill_early(lease, b"{}", CALL, accepted, early))
            token = await within(early)
            assert accepted.done()
            assert not task.done()
            end.set()
            computed = await within(task)
    assert token is not None
    assert token.text == " a"
    assert (computed.tokens, computed.cached) == (7, 4)


async def test_prefill_engine_that_refuses_gives_no_early_token() -> None:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[None] = loop.create_future()
    early: asyncio.Future[EarlyToken | None] = loop.create_future()
    async with site(refuse(422, "no"), UNUSED) as s:
        with s.pools[Side.PREFILL].lease(s.prefill) as lease, pytest.raises(Failure):
            await s.calls.prefill_early(lease, b"{}", CALL, accepted, early)
    assert early.result() is None
    assert not accepted.done()


async def test_whole_stream_is_relayed_unchanged() -> None:
    async with site(UNUSED, streaming(TOKEN, DONE)) as s, AsyncExitStack() as stack:
        assert await s.load(stack) == TOKEN + DONE


async def test_stream_without_an_end_is_a_failure_of_the_decode_engine() -> None:
    async with site(UNUSED, streaming(TOKEN)) as s, AsyncExitStack() as stack:
        with pytest.raises(EngineFailure) as raised:
            await s.load(stack)
        assert raised.value.blamed == {Side.DECODE: s.decode}


async def test_error_within_a_stream_follows_the_tokens_before_it() -> None:
    go, problem = asyncio.Event(), b'data: {"error":{"message":"dead","code":500}}\n\n'

    async def fail(request: Request, _: dict[str, Any]) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield TOKEN
            await within(go.wait())
            yield problem

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async with site(UNUSED, fail) as s, AsyncExitStack() as stack:
        with s.pools[Side.DECODE].lease(s.decode) as lease:
            answer = await s.calls.decode(lease, b"{}", CALL, stack)
            assert await anext(answer.chunks) == TOKEN
            go.set()
            with pytest.raises(EngineError, match="dead") as raised:
                await anext(answer.chunks)
    assert raised.value.blamed == {Side.DECODE: s.decode}


async def test_failed_load_names_the_reason_that_the_decode_engine_reported() -> None:
    async def fail(request: Request, body: dict[str, Any]) -> Response:
        s.calls.reasons.reported("t", "the link broke")
        return await refuse(500, "Internal Server Error")(request, body)

    async with site(UNUSED, fail) as s, AsyncExitStack() as stack:
        register = Register("d", "1", Role.DECODE, s.decode.url, "127.0.0.1", s.decode.control_port)
        s.members.register(0.0, register)
        with pytest.raises(EngineError, match="the link broke") as raised:
            await s.load(stack)
        assert raised.value.blamed == {Side.DECODE: s.decode, Side.PREFILL: s.prefill}
