"""Bounds on what clients may hold of a router: headers, bodies, connections, descriptors and time."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from router_setup import (
    PATIENCE,
    FakeEngine,
    FedStream,
    answer_ok,
    cluster,
    no_answer,
    nobody,
    serve,
    serve_engine,
    until_metric,
    within,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.router.engines import client as client_module
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.failure import Failure
from kv_connector.router.front.app import DONE, create_app
from kv_connector.router.front.limits import Limits, requests_for
from kv_connector.router.front.server import HEADER_LIMIT, BoundedProtocol, ReadTurns, ServerConfig, _Flow
from kv_connector.router.requests.completion import _DECIDING, Completion
from kv_connector.router.requests.continuation import stay_reason, tokens_left
from kv_connector.router.requests.responses_api import ResponsesRequest
from kv_connector.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

SERVED = 'kv_connector_router_requests_total{route="/v1/completions",status="200"}'
LONG = 3600  # seconds: no test waits so long


class Shipped:
    """A router as `kv-connector router` runs it."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """Returns all that the router sends until it closes the connection."""
        reader, writer = await self.connect()
        writer.write(request)
        await writer.drain()
        said = await within(reader.read())
        writer.close()
        return said


@contextlib.asynccontextmanager
async def shipped(
    app: Any = None, *, connections: int = 1000, stall: float = LONG, keep_alive: int = LONG, grace: int = 1
) -> AsyncIterator[Shipped]:
    if app is None:
        engines = (Endpoint.parse("http://127.0.0.1:1"),)
        app = create_app(RouterSettings(engines, engines))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = ServerConfig(
            app,
            connections=connections,
            stall=stall,
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=grace,
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        try:
            yield Shipped(server, listener.getsockname()[1])
        finally:
            server.should_exit = True
            await within(task)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


# --- Headers


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nx: " + b"a" * (1 << 20),
        b"GET /" + b"a" * (1 << 20),
        b"GET /live HTTP/1.1\r\n" + b"".join(b"x%d: 1\r\n" % i for i in range(100_000)),
        b"GET /live HTTP/1.1\r\nx: " + b"a" * HEADER_LIMIT + b"\r\n\r\n",
    ],
    ids=["value", "path", "many", "complete"],
)
async def test_headers_over_the_limit_get_431(head: bytes) -> None:
    async with shipped() as router:
        answer = await router.ask(head)
        assert status(answer) == 431
        assert str(HEADER_LIMIT) in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_parser_gets_no_more_of_long_headers_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parser's cost is quadratic."""
    parsed = 0
    receive = BoundedProtocol.data_received

    def count(protocol: BoundedProtocol, data: bytes) -> None:
        nonlocal parsed
        parsed += 0 if protocol._refused else len(data)
        receive(protocol, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", count)
    async with shipped() as router:
        assert status(await router.ask(b"GET /live HTTP/1.1\r\nx: " + b"a" * (16 << 20))) == 431
    assert parsed <= HEADER_LIMIT + (256 << 10)  # asyncio reads up to so much at once


async def test_trailers_are_bounded_and_do_not_become_headers() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        while (await receive()).get("more_body"):
            pass
        seen.append(dict(scope["headers"]))
        await Response("ok")(scope, receive, send)

    post = b"POST /x HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    async with shipped(app) as router:
        assert status(await router.ask(post + b"authorization: x\r\n\r\n")) == 200
        assert b"authorization" not in seen[0]
        assert status(await router.ask(post + b"x: " + b"a" * (1 << 20))) == 431


async def test_a_long_body_in_small_chunks_is_no_header() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        nbytes, more = 0, True
        while more:
            message = await receive()
            nbytes, more = nbytes + len(message.get("body", b"")), message.get("more_body", False)
        await Response(str(nbytes))(scope, receive, send)

    head = b"POST /x HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with shipped(app) as router:
        answer = await router.ask(head + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n")
        assert (status(answer), answer[-6:]) == (200, b"100000")


async def test_headers_that_do_not_end_get_408() -> None:
    async with shipped(stall=0.05) as router:
        reader, writer = await router.connect()
        writer.write(b"GET /live HTTP/1.1\r\n")
        assert status(await within(reader.read())) == 408
        writer.close()


# --- Turns


class Reading:
    """A transport that records when it may read."""

    def __init__(self, order: list[object]) -> None:
        self._order = order
        self.closing = False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        self._order.append(self)

    def is_closing(self) -> bool:
        return self.closing


async def test_one_connection_with_much_to_read_reads_in_each_turn_of_the_loop() -> None:
    order: list[object] = []
    turns = ReadTurns()
    transports = [Reading(order) for _ in range(4)]
    flows = [_Flow(transport, turns) for transport in transports]  # type: ignore[arg-type]
    for flow in flows:
        flow.resume_reading()  # none is paused
        flow.pause_reading()
        flow.resume_reading()
        flow.resume_reading()
    transports[1].closing = True
    flows[2].pause_reading()
    await asyncio.sleep(0)
    assert order == [transports[0]]
    flows[0].pause_reading()
    flows[0].resume_reading()  # it queues behind the others
    await asyncio.sleep(0)
    assert order == [transports[0]]
    await asyncio.sleep(0)
    assert order == [transports[0], transports[3]]
    await asyncio.sleep(0)
    assert order == [transports[0], transports[3], transports[0]]


async def test_long_input_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a body that is read, for a body that no task reads any more, and for a header."""
    turns = 0
    enter = ReadTurns.enter

    def count(self: ReadTurns, flow: _Flow) -> None:
        nonlocal turns
        turns += 1
        enter(self, flow)

    monkeypatch.setattr(ReadTurns, "enter", count)
    long = b"a" * (4 << 20)
    post = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\n"
    async with shipped() as router:
        whole = post + b"content-length: %d\r\n\r\n" % len(long)
        assert status(await router.ask(whole + long)) == 400
        # One read takes at most 256 KB of the 4 MiB. Senders may be slower than that.
        assert turns > 0
        turns = 0
        refused = b"GET /live HTTP/1.1\r\nconnection: close\r\nx: "
        assert status(await router.ask(refused + long)) == 431
        assert turns > 0
        turns = 0
        live = b"POST /live HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(long)
        last = b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n"
        assert (await router.ask(live + long + last)).count(b"HTTP/1.1 ") == 2
        assert turns > 0


# --- Connections


async def test_a_client_that_sends_nothing_is_closed() -> None:
    async with shipped(keep_alive=0) as router:
        reader, writer = await router.connect()
        assert await within(reader.read()) == b""
        writer.close()


async def test_an_empty_line_does_not_keep_a_connection_for_ever() -> None:
    async with shipped(stall=0.05) as router:
        reader, writer = await router.connect()
        writer.write(b"\r\n")
        assert await within(reader.read()) == b""
        writer.close()


async def test_the_connection_that_is_idle_for_the_longest_time_makes_room() -> None:
    async with shipped(connections=3) as router:
        idle = [await router.connect() for _ in range(3)]
        for reader, writer in reversed(idle):  # the last one becomes idle first
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" in await within(reader.readuntil(b"}"))
        assert b" 200 " in await router.ask(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert await within(idle[2][0].read()) == b""
        for _, writer in idle:
            writer.close()


async def test_a_reader_that_takes_nothing_is_closed() -> None:
    """Neither its connection nor its request remains."""
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not router.server.server_state.connections.isdisjoint(protocols):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        left.set()

    async with shipped(app, stall=0.1) as router:
        _, writer = await router.connect()
        while not (protocols := set(router.server.server_state.connections)):
            await asyncio.sleep(0)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await within(left.wait())
        writer.transport.abort()


# --- Bodies


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"x","tools":[' + b"{}," * 300_000 + b"{}]}",
        b'{"prompt":"x","stop":[' + b"[]," * 300_000 + b"[]]}",
        b'{"prompt":[' + b"[]," * 300_000 + b"[]]}",
        b'{"prompt":"x","vllm_xargs":{"a":[' + b"{}," * 300_000 + b"{}]}}",
        b'{"prompt":"x","prompt_embeds":[' + b"[]," * 300_000 + b"[]]}",
    ],
    ids=["tools", "stop", "prompts", "xargs", "embeds"],
)
@pytest.mark.parametrize("kind", [Completion, ResponsesRequest])
def test_no_objects_are_made_of_what_may_be_long(
    kind: type[Completion], raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = msgspec.json.decode
    of_objects = 0

    def count(data: Any, **how: Any) -> Any:
        nonlocal of_objects
        if not how:
            of_objects += len(memoryview(data))
        return decode(data, **how)

    monkeypatch.setattr(msgspec.json, "decode", count)
    completion = kind.decode(raw)
    completion.local_reason(), completion.late_reason(), completion.prompt("/v1/completions")
    completion.prefill_body("t", serial=False)
    assert of_objects < 100


class Noting(dict[str, Any]):
    """A dict that records which values are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("kind", [Completion, ResponsesRequest])
def test_few_of_many_fields_become_objects(kind: type[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = msgspec.json.decode
    objects = b"[%s{}]" % (b"{}," * 1300)
    many = b",".join(b'"f%d":%s' % (i, objects) for i in range(200))
    asked = b'"stream":true,"min_tokens":3,"vllm_xargs":{"kv_transfer_params":{},"a":1},"model":"m"'
    read = 0

    def count(data: Any, **how: Any) -> Any:
        nonlocal read
        read += 0 if how else len(memoryview(data))
        return decode(data, **how)

    monkeypatch.setattr(msgspec.json, "decode", count)
    completion = kind.decode(b'{%s,"prompt":"x",%s}' % (many, asked))
    assert read < 100
    assert completion.streamed
    assert completion.body["vllm_xargs"] == {"a": 1}
    sent = completion.local_body()
    assert isinstance(sent, bytes)
    body = decode(sent)
    assert (body["f7"], body["min_tokens"], body["model"]) == (decode(objects), 3, "m")


def test_fields_that_the_router_decides_by_are_read() -> None:
    """In a request with many fields, all others stay JSON."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        completion = Completion.decode(b'{"prompt":"x","messages":[],"stream":true,"n":1}')
        completion.body = noting = Noting(completion.body)
        completion.local_reason(), completion.late_reason(), completion.repeats_itself(), completion.model
        completion.prefill_body("t", serial=False)
        stay_reason(path, completion)
        tokens_left(path, completion, 0)
        assert noting.read - {"prompt", "messages"} <= _DECIDING
        completion.body = noting = Noting()
        ResponsesRequest.local_reason(completion)  # type: ignore[arg-type]
        assert noting.read <= _DECIDING


def test_a_request_with_too_many_fields_is_refused() -> None:
    raw = b"{" + b",".join(b'"%d":0' % i for i in range(1000)) + b"}"
    with pytest.raises(Failure, match="more than 256 fields"):
        Completion.decode(raw)
    with pytest.raises(Failure, match="more than 256 fields"):
        Completion.decode(b'{"prompt":"","vllm_xargs":%s}' % raw)


def test_long_fields_go_on_as_they_came() -> None:
    tools = b'[ {"type": "function", "name": "%s"} ]' % (b"f" * 5000)
    completion = Completion.decode(b'{"model":"m","stream":true,"messages":[],"tools":%s}' % tools)
    assert completion.late_reason() == "tools"
    sent = completion.local_body()
    assert isinstance(sent, bytes)
    assert tools in sent
    assert ResponsesRequest.decode(b'{"input":"x","tools":%s}' % tools).local_reason() is None
    hosted = tools.replace(b"function", b"mcp")
    assert ResponsesRequest.decode(b'{"input":"x","tools":%s}' % hosted).local_reason() == "engine_tools"


async def test_a_body_over_the_limit_gets_413_before_it_is_sent() -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    async with shipped(create_app(RouterSettings(engines, engines, body_limit=1000))) as router:
        reader, writer = await router.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1001\r\n\r\n")
        assert status(await within(reader.readuntil(b"\r\n"))) == 413
        writer.close()


async def test_a_body_that_stands_still_gets_408() -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    async with shipped(create_app(RouterSettings(engines, engines, stall=0.05))) as router:
        reader, writer = await router.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1001\r\n\r\n{")
        assert status(await within(reader.readuntil(b"\r\n"))) == 408
        writer.close()


async def test_bodies_beyond_the_budget_get_503_until_others_end() -> None:
    streams = FedStream()
    body = {"prompt": "x" * 700}
    async with cluster(answer_ok, streams, body_limit=1000, body_budget=1000) as (_, d, client):
        first = asyncio.create_task(client.post("/v1/completions", json=body))
        await within(d.arrived.wait())
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "--body-budget" in refused.json()["error"]["message"]
        for chunk in (DONE, None):
            streams.queue.put_nowait(chunk)
        assert (await within(first)).status_code == 200
        await until_metric(client, SERVED, 1)
        d.handler = answer_ok
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_long_bodies_leave_some_of_the_budget_to_short_ones() -> None:
    room = Limits(100, 16 << 20)

    async def hold(nbytes: int, expected: int) -> None:
        with room.enter() as place:
            place.take(nbytes, expected=expected)
            await asyncio.Event().wait()

    async def refused(nbytes: int, expected: int = 0) -> bool:
        task = asyncio.create_task(hold(nbytes, expected))
        await asyncio.sleep(0)
        held.append(task)
        return task.done() and isinstance(task.exception(), Failure)

    held: list[asyncio.Task[None]] = []
    assert not await refused(8 << 20)
    assert not await refused(7 << 20)
    assert await refused((64 << 10) + 1)
    assert await refused(1, expected=(64 << 10) + 1)
    assert [await refused(64 << 10) for _ in range(17)] == [False] * 16 + [True]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert not await refused(16 << 20)  # alone in the budget
    held[-1].cancel()


async def test_body_counts_half_once_its_answer_has_begun() -> None:
    streams = FedStream()
    body = {"prompt": "x" * 700, "stream": True}
    async with cluster(answer_ok, streams, body_limit=1200, body_budget=1200) as (_, d, client):
        streams.queue.put_nowait(b"data: {}\n\n")
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.aiter_bytes()
            await within(anext(chunks))
            d.handler = answer_ok
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            for chunk in (DONE, None):
                streams.queue.put_nowait(chunk)
            assert b"".join([chunk async for chunk in chunks]) == DONE


async def test_requests_beyond_the_limit_get_503_and_probes_do_not() -> None:
    streams = FedStream()
    async with cluster(answer_ok, streams, requests=1) as (_, d, client):
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await within(d.arrived.wait())
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        for chunk in (DONE, None):
            streams.queue.put_nowait(chunk)
        assert (await within(first)).status_code == 200
        await until_metric(client, SERVED, 1)
        assert (await client.get("/v1/models")).status_code == 200


# --- Descriptors


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
async def test_router_without_descriptors_reports_itself_and_marks_no_engine_failed(
    reason: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = True
    make = client_module._socket

    def socket_or_not(address: Any) -> socket.socket:
        if full:
            raise OSError(reason, os.strerror(reason))
        return make(address)

    monkeypatch.setattr(client_module, "_socket", socket_or_not)
    async with cluster(answer_ok, answer_ok, patience=0.01) as (_, _, client):
        named = {"x-request-id": "mine"}
        refused = await client.post("/v1/completions", json={"prompt": "x"}, headers=named)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "request mine failed" in caplog.text
        assert os.strerror(reason) in refused.json()["error"]["message"]
        health = (await client.get("/health")).json()
        assert {state for side in ("prefill", "decode") for state in health[side].values()} == {"ready"}
        full = False
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


def test_the_soft_limit_on_descriptors_is_raised() -> None:
    code = (
        "import resource; from kv_connector.router.front.limits import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))\n"
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "4096 (4096, 4096)"
    # Three descriptors for each of 640 requests, and as many idle clients.
    assert requests_for(4096) >= 640
    assert 3 * requests_for(4096) + requests_for(4096) < 4096


# --- Clients that disconnect


async def test_client_that_leaves_pipelined_requests_ends_the_one_under_way() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with shipped(app) as router:
        _, writer = await router.connect()
        writer.write(2 * b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        await within(begun.wait())
        writer.close()
        await within(left.wait())


async def test_client_that_leaves_a_forwarded_request_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def echo(engine: FakeEngine, request: Request) -> Response:
        engine.arrived.set()
        return await engine.until_gone(request)

    monkeypatch.setattr(FakeEngine, "echo", echo)
    async with cluster(answer_ok, answer_ok) as (_, d, client):
        ask = asyncio.create_task(client.post("/tokenize", json={"prompt": "x"}))
        await within(d.arrived.wait())
        ask.cancel()
        await within(d.aborted.wait())


# --- Shutdown


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"\n\n"),
    ],
)
async def test_streams_that_outlast_the_grace_end_with_an_error_event(path: str, last: bytes) -> None:
    streams = FedStream()
    async with serve_engine(answer_ok) as p, serve_engine(streams) as d:
        endpoints = ((Endpoint.parse(p.url),), (Endpoint.parse(d.url),))
        async with (
            httpx.AsyncClient(timeout=PATIENCE, verify=False) as client,
            shipped(create_app(RouterSettings(*endpoints)), grace=0) as router,
        ):
            streams.queue.put_nowait(b"data: {}\n\n")
            body = {"prompt": "x", "messages": [], "stream": True}
            async with client.stream("POST", router.url + path, json=body) as answer:
                chunks = answer.aiter_bytes()
                assert await within(anext(chunks)) == b"data: {}\n\n"
                router.server.should_exit = True
                rest = b"".join([chunk async for chunk in chunks])
        assert b'"code":503' in rest
        assert b"this router ends" in rest
        assert rest.endswith(last)
        await within(streams.aborted.wait())


async def test_a_request_without_an_answer_gets_503_at_the_end_of_the_grace() -> None:
    async with serve_engine(answer_ok) as p, serve_engine(lambda request, _: d.until_gone(request)) as d:
        endpoints = ((Endpoint.parse(p.url),), (Endpoint.parse(d.url),))
        async with (
            httpx.AsyncClient(timeout=PATIENCE, verify=False) as client,
            shipped(create_app(RouterSettings(*endpoints, patience=0.5)), grace=0) as router,
        ):
            ask = asyncio.create_task(client.post(router.url + "/v1/completions", json={"prompt": "x"}))
            await within(d.arrived.wait())
            router.server.should_exit = True
            answer = await within(ask)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


class Silent(FakeEngine):
    """An engine that answers no request of the routes that it echoes otherwise."""

    async def echo(self, request: Request) -> Response:
        self.arrived.set()
        return await no_answer(request)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_forwarded_request_gets_503_at_the_end_of_the_grace(path: str) -> None:
    silent = Silent(answer_ok)
    async with serve(silent.app) as silent.url:
        engines = (Endpoint.parse(silent.url),)
        async with (
            httpx.AsyncClient(timeout=PATIENCE, verify=False) as client,
            shipped(create_app(RouterSettings(engines, engines, patience=0.5)), grace=0) as router,
        ):
            ask = asyncio.create_task(client.post(router.url + path, json={"prompt": "x"}))
            await within(silent.arrived.wait())
            router.server.should_exit = True
            answer = await within(ask)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "--shutdown-timeout" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_request_whose_body_arrives_gets_503_at_the_end_of_the_grace(path: str) -> None:
    engines = (Endpoint.parse("http://127.0.0.1:1"),)
    async with shipped(create_app(RouterSettings(engines, engines, patience=0.5)), grace=0) as router:
        reader, writer = await router.connect()
        writer.write(b"POST %s HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{" % path.encode())
        await writer.drain()
        async with asyncio.timeout(PATIENCE):
            while not router.server.server_state.tasks:
                await asyncio.sleep(0.005)  # polled: uvicorn has no event for it
        router.server.should_exit = True
        assert status(await within(reader.read())) == 503
        writer.close()


# --- HTTP


async def test_a_whole_answer_has_its_length() -> None:
    """HTTP/1.0 has no chunks."""
    async with serve_engine(answer_ok) as p, serve_engine(answer_ok) as d:
        endpoints = ((Endpoint.parse(p.url),), (Endpoint.parse(d.url),))
        async with shipped(create_app(RouterSettings(*endpoints))) as router:
            head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: 14\r\n\r\n"
            answer = await router.ask(head + b'{"prompt":"x"}')
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower()
    assert json.loads(body)["choices"]


async def test_headers_that_engines_and_clients_read_are_passed() -> None:
    async def busy(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "busy"}}, 429, {"retry-after": "7"})

    async with cluster(answer_ok, answer_ok) as (p, d, client):
        given = {"x-vllm-priority": "-5", "x-session-id": "s", "x-other": "o"}
        await client.post("/v1/completions", json={"prompt": "x"}, headers=given)
        for engine in (p, d):
            (headers,) = engine.headers
            assert (headers["x-vllm-priority"], headers["x-session-id"]) == ("-5", "s")
            assert "x-other" not in headers
        d.handler = busy
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        refused = await client.get("/v1/completions")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


async def test_no_engine_gets_503_with_retry_after() -> None:
    with nobody() as url:
        engines = (Endpoint.parse(url),)
        async with (
            httpx.AsyncClient(timeout=PATIENCE, verify=False) as client,
            shipped(create_app(RouterSettings(engines, engines, patience=0.01))) as router,
        ):
            await client.post(router.url + "/v1/completions", json={"prompt": "x"})
            answer = await client.post(router.url + "/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_byte_order_mark_is_accepted() -> None:
    async with cluster(answer_ok, answer_ok) as (p, _, client):
        answer = await client.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt":"x"}')
        assert answer.status_code == 200
        assert p.bodies[0]["prompt"] == "x"


@pytest.mark.parametrize("more", [{}, {"filler": "x" * 5000}], ids=["short", "long"])
async def test_a_client_cannot_name_a_transfer(more: dict[str, str]) -> None:
    names = {"kv_transfer_params": "x", "ec_transfer_params": "x"}
    async with cluster(answer_ok, answer_ok) as (p, d, client):
        body = {"prompt": "x", **names, "vllm_xargs": {**names, "top": 1, **more}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        for engine in (p, d):
            (got,) = engine.bodies
            assert got["vllm_xargs"] == {"top": 1, **more}
            assert "ec_transfer_params" not in got
            assert got["kv_transfer_params"] != "x"
