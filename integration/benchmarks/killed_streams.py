"""Streams whose decode engine is killed: how each of them ends, behind two routers.

A prefill and two decode engines on CPUs serve greedy streams. One decode engine is killed in the middle. The
systems are kv-connector's router with WriteImmConnector, and vllm-router with NixlConnector. Exits with 1 if
a stream of kv-connector does not end with the whole answer of one engine, or if the kill met no stream.
"""
# ruff: noqa: T201  (its output is a table)

import argparse
import asyncio
import importlib.util
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, EngineSettings, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_llama
from kv_connector.lab.process import Process, leave_on_signals, starting

# Tokens that each stream has at the kill.
BEGUN = 10
BLOCK = 32
# A stream without a byte for this time counts as silent. kv-connector's router ends a pause after 60 s.
SILENT_SECONDS = 90.0
START_SECONDS = 600.0

WHOLE = "whole answer"


class Cluster(LocalCluster):
    """A prefill and two decode engines, and their router."""

    vllm_router = "vllm-router"
    """Command of vllm-router."""

    def start(self, system: str) -> tuple[str, list[EngineProcess]]:
        """Starts all processes. Returns the router's URL and the engines, the prefill engine first."""
        roles: tuple[tuple[str, Role], ...] = (
            ("prefill", "kv_producer"),
            ("first", "kv_consumer"),
            ("second", "kv_consumer"),
        )
        if system == "kv-connector":
            engines = [
                self.start_engine(name, role=role, extra={"providers": ["host", "tcp"]})
                for name, role in roles
            ]
            url = self.start_router("router", prefill=engines[:1], decode=engines[1:])
            return url, engines
        engines = [self._nixl(name, role) for name, role in roles]
        return self._vllm_router(engines), engines

    def _nixl(self, name: str, role: Role) -> EngineProcess:
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        (port,) = free_ports(1)
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        arguments = (*self.settings.arguments, "--kv-transfer-config", json.dumps(transfer))
        return self.start_engine(
            name, settings=replace(self.settings, arguments=arguments, environment=environment)
        )

    def _vllm_router(self, engines: Sequence[EngineProcess]) -> str:
        port, metrics = free_ports(2)
        command = [self.vllm_router, "--vllm-pd-disaggregation"]
        command += ["--kv-connector", "nixl", "--policy", "round_robin", "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--prefill", engines[0].url]
        command += [word for engine in engines[1:] for word in ("--decode", engine.url)]
        with starting():
            log = self.directory / "router.log"
            router = Process("router", command, environment=self.environment, log=log)
            self._adopt(router, f"http://{HOST}:{port}/readiness")
        return f"http://{HOST}:{port}"


