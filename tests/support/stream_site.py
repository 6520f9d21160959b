"""Fake engines with streams that leave them, a router over them, and clients that read the streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fake_vllm import FakeVllm, next_token, serve_vllm
from router_setup import PATIENCE, client_of, serve, within
from typer.testing import CliRunner, Result

from kv_connector.cli.main import app as command_line
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.front.app import create_app
from kv_connector.router.settings import RouterSettings

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Good morning"}]


class StreamSite:
    """A prefill engine, two engines of both roles, a router over them, and a client of the router."""

    def __init__(self, p: FakeVllm, first: FakeVllm, second: FakeVllm) -> None:
        self.p, self.first, self.second = p, first, second
        self.registration = Address("127.0.0.1", free_ports(1)[0])
        self.client: httpx.AsyncClient

    async def drain(self, engine: FakeVllm, *words: str) -> Result:
        """Drains the engine and waits until it is idle."""
        return await within(await self.begin_drain(engine, *words))

    async def begin_drain(self, engine: FakeVllm, *words: str) -> asyncio.Task[Result]:
        """Starts a drain. Once the router knows of it, the engine continues."""
        words = ("drain", engine.url, "--router", str(self.registration), "--move", "--force", *words)
        draining = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, command_line, words))
        async with asyncio.timeout(PATIENCE):
            while (await self.client.get("/health")).json()["decode"][engine.url] != "draining":
                if draining.done():  # the engine was idle at once
                    assert draining.result().exit_code == 0, draining.result().output
                    break
        engine.go.set()
        return draining

    async def outcomes(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        name = "kv_connector_router_moves_total{outcome="
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@contextlib.asynccontextmanager
async def site(*more: FakeVllm, **settings: Any) -> AsyncIterator[StreamSite]:
    async with serve_vllm(1) as p, serve_vllm(2) as first, serve_vllm(3) as second:
        made = StreamSite(p, first, second)
        both = [Endpoint.parse(f"{one.url}@10.0.0.{one.created}:5600") for one in (first, second, *more)]
        chosen = RouterSettings(
            (Endpoint.parse(f"{p.url}@10.0.0.1:5600"), *both),
            tuple(both),
            registration=made.registration,
            **settings,
        )
        first.limits = (8, 24)
        async with (
            serve(create_app(chosen)) as url,
            client_of(url) as made.client,
        ):
            yield made


class StreamReading:
    """A client's stream that is read in the background."""

    def __init__(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str = "one") -> None:
        self.raw = b""
        self._more = asyncio.Condition()
        self._task = asyncio.create_task(
            self._read(client, path, {"stream": True, "model": "m", **body}, name)
        )

    async def _read(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str) -> None:
        headers = {"x-request-id": name}
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            async for chunk in answer.aiter_bytes():
                async with self._more:
                    self.raw += chunk
                    self._more.notify_all()

    @property
    def events(self) -> list[dict[str, Any]]:
        """The stream's events, without the last one ([DONE])."""
        parts = self.raw.split(b"\n\n")[:-1]
        return [json.loads(event[6:]) for event in parts if event != b"data: [DONE]"]

    async def until(self, events: int) -> None:
        async with asyncio.timeout(PATIENCE), self._more:
            await self._more.wait_for(lambda: self.raw.count(b"\n\n") >= events)

    def leave(self) -> None:
        self._task.cancel()

    async def end(self) -> list[dict[str, Any]]:
        await within(self._task)
        assert self.raw.endswith(b"data: [DONE]\n\n"), self.raw[-300:]
        return self.events


def said(events: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Returns the text and token ids of all events."""
    choices = [choice for event in events for choice in event["choices"]]
    texts = (
        choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
    )
    return "".join(texts), [token for choice in choices for token in choice.get("token_ids") or ()]


async def alone(engine: FakeVllm, path: str, body: dict[str, Any], name: str = "one") -> list[dict[str, Any]]:
    """Returns the engine's answer to a client that sends its request directly."""
    async with client_of(engine.url) as client:
        return await StreamReading(client, path, body, name).end()


REQUESTS = [
    (COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 60}),
    (COMPLETION, {"prompt": "Good morning", "max_tokens": 60, "temperature": 0, "seed": 3}),
    (COMPLETION, {"prompt": [5], "max_tokens": 60, "return_token_ids": True, "min_tokens": 50}),
    (COMPLETION, {"prompt": [5], "max_tokens": 60, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 60}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 60, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": MESSAGES, "return_token_ids": True, "n": 1, "tools": [], "user": "x"}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 60, "stream_options": {"continuous_usage_stats": True}}),
]

BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 60}


async def moving(s: StreamSite, body: dict[str, Any] = BODY, path: str = COMPLETION) -> StreamReading:
    """Returns a stream that has begun on the first engine."""
    reading = StreamReading(s.client, path, body)
    await reading.until(7)
    return reading


def answer_of(prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens:
        ids.append(next_token(ids))
    return ids[len(prompt) :]
