"""The pause of a stream that moves from one decode engine to another, on GPUs.

Needs vLLM with its GPU dependencies, three GPUs and this package: a prefill engine, and two engines of both
roles, of which one has all streams. A drain moves them to the second engine, and the next drain moves them
back. Each drain is a row of the table. A pause is a stream's longest gap between two events, from the drain's
beginning to some tokens behind its end. The gaps before it are listed for comparison. In the first of all
drains the engines connect. The model (shapes.py) has dummy weights: its tokens mean nothing, its times do.

Before that, while its engines start, streams of a small float32 model move. One engine then checks that each
of their tokens is its most likely one after the tokens before it. Exits with status 1 if one is not. --cpu
does this alone, on CPUs, with times that mean nothing. Each drain appends a line of JSON to --json.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gpu_engines import (
    CPU_ENVIRONMENT,
    HOST,
    JSON,
    START_SECONDS,
    TINY_ARGUMENTS,
    Body,
    GpuServer,
    ours,
    stream,
    wait_ready,
    write_tiny,
)
from gpu_goodput import GPU, GoodputRouter, write_tokenizer
from shapes import SHAPES

from kv_connector.control.membership import Register
from kv_connector.control.registrar import Registrar
from kv_connector.lab.cluster import engine_states
from kv_connector.lab.moving import Moved, move_away
from kv_connector.lab.process import stop
from kv_connector.lab.sse import Events
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

# Events of each stream between two drains. The pause is also searched in the first part of them. The gaps of
# the rest are compared with the next drain's pauses.
BEHIND, BETWEEN = 16, 48
# 32 streams of 4,000 and 2,000 tokens of the 8B shape take 24 GiB.
CACHE_BYTES = 26 << 30
WAIT_SECONDS = 120.0
# Sums in another order round differently, and random weights have near ties. The logarithms of the
# probabilities of float32 tokens differ by less than this between an engine that decodes and one that
# prefills. A wrong page costs whole units.
TIE = 0.01


class MovesEngine:
    """An engine of both roles.

    This script makes its registration, because a drain lasts as long as a registration.
    """

    def __init__(self, server: GpuServer, registration: Address) -> None:
        self.server = server
        self._registration = registration
        self._registrar: Registrar | None = None

    def join(self, router: str) -> None:
        """Registers the engine. Returns when the router sends it requests."""
        registration = Register(
            engine_id=self.server.name,
            incarnation=uuid.uuid4().hex,
            role=Role.BOTH,
            url=self.server.url,
            control_host=HOST,
            control_port=self.server.control_port,
            early_tokens=True,
        )
        self._registrar = Registrar(registration, [self._registration], None)
        deadline = time.monotonic() + START_SECONDS
        while engine_states(router).get(self.server.url) != "ready":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the router does not accept {self.server.name}")
            time.sleep(0.05)

    def leave(self) -> None:
        if self._registrar is not None:
            self._registrar.close()
            self._registrar = None

    def drain(self) -> Moved:
        """Drains the engine. Returns when no more streams are to move."""
        moved = move_away(self._registration, self.server.url, WAIT_SECONDS)
        self.leave()
        return moved


class MovesSite:
    """The engines of one model, and their router."""

    def __init__(
        self, plan: argparse.Namespace, name: str, port: int, model: Path, arguments: Sequence[str]
    ) -> None:
        registration = Address(HOST, port + 1)
        self.name = name
        self._router = GoodputRouter(f"router-{name}", port, ["--registration", str(registration)], plan.work)
        self.url = f"http://{HOST}:{port}"
        sides = [("prefill", "kv_producer", 0), ("first", "kv_both", 1), ("second", "kv_both", 2)]
        self.servers: list[GpuServer] = []
        for index, (side, role, gpu) in enumerate(sides, 1):
            if plan.cpu or plan.share:
                gpu = 0 if plan.cpu else max(0, gpu - 1)
            first = port + 10 * index
            transfer = ours(role, first + 1, plan.provider, f"http://{HOST}:{first}", registration.port)
            if role == "kv_both":
                del transfer["kv_connector_extra_config"]["routers"]
            environment = CPU_ENVIRONMENT if plan.cpu else {}
            more = [*arguments, *shlex.split(plan.engine)]
            self.servers.append(
                GpuServer(
                    f"{name}-{side}", [gpu], first, model, more, plan.work, transfer, first + 1, environment
                )
            )
        self.here, self.there = (MovesEngine(server, registration) for server in self.servers[1:])

    @property
    def processes(self) -> list[GoodputRouter | GpuServer]:
        return [self._router, *self.servers]

    def start(self) -> None:
        for process in self.processes:
            process.start()

    def wait(self) -> None:
        wait_ready(self.servers)
        self.here.join(self.url)
        self._router.wait()

    def outcomes(self) -> Mapping[str, float]:
        """Returns the numbers of moves: {'moves_total{outcome="..."}': number}."""
        return {
            name: count for name, count in self._router.counts().items() if name.startswith("moves_total")
        }

    def stop(self) -> None:
        for engine in (self.here, self.there):
            engine.leave()
        stop([one.process for one in self.processes if one.process is not None])


class StreamClient:
    """The client of one stream.

    Its text is decoded after the end, because that would take longer than recording an event.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int) -> None:
        self.prompt = prompt
        self.times: list[float] = []
        """Records when each event came, except for events that came together with another."""
        self._said = bytearray()
        self._wanted, self._come = 0, asyncio.Event()
        self.task = asyncio.create_task(self._read(http, url, tokens))

    async def _read(self, http: httpx.AsyncClient, url: str, tokens: int) -> None:
        body = {"model": "model", "prompt": self.prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        content = json.dumps(body)
        try:
            async with http.stream("POST", f"{url}/v1/completions", content=content, headers=JSON) as told:
                if told.status_code != 200:
                    raise RuntimeError(f"HTTP {told.status_code}: {(await told.aread())[:500]!r}")
                async for chunk in told.aiter_raw():
                    self.times.append(time.perf_counter())
                    self._said += chunk
                    if len(self.times) >= self._wanted:
                        self._come.set()
        finally:
            self._come.set()

    async def go_on(self, events: int) -> None:
        """Waits until ``events`` more events have come, or the stream has ended."""
        self._wanted = len(self.times) + events
        self._come.clear()
        if not self.task.done():
            await self._come.wait()
        if self.task.done():
            await self.task

    def gaps(self, begin: int, end: int | None = None) -> list[float]:
        """Returns the seconds between events, from event ``begin`` on."""
        return np.diff(self.times[begin:end]).tolist()

    def tokens(self) -> list[int]:
        """Returns the stream's tokens. RuntimeError: the stream contains an error."""
        found: list[int] = []
        for event in Events().feed(bytes(self._said)):
            told = json.loads(event)
            if "error" in told:
                raise RuntimeError(f"a stream has broken off: {told['error']}")
            found += [token for choice in told["choices"] for token in choice.get("token_ids") or ()]
        return found


async def go_on(clients: Sequence[StreamClient], events: int) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(client.go_on(events) for client in clients))


