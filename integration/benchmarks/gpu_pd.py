"""TTFT of a prefill and a decode engine on two GPUs, against one engine: the numbers of docs/performance.md.

Needs vLLM with its GPU dependencies, two GPUs (four with --tensor-parallel 2) and this package (installed or
on PYTHONPATH); --rivals also needs NIXL. Prints a table, and one JSON line per request to --json. The models
(shapes.py) have dummy weights: their tokens mean nothing, their times do. --before also measures engines of
another build of this package, also through a router. Its value is the directory with that build's
kv_connector. The engines of rivals are stopped while others are measured, because NIXL's agents keep a core
busy each.

With --equality N, one engine and the pair answer N prompts of a small float32 model with random weights, and
their tokens are compared.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gpu_engines import (
    BEFORE,
    HOST,
    REST_SECONDS,
    RIVALS,
    TINY_ARGUMENTS,
    VERIFIED,
    Body,
    GpuAnswer,
    GpuDeployment,
    GpuServer,
    cpu_seconds,
    deployment,
    direct,
    prefilled,
    serial,
    start_router,
    stream,
    wait_ready,
    write_tiny,
)
from shapes import SHAPES

from kv_connector.lab.process import Process, StartError, stop

# The first request of DeepSeek-V4's shape compiles kernels.
REQUEST_SECONDS = 120.0
# vLLM's arguments. With async scheduling, its default, a token is returned after the next step's launch.
MODES = {
    "graphs": [],
    "eager": ["--enforce-eager"],
    "eager-sync": ["--enforce-eager", "--no-async-scheduling"],
}


class Modes:
    """The modes in which a request is answered, by name."""

    def __init__(
        self, client: httpx.AsyncClient, deployment: GpuDeployment, routers: Mapping[str, str]
    ) -> None:
        """``routers``: URLs by pair."""
        self._client = client
        self._deployment = deployment
        self._routers = routers
        self.names = ("alone", "router", "direct", *(name for name in deployment.pairs if name != "ours"))
        for name in deployment.pairs:
            self._signal(name, signal.SIGSTOP)

    @contextmanager
    def up(self, name: str) -> Iterator[None]:
        """Runs a rival's engines during a block. They are stopped otherwise."""
        self._signal(name, signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: signal.Signals) -> None:
        for engine in self._deployment.pairs[name] if name in RIVALS else ():
            assert engine.process is not None
            engine.process.signal(number)

    async def answer(self, name: str, body: Body) -> GpuAnswer:
        if name == "alone":
            return await stream(self._client, self._deployment.alone.url, body)
        if name == "router":
            return await stream(self._client, self._routers["ours"], body)
        if name in ("direct", VERIFIED):
            return await direct(
                self._client, *self._deployment.pairs["ours" if name == "direct" else name], body
            )
        if name == BEFORE:
            return await stream(self._client, self._routers[name], body)
        return await serial(self._client, *self._deployment.pairs[name], body)

    def cpu_seconds(self, name: str) -> float:
        """Returns the CPU seconds so far of the engines that answer in a mode."""
        if name == "alone":
            return cpu_seconds(self._deployment.alone)
        pairs = self._deployment.pairs
        return sum(map(cpu_seconds, pairs.get(name, pairs["ours"])))


def milliseconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f}"


async def measure(
    label: str, deployment: GpuDeployment, routers: Mapping[str, str], plan: argparse.Namespace, sink: Any
) -> None:
    rng = np.random.default_rng(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, trust_env=False, limits=limits) as client:
        modes = Modes(client, deployment, routers)
        print(
            f"{label}: TTFT in ms and its distance from one engine's, medians of {plan.rounds}, one at a time"
        )
        print(
            f"  prompt {' '.join(f'{name:>16}' for name in modes.names)}   P alone, in P/D   "
            "token alone, D   second alone, router"
        )
        for length in plan.lengths:
            times: dict[str, list[GpuAnswer]] = {name: [] for name in modes.names}
            own = []
            for round_number in range(plan.rounds + 2):
                # Each mode is the first in turn, because the preceding request differs from mode to mode.
                ways = [*times.items()]
                turn = round_number % len(ways)
                for name, answers in ways[turn:] + ways[:turn]:
                    body = Body(rng.integers(1000, 100000, length).tolist(), plan.tokens)
                    try:
                        with modes.up(name):
                            await asyncio.sleep(REST_SECONDS)
                            answer = await modes.answer(name, body)
                    except (httpx.HTTPError, RuntimeError) as error:
                        if name not in RIVALS:
                            raise
                        print(f"  {name} is left out: {type(error).__name__}: {error}", flush=True)
                        modes.names = tuple(other for other in modes.names if other != name)
                        del times[name]
                        continue
                    if round_number >= 2:  # two rounds warm up
                        answers.append(answer)
                        line = {"label": label, "length": length, "mode": name, "ttft": answer.ttft}
                        line |= {"seconds": answer.seconds, "prefill": answer.prefill_seconds}
                        line |= {"second": answer.second, "tokens": answer.tokens}
                        sink.write(json.dumps(line) + "\n")
                # P's prefill by itself: a request for one token that no decode engine fetches.
                body = Body(rng.integers(1000, 100000, length).tolist(), plan.tokens)
                await asyncio.sleep(REST_SECONDS)
                own.append((await prefilled(client, deployment.pairs["ours"][0].url, body))[0])
            base = statistics.median(answer.ttft for answer in times["alone"])
            columns = [f"{base * 1e3:16.1f}"]
            for name in modes.names[1:]:
                ttft = statistics.median(answer.ttft for answer in times[name])
                columns.append(f"{ttft * 1e3:9.1f} {(ttft - base) * 1e3:+6.1f}")
            step = {
                name: [(answer.seconds - answer.ttft) / (plan.tokens - 1) for answer in times[name]]
                for name in ("alone", "direct")
            }
            print(
                f"  {length:6d} {' '.join(columns)}   {milliseconds(own[2:]):>7} "
                f"{milliseconds([a.prefill_seconds for a in times['direct']]):>7}   "
                f"{milliseconds(step['alone']):>8} {milliseconds(step['direct']):>5}   "
                f"{milliseconds([a.second for a in times['alone']]):>8} "
                f"{milliseconds([a.second for a in times['router']]):>6}",
                flush=True,
            )
        for name, router in routers.items():
            counted = (await client.get(f"{router}/metrics")).text.splitlines()
            early = [line for line in counted if line.startswith("kv_connector_router_early_tokens_total")]
            print(f"  {name}, through the router:", *early, flush=True)
        for concurrency in plan.concurrency:
            for name in modes.names:
                if name != "direct":
                    with modes.up(name):
                        await load(label, modes, name, concurrency, plan, rng, sink)


