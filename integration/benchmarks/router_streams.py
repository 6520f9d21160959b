"""Streams that one router relays between engines that compute nothing, and its CPU time for each event."""
# ruff: noqa: T201  (its output is a table)

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, ProcessGroup, leave_on_signals, starting

HOST = "127.0.0.1"
PROMPT_TOKENS = 512
WARM_UP_SECONDS = 2.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class StreamLoad:
    streams: int
    """Streams at a time."""
    tokens: int
    """Events of each stream."""
    pause: float
    """Seconds between two events; 0: as fast as the router takes them."""


async def send(url: str, load: StreamLoad, seconds: float) -> int:
    """Sends requests for some time, and returns the number of complete streams."""
    complete, until = 0, time.perf_counter() + seconds
    body = {"model": "m", "prompt": [1] * PROMPT_TOKENS, "stream": True, "max_tokens": load.tokens}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            nonlocal complete
            while time.perf_counter() < until:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    text = await answer.read()
                assert text.count(b"data: {") == load.tokens, text[-200:]
                complete += 1

        await asyncio.gather(*(client() for _ in range(load.streams)))
    return complete


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(load: StreamLoad, seconds: float) -> None:
    prefill, decode, port = free_ports(3)
    with tempfile.TemporaryDirectory() as directory, ProcessGroup() as group:

        def start(name: str, port: int, *words: str) -> Process:
            command = [sys.executable, "-m", *words, "--port", str(port)]
            with starting():
                process = Process(name, command, environment={}, log=Path(directory) / name)
                group._adopt(process, f"http://{HOST}:{port}/health")
            return process

        stub = "kv_connector.bench.stub_engine"
        start("prefill", prefill, stub)
        start("decode", decode, stub, "--tokens", str(load.tokens), "--pause", str(load.pause))
        engines = ("--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}")
        router = start("router", port, "kv_connector.cli.main", "router", *engines)
        group.wait_ready()
        url = f"http://{HOST}:{port}"
        asyncio.run(send(url, load, WARM_UP_SECONDS))
        begun, used = time.perf_counter(), cpu_seconds(router)
        complete = asyncio.run(send(url, load, seconds))
        took, used = time.perf_counter() - begun, cpu_seconds(router) - used
    events = complete * load.tokens
    print(
        f"| {load.streams} | {load.tokens} | {load.pause:g} | {complete / took:.0f} | {events / took:.0f} "
        f"| {100 * used / took:.0f} % | {1e3 * used / complete:.2f} | {1e6 * used / events:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print("| streams | events | pause, s | streams/s | events/s | core | ms a stream | us an event |")
    print("|---" * 8 + "|")
    with leave_on_signals():
        for load in (StreamLoad(20, 1, 0.0), StreamLoad(20, 200, 0.0), StreamLoad(200, 100, 0.02)):
            measure(load, options.seconds)


if __name__ == "__main__":
    main()
