"""P and D of SGLang servers beside one server alone, over write_imm and SGLang's own mooncake backend (by
tcp), on CPUs.

Measures time to first token, throughput, and the effect of aborts and of killed servers.

    .venv-sglang/bin/python integration/benchmarks/sglang_cpu.py [--rounds 3] [--faults]

Requests go to P (prefill server) and D (decode server) directly, as a router sends them, so that no router is
measured. The deployments take turns within a round. The servers of the others are stopped meanwhile
(SIGSTOP).
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from kv_connector.lab.model import make_llama
from kv_connector.lab.sglang_cluster import HOST, ServerSettings, SglangCluster, SglangServer
from kv_connector.lab.sse import Events

TOKENS = 16
LOADS = ((512, 1, 16), (512, 8, 16), (2048, 1, 8), (2048, 8, 16))
"""Tokens of a prompt, requests at a time, number of requests."""
SECONDS = 120.0
SETTINGS = ServerSettings(
    page_size=16,
    max_total_tokens=32768,
    arguments=("--disable-radix-cache",),  # no prompt occurs twice, so that prefill and transfer are measured
)
# Without it mooncake's path for indices needs memory that CUDA pins.
MOONCAKE = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}


@dataclass
class SglangDeployment:
    name: str
    decode: SglangServer
    prefill: SglangServer | None = None

    @property
    def servers(self) -> list[SglangServer]:
        return [server for server in (self.prefill, self.decode) if server is not None]

    def signal(self, number: signal.Signals) -> None:
        for server in self.servers:
            os.killpg(server.pid, number)

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of its servers' processes."""
        seconds = 0.0
        for server in self.servers:
            first = psutil.Process(server.pid)
            for process in (first, *first.children(recursive=True)):
                used = process.cpu_times()
                seconds += used.user + used.system
        return seconds

    async def ask(
        self, http: httpx.AsyncClient, prompt: Sequence[int], **more: Any
    ) -> tuple[float, list[int]]:
        """Returns the seconds to the first token, and all tokens. Raises httpx.HTTPError."""
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            **more,
        }
        half = None
        if self.prefill is not None:
            body["bootstrap_host"], body["bootstrap_port"] = HOST, self.prefill.bootstrap_port
            body["bootstrap_room"] = random.randrange(1 << 62)
            half = asyncio.create_task(_ignored(http.post(f"{self.prefill.url}/generate", json=body)))
        began, first, tokens, events = time.perf_counter(), 0.0, [], Events()
        try:
            async with http.stream(
                "POST", f"{self.decode.url}/generate", json=body | {"stream": True}
            ) as answer:
                answer.raise_for_status()
                async for chunk in answer.aiter_bytes():
                    for event in events.feed(chunk):
                        said = msgspec.json.decode(event)
                        if "error" in said:
                            raise httpx.HTTPError(str(said["error"]))
                        first = first or time.perf_counter() - began
                        tokens = said["output_ids"]
                        reason = said["meta_info"]["finish_reason"]
                        if reason and reason["type"] == "abort":
                            raise httpx.HTTPError(reason["message"])
        finally:
            if half is not None:
                half.cancel()
        return first, tokens


async def _ignored(call: Any) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await call


def prompts(tokens: int, count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(tokens)] for _ in range(count)]


async def load(one: SglangDeployment, asked: Sequence[Sequence[int]], at_once: int) -> dict[str, Any]:
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(timeout=SECONDS) as http:

        async def ask(prompt: Sequence[int]) -> tuple[float, list[int]]:
            async with gate:
                return await one.ask(http, prompt)

        began, cpu = time.perf_counter(), one.cpu_seconds()
        answers = await asyncio.gather(*map(ask, asked))
        seconds, cpu = time.perf_counter() - began, one.cpu_seconds() - cpu
    return {
        "seconds": seconds,
        "cpu": cpu,
        "ttft": [a[0] for a in answers],
        "tokens": [a[1] for a in answers],
    }


