"""Servers, a router and clients, and the queries that all tests with them share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.sglang_cluster import HOST, ServerSettings, SglangCluster, SglangServer
from kv_connector.lab.sse import Events
from kv_connector.sglang.plugin import BACKEND, LOADER

SECONDS = 120.0
"""Time limit of an answer on a busy machine."""
AT_REST_S = 30.0
ARGUMENTS = ("--enable-metrics", "--sleep-on-idle")
"""Arguments of every server. An idle server leaves the cores to servers that start."""


def prompts(count: int, *, longest: int = 600, seed: int = 0, begin: Sequence[int] = ()) -> list[list[int]]:
    """Returns prompts of token ids, each of which stands for a byte. All start with `begin`."""
    rng = random.Random(seed)
    return [[*begin, *(rng.randrange(256) for _ in range(rng.randrange(1, longest)))] for _ in range(count)]


@dataclass
class Pair:
    """A P and a D. A test that kills one of them replaces it."""

    cluster: SglangCluster
    settings: ServerSettings
    """Settings of P."""
    prefill: SglangServer
    decode: SglangServer
    takes: Sequence[str] = ()
    """Addresses where P and D take weights, if they do."""


# A server that gets no CPU time on a busy machine must not count as dead. A killed trainer closes its
# sockets.
PATIENT = {"suspect": 15.0, "dead": 30.0}


def taking_weights(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Returns the settings of a server that takes weights, and the address where it does."""
    (port,) = free_ports(1)
    given = {"control_host": HOST, "control_port": port, "providers": ["host", "tcp"], "timeouts": PATIENT}
    options = ("--custom-weight-loader", LOADER, "--warmups", BACKEND)
    environment = {**settings.environment, "KV_CONNECTOR_WEIGHTS": json.dumps(given)}
    taking = replace(settings, arguments=(*settings.arguments, *options), environment=environment)
    return taking, f"{HOST}:{port}"


@dataclass
class Client:
    """A client that requests greedy tokens."""

    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=SECONDS))

    async def generate(self, url: str, prompt: Sequence[int], tokens: int = 16, **more: Any) -> list[int]:
        """Returns the output tokens. Raises httpx.HTTPStatusError if the server answers with an error."""
        answer = await self.http.post(f"{url}/generate", json=body(prompt, tokens, **more))
        answer.raise_for_status()
        ids: list[int] = answer.json()["output_ids"]
        return ids

    async def stream(self, url: str, prompt: Sequence[int], tokens: int = 16) -> list[int]:
        ids: list[int] = []
        async with self.http.stream(
            "POST", f"{url}/generate", json=body(prompt, tokens, stream=True)
        ) as answer:
            answer.raise_for_status()
            events = Events()
            async for chunk in answer.aiter_bytes():
                for event in events.feed(chunk):
                    ids = json.loads(event)["output_ids"]
        return ids

    async def both(
        self,
        prefill: SglangServer,
        decode: SglangServer,
        prompt: Sequence[int],
        tokens: int = 16,
        **more: Any,
    ) -> list[int]:
        """Sends a request to P and D at once, as a router does. Raises httpx.HTTPError if D answers with an
        error or not at all."""
        where = {"bootstrap_host": HOST, "bootstrap_port": prefill.bootstrap_port, **more}
        where["bootstrap_room"] = random.randrange(1 << 62)
        async with asyncio.TaskGroup() as halves:
            to_prefill = halves.create_task(self._prefill(prefill, prompt, where))
            try:
                return await self.generate(decode.url, prompt, tokens, **where)
            finally:
                to_prefill.cancel()

    async def _prefill(self, prefill: SglangServer, prompt: Sequence[int], where: dict[str, Any]) -> None:
        """Sends P's half. Its answer is ignored, because D's answer is the client's."""
        with contextlib.suppress(httpx.HTTPError):
            await self.http.post(f"{prefill.url}/generate", json=body(prompt, 1, **where))

    async def all(
        self, url: str, asked: Sequence[Sequence[int]], *, at_once: int = 1, tokens: int = 16
    ) -> list[list[int]]:
        return await _gated([self.generate(url, prompt, tokens) for prompt in asked], at_once)

    async def all_of_both(
        self, prefill: SglangServer, decode: SglangServer, asked: Sequence[Sequence[int]], *, at_once: int = 1
    ) -> list[list[int]]:
        return await _gated([self.both(prefill, decode, prompt) for prompt in asked], at_once)


async def _gated(asking: Sequence[Awaitable[list[int]]], at_once: int) -> list[list[int]]:
    gate = asyncio.Semaphore(at_once)

    async def one(ask: Awaitable[list[int]]) -> list[int]:
        async with gate:
            return await ask

    return list(await asyncio.gather(*map(one, asking)))


def body(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **more}


async def metrics(server: SglangServer) -> dict[str, float]:
    """Returns the sums over all labels, by metric name."""
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"{server.url}/metrics")).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def sent(server: SglangServer, transfers: float = 0) -> tuple[float, float]:
    """Returns the transfers of a prefill server and their bytes, once it has shown this many and no more
    come.

    Its agent shows them once a second.
    """
    deadline, last = time.monotonic() + AT_REST_S, None
    while True:
        shown = await metrics(server)
        found = tuple(shown.get(f"kv_connector_send_size_bytes_{what}", 0.0) for what in ("count", "sum"))
        if found == last and found[0] >= transfers:
            return found[0], found[1]
        assert time.monotonic() < deadline, f"{server.name} has sent {found}, not {transfers} transfers"
        last = found
        await asyncio.sleep(1.5)


async def at_rest(*servers: SglangServer) -> None:
    """Waits until these servers are idle, for SGLang and for the connector's agents.

    SGLang empties its cache only when it is idle, and ends itself if pages are lost.
    """
    deadline = time.monotonic() + AT_REST_S
    async with httpx.AsyncClient(timeout=10) as http:
        for server in servers:
            while True:
                answer = await http.post(f"{server.url}/flush_cache")
                live = {
                    name: value
                    for name, value in (await metrics(server)).items()
                    if name.startswith("kv_connector_live") and value
                }
                if answer.status_code == 200 and not live:
                    break
                assert time.monotonic() < deadline, f"{server.name}: {answer.text}, {live}"
                await asyncio.sleep(0.2)
