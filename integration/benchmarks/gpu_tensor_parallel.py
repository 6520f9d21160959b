"""P and D of different tensor parallelism: one engine's tokens, and TTFT beside NixlConnector.

Needs what gpu_pd.py needs, and GPUs. A topology "2:1" is a P (prefill engine) of two ranks on the first GPUs
and a D (decode engine) of one rank on the last. Engines of the same side and size serve all topologies, and
run all the time. First, the answers of a small float32 model through each pair are compared with those of one
engine of one rank. Then the times of a shape are measured, one request at a time, through a router for each
pair. The single engine has P's size. The time in brackets is from the first token to the second. The first
request is the pair's first of all, for which its ranks have to connect. Each request appends a line of JSON
to --json. --cpu does all of it on CPUs with the small model: to try it, not to measure.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gpu_engines import (
    CPU_ENVIRONMENT,
    HOST,
    REST_SECONDS,
    RIVALS,
    TINY_ARGUMENTS,
    Body,
    GpuAnswer,
    GpuServer,
    direct,
    ours,
    serial,
    stream,
    theirs,
    wait_ready,
    write_tiny,
)
from gpu_goodput import GoodputRouter
from shapes import SHAPES

from kv_connector.lab.process import Process, StartError, stop

# Ports of an engine: the API's, then one for each rank from the given offset on.
PORTS, CONTROL = 20, 1
SHORT_TOKENS = 64
# Tokens of the small model's prompts and answers.
PROMPT_TOKENS, ANSWER_TOKENS = 1500, 24


@dataclass(frozen=True)
class Topology:
    prefill: int  # ranks
    decode: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        return cls(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @property
    def title(self) -> str:
        return f"TP{self.prefill} to TP{self.decode}"


@dataclass(frozen=True)
class ParallelEngine:
    """One engine of a system. Several of the system's topologies may use it."""

    system: str  # alone, ours, nixl
    side: str  # prefill, decode
    ranks: int

    def gpus(self, count: int) -> list[int]:
        """Returns the GPUs: the first ones, or the last ones.

        A single rank of another system moves up by one, because the first GPU would have most of the engines
        otherwise.
        """
        shift = int(self.ranks == 1 and self.system != "ours")
        if self.side == "prefill":
            return [(shift + rank) % count for rank in range(self.ranks)]
        return [(count - self.ranks - shift + rank) % count for rank in range(self.ranks)]


def engines(topologies: Sequence[Topology], rivals: Sequence[str]) -> list[ParallelEngine]:
    """Returns one engine of P's size for each topology, and the pairs."""
    found = {ParallelEngine("alone", "prefill", one.prefill): None for one in topologies}
    for system in ("ours", *rivals):
        found |= {ParallelEngine(system, "prefill", one.prefill): None for one in topologies}
        found |= {ParallelEngine(system, "decode", one.decode): None for one in topologies}
    return [*found]