@dataclass
class KilledStream:
    """A client's stream."""

    number: int
    tokens: int
    """Tokens of the answer."""
    got: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: str = ""
    """How the stream ended."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has BEGUN tokens, or has ended."""

    def body(self) -> dict[str, Any]:
        prompt = random.Random(self.number).choices(range(256), k=20 + self.number)
        return {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            # Printable characters, so that there is text at each token.
            "allowed_token_ids": list(range(94)),
        }

    async def read(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            self.end = await self._read(client, f"{url}/v1/completions")
        except httpx.TimeoutException:
            self.end = f"silent for {SILENT_SECONDS:g} s"
        except httpx.HTTPError:
            self.end = "connection broken, no error event"
        finally:
            self.begun.set()

    async def _read(self, client: httpx.AsyncClient, url: str) -> str:
        async with client.stream("POST", url, json=self.body() | {"stream": True}) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                said = line.removeprefix("data: ")
                if said == "[DONE]":
                    return "" if len(self.got) == self.tokens else "[DONE] too early, no error event"
                if said == line:
                    continue
                event = json.loads(said)
                if "choices" not in event:
                    return "error event"
                self.got += event["choices"][0].get("token_ids") or []
                self.times.append(time.monotonic())
                if len(self.got) >= BEGUN:
                    self.begun.set()
        return "end without [DONE], no error event"

    def pause(self, since: float) -> float:
        """Returns the longest pause that ended after this moment, in seconds."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


async def measure(router: str, engines: Sequence[EngineProcess], streams: int, tokens: int) -> dict[str, Any]:
    """Returns the ends of the streams, and their pauses at the kill."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=SILENT_SECONDS, limits=limits, trust_env=False) as client:
        readings = [KilledStream(number, tokens) for number in range(streams)]
        tasks = [asyncio.create_task(one.read(client, router)) for one in readings]
        await asyncio.gather(*(one.begun.wait() for one in readings))
        victim, survivor = engines[1:]
        running = await asyncio.to_thread(victim.metric, "vllm:num_requests_running")
        killed = time.monotonic()
        await asyncio.to_thread(victim.kill)
        await asyncio.gather(*tasks)
        url = f"{survivor.url}/v1/completions"
        bodies = [one.body() | {"max_tokens": max(1, len(one.got))} for one in readings]
        answers = await asyncio.gather(*(client.post(url, json=body, timeout=None) for body in bodies))
        for one, answer in zip(readings, answers, strict=True):
            right = answer.json()["choices"][0]["token_ids"]
            if one.got != right[: len(one.got)]:
                one.end = f"wrong tokens, {one.end or 'no error event'}"
            one.end = one.end or WHOLE
    whole = sorted(one.pause(killed) for one in readings if one.end == WHOLE)
    return {
        "streams": streams,
        "at_the_killed_engine": int(running),
        "ends": dict(Counter(one.end for one in readings)),
        "longest_pause_of_whole_answers_s": {
            name: round(whole[min(int(len(whole) * share), len(whole) - 1)], 2) if whole else None
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
    }


SYSTEMS = ("kv-connector", "vllm-router and NixlConnector")


def missing(system: str, vllm_router: str) -> str | None:
    """Returns what this system needs and does not have, or None."""
    if system == SYSTEMS[0]:
        return None
    if importlib.util.find_spec("nixl") is None:
        return "the Python package nixl is not installed: run `scripts/setup rivals`"
    if shutil.which(vllm_router) is None:
        return f"{vllm_router} does not exist: run `scripts/setup fleet`, and use .venv-fleet/bin/python"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--streams", type=int, default=100, help="Streams at the same time.")
    parser.add_argument("--tokens", type=int, default=400, help="Tokens of each answer.")
    parser.add_argument("--logs", type=Path, help="Folder for the processes' logs. Default: a temporary one.")
    beside = str(Path(sys.executable).parent / "vllm-router")
    parser.add_argument(
        "--vllm-router", default=beside, help="vllm-router's command. Default: beside this Python."
    )
    options = parser.parse_args()
    for system in options.systems:
        if lack := missing(system, options.vllm_router):
            parser.error(f"{system}: {lack}")
    # At one decode engine all streams have a place, with their prompts of up to 20 + streams tokens.
    blocks = options.streams * ((20 + options.streams + options.tokens) // BLOCK + 1) + 100
    settings = EngineSettings(
        max_model_len=4096,
        max_seqs=options.streams,
        block_size=BLOCK,
        arguments=("--num-gpu-blocks-override", str(blocks)),
    )
    failed = False
    with tempfile.TemporaryDirectory() as temporary, leave_on_signals():
        model = make_llama(Path(temporary) / "model")
        for system in options.systems:
            logs = (options.logs or Path(temporary)) / system.replace(" ", "-")
            with Cluster(logs, model, settings) as cluster:
                cluster.vllm_router = options.vllm_router
                router, engines = cluster.start(system)
                cluster.wait_ready(seconds=START_SECONDS)
                if system == SYSTEMS[0]:
                    # Streams that begin before all run at the engine that the router finds first.
                    cluster.wait_joined(router, *engines)
                row = asyncio.run(measure(router, engines, options.streams, options.tokens))
            print(json.dumps({"system": system, **row}), flush=True)
            if row["at_the_killed_engine"] == 0:
                print(f"{system}: no stream ran at the killed engine", file=sys.stderr)
                failed = True
            failed |= system == SYSTEMS[0] and set(row["ends"]) != {WHOLE}
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
