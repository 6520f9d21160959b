"""The ASGI application: routes of OpenAI's and Anthropic's APIs, and the router's own health and metrics."""

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kv_connector.router.bodies.body_parser import LONG, BodyParser
from kv_connector.router.bodies.fields import content
from kv_connector.router.engines.client import EngineClient, EngineReply, read_authority
from kv_connector.router.engines.incidents import Incidents
from kv_connector.router.engines.members import MemberStatus, Side
from kv_connector.router.failure import UNREADABLE, Failure, failure, overloaded
from kv_connector.router.front.api_keys import ApiKeys, KeyCheck, read_engine_key
from kv_connector.router.front.deadline import Deadline
from kv_connector.router.front.keep_alive import KeepAlive
from kv_connector.router.front.limits import Limits, LimitsPlace
from kv_connector.router.front.registry import Registry, RegistryError
from kv_connector.router.front.router_app import RouterApp, sender_of_body
from kv_connector.router.front.status import Status
from kv_connector.router.front.status_page import Page
from kv_connector.router.observe.access_log import AccessLog, Exchange, exchange_of
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.observe.spans import Spans
from kv_connector.router.placement.balance import EvenStreams
from kv_connector.router.requests.answers import Answer
from kv_connector.router.requests.completion import Completion
from kv_connector.router.requests.responses_api import ResponsesRequest
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.calls import EVENT_STREAM, Call
from kv_connector.router.streams.dispatch import Dispatcher

logger = logging.getLogger(__name__)

# Routes whose requests are prefilled on one engine and decoded on another.
COMPLETIONS = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Completion,
    "/v1/messages": Completion,
    "/v1/responses": ResponsesRequest,
}
# Routes whose streams have events with names.
NAMED_EVENTS = ("/v1/messages", "/v1/responses")
# The last event of a stream without event names. It also follows an error event.
DONE = b"data: [DONE]\n\n"
# Routes that any decode engine answers. The list names only routes that are safe: others of vLLM pause, reset
# or unload an engine.
FORWARDED = (
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages/count_tokens"),
)
# Routes of the router itself.
OWN = ("/", "/status.json", "/live", "/health", "/ping", "/load", "/metrics", "/openapi.json")
SERVED = sorted({*COMPLETIONS, *(path for _, path in FORWARDED), *OWN})

# The client's headers that are passed to engines.
PASSED_HEADERS = (
    "authorization",
    "content-type",
    "traceparent",
    "tracestate",
    "x-session-id",
    "x-vllm-priority",
)
# Headers of an answer that scripts of another origin may read (CORS).
_EXPOSED_HEADERS = ("retry-after", "x-request-id")

Handler = Callable[[Request], Awaitable[Response]]

# In addition to the pause that a body may make, its bytes must arrive at this average rate. It is 0.5 Mbit/s,
# the uplink of a poor mobile connection. A slow body of 64 MiB holds its memory for 18 minutes at most.
BODY_RATE = 64 << 10

CLIENT_LEFT = 499  # nginx's status for a client that disconnected; only metrics see it


