"""A fuzzer of the router's limits: the memory that it holds for its clients, and the time that they wait.

A scenario is a few clients and engines. Clients send bodies of any size, broken or without an end, and may
leave at any moment. Engines are slow, fail, go away, or die in the middle of a stream. Half of them may have
another checkpoint. The whole router runs in virtual time, from the bytes of a connection to its requests to
engines. Each client must get an answer that fits its request, and of a stream each token once. No limit may
be exceeded, and nothing may be left at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch

import aiohttp
import httptools
from aiohttp.client_reqrep import ConnectionKey
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from kv_connector.protocol.session.checkpoint import Checkpoint, Weights
from kv_connector.router.bodies.body_parser import BodyParser
from kv_connector.router.bodies.fields import Pieces
from kv_connector.router.bodies.parser_process import Parsed, WantedParts, parsed
from kv_connector.router.engines.client import EngineReply
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.failure import Failure
from kv_connector.router.front import app as app_module
from kv_connector.router.front.app import create_app
from kv_connector.router.front.limits import Limits
from kv_connector.router.front.server import HEADER_LIMIT, BoundedProtocol, ServerConfig
from kv_connector.router.settings import RouterSettings
from kv_connector.router.streams.dispatch import Dispatcher
from tests.fuzz.seeds import chosen_seeds, search

KIB = 1 << 10
# Limits of the router, small enough for a scenario to reach them.
BODY_LIMIT = 400 * KIB
LONG = 100 * KIB  # bodies that the child process parses
STALL_S = 60.0
READ = 250 * KIB  # bytes that uvloop reads at once
# Three attempts at engines that take 30 s, a stalled body and a stalled reader, and the child's 30 s.
LONGEST_WAIT_S = 600.0


@dataclass(frozen=True)
class Plan:
    """The behaviour of one client."""

    kind: str
    starts: float
    size: int
    chunked: bool = False
    pause: float = 1e-3
    """Seconds between two parts of the body."""
    part: int = READ
    leaves: float | None = None
    """Seconds from its start until it leaves."""
    stops: float = 0.0
    """Seconds in which it reads nothing of its answer."""
    stream: bool = False
    tokens: int = 1
    """Tokens of the answer."""


KINDS = {
    "completion": 40,
    "broken": 8,  # no JSON
    "no object": 3,
    "too long": 6,
    "stall": 6,  # its body stalls
    "headers": 4,  # without an end
    "late headers": 3,
    "no request": 2,
    "live": 6,
    "models": 3,
    "tokenize": 6,
    "pipelined": 5,  # a second request follows, before the answer to the first
}


@dataclass(frozen=True)
class Scenario:
    dispatch: str
    budget: int
    requests: int
    connections: int
    trouble: bool
    """Whether engines may fail."""
    clients: tuple[Plan, ...]
    salt: int
    replaced: bool = False
    """Whether half of the engines of each side have another checkpoint."""


def scenario(seed: int) -> Scenario:
    rng = Random(seed)
    burst = rng.choice([0.1, 2.0, 60.0])
    return Scenario(
        dispatch=rng.choice(["serial", "concurrent"]),
        budget=rng.choice([1, 2, 5]) * BODY_LIMIT,
        requests=rng.choice([2, 8, 100]),
        connections=rng.choice([4, 100]),
        trouble=rng.random() < 0.5,
        clients=tuple(_plan(rng, burst) for _ in range(rng.randrange(1, 16))),
        salt=rng.randrange(1 << 30),
        replaced=rng.random() < 0.3,
    )


def _plan(rng: Random, burst: float) -> Plan:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    size = rng.choice([100, 2 * KIB, 60 * KIB, 120 * KIB, rng.randrange(100, BODY_LIMIT)])
    if kind == "too long":
        size = BODY_LIMIT + rng.choice([1, BODY_LIMIT])
    part = rng.choice([READ, READ, 64 * KIB, 8 * KIB])
    return Plan(
        kind=kind,
        starts=rng.random() * burst,
        size=size,
        chunked=rng.random() < 0.3,
        pause=rng.choice([0.0, 1e-3, 0.01, 1.0]),
        part=part,
        leaves=rng.choice([0.0, rng.random() * 0.2, rng.random() * 40]) if rng.random() < 0.25 else None,
        stops=rng.choice([1.0, 2 * STALL_S]) if rng.random() < 0.1 else 0.0,
        stream=rng.random() < 0.5,
        tokens=rng.choice([1, 5, 100, 2000]),
    )


class Wrong(AssertionError):
    """The router has broken a rule."""


# --- Virtual time


class _Selector(selectors.SelectSelector):
    """A selector that advances virtual time when no other work is left."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Wrong("nothing is left to happen, and somebody waits")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