async def warm(one: SglangDeployment) -> None:
    """Sends requests until one succeeds: connections may have broken while the deployment was stopped."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            await load(one, prompts(300, 2, 99), 1)
            return
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise
            print(f"  {one.name}: not yet: {str(error)[:100]}", file=sys.stderr)
            await asyncio.sleep(1)


async def measure(deployments: Sequence[SglangDeployment], rounds: int) -> None:
    found: dict[tuple[str, tuple[int, int, int]], list[dict[str, Any]]] = {}
    for one in deployments:
        one.signal(signal.SIGSTOP)
    for number in range(rounds):
        # Machines change their speed within a round, so each deployment is as often early as late.
        for one in deployments if number % 2 == 0 else reversed(deployments):
            one.signal(signal.SIGCONT)
            await warm(one)
            for each in LOADS:
                tokens, at_once, count = each
                asked = prompts(tokens, count, 1000 * number + tokens + at_once)
                found.setdefault((one.name, each), []).append(await load(one, asked, at_once))
            one.signal(signal.SIGSTOP)
    for one in deployments:
        one.signal(signal.SIGCONT)
    names = [one.name for one in deployments]
    print(f"{'':24}" + "".join(f"{name:>46}" for name in names))
    for each in LOADS:
        cells = []
        for name in names:
            rows = found[name, each]
            ttft = statistics.median(value for row in rows for value in row["ttft"]) * 1e3
            requests = each[2] * len(rows)
            rate = requests / sum(row["seconds"] for row in rows)
            cpu = sum(row["cpu"] for row in rows) / requests
            equal = sum(
                tokens == expected
                for row, alone in zip(rows, found[names[0], each], strict=True)
                for tokens, expected in zip(row["tokens"], alone["tokens"], strict=True)
            )
            cells.append(f"{ttft:8.1f} ms {rate:6.2f}/s {cpu:5.2f} CPU s {equal:3d} of {requests} equal")
        print(f"{each[0]} tokens, {each[1]} at a time".ljust(24) + "".join(f"{cell:>46}" for cell in cells))


async def at_rest(server: SglangServer, limit: float) -> float | None:
    """Returns the seconds until the server has no request in flight; None beyond `limit`."""
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=10) as http:
        while time.monotonic() - began < limit:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.post(f"{server.url}/flush_cache")).status_code == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.1)
    return None


async def killed(one: SglangDeployment, cluster: SglangCluster, victim: str) -> None:
    """Kills a server in the middle of eight requests.

    Prints which requests fail and when, and when the other server is empty.
    """
    server = getattr(one, victim)
    survivor = one.decode if victim == "prefill" else one.prefill
    assert survivor is not None
    async with httpx.AsyncClient(timeout=SECONDS) as http:
        asking = [asyncio.create_task(one.ask(http, prompt)) for prompt in prompts(3000, 8, 7)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        os.killpg(server.pid, signal.SIGKILL)
        began, failures = time.monotonic(), []
        for ask in asyncio.as_completed(asking):
            try:
                await ask
            except httpx.HTTPError:
                failures.append(time.monotonic() - began)
    rest = await at_rest(survivor, 180)
    again = cluster.restart(server)
    cluster.wait_ready(again)
    setattr(one, victim, again)
    began = time.monotonic()
    try:
        await warm(one)
        back = f"{time.monotonic() - began:.1f} s"
    except httpx.HTTPError as error:
        back = f"not within {SECONDS:.0f} s ({str(error)[:80]})"
    last = f"{max(failures):.1f} s" if failures else "-"
    free = "not within 180 s" if rest is None else f"{rest:.1f} s"
    print(
        f"{one.name}: kill -9 of {victim}: {len(failures)} of 8 failed, the last after {last}; "
        f"the other server is empty after {free}; restarted: right answer after {back}"
    )


async def aborts(one: SglangDeployment, count: int = 100) -> None:
    """Aborts requests: at the client, in P's half alone and in D's half alone."""
    rng = random.Random(2)
    gate = asyncio.Semaphore(8)
    failed = 0
    async with httpx.AsyncClient(timeout=SECONDS) as http:

        async def aborted(number: int, prompt: list[int]) -> None:
            nonlocal failed
            async with gate:
                rid = f"abort-{number}"
                ask = asyncio.create_task(one.ask(http, prompt, rid=rid))
                await asyncio.wait([ask], timeout=rng.uniform(0, 0.6))
                if number % 3 == 0:
                    ask.cancel()
                else:
                    server = one.prefill if number % 3 == 1 else one.decode
                    assert server is not None
                    await http.post(f"{server.url}/abort_request", json={"rid": rid})
                (answer,) = await asyncio.gather(ask, return_exceptions=True)
                failed += isinstance(answer, BaseException)

        began = time.monotonic()
        await asyncio.gather(*(aborted(n, prompt) for n, prompt in enumerate(prompts(900, count, 3))))
        seconds = time.monotonic() - began
    rest = [await at_rest(server, 180) for server in one.servers]
    text = ", ".join("not within 180 s" if value is None else f"{value:.1f} s" for value in rest)
    held = sum("releasing anyway" in server.log.read_text() for server in one.servers)
    print(
        f"{one.name}: {count} aborts in {seconds:.0f} s, {failed} without an answer; "
        f"both servers empty after {text}; released by timeout: {'yes' if held else 'no'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", action="store_true", help="measure aborts and kills in place of times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-connector-bench-") as where:
        directory = Path(where)
        model = make_llama(directory / "model")
        with SglangCluster(directory, model, SETTINGS) as cluster:
            mooncake = replace(SETTINGS, backend="mooncake_tcp", environment=MOONCAKE)
            deployments = []
            for name, settings in (("write_imm", SETTINGS), ("mooncake", mooncake)):
                prefill = cluster.start_server(f"{name}-prefill", role="prefill", settings=settings)
                decode = cluster.start_server(f"{name}-decode", role="decode", settings=settings)
                deployments.append(SglangDeployment(name, decode, prefill))
            if not options.faults:
                deployments.insert(0, SglangDeployment("one server", cluster.start_server("one")))
            cluster.wait_ready(seconds=600)
            if not options.faults:
                asyncio.run(measure(deployments, options.rounds))
                return
            for one in deployments:
                for other in deployments:
                    other.signal(signal.SIGCONT if other is one else signal.SIGSTOP)
                asyncio.run(warm(one))
                asyncio.run(aborts(one))
                asyncio.run(killed(one, cluster, "prefill"))
                asyncio.run(killed(one, cluster, "decode"))
            for one in deployments:
                one.signal(signal.SIGCONT)


if __name__ == "__main__":
    main()
