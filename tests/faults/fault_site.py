"""The site of fault tests: engines that register with a router under load, all with one cluster key."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx
from deployment import Client, RefusedCall, assert_quiescent, engine_settings, prompt

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports

# The default dead time of the connector and the router.
DEAD_SECONDS = 5.0
# Time allowed beyond the dead time for a request that used the dead process.
GRACE_SECONDS = 1.0

OUTPUT = 24
# Prompts of a few blocks to some chunks. Each is requested repeatedly, and has one right answer.
LENGTHS = (40, 150, 333, 500, 700, 900, 1100, 1500)


@dataclass(frozen=True)
class Answer:
    """The outcome of one request of the load."""

    number: int  # number of its prompt
    began: float
    ended: float
    tokens: tuple[int, ...]
    problem: str  # empty: the answer is complete


@dataclass
class Outcome:
    """The load's requests around one fault."""

    fault: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    def row(self, what: str) -> dict[str, Any]:
        """Returns the figures for docs/benchmarks."""
        latest = max((answer.ended - self.fault for answer in self.failed), default=0.0)
        touched = [a for a in self.answers if a.began < self.fault < a.ended]
        return {
            "fault": what,
            "requests": len(self.answers),
            "under_way_at_the_fault": len(touched),
            "failed": len(self.failed),
            "last_failure_s_after_the_fault": round(latest, 2),
            "slowest_ok_s": round(
                max((a.ended - a.began for a in self.answers if not a.problem), default=0), 2
            ),
        }


class Site:
    """Engines by name ("p0", "d1"), and a router that they join."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.cluster = LocalCluster(directory, model, engine_settings())
        self.engines: dict[str, EngineProcess] = {}
        self.registration, self._router_port = free_ports(2)
        key_file = directory / "key"
        ClusterKey.generate().write(key_file)
        self.cluster.environment = {KEY_FILE_VARIABLE: str(key_file)}
        self.router = ""
        self.expected: list[list[int]] = []
        self.decode_role: Role = "kv_consumer"
        self.extra: dict[str, Any] = {}
        """Further settings of the connector, for every engine that starts from now on."""
        self.host = HOST
        """Address of the router."""
        self.output = OUTPUT
        """Tokens of each answer."""
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Network namespace and address of each engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt(f"fault {length}", length) for length in LENGTHS]

    async def begin(self, client: Client, names: Iterable[str]) -> None:
        """Starts the router and the engines, and gets the right answers from a single engine."""
        plain = self.cluster.start_engine("plain")
        self.cluster.wait_ready()
        self.expected = [await client.complete(plain.url, one, self.output) for one in self.prompts]
        self.cluster.stop(plain)
        self.start_router()
        for name in names:
            self.start(name)
        self.cluster.wait_ready()

    def start_router(self) -> None:
        self.router = self.cluster.start_router(
            "router", registration=self.registration, port=self._router_port, host=self.host
        )

    def start(self, name: str, like: EngineProcess | None = None, **more: Any) -> EngineProcess:
        """Starts an engine, prefill or decode by its first letter, at the ports of `like` if that one has
        ended."""
        role: Role = "kv_producer" if name.startswith("p") else self.decode_role
        settings = replace(self.cluster.settings, max_batched_tokens=200) if role == "kv_producer" else None
        engine = self.cluster.start_engine(
            name,
            role=role,
            routers=[f"{self.host}:{self.registration}"],
            namespace=self.namespaces.get(name),
            settings=settings,
            port=like.port if like else None,
            control_port=like.control_port if like else None,
            extra={"providers": ["host", "tcp"], **self.extra},
            **more,
        )
        self.engines[name] = engine
        return engine

    async def states(self, client: httpx.AsyncClient) -> dict[str, str]:
        """Returns the router's status of its engines, by URL."""
        try:
            answer = (await client.get(f"{self.router}/health")).json()
        except httpx.HTTPError:
            return {}
        return {**answer["prefill"], **answer["decode"]}

    async def until_ready(self, *names: str, seconds: float = 180.0) -> None:
        """Waits until the router uses these engines (default: all)."""
        wanted = {self.engines[name].url for name in names or self.engines}
        deadline = time.monotonic() + seconds
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            while True:
                states = await self.states(client)
                if {url for url, state in states.items() if state == "ready"} >= wanted:
                    return
                assert time.monotonic() < deadline, f"not all ready: {states}"
                await asyncio.sleep(0.1)

    async def assert_at_rest(self, client: Client, *names: str) -> None:
        """Checks that every KV block of these engines (default: all) is free, and no request is left."""
        engines = [self.engines[name] for name in names or self.engines]
        await assert_quiescent(client, *engines, seconds=90)


class Load:
    """Clients that request one prompt after another, until they are stopped."""

    def __init__(self, site: Site, clients: int = 4, seed: int = 0) -> None:
        self._site = site
        self._random = random.Random(seed)
        self._stop = asyncio.Event()
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self.outcome = Outcome(fault=float("inf"))

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._one()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def answered(self, more: int, seconds: float = 300.0) -> None:
        """Waits until this many further requests have been answered."""
        wanted = sum(not answer.problem for answer in self.outcome.answers) + more
        async with asyncio.timeout(seconds):
            while sum(not answer.problem for answer in self.outcome.answers) < wanted:
                await asyncio.sleep(0.05)

    def note_fault(self) -> None:
        self.outcome.fault = time.monotonic()

    async def _one(self) -> None:
        prompts = self._site.prompts
        async with Client() as client:
            while not self._stop.is_set():
                number = self._random.randrange(len(prompts))
                began, problem = time.monotonic(), ""
                tokens: list[int] = []
                try:
                    await client.stream(self._site.router, prompts[number], self._site.output, tokens.extend)
                except (RefusedCall, httpx.HTTPError) as error:
                    problem = f"{type(error).__name__}: {error!s:.300}"
                if not problem and len(tokens) < self._site.output:
                    problem = f"ended after {len(tokens)} tokens"
                self.outcome.answers.append(Answer(number, began, time.monotonic(), tuple(tokens), problem))
                if problem:
                    await asyncio.sleep(0.2)  # a refused client retries after a pause


def record(row: dict[str, Any]) -> None:
    """Prints the figures of a fault for docs/benchmarks."""
    print(f"\nRELIABILITY {json.dumps(row)}", flush=True)
    if path := os.environ.get("KVC_FAULT_RECORDS"):
        with suppress(OSError), Path(path).open("a") as records:
            records.write(json.dumps(row) + "\n")


def judge(site: Site, outcome: Outcome, what: str, *, may_fail: bool, dead: float = DEAD_SECONDS) -> None:
    """Checks the outcome: no wrong token, and failures only of requests in flight when the fault came or was
    noticed."""
    record(outcome.row(what))
    for answer in outcome.answers:
        right = site.expected[answer.number]
        assert list(answer.tokens) == right[: len(answer.tokens)], f"wrong tokens: {answer}"
    assert any(not answer.problem and answer.began > outcome.fault for answer in outcome.answers), (
        "no service"
    )
    if not may_fail:
        assert not outcome.failed, outcome.failed
    limit = outcome.fault + dead + GRACE_SECONDS
    late = [answer for answer in outcome.failed if answer.began > limit or answer.ended > limit]
    early = [answer for answer in outcome.failed if answer.ended < outcome.fault]
    assert not late, f"failed after the dead time: {late}"
    assert not early, f"failed before the fault: {early}"