# --- Engines

DONE = b"data: [DONE]\n\n"
PARAMS = {"do_remote_prefill": True}
PROMPT = 7  # the only token of each prompt that is text


def stream_of(asked: dict[str, Any]) -> list[bytes]:
    """Returns the events of an answer, whose tokens are counted from 1, behind those in the prompt. Every
    seventh token is a part of a character: its text comes with the next."""
    prompt = asked["prompt"] if isinstance(asked["prompt"], list) else [PROMPT]
    begin, held = len(prompt), ""
    events: list[bytes] = []
    end = begin + asked["max_tokens"] - 1
    for number in range(begin, end + 1):
        held += f"{number},"
        text, held = (held, "") if number % 7 or number == end else ("", held)
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "finish_reason": "length" if number == end else None,
        }
        if asked.get("return_token_ids"):
            choice |= {"prompt_token_ids": prompt if number == begin else None, "token_ids": [number]}
        said = json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":"))
        events.append(b"data: %s\n\n" % said.encode())
    return events


class Engines:
    """All engines, as the router's client reaches them."""

    def __init__(self, trouble: bool, salt: int) -> None:
        self.rng = Random(salt)
        self.trouble = trouble
        self.requests = 0
        self.open: Counter[str] = Counter()
        """Open requests by their id."""
        self.down: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()
        """The prefill and decode engines that a request has had together, by their hosts."""

    async def __aenter__(self) -> Engines:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def chance(self, probability: float) -> bool:
        return self.trouble and self.rng.random() < probability

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: Any = None, headers: Any = None
    ) -> AsyncIterator[Response]:
        host, _, path = url.removeprefix("http://").partition("/")
        await asyncio.sleep(self.rng.choice([0.0, 0.001]))
        if self.chance(0.02):
            self.down ^= {host}
        if host in self.down:
            raise aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "refused"))
        # The request that disowns a transfer has its client's id, and not its body.
        disowns = isinstance(body, bytes) and b"nobody-wants/" in body
        name = "" if headers is None or disowns else headers.get("x-request-id", "")
        self.open[name] += 1
        try:
            yield await self._answer(host, path, body, name)
        finally:
            self.open[name] -= 1

    async def _answer(self, host: str, path: str, body: Any, name: str) -> Response:
        if path in ("health", "v1/models"):
            return Response(self, 200, [b'{"data": [{"id": "m"}]}'])
        sent = bytearray()
        for part in body.slices() if isinstance(body, Pieces) else [body]:
            sent += part
            await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.001]))
        asked = json.loads(sent)
        if str(asked.get("model", "")).startswith("nobody-wants/"):
            return Response(self, 404, [b"{}"])
        self.requests += 1
        if isinstance(prompt := asked["prompt"], list):
            if prompt != [PROMPT, *range(1, len(prompt))]:
                raise Wrong(f"{name} continues behind other tokens than those of its stream")
        elif path != "tokenize" and prompt != expected_prompt(name, len(prompt)):
            raise Wrong(f"an engine got another prompt than {name} sent")
        if (params := asked.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            self.pairs.add((params["remote_host"], host.removesuffix(":80")))
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.5, 30.0]))
        if self.chance(0.1):
            raise aiohttp.ServerDisconnectedError
        if self.chance(0.1):
            return Response(self, *self.rng.choice([(500, [b"{}"]), (400, [b"{}"]), (503, [b"{}"])]))
        if asked.get("stream"):
            events = [*stream_of(asked), DONE]
            if self.chance(0.5):
                del events[self.rng.randrange(len(events)) :]
            return Response(self, 200, events, "text/event-stream")
        params = PARAMS | {"remote_host": host.removesuffix(":80")}
        return Response(self, 200, [json.dumps({"choices": [], "kv_transfer_params": params}).encode()])

    async def whole(self, method: str, url: str, body: Any = None, headers: Any = None) -> EngineReply:
        async with self.stream(method, url, body, headers) as response:
            given = response.headers
            return EngineReply(
                response.status, given["content-type"], await response.read(), given.get("retry-after")
            )