class ParallelSite:
    """All engines and routers of one model."""

    def __init__(
        self, plan: argparse.Namespace, name: str, port: int, model: Path, arguments: Sequence[str]
    ) -> None:
        self._plan = plan
        self._registrations = {one: port + index for index, one in enumerate(plan.topologies)}
        routers = port + len(plan.topologies)
        self.routers = {one: routers + index for index, one in enumerate(plan.topologies)}
        self._processes: list[Process] = []
        self.servers: dict[ParallelEngine, GpuServer] = {}
        for index, engine in enumerate(engines(plan.topologies, plan.rivals), 1):
            first = port + PORTS * index
            environment = dict(CPU_ENVIRONMENT) if plan.cpu else {}
            role = "kv_producer" if engine.side == "prefill" else "kv_consumer"
            transfer: dict[str, Any] | None = None
            if engine.system == "ours":
                transfer = ours(role, first + CONTROL, plan.provider, f"http://{HOST}:{first}", 0)
                meets = [one for one in plan.topologies if engine.ranks == getattr(one, engine.side)]
                routers_of = [f"{HOST}:{self._registrations[one]}" for one in meets]
                transfer["kv_connector_extra_config"]["routers"] = routers_of
            elif engine.system in RIVALS:
                transfer, meeting = theirs(engine.system, role, first + CONTROL, cpu=plan.cpu)
                environment |= meeting
            self.servers[engine] = GpuServer(
                f"{name}-{engine.system}-{engine.side}-{engine.ranks}",
                [0] * engine.ranks if plan.cpu else engine.gpus(plan.gpus),
                first,
                model,
                arguments,
                plan.work,
                transfer,
                first + CONTROL,
                environment,
            )

    def start(self) -> None:
        """Starts the servers. A rival that does not start is left out."""
        begin = time.monotonic()
        routers = []
        for topology, port in self.routers.items():
            options = ["--registration", f"{HOST}:{self._registrations[topology]}"]
            routers.append(GoodputRouter(f"router-{topology}", port, options, self._plan.work))
            routers[-1].start()
            assert routers[-1].process is not None
            self._processes.append(routers[-1].process)
        for server in self.servers.values():
            server.start()
            assert server.process is not None
            self._processes.append(server.process)
        for engine, server in [*self.servers.items()]:
            try:
                wait_ready([server])
            except StartError as error:
                if engine.system not in RIVALS:
                    raise
                print(f"{server.name} is left out: {error}", flush=True)
                del self.servers[engine]
        for router in routers:
            router.wait()
        print(f"{len(self.servers)} engines are up after {time.monotonic() - begin:.0f} s", flush=True)

    async def warm(self, client: httpx.AsyncClient) -> None:
        """Sends one request to each engine by itself, to warm it up."""
        for server in self.servers.values():
            await stream(client, server.url, Body([9] * SHORT_TOKENS, 2))

    def stop(self) -> None:
        stop(self._processes)

    def alone(self, ranks: int) -> GpuServer:
        return self.servers[ParallelEngine("alone", "prefill", ranks)]

    def pair(self, system: str, topology: Topology) -> tuple[GpuServer, GpuServer] | None:
        prefill = self.servers.get(ParallelEngine(system, "prefill", topology.prefill))
        decode = self.servers.get(ParallelEngine(system, "decode", topology.decode))
        return (prefill, decode) if prefill and decode else None


async def compare(site: ParallelSite, topologies: Sequence[Topology], count: int) -> bool:
    """Returns whether all tokens are one engine's, of any size, with and without the prompt in its prefix
    cache.

    Sums in another order, of other ranks or in batches of another size, round differently, and random weights
    have ties. D computes the last token by itself, like one engine that has all other tokens in its cache.
    """
    rng = np.random.default_rng(7)
    lengths = [1, 2, 7, 33, 100, *rng.integers(5, PROMPT_TOKENS, max(0, count - 5)).tolist()][:count]
    bodies = [Body(rng.integers(8, 250, length).tolist(), ANSWER_TOKENS) for length in lengths]
    right = True
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        alone = [site.alone(ranks) for ranks in sorted({one.prefill for one in topologies})]
        asked = [*alone, *alone]
        expected = [[(await stream(client, one.url, body)).tokens for one in asked] for body in bodies]
        agree = sum(len({*answers}) == 1 for answers in expected)
        print(f"engines alone: the same {agree} of {len(bodies)} times, whatever their size and cache")
        for topology in topologies:
            pair = site.pair("ours", topology)
            assert pair is not None
            got = [(await direct(client, *pair, body)).tokens for body in bodies]
            wrong = [number for number, answer in enumerate(got) if answer not in expected[number]]
            right = right and not wrong
            told = f"{len(bodies) - len(wrong)} of {len(bodies)} answers of {ANSWER_TOKENS} tokens"
            print(f"{topology.title}: {told} are one engine's", flush=True)
            for number in wrong:
                print(f"  {lengths[number]} tokens: {got[number]}, not {expected[number]}", flush=True)
    return right


async def meet(client: httpx.AsyncClient, ask: Mapping[str, Any], sink: Any, topology: Topology) -> None:
    """Prints how much longer a pair's first request takes than its second."""
    rng = np.random.default_rng(3)
    told = []
    for name, answer in ask.items():
        times = []
        for _ in range(2):
            times.append((await answer(client, Body(rng.integers(8, 250, SHORT_TOKENS).tolist(), 2))).ttft)
        told.append(f"{name} {(times[0] - times[1]) * 1e3:.1f} ms")
        sink.write(json.dumps({"topology": str(topology), "mode": name, "first": times}) + "\n")
    print(f"  first request, less the second: {', '.join(told)}", flush=True)


def ways(site: ParallelSite, topology: Topology, rivals: Sequence[str]) -> dict[str, Any]:
    """The modes in which a request is answered, by name."""

    async def alone(client: httpx.AsyncClient, body: Body) -> GpuAnswer:
        return await stream(client, site.alone(topology.prefill).url, body)

    async def routed(client: httpx.AsyncClient, body: Body) -> GpuAnswer:
        return await stream(client, f"http://{HOST}:{site.routers[topology]}", body)

    found: dict[str, Any] = {"alone": alone, "ours": routed}
    for rival in rivals:
        if (pair := site.pair(rival, topology)) is not None:

            async def rivals_way(
                client: httpx.AsyncClient, body: Body, pair: tuple[GpuServer, GpuServer] = pair
            ) -> GpuAnswer:
                return await serial(client, *pair, body)

            found[rival] = rivals_way
    return found


