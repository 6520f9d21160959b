"""The router's health checks of engines: what counts as no answer, and what as a restart."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from router_setup import answer_ok, cluster, until_metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kv_connector.control.membership import PromptHits, Register
from kv_connector.control.sockets import Received
from kv_connector.protocol.actions import Source
from kv_connector.protocol.wire.messages import Role
from kv_connector.router.engines.client import EngineClient
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import Members, MemberStatus, Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.front.registry import Registry
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.records import CacheRecords
from kv_connector.router.streams.calls import Calls
from kv_connector.router.streams.moves import Moves

pytestmark = pytest.mark.anyio

PATIENCE = 60.0


class Engine(ThreadingHTTPServer):
    """An API server on its own threads: it answers while the test's event loop stands still."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.looked = threading.Semaphore(0)
        """Counts answered health checks."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.body = b""


class _Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self.server.may_answer.wait(PATIENCE)
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)
        self.server.looked.release()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def engine(port: int = 0) -> Iterator[Engine]:
    server = Engine(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.asynccontextmanager
async def watching(url: str) -> AsyncIterator[Members]:
    """Runs a Registry over this one decode engine, and yields its Members."""
    pools = {side: Pool() for side in Side}
    members = Members(
        pools, {Side.PREFILL: (), Side.DECODE: [Endpoint.parse(url)]}, Incidents(), suspect=3.0, dead=5.0
    )
    async with EngineClient() as client:
        metrics, spans = Metrics(), Spans.to(None)
        calls = Calls(client, members, metrics, Incidents(), spans)

        async def pair(*_: object) -> None:
            raise AssertionError

        moves = Moves(pools, members, calls, metrics, pair)  # type: ignore[arg-type]
        registry = Registry(members, calls.reasons, CacheRecords(), moves, client, None, None)
        task = asyncio.create_task(registry.run())
        pool = pools[Side.DECODE]
        try:
            with pool.lease(pool.fewest()):
                yield members
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def state(members: Members) -> MemberStatus:
    (found,) = members.states()[Side.DECODE].values()
    return found


async def until_looked(server: Engine, looks: int = 1) -> None:
    for _ in range(looks):
        assert await asyncio.to_thread(server.looked.acquire, timeout=PATIENCE)


async def until(members: Members, wanted: MemberStatus) -> None:
    async with asyncio.timeout(PATIENCE):
        while state(members) is not wanted:
            await asyncio.sleep(0.01)  # only the log reports a change


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_PROBE_S", 0.02), ("_WATCH_S", 0.0), ("_MISS_S", 0.5), ("_STALL_S", 0.1)):
        monkeypatch.setattr(f"kv_connector.router.front.registry.{name}", seconds)


async def test_a_loop_that_stands_still_marks_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    with engine() as server:
        async with watching(server.url) as members:
            await until_looked(server)
            for _ in range(6):
                # A health check is in progress at almost any moment, and its answer comes meanwhile.
                await asyncio.sleep(0.001)
                time.sleep(0.6)  # noqa: ASYNC251 - this is the fault
            await until_looked(server, 2)
            assert state(members) is MemberStatus.READY
    assert "UNREACHABLE" not in caplog.text


async def test_an_engine_that_answers_no_look_is_marked() -> None:
    with engine() as server:
        async with watching(server.url) as members:
            await until_looked(server)
            server.may_answer.clear()
            await until(members, MemberStatus.UNREACHABLE)
            server.may_answer.set()
            await until(members, MemberStatus.READY)


async def test_registry_stores_the_length_of_an_engines_model() -> None:
    with engine() as server:
        server.body = b'{"data": [{"id": "adapter"}, {"id": "m", "max_model_len": 2048}]}'
        async with watching(server.url) as members:
            workload = members._pools[Side.DECODE].workload(Endpoint.parse(server.url))
            assert workload is not None
            async with asyncio.timeout(PATIENCE):
                while workload.longest is None:
                    await asyncio.sleep(0.005)  # polled: there is no event to wait for
            assert workload.longest == 2048
            server.body = b'{"data": [{"id": "m"}]}'
            members.lacks(Side.DECODE, Endpoint.parse(server.url), "m")
            assert workload.longest == 2048, "nothing new is known of it"


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_hits_that_a_decode_engine_reports_are_counted(
    dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages come from a stand-in for the sockets."""
    reports: list[Received[Any]] = []

    def receive() -> list[Received[Any]]:
        return [reports.pop() for _ in range(len(reports))]

    def open_stand_in(registry: Registry) -> None:
        sockets: Any = SimpleNamespace(wait=lambda _: time.sleep(0.01), receive=receive, close=lambda: None)
        registry._sockets = sockets

    async def prefill(request: Request, body: dict[str, Any]) -> Response:
        transfer_id = body["kv_transfer_params"]["transfer_id"]
        return JSONResponse({"kv_transfer_params": {"transfer_id": transfer_id}})

    async def decode(request: Request, body: dict[str, Any]) -> Response:
        hits = {"of another router": (9, 3), body["kv_transfer_params"]["transfer_id"]: (1250, 64)}
        # Another registered engine reports the same transfer before.
        others = {name: (tokens, tokens) for name, (tokens, _) in hits.items()}
        reports.append(Received(Source(b"d"), PromptHits(hits)))
        reports.append(Received(Source(b"other"), PromptHits(others)))
        return await answer_ok(request, body)

    monkeypatch.setattr(Registry, "open", open_stand_in)
    async with cluster(prefill, decode, dispatch=dispatch) as (_, d, client):
        for url, source in (("http://127.0.0.1:1", b"other"), (d.url, b"d")):
            port = 1 + len(source)
            register = Register(url, "1", Role.DECODE, url, "127.0.0.1", port)
            reports.append(Received(Source(source), register))
        async with asyncio.timeout(PATIENCE):
            while reports:
                await asyncio.sleep(0.005)  # polled: there is no event to wait for
        answer = await client.post("/v1/completions", json={"prompt": "x" * 5000})
        assert answer.status_code == 200
        await until_metric(client, 'kv_connector_router_actual_hit_tokens_total{side="decode"}', 64)