KEY = ConnectionKey("engine", 80, False, True, None, None, None, None)


class Response:
    """An engine's answer, with aiohttp's interface."""

    def __init__(
        self, engines: Engines, status: int, chunks: list[bytes], content_type: str = "application/json"
    ) -> None:
        self._engines = engines
        self._chunks = chunks
        self.status = status
        self.headers = {"content-type": content_type}
        if status == 503:
            self.headers["retry-after"] = "7"
        self.content = self
        self._error: Exception | None = None

    def set_exception(self, error: Exception) -> None:
        self._error = error

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await asyncio.sleep(self._engines.rng.choice([0.0, 0.001]) if len(self._chunks) < 100 else 0)
            if self._error is not None:
                raise self._error
            yield chunk
        if self._chunks and self._chunks[-1] != DONE and self.headers["content-type"] == "text/event-stream":
            raise aiohttp.ClientPayloadError("died")

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.iter_any()])


# --- Clients


class Transport(asyncio.Transport):
    """The router's end of a connection."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._closing = False
        self._lost = False
        self._unread = bytearray()
        self._paused = False
        self.readable = asyncio.Event()
        self.readable.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.readable.clear()

    def resume_reading(self) -> None:
        self.readable.set()

    def write(self, data: Any) -> None:
        if self._closing:
            return
        self._unread += data
        if self._client.takes:
            self.taken()
        elif len(self._unread) > HIGH_WATER_LIMIT and not self._paused:
            self._paused = True
            self._client.protocol.pause_writing()

    def taken(self) -> None:
        """The client reads what was written."""
        data, self._unread = bytes(self._unread), bytearray()
        self._client.read(data)
        if self._paused:
            self._paused = False
            self._client.protocol.resume_writing()
        if self._closing:
            self._lose(None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(self._unread)

    def close(self) -> None:
        self._closing = True
        if not self._unread:
            self._lose(None)

    def abort(self) -> None:
        self._closing = True
        self._unread.clear()
        self._lose(ConnectionAbortedError())

    def leave(self) -> None:
        """The client closes the connection."""
        self._closing = True
        self._lose(ConnectionResetError())

    def _lose(self, why: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.readable.set()
            asyncio.get_running_loop().call_soon(self._gone, why)

    def _gone(self, why: Exception | None) -> None:
        self._client.protocol.connection_lost(why)
        self._client.over.set()


def expected_prompt(name: str, length: int) -> str:
    """Returns the prompt of the client with this request id."""
    return (name * (length // max(1, len(name)) + 1))[:length]


class Client:
    def __init__(self, world: World, name: str, plan: Plan) -> None:
        self.world = world
        self.name = name
        self.plan = plan
        self.takes = True
        self.over = asyncio.Event()
        """The answer is complete, or the connection is closed."""
        self.left = False
        self.done = 0.0
        self.delivered = 0
        """Bytes of the body that the router has received."""
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.complete = False
        self.protocol = BoundedProtocol(world.config, world.state, {})
        self.transport = Transport(self)
        self._parser = httptools.HttpResponseParser(self)

    # Callbacks of httptools. A client that pipelines reads both answers at once if it has stopped reading
    # before. Only the first one is judged.
    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self.body += body

    def on_message_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status != 100:
            self.complete = True
            self.over.set()

    def read(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self.plan.stops and len(self.body) > 1000 and self.takes:
            self.takes = False
            asyncio.get_running_loop().call_later(self.plan.stops, self._take_on)

    def _take_on(self) -> None:
        self.takes = True
        self.transport.taken()

    async def run(self) -> None:
        await asyncio.sleep(self.plan.starts)
        self.protocol.connection_made(self.transport)
        talking = asyncio.create_task(self._talk())
        try:
            await asyncio.wait_for(asyncio.shield(talking), self.plan.leaves)
        except TimeoutError:
            self.left = not self.over.is_set()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        if talking.done() and not talking.cancelled() and (error := talking.exception()) is not None:
            raise error
        if not self.transport.is_closing():
            self.transport.leave()
        self.done = asyncio.get_running_loop().time()
        self.world.check()

    async def _talk(self) -> None:
        for part in self._parts():
            await asyncio.sleep(self.plan.pause)
            while not self.transport.readable.is_set():
                await self.transport.readable.wait()
            if self.transport.is_closing():
                break
            self.protocol.data_received(part)
            self.world.check()
        begun = asyncio.get_running_loop().time()
        await self.over.wait()
        if (waited := asyncio.get_running_loop().time() - begun) > LONGEST_WAIT_S:
            raise Wrong(f"{self.name} has waited {waited:.0f} s for its answer")

    def _parts(self) -> Iterator[bytes]:
        """Yields the bytes of the request in the parts in which the router may read them."""
        kind, plan = self.plan.kind, self.plan
        if kind == "no request":
            return
        method, path = {"live": ("GET", "/live"), "models": ("GET", "/v1/models")}.get(
            kind, ("POST", "/tokenize" if kind == "tokenize" else "/v1/completions")
        )
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {self.name}\r\n".encode()
        if kind == "headers":
            yield head + b"x-long: "
            for _ in range(2 * HEADER_LIMIT // plan.part + 20):
                yield b"a" * plan.part
            return
        if kind == "late headers":
            yield head
            return
        if method == "GET":
            yield head + b"\r\n"
            return
        body = self._body()
        length = b"transfer-encoding: chunked" if plan.chunked else b"content-length: %d" % len(body)
        yield head + length + b"\r\n\r\n"
        if kind == "stall":
            body = body[: len(body) // 2]
        for at in range(0, len(body), plan.part):
            part = body[at : at + plan.part]
            self.delivered += len(part)
            yield b"%x\r\n%s\r\n" % (len(part), part) if plan.chunked else part
        if plan.chunked and kind != "stall":
            yield b"0\r\n\r\n"
        if kind == "pipelined":
            yield head + b"content-length: %d\r\n\r\n" % BODY_LIMIT
            for at in range(0, BODY_LIMIT, plan.part):
                yield b"x" * min(plan.part, BODY_LIMIT - at)

    def _body(self) -> bytes:
        asked = {"model": "m", "stream": self.plan.stream, "max_tokens": self.plan.tokens, "prompt": ""}
        room = max(0, self.plan.size - len(json.dumps(asked)))
        body = json.dumps(asked | {"prompt": expected_prompt(self.name, room)}).encode()
        if self.plan.kind == "broken":
            return body[:-1]
        return b"[%s]" % body if self.plan.kind == "no object" else body


# --- The world


class WatchedRoom(Limits):
    """A Limits that checks its account at each change."""

    world: World

    def take(self, nbytes: int, *, had: int, expected: int) -> None:
        before = self._bytes
        try:
            super().take(nbytes, had=had, expected=expected)
        except Failure:
            if before + nbytes <= self._most_bytes - self._most_bytes // 16:
                raise Wrong("a body is refused though there is room") from None
            raise
        self.check()

    @contextmanager
    def enter(self, key: str | None = None) -> Iterator[Any]:
        before = len(self._tasks)
        with ExitStack() as stack:
            try:
                place = stack.enter_context(super().enter(key))
            except Failure:
                if before < self._most_requests:
                    raise Wrong("a request is refused though there is room") from None
                raise
            self.check()
            yield place

    def check(self) -> None:
        if not 0 <= self._bytes <= self._most_bytes:
            raise Wrong(f"{self._bytes} bytes are counted, of {self._most_bytes}")
        if len(self._tasks) > self._most_requests:
            raise Wrong(f"{len(self._tasks)} requests are in flight, of {self._most_requests}")


class World:
    def __init__(self, given: Scenario) -> None:
        self.given = given
        self.engines = Engines(given.trouble, given.salt)
        self.rng = Random(given.salt)
        self.rooms: list[WatchedRoom] = []
        self.dispatchers: list[Dispatcher] = []
        self.clients: list[Client] = []

    def room(self, requests: int, nbytes: int, per_key: int | None) -> Limits:
        self.rooms.append(WatchedRoom(requests, nbytes, per_key))
        return self.rooms[-1]

    def dispatcher(self, *args: Any) -> Dispatcher:
        self.dispatchers.append(Dispatcher(*args))
        return self.dispatchers[-1]

    async def to_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        """Replaces asyncio.to_thread() and needs no thread."""
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.3]))
        return call(*args)

    def exchange(self, raw: bytes | memoryview, wanted: WantedParts) -> Parsed:
        """Replaces BodyParser._exchange() and parses in this process."""
        if self.given.trouble and self.rng.random() < 0.05:
            raise EOFError
        return parsed(bytes(raw), wanted)

    def check(self) -> None:
        """Checks the limits. It may be called at any moment."""
        (room,) = self.rooms
        room.check()
        with_engines = sum(
            client.delivered // 2
            for client in self.clients
            if self.engines.open[client.name] and client.plan.kind == "completion"
        )
        if with_engines > room._bytes:
            raise Wrong(f"engines answer {with_engines} bytes, of which {room._bytes} are counted")
        for client in self.clients:
            cycle = client.protocol.cycle
            if cycle is not None and len(cycle.body) > HIGH_WATER_LIMIT + READ:
                raise Wrong(f"{len(cycle.body)} bytes of {client.name} are read, and nobody took them")
        if len(self.config.idle) > self.given.connections:
            raise Wrong(f"{len(self.config.idle)} connections are idle")

    async def run(self) -> None:
        prefill = (f"http://p{number}:80@p{number}:1" for number in range(2))
        app = create_app(
            RouterSettings(
                prefill=tuple(map(Endpoint.parse, prefill)),
                decode=tuple(Endpoint.parse(f"http://d{number}:80") for number in range(2)),
                dispatch=self.given.dispatch,  # type: ignore[arg-type]
                body_limit=BODY_LIMIT,
                body_budget=self.given.budget,
                requests=self.given.requests,
                stall=STALL_S,
            )
        )
        self.config = ServerConfig(
            app, connections=self.given.connections, stall=STALL_S, lifespan="off", timeout_keep_alive=75
        )
        self.config.load()
        self.state = ServerState()
        async with app.router.lifespan_context(app):
            if self.given.replaced:
                self._replace_half()
            for number, plan in enumerate(self.given.clients):
                self.clients.append(Client(self, f"client{number}.", plan))
            async with asyncio.timeout(10 * LONGEST_WAIT_S):
                found = await asyncio.gather(*(one.run() for one in self.clients), return_exceptions=True)
            for error in found:
                if error is not None:
                    raise error
            for client in self.clients:
                self._judge(client)
            await asyncio.sleep(10.0)  # for notifications that engines still receive
            self._at_the_end()

    def _replace_half(self) -> None:
        """Gives the engines of each side two checkpoints, as registrations do."""
        members = self.dispatchers[0].parts.members
        for engine in members._engines.values():
            engine.weights = Weights(
                "", Checkpoint("", "new" if engine.endpoint.url.endswith("1") else "old")
            )
            members._publish(engine)

    def _at_the_end(self) -> None:
        (room,), (dispatcher,) = self.rooms, self.dispatchers
        if self.given.replaced and (
            unlike := [pair for pair in self.engines.pairs if pair[0][1] != pair[1][1]]
        ):
            raise Wrong(f"engines of different checkpoints are paired: {unlike}")
        members = [one for pool in dispatcher.parts.pools.values() for one in pool._members.values()]
        left = {
            "bytes": room._bytes,
            "requests": len(room._tasks),
            "waiting for a turn": len(self.config.turns._waiting),
            "idle": len(self.config.idle),
            "connections": len(self.state.connections),
            "tasks": len(self.state.tasks),
            "at engines": sum(count for name, count in self.engines.open.items() if name),  # status: no id
            "to be moved": len(dispatcher.moves._requests),
            "to be released": dispatcher.parts.holds.releasing,
            "leases": sum(one.outstanding + one.owes for one in members),
        }
        if any(left.values()):
            raise Wrong(f"left at the end: { {name: count for name, count in left.items() if count} }")

    def _judge(self, client: Client) -> None:
        """Checks that the client's answer fits its request."""
        plan, status = client.plan, client.status
        if client.left:
            return
        if plan.kind == "no request":
            allowed: set[int | None] = {None}
        elif plan.kind == "live":
            allowed = {200}
        elif plan.kind == "headers":
            allowed = {431}
        elif plan.kind == "late headers":
            allowed = {408}
        elif plan.kind == "stall":
            allowed = {408, 503}
        elif plan.kind == "too long":
            allowed = {413, 503}
        elif plan.kind in ("broken", "no object"):
            allowed = {400, 503}
        else:
            allowed = {200, 503}
            if self.given.trouble:
                allowed |= {400, 500, 502}
        if plan.stops or len(self.clients) > self.given.connections:
            allowed.add(None)  # closed
        if self.given.trouble and plan.kind == "tokenize":
            allowed.add(503)
        if status not in allowed or (status is not None and not client.complete):
            raise Wrong(f"{client.name} ({plan}) got {status}: {bytes(client.body[:300])!r}")
        if status == 503:
            after = client.headers.get(b"retry-after")
            if after is None:
                raise Wrong(f"{client.name} got 503 without Retry-After")
            reasons = (b"--body-budget", b"limit on open files")
            if not self.given.trouble and not any(reason in client.body for reason in reasons):
                raise Wrong(f"{client.name} got 503 for no reason: {bytes(client.body)!r}")
        if status == 200 and plan.kind == "completion" and plan.stream and not client.body.endswith(DONE):
            raise Wrong(f"{client.name} got a stream without an end: {bytes(client.body[-100:])!r}")
        if status == 200 and plan.kind == "completion" and plan.stream:
            self._judge_stream(client)

    def _judge_stream(self, client: Client) -> None:
        """Checks that the stream has each token once, in order, and all of them or an error at its end."""
        parts = bytes(client.body).split(b"\n\n")[:-2]
        said = [json.loads(part.removeprefix(b"data: ")) for part in parts]
        failed = bool(said) and "error" in said[-1]
        choices = [one["choices"][0] for one in (said[:-1] if failed else said)]
        text, tokens = "".join(one["text"] for one in choices), client.plan.tokens
        whole = "".join(f"{number}," for number in range(1, tokens + 1))
        if not (whole.startswith(text) if failed else text == whole and choices[-1]["finish_reason"]):
            raise Wrong(f"{client.name} got other tokens than 1 to {tokens}: ...{text[-100:]} {said[-1]}")