async def move(site: MovesSite, clients: Sequence[StreamClient]) -> dict[str, Any]:
    """Measures one drain, after which the other engine has the streams."""
    await asyncio.to_thread(site.there.join, site.url)
    await go_on(clients, BETWEEN)
    live = [client for client in clients if not client.task.done()]
    if not live:
        raise RuntimeError("all streams have ended. Set more --tokens, or fewer --rounds")
    counts, outcomes = [len(client.times) for client in live], site.outcomes()
    moved = await asyncio.to_thread(site.here.drain)
    await go_on(live, BEHIND)
    site.here, site.there = site.there, site.here
    before = [client.gaps(count - BETWEEN, count) for client, count in zip(live, counts, strict=True)]
    behind = [client.gaps(count - 1) for client, count in zip(live, counts, strict=True)]
    return {
        "moved": moved.streams,
        "staying": moved.staying,
        "seconds": moved.seconds,
        "pauses": [max(gaps, default=0.0) for gaps in behind],
        "gap": statistics.median(gap for gaps in before for gap in gaps),
        "longest gaps": [max(gaps) for gaps in before],
        "outcomes": {name: count - outcomes.get(name, 0) for name, count in site.outcomes().items()},
    }


async def case(
    site: MovesSite, plan: argparse.Namespace, length: int, count: int, sink: Any
) -> list[StreamClient]:
    """Moves the streams of one length and number back and forth, then closes them. Returns their tokens."""
    rng = np.random.default_rng(length + count)
    prompts = rng.integers(8, 250, (count, length)).tolist()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False, limits=limits) as http:
        clients = [StreamClient(http, site.url, prompt, plan.tokens) for prompt in prompts]
        try:
            await go_on(clients, BEHIND)  # all prompts are computed
            for number in range(1, 2 * plan.rounds + 1):
                line = {"model": site.name, "prompt": length, "streams": count, "drain": number}
                line |= await move(site, clients)
                sink.write(json.dumps(line) + "\n")
                print(row(line), flush=True)
        finally:
            for client in clients:
                client.task.cancel()
            await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    return clients


