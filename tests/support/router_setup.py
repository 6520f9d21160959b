"""Fake engines, a router over them, and what the router's tests query: servers on loopback."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

# Seconds. Longer than any step here and shorter than a CI's time limit: a wait that never ends fails the
# test.
PATIENCE = 60.0

Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]


class FakeEngine:
    """An engine whose completions are answered by `handler`. It records the requests that it received."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self.url = ""
        self.health: Callable[[Request], Awaitable[Response]] = self.models
        routes = [
            Route(path, self.complete, methods=["POST"])
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
        ]
        routes += [
            Route("/v1/models", self.models),
            Route("/health", self.look),
            Route("/tokenize", self.echo, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.echo, methods=["POST"]),
            Route("/openapi.json", self.describe),
            Route("/reset_prefix_cache", self.echo, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.arrived.set()
        return await self.handler(request, body)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m"}], "engine": self.url})

    async def look(self, request: Request) -> Response:
        return await self.health(request)

    async def describe(self, request: Request) -> Response:
        paths: dict[str, Any] = {path: {"post": {}} for path in ("/v1/responses", "/sleep", "/v1/models")}
        return JSONResponse({"openapi": "3.1.0", "paths": paths})

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"echo": json.loads(await request.body())})

    async def until_gone(self, request: Request) -> Response:
        """Answers nothing, and sets `aborted` when the router closes the connection.

        The request that disowns a prompt names a model that this engine refuses: a router that stops waits
        for that answer.
        """
        if str((await request.json()).get("model", "")).startswith("nobody-wants/"):
            return await refuse(404, "no such model")(request, {})
        nothing = await no_answer(request)
        self.aborted.set()
        return nothing


class EndingServer(uvicorn.Server):
    """A server that ends as soon as `end` is called and its connections are closed.

    uvicorn polls every 0.1 s for each step of its end. That was half a second for each test of a router.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to pytest."""
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.001)  # uvicorn has no event for it
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def serve(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Runs an ASGI application, on a free port unless one is named, and yields its URL."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = EndingServer(
            uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
        )
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not task.done(), "the server did not start"
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end()
            await task


def client_of(url: str, timeout: float = PATIENCE) -> httpx.AsyncClient:
    """A client of a server on loopback.

    It loads no certificates: each client would read the whole list of authorities, in 30 ms of a core.
    """
    return httpx.AsyncClient(base_url=url, timeout=timeout, verify=False)


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """Yields the URL of an engine that refuses connections."""
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.asynccontextmanager
async def serve_engine(handler: Handler) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(handler)
    async with serve(engine.app) as engine.url:
        yield engine


@contextlib.asynccontextmanager
async def serve_engines(
    prefill: Sequence[Handler], decode: Sequence[Handler]
) -> AsyncIterator[tuple[list[FakeEngine], list[FakeEngine], dict[str, Any]]]:
    """Yields fake prefill engines, fake decode engines, and the settings that list them."""
    async with contextlib.AsyncExitStack() as stack:
        p = [await stack.enter_async_context(serve_engine(handler)) for handler in prefill]
        d = [await stack.enter_async_context(serve_engine(handler)) for handler in decode]
        yield (
            p,
            d,
            {
                "prefill": tuple(Endpoint.parse(engine.url) for engine in p),
                "decode": tuple(Endpoint.parse(engine.url) for engine in d),
            },
        )


@contextlib.asynccontextmanager
async def cluster(
    prefill: Handler, decode: Handler, **settings: Any
) -> AsyncIterator[tuple[FakeEngine, FakeEngine, httpx.AsyncClient]]:
    """Yields one fake P, one fake D, a router over them and a client of the router."""
    async with serve_engine(prefill) as p, serve_engine(decode) as d:
        endpoints: dict[str, Any] = {
            "prefill": (Endpoint.parse(f"{p.url}@10.0.0.1:5601"),),
            "decode": (Endpoint.parse(d.url),),
        }
        async with (
            serve(create_app(RouterSettings(**endpoints, **settings))) as url,
            client_of(url) as client,
        ):
            yield p, d, client


async def answer_ok(request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse(
        {"choices": [{"text": "ok"}], "kv_transfer_params": {"do_remote_prefill": True, "from": "p"}}
    )


async def no_answer(request: Request) -> Response:
    """Sends no answer, and ends when the router closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()


def refuse(status: int, message: str) -> Handler:
    async def handler(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": message}}, status)

    return handler


def streaming(*events: bytes | asyncio.Event) -> Handler:
    """A stream of these events. It goes on behind an asyncio.Event once the test has set that."""

    async def handler(request: Request, body: dict[str, Any]) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            for event in events:
                if isinstance(event, bytes):
                    yield event
                else:
                    await within(event.wait())

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return handler


class Rendezvous:
    """Handlers that answer only after both sides have received a request."""

    def __init__(self) -> None:
        self.meet = asyncio.Barrier(2)

    async def __call__(self, request: Request, body: dict[str, Any]) -> Response:
        async with asyncio.timeout(PATIENCE):
            await self.meet.wait()
        return await answer_ok(request, body)


class FedStream:
    """A streaming handler that sends each chunk when the test puts it in. None ends the stream.

    Like an engine, it answers 404 to the request by which a router disowns a transfer.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.aborted = asyncio.Event()

    async def __call__(self, request: Request, body: dict[str, Any]) -> Response:
        if body.get("model", "").startswith("nobody-wants/"):
            return await refuse(404, "no such model")(request, body)

        async def chunks() -> AsyncIterator[bytes]:
            try:
                while (chunk := await self.queue.get()) is not None:
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield chunk
            except asyncio.CancelledError:
                self.aborted.set()
                raise

        return StreamingResponse(chunks(), media_type="text/event-stream")


async def within(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await awaitable


async def metric(client: httpx.AsyncClient, line: str) -> float:
    """Returns the value of one line of the router's /metrics, or 0 if it is missing."""
    text = (await client.get("/metrics")).text
    return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(line)), 0.0)


async def until_metric(client: httpx.AsyncClient, line: str, value: float) -> None:
    """Waits until a line of the router's /metrics has this value."""
    async with asyncio.timeout(PATIENCE):
        while await metric(client, line) != value:
            await asyncio.sleep(0.01)  # polled: /metrics gives no event to wait for