def problem(given: Scenario, answers: list[tuple[float, int | None]] | None = None) -> str | None:
    """Returns the rule that the router breaks, or None. ``answers`` receives the end time of each client, and
    the status of its answer."""
    logging.disable(logging.CRITICAL)
    world = World(given)
    loop = VirtualLoop()
    faults: list[str] = []

    def note(_: object, context: dict[str, Any]) -> None:
        faults.append(f"{context['message']}: {context.get('exception')!r}")

    def exchange(_: BodyParser, raw: bytes | memoryview, wanted: WantedParts) -> Parsed:
        return world.exchange(raw, wanted)

    loop.set_exception_handler(note)
    with (
        patch("time.monotonic", loop.time),
        patch("asyncio.to_thread", world.to_thread),
        patch.object(app_module, "EngineClient", lambda *_: world.engines),
        patch.object(app_module, "Limits", world.room),
        patch.object(app_module, "Dispatcher", world.dispatcher),
        patch("kv_connector.router.bodies.body_parser.LONG", LONG),
        patch.object(BodyParser, "_exchange", exchange),
    ):
        try:
            loop.run_until_complete(world.run())
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if answers is not None:
                answers += [(client.done, client.status) for client in world.clients]
            _close(loop)
            logging.disable(logging.NOTSET)
    return f"a task failed: {faults[0]}" if faults else None


def _close(loop: VirtualLoop) -> None:
    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(end())
        loop.run_until_complete(loop.shutdown_asyncgens())
    except Wrong:
        pass  # a task that cannot be cancelled: the scenario has failed before
    loop.close()


# --- Campaign


def smallest(given: Scenario) -> Scenario:
    """Returns the failing scenario with as few clients as possible."""
    shorter = True
    while shorter:
        shorter = False
        for number in reversed(range(len(given.clients))):
            fewer = replace(given, clients=given.clients[:number] + given.clients[number + 1 :])
            if problem(fewer):
                given, shorter = fewer, True
                break
    return given


def report(seed: int) -> str | None:
    """Returns a description of the fault that this seed finds, or None."""
    given = scenario(seed)
    if problem(given) is None:
        return None
    given = smallest(given)
    return f"seed {seed}: {problem(given)}\n  the smallest scenario: {given}"


def main() -> None:
    search(chosen_seeds(__doc__, 1000, "scenarios"), "scenarios", report)


if __name__ == "__main__":
    main()
