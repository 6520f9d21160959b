"""Cost of many engines at one router: time to join, idle processor time, requests, memory, descriptors.

The engines are stubs that register as vLLM's do, each over its own connection and with its own address of the
loopback network, and answer at once. A few processes hold all of them. The router runs as in production, with
a cluster key. `--descriptors` gives it fewer descriptors, to see what breaks first.
"""
# ruff: noqa: T201  (its output is JSON lines)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kv_connector.bench.records import percentile
from kv_connector.bench.stub_engine import complete, health
from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.control.membership import (
    HEARTBEAT_S,
    Activity,
    MembershipSockets,
    PromptCost,
    Register,
    WorkloadReport,
)
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, ProcessGroup, starting
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

# libzmq allows 1,023 sockets in one context.
ENGINES_OF_A_PROCESS = 250
JOIN_SECONDS = 300.0
IDLE_SECONDS = 30.0
CLIENTS = 8
PROMPT_BYTES = 4096
_TICKS = os.sysconf("SC_CLK_TCK")


def address(number: int) -> str:
    """Returns the loopback address of an engine."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


async def models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "model", "max_model_len": 32768}]})


def stub(first: int, count: int, port: int, registration: int) -> None:
    """Runs the engines of one process. BLOCKS until it is killed."""
    threading.Thread(target=register, args=(first, count, port, registration), daemon=True).start()
    app = Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )
    app.state.status = 200
    uvicorn.run(app, host="0.0.0.0", port=port, log_config=None, access_log=False)


def register(first: int, count: int, port: int, registration: int) -> None:
    """Sends a REGISTER of each engine in each interval, evenly spread."""
    sockets = MembershipSockets(ClusterKey.read(Path(os.environ[KEY_FILE_VARIABLE])))
    router = Address("127.0.0.1", registration)
    engines = [(sockets.dial(router), message(number, port)) for number in range(first, first + count)]
    due = time.monotonic()
    while True:
        for source, register in engines:
            sockets.send(source, register)
            due += HEARTBEAT_S / count
            time.sleep(max(0.0, due - time.monotonic()))
        sockets.wait(0)
        sockets.receive()


def message(number: int, port: int) -> Register:
    return Register(
        engine_id=f"stub-{number}",
        incarnation=uuid.uuid4().hex,
        role=(Role.PREFILL, Role.DECODE)[number % 2],
        url=f"http://{address(number)}:{port}",
        control_host=address(number),
        control_port=5600,
        activity=Activity(lanes={"verbs": 8}, transfers=3, bytes_pushed=1 << 40),
        load=WorkloadReport(
            step_tokens=8192,
            prompt_tokens=8192,
            cache_tokens=400_000,
            waiting=2000,
            running=20,
            decode_ns=20_000_000,
            prompt=PromptCost(5_000_000, 20_000, 100),
        ),
        prefixes="same",
        borrows=True,
    )


class RouterSite(ProcessGroup):
    """The router and the processes of the engines."""

    def __init__(self, directory: Path, descriptors: int | None) -> None:
        super().__init__()
        self._directory = directory
        self.registration, port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        key_file = directory / "key"
        ClusterKey.generate().write(key_file)
        self._environment = {KEY_FILE_VARIABLE: str(key_file)}
        command = [sys.executable, "-m", "kv_connector.cli.main", "router", "--port", f"{port}"]
        command += ["--registration", f"127.0.0.1:{self.registration}"]
        if descriptors is not None:
            command = ["prlimit", f"--nofile={descriptors}", *command]
        self.router = self._run("router", command, f"{self.url}/live")

    def start_engines(self, count: int) -> None:
        (port,) = free_ports(1)
        for first in range(0, count, ENGINES_OF_A_PROCESS):
            many = min(ENGINES_OF_A_PROCESS, count - first)
            # Engines of other processes have other ports: each process listens at all addresses.
            numbers = [str(number) for number in (first, many, port, self.registration)]
            command = [sys.executable, __file__, "--stub", *numbers]
            self._run(f"engines{first}", command, f"http://{address(first)}:{port}/health")
            (port,) = free_ports(1)

    def _run(self, name: str, command: list[str], health: str) -> Process:
        with starting():
            process = Process(
                name, command, environment=self._environment, log=self._directory / f"{name}.log"
            )
            self._adopt(process, health)
        return process


class ProcessUsage:
    """Processor time, memory and descriptors of a process."""

    def __init__(self, pid: int) -> None:
        self._proc = Path("/proc") / str(pid)

    def cpu(self) -> float:
        """Returns the processor seconds so far."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> float:
        """Returns the resident MiB."""
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def descriptors(self) -> int:
        return sum(1 for _ in (self._proc / "fd").iterdir())