async def measure(site: ParallelSite, topology: Topology, plan: argparse.Namespace, sink: Any) -> None:
    rng = np.random.default_rng(1)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits) as client:
        ask = ways(site, topology, plan.rivals)
        print(
            f"TP{topology.prefill} to TP{topology.decode}: TTFT in ms, medians of {plan.rounds}", flush=True
        )
        await meet(client, {name: way for name, way in ask.items() if name != "alone"}, sink, topology)
        for length in plan.lengths:
            times: dict[str, list[GpuAnswer]] = {name: [] for name in ask}
            for number in range(plan.rounds + 1):
                body = Body(rng.integers(8, 250, length).tolist(), plan.tokens)
                for name in [*times]:
                    await asyncio.sleep(REST_SECONDS)
                    try:
                        answer = await ask[name](client, body)
                    except (httpx.HTTPError, RuntimeError) as error:
                        if name not in RIVALS:
                            raise
                        print(f"  {name} is left out: {type(error).__name__}: {error}", flush=True)
                        del ask[name], times[name]
                        continue
                    if number:  # the first round warms up
                        times[name].append(answer)
                        line = {"topology": str(topology), "length": length, "mode": name}
                        line |= {"ttft": answer.ttft, "second": answer.second, "seconds": answer.seconds}
                        sink.write(json.dumps(line) + "\n")
            base = statistics.median(answer.ttft for answer in times["alone"])
            told = [f"alone {base * 1e3:8.1f}"]
            for name, answers in times.items():
                ttft = statistics.median(answer.ttft for answer in answers)
                second = statistics.median(answer.second for answer in answers)
                if name != "alone":
                    told.append(f"{name} {ttft * 1e3:8.1f} ({(ttft - base) * 1e3:+.1f})")
                told.append(f"[{second * 1e3:.1f}]")
            print(f"  {length:6d} {'   '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvc-bench-tp"), help="folder for models and logs"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="file to which JSON lines are appended"
    )
    parser.add_argument("--port", type=int, default=8100, help="first of 1,000 ports")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument(
        "--topologies",
        nargs="+",
        type=Topology.parse,
        default=[Topology(2, 2), Topology(2, 1), Topology(1, 2)],
        metavar="P:D",
    )
    parser.add_argument("--equality", type=int, default=24, metavar="N", help="prompts of the small model")
    parser.add_argument("--lengths", nargs="*", type=int, default=[1024, 4096, 16384, 32000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rivals", nargs="*", default=["nixl"], choices=[*RIVALS])
    parser.add_argument("--provider", default="nvlink")
    parser.add_argument("--cpu", action="store_true")
    plan = parser.parse_args()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    tiny = write_tiny(plan.work / "tiny")
    small = [*TINY_ARGUMENTS, "--gpu-memory-utilization", "0.1"]
    if plan.cpu:
        plan.provider = "host"
        small += ["--block-size", "32", "--kv-cache-memory-bytes", str(1 << 28)]
    right = True
    if plan.equality:
        rivals, plan.rivals = plan.rivals, []
        topologies, plan.topologies = plan.topologies, [*dict.fromkeys([*plan.topologies, Topology(1, 1)])]
        site = ParallelSite(plan, "tiny", plan.port + 500, tiny, small)
        plan.rivals = rivals
        try:
            site.start()
            right = asyncio.run(compare(site, plan.topologies, plan.equality))
        finally:
            site.stop()
        plan.topologies = topologies
    if plan.lengths:
        shape = SHAPES["llama"]
        large = ["--load-format", "dummy", "--max-model-len", "33000", *shape.arguments]
        large += ["--kv-cache-memory-bytes", str(9 << 29), "--gpu-memory-utilization", "0.2"]
        model = tiny if plan.cpu else shape.write(plan.work / "llama")
        site = ParallelSite(plan, "large", plan.port, model, small if plan.cpu else large)
        try:
            site.start()
            with plan.json.open("a", buffering=1) as sink:
                for topology in plan.topologies:
                    asyncio.run(measure(site, topology, plan, sink))
        finally:
            site.stop()
    sys.exit(not right)


if __name__ == "__main__":
    main()