class Current:
    """The router's settings, some of which may change while it runs."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings


def create_app(settings: RouterSettings) -> RouterApp:
    """Returns the router as an ASGI application. It holds no state beyond its lifespan."""
    current = Current(settings)
    metrics = Metrics()
    client = EngineClient(*_access_to_engines(settings))
    incidents = Incidents()
    spans = Spans.to(settings.otlp_traces_endpoint)
    access_log = AccessLog.to(settings.access_log, metrics.access_log_drops.inc)
    keys = None if settings.api_key_file is None else ApiKeys.read(Path(settings.api_key_file))
    dispatcher = Dispatcher(settings, client, metrics, incidents, spans)
    members = dispatcher.parts.members
    status = Status(members, metrics, incidents, details=settings.status_details)
    page = Page.load()
    limits = Limits(settings.requests, settings.body_budget, settings.requests_per_key)
    parser = BodyParser(prompts=dispatcher.parts.learns)
    registry = Registry(
        members,
        dispatcher.parts.calls.reasons,
        dispatcher.parts.caches,
        dispatcher.moves,
        client,
        settings.registration,
        settings.key,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            try:
                registry.open()
            except RegistryError as error:
                application.refusal = str(error)
                raise
            tasks = [asyncio.create_task(registry.run())]
            if settings.rebalance:
                tasks.append(asyncio.create_task(dispatcher.moves.balance(EvenStreams())))
            try:
                yield
            finally:
                # When the server's grace period ends, it cancels the requests. Each still has to answer its
                # client.
                await limits.wait_empty(settings.patience)
                await dispatcher.close()
                await parser.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.to_thread(spans.close)
                await asyncio.to_thread(access_log.close)

    async def forward_any(request: Request) -> EngineReply:
        exchange = exchange_of(request.scope)
        with _within_shutdown(), limits.enter(exchange.key) as place:
            body = await _read(request, current.settings, place)
            headers = {**_passed(request), "x-request-id": exchange.request_id}
            exchange.model = await parser.model(body)
            call = Call(request.url.path, headers, exchange.request_id, exchange.model, exchange=exchange)
            async with Deadline(current.settings.timeouts, streamed=False).guard():
                # The server leaves the body of an answer to HEAD out. vLLM has no route for HEAD.
                method = "GET" if request.method == "HEAD" else request.method
                reply = dispatcher.forward(method, call, content(body))
                return await _unless_left(reply, request.receive)

    async def forward(request: Request) -> Response:
        reply = await forward_any(request)
        return _response(Failure(reply.status, reply.body, reply.content_type, reply.retry_after))

    async def openapi(request: Request) -> Response:
        """Returns a decode engine's description of its routes, without the routes that the router does not
        serve."""
        reply = await forward_any(request)
        if reply.status == 200:
            try:
                described = msgspec.json.decode(reply.body, type=dict[str, Any])
                paths = msgspec.convert(described.get("paths"), dict[str, Any])
            except UNREADABLE as error:
                words = f"the decode engine's answer does not describe its routes: {error}"
                raise failure(502, "api_error", words) from None
            described["paths"] = {path: text for path, text in paths.items() if path in SERVED}
            return JSONResponse(described)
        return _response(Failure(reply.status, reply.body, reply.content_type, reply.retry_after))

    async def status_page(_: Request) -> Response:
        return HTMLResponse(page.html, headers=page.headers)

    async def status_json(_: Request) -> Response:
        return Response(status.json(), media_type="application/json", headers={"cache-control": "no-store"})

    async def live(_: Request) -> Response:
        """Reports that this process serves, whatever the state of its engines, for supervisors that restart
        it."""
        return JSONResponse({"live": True})

    def state_of_engines() -> tuple[int, dict[str, Any]]:
        """Returns the status and the body of an answer at /health."""
        states = members.states()
        lacking = {side for side, engines in states.items() if MemberStatus.READY not in engines.values()}
        unready = not lacking.isdisjoint(members.needed)
        found = {side.value: {url: s.value for url, s in engines.items()} for side, engines in states.items()}
        status = "unready" if unready else "degraded" if lacking else "ready"
        return 503 if unready else 200, {"status": status, **found}

    async def health(_: Request) -> Response:
        code, found = state_of_engines()
        return JSONResponse(found, code)

    async def health_without_engines(_: Request) -> Response:
        code, found = state_of_engines()
        return JSONResponse({"status": found["status"]}, code)

    async def load(_: Request) -> Response:
        return JSONResponse({"server_load": metrics.requests_in_flight()})

    async def metrics_page(_: Request) -> Response:
        states = members.states()
        for side, engines in states.items():
            count = Counter(engines.values())
            for state in MemberStatus:
                metrics.engines.labels(side.value, state.value).set(count[state])
        metrics.engines_are(members.engines(time.monotonic()))
        metrics.caches_filled.set(dispatcher.parts.pools[Side.DECODE].caches_filled())
        metrics.prefixes.set(len(members.index))
        metrics.sessions.set(len(dispatcher.parts.caches.sessions))
        metrics.prune(time.monotonic(), {url for engines in states.values() for url in engines})
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def complete(path: str, kind: type[Completion]) -> Completions:
        return Completions(path, kind, current, limits, parser, dispatcher, metrics)

    def probes(health: Handler) -> list[Route]:
        return [
            Route("/live", live),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
        ]

    of_operators = [
        Route("/", status_page),
        Route("/status.json", status_json),
        Route("/load", load),
        Route("/metrics", metrics_page),
    ]
    handlers: Any = {HTTPException: _http_error, Failure: _failure, ClientDisconnect: _left}
    middleware = []
    if settings.allow_origins:
        options: dict[str, Any] = {"allow_methods": ["GET", "POST"], "expose_headers": _EXPOSED_HEADERS}
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=settings.allow_origins, allow_headers=["*"], **options)
        )
    if keys is not None:
        middleware.append(Middleware(KeyCheck, keys=keys))
    strangers = keys is not None or settings.admin is not None

    def change(new: RouterSettings) -> None:
        access = _access_to_engines(new)  # all files are read before anything changes
        if keys is not None and new.api_key_file is not None:
            keys.replace(ApiKeys.read(Path(new.api_key_file)))
        client.change(*access)
        members.relist({Side.PREFILL: new.prefill, Side.DECODE: new.decode, Side.ENCODER: new.encoders})
        limits.change(new.requests, new.body_budget, new.requests_per_key)
        current.settings = new

    application = RouterApp(
        change,
        access_log,
        OWN,
        settings.admin,
        Starlette(routes=[*of_operators, *probes(health)], exception_handlers=handlers),
        routes=[
            *(Route(path, complete(path, kind), methods=["POST"]) for path, kind in COMPLETIONS.items()),
            *(Route(path, forward, methods=[method]) for method, path in FORWARDED),
            Route("/openapi.json", openapi),
            *probes(health_without_engines if strangers else health),
            *([] if settings.admin is not None else of_operators),
        ],
        exception_handlers=handlers,
        middleware=middleware,
        lifespan=lifespan,
    )
    return application


def _access_to_engines(settings: RouterSettings) -> tuple[str | None, ssl.SSLContext | None]:
    """Returns the key and the authorities for engines. Raises KeyFileError or AuthorityError."""
    key = None if settings.engine_key_file is None else read_engine_key(Path(settings.engine_key_file))
    return key, None if settings.engine_ca is None else read_authority(Path(settings.engine_ca))


class Completions:
    """One completions route, as a plain ASGI endpoint: it has to notice at any moment that the client
    disconnects."""

    def __init__(
        self,
        path: str,
        kind: type[Completion],
        current: Current,
        limits: Limits,
        parser: BodyParser,
        dispatcher: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self._path = path
        self._kind = kind
        self._current = current
        self._limits = limits
        self._parser = parser
        self._dispatcher = dispatcher
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        exchange = exchange_of(scope)
        status = CLIENT_LEFT
        with self._metrics.in_flight.track_inprogress():
            try:
                with self._limits.enter(exchange.key) as place:
                    with _within_shutdown():
                        body = await _read(request, self._current.settings, place)
                        completion = self._kind.of_fields(await self._parser.fields(body))
                    exchange.model = completion.model
                    status = await self._serve(request, exchange, place, completion)
            except ClientDisconnect:
                words = "request %s: the client disconnected while it sent the request to %s"
                logger.info(words, exchange.request_id, self._path)
            except Exception as error:
                failed = client_failure(error, exchange.request_id)
                status = failed.status
                await _response(failed)(scope, receive, send)
            finally:
                exchange.status = exchange.refusal or status
                self._metrics.requests.labels(self._path, str(exchange.status)).inc()

    async def _serve(
        self, request: Request, exchange: Exchange, place: LimitsPlace, completion: Completion
    ) -> int:
        """Answers the request; returns its status, or CLIENT_LEFT if the client disconnected before
        the end."""
        settings = self._current.settings
        deadline = Deadline(settings.timeouts, streamed=completion.streamed)
        interval = settings.stream_comments if completion.streamed else None
        answering = _Answering(
            request, exchange, self._path, place, deadline, interval, self._dispatcher, self._metrics
        )
        work = asyncio.create_task(answering.run(completion))
        try:
            # A server also reports a disconnect after the client has received the whole answer.
            if not await _done_first(work, request.receive) and not answering.complete:
                logger.info("request %s: the client disconnected", exchange.request_id)
                return CLIENT_LEFT
            return await work
        except asyncio.CancelledError:
            # The server's grace period for running requests has ended. The server itself sends nothing.
            await _end(work)
            if answering.complete:
                raise
            return await answering.fail(_ended())
        finally:
            await _end(work)


class _Answering:
    """The answer to one request in flight."""

    def __init__(
        self,
        request: Request,
        exchange: Exchange,
        path: str,
        place: LimitsPlace,
        deadline: Deadline,
        interval: float | None,
        dispatcher: Dispatcher,
        metrics: Metrics,
    ) -> None:
        self.complete = False
        self._exchange = exchange
        self._path = path
        self._place = place
        self._deadline = deadline
        self._comments = KeepAlive(interval, self._begin, request._send)
        self._begun = False
        self._request = request
        self._dispatcher = dispatcher
        self._metrics = metrics

    async def run(self, completion: Completion) -> int:
        started, path = time.perf_counter(), self._path
        request_id = self._exchange.request_id
        headers = {**_passed(self._request), "x-request-id": request_id}
        call = Call(path, headers, request_id, completion.model, exchange=self._exchange, begin=self._begin)
        with self._dispatcher.parts.spans.server(path, request_id, headers):
            try:
                async with (
                    self._comments,
                    self._deadline.guard(),
                    self._dispatcher.open(completion, call) as answer,
                ):
                    self._metrics.answer_began(time.perf_counter() - started)
                    if answer.streaming:
                        await self._begin(answer.status, answer.content_type)
                        await self._send(answer)
                    else:
                        await self._send_whole(answer)
            except Exception as error:
                return await self.fail(client_failure(error, request_id))
        return answer.status

    async def fail(self, failed: Failure) -> int:
        """Ends the answer with an error event and returns its status; raises the failure if the answer has
        not begun."""
        if not self._begun:
            raise failed
        self.complete = True
        named = self._path in NAMED_EVENTS
        last = failed.event(named=named) + (b"" if named else DONE)
        await self._request._send({"type": "http.response.body", "body": last})
        return failed.status

    async def _begin(
        self, status: int = 200, content_type: str = EVENT_STREAM, length: int | None = None
    ) -> None:
        """Begins the answer, unless it has begun. Call.begin() calls this before the decode engine has an
        answer."""
        if self._begun:
            return
        self._begun = True
        self._place.answered()
        headers = [(b"content-type", content_type.encode("latin-1"))]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._request._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_whole(self, answer: Answer) -> None:
        """Sends the answer with its length: HTTP/1.0 has no chunks."""
        body = b"".join([chunk async for chunk in answer.chunks])
        if answer.transcript is not None:
            answer.transcript.whole(body)
        if self._begun:  # a comment has begun a stream, and the engine answers without events
            raise Failure(answer.status, body)
        await self._begin(answer.status, answer.content_type, len(body))
        self._exchange.send(body)
        self._finish()
        await self._request._send({"type": "http.response.body", "body": body})

    async def _send(self, answer: Answer) -> None:
        send = self._request._send
        keep = _drop if answer.transcript is None else answer.transcript.add
        async for chunk in answer.chunks:
            self._deadline.received()
            keep(chunk)
            self._exchange.send(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if self._exchange.first_byte is not None:
                send = sender_of_body(self._request.scope)
            self._comments.sent()
            self._deadline.waiting()
        self._finish()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _finish(self) -> None:
        """Notes that the answer is complete: nothing may follow it. The prefill engine may still have to
        finish its own answer."""
        self.complete = True
        self._comments.end()
        self._deadline.complete()


def _drop(chunk: bytes) -> None:
    pass


def client_failure(error: Exception, request_id: str) -> Failure:
    """Returns the failure that the client receives for this error."""
    if isinstance(error, Failure):
        return error
    logger.error("request %s: internal error of the router", request_id, exc_info=error)
    words = "internal error of the router. Its log describes the error under the request id"
    return failure(500, "api_error", f"{words} {request_id}")


async def _read(request: Request, settings: RouterSettings, place: LimitsPlace) -> bytes | memoryview:
    """Reads the request's body. Failure 413 if the body is longer than the limit, 408 if it arrives too
    slowly, 503 if all bodies in flight have too many bytes."""
    limit, stall = settings.body_limit, settings.stall
    too_long = failure(413, "invalid_request_error", f"the body is longer than {limit} bytes (--body-limit)")
    # The server has checked that the header is a number.
    expected = int(request.headers.get("content-length", 0))
    if expected > limit:
        raise too_long
    body = bytearray()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with asyncio.timeout(stall) as due:
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_long
                place.take(len(chunk), expected=expected)
                body += chunk
                due.reschedule(min(loop.time(), begun + len(body) / BODY_RATE) + stall)
    except TimeoutError:
        words = f"no data for {stall:g} s, or less than {BODY_RATE >> 10} KiB/s on average"
        raise failure(408, "invalid_request_error", f"the body arrived too slowly: {words}") from None
    return bytes(body) if len(body) <= LONG else memoryview(body).toreadonly()


def _ended() -> Failure:
    """Returns the failure of requests that run when the server's grace period ends."""
    return overloaded("this router ends: the answer was not complete within --shutdown-timeout")


