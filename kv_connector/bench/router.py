"""The router's share of a time to first token, and the share of open status pages.

The engines answer at once, one request at a time.
"""

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from kv_connector.bench.machine import conditions
from kv_connector.bench.records import append, percentile
from kv_connector.bench.tables import print_conditions, print_table
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, ProcessGroup, starting

_HOST = "127.0.0.1"
_PROMPT_TOKENS = 512
# Interval of the page's requests, in seconds.
_LOOK_SECONDS = 1.0
_WARM_UP_REQUESTS = 50


@dataclass(frozen=True)
class RouterPlan:
    rounds: int
    requests: int
    json: Path | None


@dataclass(frozen=True)
class Way:
    """The target of a client's requests, and the number of open status pages meanwhile."""

    label: str
    through_router: bool
    readers: int = 0


WAYS = (
    Way("the decode engine itself", through_router=False),
    Way("router", through_router=True),
    Way("router, 1 status page open", through_router=True, readers=1),
    Way("router, 10 status pages open", through_router=True, readers=10),
)


class WayTimes(msgspec.Struct, tag="router", kw_only=True, frozen=True):
    """The results of one way in one round."""

    round: int
    way: str
    looks: int
    """Answers of /status.json meanwhile."""
    first_byte: list[float]
    """Milliseconds of each request."""


class Local(ProcessGroup):
    """Two stub engines and a router over them."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        prefill, decode, router = free_ports(3)
        self.engine, self.router = f"http://{_HOST}:{decode}", f"http://{_HOST}:{router}"
        stub = "kv_connector.bench.stub_engine"
        self._start("prefill", stub, "--port", str(prefill), port=prefill)
        self._start("decode", stub, "--port", str(decode), port=decode)
        engines = ["--prefill", f"http://{_HOST}:{prefill}", "--decode", self.engine]
        self._start("router", "kv_connector.cli.main", "router", "--port", str(router), *engines, port=router)

    def _start(self, name: str, module: str, *arguments: str, port: int) -> None:
        command = [sys.executable, "-m", module, *arguments]
        with starting():
            process = Process(name, command, environment={}, log=self._directory / f"{name}.log")
            self._adopt(process, f"http://{_HOST}:{port}/health")


def run(plan: RouterPlan, console: Console) -> bool:
    """Measures and prints. StartError: a process does not start."""
    where = conditions(
        {
            "rounds": f"{plan.rounds}, ways in turn within a round",
            "requests": f"{plan.requests} a way and round, {_PROMPT_TOKENS} tokens, one at a time, streamed",
            "engines": "stubs that answer at once",
        }
    )
    print_conditions(console, where)
    append(plan.json, where)
    records: list[WayTimes] = []
    temporary = tempfile.TemporaryDirectory(prefix="kv-connector-bench-")
    with temporary as directory, Local(Path(directory)) as local:
        local.wait_ready()
        for number in range(1, plan.rounds + 1):
            for way in WAYS:
                with console.status(f"round {number} of {plan.rounds}: {way.label}"):
                    records.append(asyncio.run(_measure(local, way, number, plan.requests)))
                append(plan.json, records[-1])
    _print(console, records)
    return True


async def _measure(local: Local, way: Way, number: int, requests: int) -> WayTimes:
    async with aiohttp.ClientSession() as client:
        url = local.router if way.through_router else local.engine
        for _ in range(_WARM_UP_REQUESTS):
            await _first_byte(client, url)
        async with _readers(local.router, way.readers) as looks:
            found = [await _first_byte(client, url) for _ in range(requests)]
    return WayTimes(
        round=number, way=way.label, looks=len(looks), first_byte=[round(one * 1e3, 4) for one in found]
    )


async def _first_byte(client: aiohttp.ClientSession, url: str) -> float:
    """Returns the seconds from the request to the first byte of its answer, which is read to the end."""
    body = {"model": "m", "prompt": [97] * _PROMPT_TOKENS, "max_tokens": 8, "stream": True}
    start = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.content.readany()
        seconds = time.perf_counter() - start
        await answer.read()
    return seconds


@contextlib.asynccontextmanager
async def _readers(router: str, count: int) -> AsyncIterator[list[float]]:
    """Keeps ``count`` status pages open for the length of a block. Yields the times of their requests."""
    looks: list[float] = []

    async def watch(client: aiohttp.ClientSession, delay: float) -> None:
        await asyncio.sleep(delay)
        async with client.get(router) as page:
            page.raise_for_status()
            await page.read()
        while True:
            async with client.get(f"{router}/status.json") as answer:
                answer.raise_for_status()
                await answer.read()
            looks.append(time.monotonic())
            await asyncio.sleep(_LOOK_SECONDS)

    async with aiohttp.ClientSession() as client:
        tasks = [
            asyncio.create_task(watch(client, number * _LOOK_SECONDS / count)) for number in range(count)
        ]
        try:
            yield looks
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


def _print(console: Console, records: Sequence[WayTimes]) -> None:
    rows = []
    for way in WAYS:
        mine = [record for record in records if record.way == way.label]
        medians = [statistics.median(record.first_byte) for record in mine]
        together = [one for record in mine for one in record.first_byte]
        rows.append(
            [
                way.label,
                f"{statistics.median(together):.2f}",
                f"{min(medians):.2f} to {max(medians):.2f}",
                f"{percentile(together, 99):.2f}",
                str(sum(record.looks for record in mine)),
            ]
        )
    header = ["", "median", "medians of the rounds", "99th percentile", "looks at the page"]
    print_table(console, "Time to the first byte, ms", header, rows)
