"""Fake deployments for `kv-connector verify`: servers with a made-up model, on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from router_setup import PATIENCE, serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

BEGIN = 1000  # the token of the beginning
MODEL = "m"


def answer_of(prompt: str, count: int) -> list[int]:
    """The made-up model: lower-case letters that depend on the whole prompt."""
    numbers = random.Random(hashlib.sha256(prompt.encode()).digest())
    return [ord("a") + numbers.randrange(26) for _ in range(count)]


@dataclass
class Asked:
    """One request to a fake server."""

    number: int
    """Number of requests for answers before it."""
    prompt: str
    body: dict[str, Any]
    headers: dict[str, str]


Change = Callable[[Asked, list[int]], list[int] | Response]


@dataclass
class FakeModelServer:
    """Answers like the made-up model, unless `change` returns other tokens or a whole response."""

    change: Change = lambda asked, tokens: tokens
    models: list[str] = field(default_factory=lambda: [MODEL])
    health: dict[str, Any] | None = None
    refused: tuple[str, ...] = ()
    """Fields and routes that it refuses with 400."""
    margin: float = 5.0
    """Distance of the second candidate of each token, in nats."""
    answers_ids: bool = True
    asked: list[Asked] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    """Values of `authorization` with which its health and metrics were read."""
    url: str = ""

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        info = Gauge("vllm:cache_config_info", "Cache", ["block_size"], registry=self.registry)
        info.labels("32").set(1)
        self.local = Counter(
            "kv_connector_router_local_prefills", "Local", ["reason"], registry=self.registry
        )
        self.transfers = Counter(
            "kv_connector_transfers", "Ended", ["role", "outcome"], registry=self.registry
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": name, "max_model_len": 4096} for name in self.models]})

    async def _health(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        return Response() if self.health is None else JSONResponse(self.health)

    async def _metrics(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        return PlainTextResponse(generate_latest(self.registry))

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        if "tokenize" in self.refused:
            return JSONResponse({"error": {"message": "no tokenizer"}}, 404)
        tokens = [BEGIN] * body["add_special_tokens"] + [*body["prompt"].encode()]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        chat = "messages" in body
        if any(name in body or name == ("chat" if chat else "") for name in self.refused):
            return JSONResponse({"error": {"message": "refused"}}, 400)
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        asked = Asked(len(self.asked), text, body, dict(request.headers))
        self.asked.append(asked)
        tokens = self.change(asked, answer_of(text, body["max_tokens"]))
        if isinstance(tokens, Response):
            return tokens
        if not body["stream"]:
            choice = self._choice(chat, tokens, body, "message") | {"finish_reason": "length"}
            return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": len(text)}})
        pieces = [self._choice(chat, [token], body, "delta") for token in tokens]
        last = self._choice(chat, [], body, "delta") | {"finish_reason": "length"}
        return events(*({"choices": [piece]} for piece in [*pieces, last]))

    def _choice(self, chat: bool, tokens: list[int], body: dict[str, Any], kind: str) -> dict[str, Any]:
        text = "".join(map(chr, tokens))
        choice: dict[str, Any] = {kind: {"content": text}} if chat else {"text": text}
        if self.answers_ids:
            choice["token_ids"] = tokens
        candidates = [-0.1, -0.1 - self.margin]
        if body.get("top_logprobs"):
            row = {"top_logprobs": [{"logprob": one} for one in candidates]}
            choice["logprobs"] = {"content": [row for _ in tokens]}
        elif body.get("logprobs"):
            by_text = {str(number): one for number, one in enumerate(candidates)}
            choice["logprobs"] = {"top_logprobs": [by_text for _ in tokens]}
        return choice


def events(*bodies: dict[str, Any], done: bool = True) -> Response:
    """A stream of these events."""

    async def chunks() -> AsyncIterator[bytes]:
        for body in bodies:
            yield b"data: " + json.dumps(body).encode() + b"\n\n"
        if done:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


@contextlib.contextmanager
def running(*servers: FakeModelServer) -> Iterator[None]:
    """Runs the servers, on a thread of their own, until the block is left."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    end = asyncio.Event()

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                server.url = await stack.enter_async_context(serve(server.app()))
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