COLUMNS = (
    "model",
    "prompt",
    "streams",
    "drain",
    "moved",
    "seconds until all have",
    "pause p50, ms",
    "max",
    "time between tokens before p50, ms",
    "longest of a stream p50",
    "max",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def row(line: Mapping[str, Any]) -> str:
    pauses, longest = line["pauses"], line["longest gaps"]
    times = [statistics.median(pauses), max(pauses), line["gap"], statistics.median(longest), max(longest)]
    cells = [*(str(line[name]) for name in ("model", "prompt", "streams", "drain", "moved"))]
    cells += [f"{line['seconds']:.2f}", *(f"{seconds * 1e3:.1f}" for seconds in times)]
    return f"| {' | '.join(cells)} |"


async def right(server: GpuServer, clients: Sequence[StreamClient]) -> bool:
    """Returns whether each token is the most likely one for this engine, which computes all of them anew."""
    worst, others, count = 0.0, 0, 0
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as http:
        for client in clients:
            said = client.tokens()
            body = {"model": "model", "prompt": [*client.prompt, *said], "max_tokens": 1, "temperature": 0}
            answer = await http.post(f"{server.url}/v1/completions", json=body | {"prompt_logprobs": 1})
            answer.raise_for_status()
            rated = answer.json()["choices"][0]["prompt_logprobs"][len(client.prompt) :]
            for token, likely in zip(said, rated, strict=True):
                best = max(one["logprob"] for one in likely.values())
                short = best - likely[str(token)]["logprob"]
                worst, others, count = max(worst, short), others + (short > 0), count + 1
    print(
        f"\n{count} tokens of {len(clients)} streams that have moved: {others} are not the ones that one "
        f"engine finds most likely; the furthest from it is {worst:.2g} less likely (logarithm)\n",
        flush=True,
    )
    return count > 0 and worst < TIE


async def warm(site: MovesSite) -> None:
    """Sends one request to each engine by itself, to warm it up."""
    async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as http:
        for server in site.servers:
            await stream(http, server.url, Body([9] * 64, 2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvc-bench-moves"), help="folder for models and logs"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="file to which JSON lines are appended"
    )
    parser.add_argument("--port", type=int, default=8100, help="first of 200 ports")
    parser.add_argument(
        "--share", action="store_true", help="use two GPUs: the prefill engine shares the first engine's"
    )
    parser.add_argument(
        "--prompts", nargs="+", type=int, default=[500, 4000], help="prompt lengths in tokens"
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--tokens", type=int, default=2000, help="longest answer of a stream, in tokens")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, each with two moves")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no measurement starts"
    )
    parser.add_argument("--provider", default="nvlink")
    parser.add_argument("--engine", default="", metavar="ARGUMENTS", help="more arguments for every engine")
    parser.add_argument("--cpu", action="store_true")
    plan = parser.parse_args()
    began = time.monotonic()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    model = write_tiny(plan.work / "tiny")
    write_tokenizer(model)
    small = [*TINY_ARGUMENTS, "--max-model-len", "8192", "--gpu-memory-utilization", "0.1"]
    small += ["--no-skip-tokenizer-init"]
    if plan.cpu:
        plan.provider = "host"
        small += ["--block-size", "32", "--kv-cache-memory-bytes", str(1 << 29)]
    sites = [MovesSite(plan, "small", plan.port, model, small)]
    if not plan.cpu:
        shape = SHAPES["llama"].write(plan.work / "llama")
        write_tokenizer(shape)
        large = [*GPU.arguments, "--max-model-len", "8192", "--kv-cache-memory-bytes", str(CACHE_BYTES)]
        sites.append(MovesSite(plan, "llama", plan.port + 100, shape, large))
    try:
        for site in sites:
            site.start()
        with plan.json.open("a", buffering=1) as sink:
            sites[0].wait()
            print(
                f"the small model's engines are up after {time.monotonic() - began:.0f} s\n\n{HEAD}",
                flush=True,
            )
            moved = asyncio.run(case(sites[0], plan, plan.prompts[0], plan.streams[0], sink))
            equal = asyncio.run(right(sites[0].servers[1], moved))
            for site in sites[1:]:
                site.wait()
                print(f"the others are up after {time.monotonic() - began:.0f} s\n{HEAD}", flush=True)
                asyncio.run(warm(site))
                for length in plan.prompts:
                    for count in plan.streams:
                        if time.monotonic() - began < plan.limit:
                            asyncio.run(case(site, plan, length, count, sink))
    finally:
        for site in sites:
            site.stop()
    print(f"over after {time.monotonic() - began:.0f} s")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