async def states(http: aiohttp.ClientSession, url: str) -> Counter[str]:
    """Returns the number of engines in each state."""
    async with http.get(f"{url}/health") as answer:
        sides = await answer.json()
    return Counter(state for side in ("prefill", "decode") for state in sides[side].values())


async def page(http: aiohttp.ClientSession, url: str) -> tuple[float, int]:
    """Returns the milliseconds in which a page is answered, the best of five, and its bytes."""
    times, size = [], 0
    for _ in range(5):
        began = time.perf_counter()
        async with http.get(url) as answer:
            size = len(await answer.read())
        times.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.6)  # the status is kept for half a second
    return min(times), size


async def requests(http: aiohttp.ClientSession, url: str, count: int) -> tuple[list[float], Counter[int]]:
    """Sends requests, some at a time. Returns their times in milliseconds, and their statuses."""
    times: list[float] = []
    statuses: Counter[int] = Counter()
    left = iter(range(count))

    async def client() -> None:
        for number in left:
            prompt = f"{number % 100:04}" * (PROMPT_BYTES // 4)
            began = time.perf_counter()
            body = {"model": "model", "prompt": prompt, "max_tokens": 8, "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
            times.append((time.perf_counter() - began) * 1e3)
            statuses[answer.status] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return times, statuses


async def measure(site: RouterSite, engines: int, count: int) -> Mapping[str, object]:
    usage = ProcessUsage(site.router.pid)
    found: dict[str, object] = {"engines": engines}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        found["empty"] = {"memory_mib": round(usage.memory()), "descriptors": usage.descriptors()}
        began, cpu = time.monotonic(), usage.cpu()
        await asyncio.to_thread(site.start_engines, engines)
        known: Counter[str] = Counter()
        ready, most = 0, usage.descriptors()
        while ready < engines and time.monotonic() - began < JOIN_SECONDS:
            await asyncio.sleep(0.25)
            known, most = await states(http, site.url), max(most, usage.descriptors())
            if known and not ready:
                began, cpu = min(began + JOIN_SECONDS, time.monotonic()), usage.cpu()
            ready = known["ready"]
        found["join"] = {
            "seconds_from_the_first": round(time.monotonic() - began, 1),
            "cpu_s": round(usage.cpu() - cpu, 2),
            "states": dict(known),
            "most_descriptors": most,
        }
        if ready < engines:
            return found
        cpu, began = usage.cpu(), time.monotonic()
        while time.monotonic() - began < IDLE_SECONDS:
            await asyncio.sleep(0.1)
            most = max(most, usage.descriptors())
        idle = (usage.cpu() - cpu) / (time.monotonic() - began)
        found["idle"] = {
            "cpu_percent": round(idle * 100, 1),
            "memory_mib": round(usage.memory()),
            "most_descriptors": most,
            "states": dict(await states(http, site.url)),
        }
        for name in ("metrics", "status.json", "health"):
            milliseconds, size = await page(http, f"{site.url}/{name}")
            found[name] = {"ms": round(milliseconds, 1), "kb": round(size / 1e3, 1)}
        await requests(http, site.url, count // 4)
        cpu, began = usage.cpu(), time.monotonic()
        times, statuses = await requests(http, site.url, count)
        # Without the processor time of an idle router.
        busy = usage.cpu() - cpu - idle * (time.monotonic() - began)
        found["requests"] = {
            "cpu_ms": round(busy / count * 1e3, 2),
            "p50_ms": round(percentile(times, 50), 1),
            "p99_ms": round(percentile(times, 99), 1),
            "statuses": dict(statuses),
            "memory_mib": round(usage.memory()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 250, 1000], help="engines in each run")
    parser.add_argument("--requests", type=int, default=1000, help="requests in each run")
    parser.add_argument("--descriptors", type=int, help="limit on the router's descriptors")
    parser.add_argument("--stub", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stub is not None:
        stub(*given.stub)
        return
    for engines in given.engines:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            site = stack.enter_context(RouterSite(directory, given.descriptors))
            site.wait_ready()
            print(json.dumps(asyncio.run(measure(site, engines, given.requests))), flush=True)
            if given.descriptors is not None:
                print((directory / "router.log").read_text()[-6000:])


if __name__ == "__main__":
    main()