@contextmanager
def _within_shutdown() -> Iterator[None]:
    """Raises a failure when the server ends its grace period by cancelling the request.

    The answer must not have begun.
    """
    try:
        yield
    except asyncio.CancelledError:
        raise _ended() from None


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_left(reply: Coroutine[Any, Any, EngineReply], receive: Receive) -> EngineReply:
    """Waits for the reply. If the client disconnects first, cancels the reply and raises ClientDisconnect."""
    work = asyncio.create_task(reply)
    try:
        if not await _done_first(work, receive):
            raise ClientDisconnect
        return await work
    finally:
        await _end(work)


async def _done_first(work: asyncio.Task[Any], receive: Receive) -> bool:
    """Waits until the work is done or its client has disconnected. Returns whether the work is done."""
    left = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        await _end(left)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed(request: Request) -> dict[str, str]:
    """Returns the client's headers for engines. A key of the router itself goes to no engine."""
    passed = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
    if exchange_of(request.scope).key is not None:
        passed.pop("authorization", None)
    return passed


def _response(failed: Failure) -> Response:
    headers = {} if failed.retry_after is None else {"retry-after": failed.retry_after}
    return Response(failed.body, failed.status, headers, media_type=failed.content_type)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. This router serves {', '.join(SERVED)}"
    response = _response(failure(error.status_code, "invalid_request_error", message))
    response.headers.update(error.headers or {})  # Allow, with a 405
    return response


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # only the access log sees it


async def _failure(_: Request, error: Exception) -> Response:
    assert isinstance(error, Failure)
    return _response(error)
