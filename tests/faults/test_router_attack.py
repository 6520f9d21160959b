"""A router under attack, and one whose decode engine fails at once.

Other clients are served, no engine is blamed, and the router's memory stays bounded. Engines are stubs that
answer at once. The figures go to build/router-attack.md.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from kv_connector.bench.records import percentile
from kv_connector.lab.cluster import engine_states
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import ProcessGroup, starting
from kv_connector.lab.served import Served

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build" / "router-attack.md"
STUB = "kv_connector.bench.stub_engine"
MIB = 1 << 20
CLIENTS = 4
SECONDS = 10.0
# docs/router-api.md: 100 MiB, and three times the budget of bodies, 128 MiB.
MEMORY_MIB = 100 + 3 * 128
# With this limit, at most 224 requests are in flight, and 224 connections are idle.
DESCRIPTORS = 1024


class Server(Served):
    """A stub engine or the router."""

    def __init__(self, name: str, command: list[str], log: Path, port: int) -> None:
        super().__init__(name, command, environment={}, log=log)
        self._port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


class Site(ProcessGroup):
    """A prefill engine, four decode engines and a router over them."""

    def __init__(self, directory: Path, *, failing: bool = False, descriptors: int | None = None) -> None:
        super().__init__()
        self._directory = directory
        prefill, *decode, self.port = free_ports(6)
        engines = ["--prefill", self._start("prefill", [STUB], prefill).url]
        self.decode = []
        for number, port in enumerate(decode):
            status = ["--status", "500"] if failing and not number else []
            self.decode.append(self._start(f"decode{number}", [STUB, *status], port).url)
            engines += ["--decode", self.decode[-1]]
        command = ["kv_connector.cli.main", "router", *engines]
        self.router = self._start("router", command, self.port, descriptors)
        self.url = self.router.url

    def _start(self, name: str, module: list[str], port: int, descriptors: int | None = None) -> Server:
        command = [sys.executable, "-m", *module, "--port", f"{port}"]
        if descriptors is not None:
            command = ["prlimit", f"--nofile={descriptors}", *command]
        with starting():
            server = Server(name, command, self._directory / f"{name}.log", port)
            self._adopt(server, f"{server.url}/health")
        return server

    def failures(self, engine: str) -> float:
        """Returns the number of requests that failed at this engine."""
        samples = self.router.samples("kv_connector_router_failures_total")
        return sum(value for labels, value in samples if labels["engine"] == engine)

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.router.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        raise AssertionError("the router is gone")


@dataclass
class Load:
    """Small requests of other clients: their durations, and the errors of those that failed."""

    milliseconds: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return percentile(self.milliseconds, 99)


async def load(site: Site, seconds: float) -> tuple[Load, float, set[str]]:
    """Sends small requests for this time. Returns them with the router's largest memory and its engines'
    statuses."""
    found, end = Load(), time.monotonic() + seconds
    most = 0.0
    states: set[str] = set()

    async def ask(client: aiohttp.ClientSession) -> None:
        body = {"model": "m", "prompt": [97] * 512, "max_tokens": 8, "stream": True}
        while time.monotonic() < end:
            start = time.perf_counter()
            try:
                async with client.post(f"{site.url}/v1/completions", json=body) as answer:
                    text = await answer.text()
                    if answer.status != 200 or "[DONE]" not in text or "error" in text:
                        found.failed.append(f"{answer.status} {text[:200]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                found.failed.append(repr(error))
            found.milliseconds.append((time.perf_counter() - start) * 1e3)

    async def look() -> None:
        nonlocal most
        while time.monotonic() < end:
            most = max(most, site.resident_mib())
            states.update((await asyncio.to_thread(engine_states, site.url)).values())
            await asyncio.sleep(0.2)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
        await asyncio.gather(look(), *(ask(client) for _ in range(CLIENTS)))
    return found, most, states


@contextmanager
def attack(kind: str, site: Site) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).parent / "attackers.py"), kind, str(site.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    lines = [
        "| attack | requests of others | failed | p99 without, ms | p99 with, ms | router's memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    yield lines
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


@pytest.mark.parametrize("kind", ["headers", "bodies", "idle"])
def test_an_attack_costs_no_other_client_and_no_engine(kind: str, tmp_path: Path, report: list[str]) -> None:
    with Site(tmp_path, descriptors=DESCRIPTORS if kind == "idle" else None) as site:
        site.wait_ready()
        before, _, _ = asyncio.run(load(site, SECONDS))
        with attack(kind, site):
            during, memory, states = asyncio.run(load(site, SECONDS))
        after, _, _ = asyncio.run(load(site, 1))
    report.append(
        f"| {kind} | {len(during.milliseconds)} | {len(during.failed)} | {before.p99:.1f} | {during.p99:.1f} "
        f"| {memory:.0f} |"
    )
    assert states == {"ready"}
    assert memory < MEMORY_MIB
    assert during.failed == []
    assert before.failed == after.failed == []


def test_an_engine_that_fails_at_once_gets_few_requests(tmp_path: Path, report: list[str]) -> None:
    with Site(tmp_path, failing=True) as site:
        site.wait_ready()
        found, memory, _ = asyncio.run(load(site, SECONDS))
        share = site.failures(site.decode[0]) / len(found.milliseconds)
    report.append(
        f"| one of four decode engines answers 500: {share:.2%} of the requests | {len(found.milliseconds)} "
        f"| {len(found.failed)} | | {found.p99:.1f} | {memory:.0f} |"
    )
    assert found.failed == []
    assert 0 < share < 0.02