async def load(
    label: str,
    modes: Modes,
    name: str,
    concurrency: int,
    plan: argparse.Namespace,
    rng: np.random.Generator,
    sink: Any,
) -> None:
    count = 4 * concurrency
    turn = asyncio.Semaphore(concurrency)

    async def in_turn(body: Body) -> GpuAnswer:
        async with turn:
            return await modes.answer(name, body)

    prompts = rng.integers(1000, 100000, (count, plan.load_tokens)).tolist()
    bodies = [Body(prompt, 64) for prompt in prompts]
    used = modes.cpu_seconds(name)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(in_turn(body) for body in bodies))
    seconds = time.perf_counter() - begin
    ttft = sorted(answer.ttft for answer in answers)
    token = statistics.median((answer.seconds - answer.ttft) / 63 for answer in answers)
    line: dict[str, Any] = {
        "label": label,
        "mode": name,
        "concurrency": concurrency,
        "requests/s": count / seconds,
        "ttft p50": ttft[count // 2],
        "ttft p99": ttft[min(count - 1, count * 99 // 100)],
        "token": token,
        "cpu a request": (modes.cpu_seconds(name) - used) / count,
    }
    sink.write(json.dumps(line) + "\n")
    print(
        f"  {concurrency} at a time, {plan.load_tokens} tokens in, 64 out, {name}: "
        f"{line['requests/s']:.1f} requests/s, TTFT p50 {line['ttft p50'] * 1e3:.0f} "
        f"p99 {line['ttft p99'] * 1e3:.0f} ms, {token * 1e3:.1f} ms a token, "
        f"{line['cpu a request'] * 1e3:.0f} ms of CPU a request",
        flush=True,
    )


async def compare(deployment: GpuDeployment, count: int, block_size: int) -> None:
    """Compares tokens through P and D with one engine's, which computes the prompt and then has it in its
    prefix cache.

    With the cached prompt, the engine computes the last token by itself, as D does, if a prompt ends one
    token after a block: every second one here. Only those tokens must be equal in half precision, because
    batches of different sizes round differently.
    """
    prefill, decode = deployment.pairs["ours"]
    rng = np.random.default_rng(7)
    equal = alike = first = 0
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for number in range(count):
            length = int(rng.integers(5, 3000))
            if number % 2:
                length += 1 - length % block_size
            body = Body(rng.integers(32, 127, length).tolist(), 32)
            expected = [(await stream(client, deployment.alone.url, body)).tokens for _ in range(2)]
            tokens = (await direct(client, prefill, decode, body)).tokens
            equal += tokens in expected
            alike += number % 2 and tokens == expected[1]
            first += tokens[0] in (expected[0][0], expected[1][0])
            if tokens not in expected:
                print(f"  prompt {number} ({length} tokens) differs: {expected} {tokens}")
    print(
        f"equality: {equal} of {count} answers of 32 tokens are one engine's ({first} first tokens); "
        f"{alike} of {count // 2} where both compute the last token by itself",
        flush=True,
    )


async def plant(deployment: GpuDeployment, length: int) -> None:
    """Flips one bit of a page, on the GPU, once the pages have landed and before they are summed: in the
    decode engine's memory, then in the prefill engine's. The decode engine must log the page."""
    prefill, decode = deployment.pairs[VERIFIED]
    log = decode.logs / f"{decode.name}.log"
    rng = np.random.default_rng(3)
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for side in (None, decode, prefill):
            if side is not None:
                probe = {"method": "probe_flip_bit"}
                (await client.post(f"{side.url}/collective_rpc", json=probe)).raise_for_status()
            begin = log.stat().st_size
            body = Body(rng.integers(1000, 100000, length).tolist(), 8)
            answer = await direct(client, prefill, decode, body)
            logged = log.read_bytes()[begin:].decode(errors="replace").splitlines()
            found = [line for line in logged if "CORRUPT PAGE" in line]
            name = "no bit" if side is None else f"a bit of {side.name}'s pages"
            print(f"  flipped {name}: {len(answer.tokens)} tokens, found {len(found)}", *found, sep="\n    ")
            assert len(found) == (side is not None), name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvc-bench-gpu"), help="folder for models and logs"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--port", type=int, default=8100, help="first of 1,000 ports")
    parser.add_argument("--modes", nargs="*", default=["eager", "graphs"], choices=[*MODES])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384, 32000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--concurrency", nargs="*", type=int, default=[8, 32])
    parser.add_argument("--load-tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=None, help="tokens per block; default: vLLM's")
    parser.add_argument("--shape", default="llama", choices=[*SHAPES])
    parser.add_argument("--before", type=Path, default=None, metavar="DIRECTORY")
    parser.add_argument(
        "--verified", action="store_true", help="also measure a pair with verify_pages, direct"
    )
    parser.add_argument(
        "--plant", action="store_true", help="with --verified: also flip a bit on each side, which is found"
    )
    parser.add_argument("--equality", type=int, default=50)
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks per engine, on 2 N GPUs"
    )
    parser.add_argument("--rivals", nargs="*", default=[], choices=[*RIVALS])
    parser.add_argument("--provider", default="nvlink", help="our lane: bounce is tcp through host memory")
    parser.add_argument("--engine", default="", metavar="ARGUMENTS", help="more arguments for every engine")
    plan = parser.parse_args()
    more = shlex.split(plan.engine)
    if plan.block_size:
        more += ["--block-size", str(plan.block_size)]
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[plan.shape]
    model = shape.write(plan.work / plan.shape)
    base = ["--load-format", "dummy", "--max-model-len", "40000", "--kv-cache-memory-bytes", str(8 << 30)]
    # vLLM's default: prompts are hashed, as with any connector. No prompt occurs twice.
    base += ["--enable-prefix-caching"]
    running: list[GpuServer] = []
    routers: list[Process] = []
    lay: dict[str, Any] = {"tensor_parallel": plan.tensor_parallel, "provider": plan.provider}

    def end() -> None:
        for server in running:
            if server.process is not None:
                server.process.signal(signal.SIGCONT)  # a stopped process does not receive the request to end
        stop([*routers, *(server.process for server in running if server.process is not None)])
        routers.clear()
        running.clear()

    def start(deployment: GpuDeployment) -> GpuDeployment:
        """Starts the servers. Rivals that do not start are left out."""
        begin = time.monotonic()
        for server in deployment.servers:
            running.append(server)
            server.start()
        wait_ready([deployment.alone])
        pairs = {}
        for name, pair in deployment.pairs.items():
            try:
                wait_ready(pair)
            except StartError as error:
                if name not in RIVALS:
                    raise
                print(f"{name} is left out: {error}", flush=True)
            else:
                pairs[name] = pair
        print(f"{1 + 2 * len(pairs)} engines up after {time.monotonic() - begin:.0f} s", flush=True)
        return replace(deployment, pairs=pairs)

    try:
        if plan.equality:
            arguments, small = [*TINY_ARGUMENTS, *more], write_tiny(plan.work / "tiny")
            tiny = deployment("tiny", plan.port + 800, small, arguments, plan.work, **lay)
            start(tiny)
            asyncio.run(compare(tiny, plan.equality, plan.block_size or 16))
            end()
        with (plan.json or Path(os.devnull)).open("w", buffering=1) as sink:
            # One after the other, because all of them do not fit into two GPUs.
            for index, mode in enumerate(plan.modes):
                arguments = [*base, *shape.arguments, *MODES[mode], *more]
                port = plan.port + 250 * index
                whole = deployment(
                    mode,
                    port,
                    model,
                    arguments,
                    plan.work,
                    rivals=plan.rivals,
                    before=plan.before,
                    verified=plan.verified,
                    planted=plan.plant,
                    environment=shape.environment,
                    **lay,
                )
                measured = start(whole)
                urls = {}
                for number, name in enumerate(name for name in measured.pairs if name not in RIVALS):
                    own = port + 40 + number
                    routers.append(start_router(measured.pairs[name][0], own, plan.work))
                    urls[name] = f"http://{HOST}:{own}"
                asyncio.run(measure(mode, measured, urls, plan, sink))
                if plan.verified and plan.plant:
                    asyncio.run(plant(measured, plan.lengths[-1]))
                end()
    finally:
        end()


if __name__ == "__main__":
    main()
