"""Running streams that move to another decode engine: what the client sees of it is one stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_vllm import LENGTH, FakeVllm, serve_vllm
from router_setup import PATIENCE, serve, within
from typer.testing import CliRunner, Result

from kv_connector.cli.main import app as command_line
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address
from kv_connector.router.app import create_app
from kv_connector.router.endpoint import Endpoint
from kv_connector.router.settings import Settings

pytestmark = pytest.mark.anyio

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Good morning"}]


class Site:
    """One P, two engines of both roles, a router over them, and a client of the router."""

    def __init__(self, p: FakeVllm, first: FakeVllm, second: FakeVllm) -> None:
        self.p, self.first, self.second = p, first, second
        self.registration = Address("127.0.0.1", free_ports(1)[0])
        self.client: httpx.AsyncClient

    async def drain(self, engine: FakeVllm, *words: str) -> Result:
        """Until the engine is idle."""
        return await within(await self.begin_drain(engine, *words))

    async def begin_drain(self, engine: FakeVllm, *words: str) -> asyncio.Task[Result]:
        """Once the router knows of it, the engine goes on."""
        words = ("drain", engine.url, "--router", str(self.registration), "--move", *words)
        draining = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, command_line, words))
        async with asyncio.timeout(PATIENCE):
            while (await self.client.get("/health")).json()["decode"][engine.url] != "draining":
                assert not draining.done(), draining.result().output
        engine.go.set()
        return draining

    async def outcomes(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        name = "kv_connector_router_moves_total{outcome="
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@contextlib.asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    async with serve_vllm(1) as p, serve_vllm(2) as first, serve_vllm(3) as second:
        made = Site(p, first, second)
        both = [Endpoint.parse(f"{one.url}@10.0.0.{one.created}:5600") for one in (first, second)]
        chosen = Settings(
            (Endpoint.parse(f"{p.url}@10.0.0.1:5600"), *both),
            tuple(both),
            registration=made.registration,
            **settings,
        )
        first.limits = (8, 24)
        async with (
            serve(create_app(chosen)) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE) as made.client,
        ):
            yield made


class Reading:
    """A client's stream that is read while something else happens."""

    def __init__(self, client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str = "one") -> None:
        self.events: list[dict[str, Any]] = []
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
                    said = [event[6:] for event in self.raw.split(b"\n\n")[:-1] if event != b"data: [DONE]"]
                    self.events = [json.loads(event) for event in said]
                    self._more.notify_all()

    async def until(self, events: int) -> None:
        async with asyncio.timeout(PATIENCE), self._more:
            await self._more.wait_for(lambda: len(self.events) >= events)

    async def end(self) -> list[dict[str, Any]]:
        await within(self._task)
        assert self.raw.endswith(b"data: [DONE]\n\n")
        return self.events


async def alone(engine: FakeVllm, path: str, body: dict[str, Any], name: str = "one") -> list[dict[str, Any]]:
    """What the engine says to a client that asks it itself."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=PATIENCE) as client:
        return await Reading(client, path, body, name).end()


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


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_drained_engines_stream_goes_on_elsewhere_and_back(path: str, body: dict[str, Any]) -> None:
    async with site() as s:
        reading = Reading(s.client, path, body)
        await reading.until(7)
        drained = await s.drain(s.first)
        assert (drained.exit_code, drained.output.strip()) == (
            0,
            f"{s.first.url} is idle, 1 streams have moved",
        )
        events = await reading.end()
        s.first.limits = (LENGTH, LENGTH)
        expected = await alone(s.first, path, body)
        if "usage" in events[-1] and not events[-1]["choices"]:
            expected[-1]["usage"]["prompt_tokens_details"] = events[-1]["usage"]["prompt_tokens_details"]
        assert events == expected
        assert await s.outcomes() == {"moved": 1}
        assert s.first.closed == 1
        # The old engine was asked for the pages of all that was said, and the new one goes on behind that.
        (to_first,), (to_second,) = s.first.bodies[1:2], s.second.bodies
        assert to_first["kv_transfer_params"]["do_remote_decode"]
        transfer = to_second["kv_transfer_params"]
        assert transfer["transfer_id"] == to_first["kv_transfer_params"]["transfer_id"]
        assert (transfer["remote_host"], transfer["do_remote_prefill"]) == ("10.0.0.2", True)
        assert to_first["prompt"] == to_second["prompt"]
        assert to_first["max_tokens"] == 1
        said = len(to_second["prompt"]) - len(s.first.ids_of_body(path, body))
        assert said >= 5
        if "min_tokens" in body:
            assert to_second["min_tokens"] == 50 - said
        assert "seed" not in to_second


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_noting_the_ids_leaves_no_trace(path: str, body: dict[str, Any]) -> None:
    async with site() as s:
        s.first.limits = (LENGTH, LENGTH)
        reading = Reading(s.client, path, body)
        await reading.end()
        assert s.first.bodies[0]["return_token_ids"] is True
        asked = Reading(httpx.AsyncClient(base_url=s.first.url, timeout=PATIENCE), path, body)
        await asked.end()
        assert reading.raw == asked.raw
