"""Goodput and throughput: plain engines in turn, ours with and without objectives, NixlConnector.

Needs vLLM with its GPU dependencies, two GPUs or more and this package; the system nixl also needs NIXL. The
load is `vllm bench serve`, dataset timed_trace. This script writes its traces, which contain every request's
arrival, lengths and shared prefix, and which are equal for all systems. It prints tables and the command
lines, and writes a JSON line to --json after each measurement. --report prints the tables of such files and
exits.

A time between tokens is the time between two events of a stream, over all requests. Goodput is that of `vllm
bench serve --goodput`: requests a second with TTFT and mean time per token (tpot) within a pair of
objectives. With --at-once the load is a number of requests in flight, not a rate. --pairs 2 is for four GPUs.

A rate is measured with one system after the other. A system drops out once it has missed each pair of
objectives that it should hold (--all-rates: no system drops out). The engines of all systems run all the
time. --cpu runs everything with a tiny model and short prompts on CPUs: to try it, not to measure.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shlex
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
from goodput_load import CHUNK, WORKLOADS, LoadObjectives, answers, lateness, report, row, summary, trace
from gpu_engines import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    HOST,
    RIVALS,
    START_SECONDS,
    GpuServer,
    ours,
    rests,
    theirs,
    wait_ready,
    write_tiny,
)
from shapes import SHAPES

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import Process, StartError, stop, wait_healthy

# Seconds from the beginning of a load to the first kill, and from that to the second: all requests are in
# flight then.
KILL_SECONDS = 3.0
RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
# Seconds for a client's start before the first arrival, and for the requests in flight after the last one.
DRAIN_SECONDS = 120.0


def run_client(pipe: Connection, log: Path) -> None:
    """Runs `vllm bench serve` for each received list of arguments, in one process, because importing it takes
    seconds.

    Ends when the other end of ``pipe`` is closed.
    """
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        error = ""
        try:
            serve.main(parser.parse_args(arguments))
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        pipe.send(error)


class GoodputClient:
    def __init__(self, log: Path) -> None:
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=run_client, args=(theirs, log), daemon=True).start()
        theirs.close()

    def begin(self, arguments: Sequence[str]) -> None:
        self._pipe.send(list(arguments))

    def wait(self, seconds: float) -> None:
        """Waits for the load. RuntimeError: it did not end in time, or failed."""
        error = self._pipe.recv() if self._pipe.poll(seconds) else f"not done after {seconds:.0f} s"
        if error:
            raise RuntimeError(f"vllm bench serve: {error}; see {self._log}")


@dataclass
class GoodputRouter:
    name: str
    port: int
    arguments: Sequence[str]
    logs: Path
    process: Process | None = field(default=None, repr=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "kv_connector.cli.main", "router"]
        command += ["--host", HOST, "--port", str(self.port), *self.arguments]
        log = self.logs / f"{self.name.replace(' ', '-').replace(':', '-')}.log"
        log.unlink(missing_ok=True)
        self.process = Process(self.name, command, environment=ENVIRONMENT, log=log)

    def wait(self) -> None:
        """Waits until the router has engines of both roles."""
        assert self.process is not None
        url = f"http://{HOST}:{self.port}/health"
        wait_healthy({self.process: url}, deadline=time.monotonic() + START_SECONDS)

    def counts(self) -> dict[str, float]:
        """Returns the router's non-zero counters: where prompts were computed, and why."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=10) as response:
            samples = [line.rpartition(" ") for line in response.read().decode().splitlines()]
        counted = {name: float(value) for name, _, value in samples if "_total" in name and name[0] != "#"}
        return {name.removeprefix("kv_connector_router_"): value for name, value in counted.items() if value}


@dataclass(frozen=True)
class GoodputSystem:
    name: str
    urls: Sequence[str]  # to which requests go in turn
    servers: Sequence[GpuServer]
    pairs: Sequence[LoadObjectives]  # pairs of objectives that it should hold
    router: GoodputRouter | None = None


@dataclass(frozen=True)
class GoodputMachine:
    arguments: Sequence[str]  # for every engine
    provider: str
    shorter: int  # divides the prompts' lengths
    warm_up: tuple[float, float]  # requests a second, and seconds
    environment: Mapping[str, str] = field(default_factory=dict)


# Three engines with 8 billion weights fit on an H200. The tokenizer is real, because the first token from P
# is text, too.
_COMMON = ["--no-skip-tokenizer-init", "--enable-prefix-caching", "--kv-cache-memory-bytes"]
_DUMMY = ["--load-format", "dummy", "--max-model-len", "16384", "--gpu-memory-utilization", "0.28"]
GPU = GoodputMachine([*_COMMON, str(16 << 30), *_DUMMY], "nvlink", 1, (6.0, 5.0))
_TINY = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--block-size", "32"]
CPU = GoodputMachine(
    [*_COMMON, str(1 << 28), *_TINY, "--max-num-batched-tokens", "512"],
    "host",
    16,
    (1.0, 5.0),
    CPU_ENVIRONMENT,
)
SYSTEMS = ("plain", "ours", "goodput", "nixl")


def write_tokenizer(directory: Path) -> None:
    """Makes a tokenizer in which each token is a separate text.

    So there is text to stream, whatever the model's tokens are.
    """
    from tokenizers import Tokenizer, decoders, models

    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.BPE(vocab={f"t{token}.": token for token in range(size)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def systems(plan: argparse.Namespace, machine: GoodputMachine, model: Path) -> list[GoodputSystem]:
    """Returns the systems, each with one engine on every GPU.

    Ours share engines, which register with several routers.
    """
    ports = iter(free_ports(32 * plan.pairs))
    common = [*machine.arguments, *shlex.split(plan.engine)]

    def server(name: str, gpu: int, port: int, more: Sequence[str] = (), **rest: Any) -> GpuServer:
        environment = {**machine.environment, **rest.pop("environment", {})}
        arguments = [*common, *more]
        return GpuServer(name, [gpu], port, model, arguments, plan.work, environment=environment, **rest)

    def router(name: str, *arguments: str) -> GoodputRouter:
        return GoodputRouter(f"router-{name}", next(ports), arguments, plan.work)

    sides = [("kv_producer", gpu) for gpu in range(plan.pairs)]
    sides += [("kv_consumer", gpu) for gpu in range(plan.pairs, 2 * plan.pairs)]
    made = []
    if "plain" in plan.systems:
        steps = [] if plan.plain_tokens is None else ["--max-num-batched-tokens", str(plan.plain_tokens)]
        engines = [server(f"plain-{gpu}", gpu, next(ports), steps) for _, gpu in sides]
        made.append(GoodputSystem("plain", [engine.url for engine in engines], engines, plan.objectives))
    wanted: dict[str, Sequence[LoadObjectives]] = {"ours": plan.objectives} if "ours" in plan.systems else {}
    if "goodput" in plan.systems:
        wanted |= {f"goodput {pair}": [pair] for pair in plan.objectives}
    if wanted:
        registrations = {name: f"{HOST}:{next(ports)}" for name in wanted}
        engines = []
        steps = ["--long-prefill-token-threshold", str(plan.decode_tokens)]
        steps += ["--max-num-batched-tokens", str(4 * plan.decode_tokens)]
        for role, gpu in sides:
            port, control = next(ports), next(ports)
            transfer = ours(role, control, machine.provider, f"http://{HOST}:{port}", 0)
            transfer["kv_connector_extra_config"]["routers"] = [*registrations.values()]
            more = steps if role == "kv_consumer" else []
            name = f"ours-{role}-{gpu}"
            engines.append(server(name, gpu, port, more, transfer=transfer, control_port=control))
        for name, pairs in wanted.items():
            options = ["--registration", registrations[name]]
            if name != "ours":
                options += ["--ttft-ms", f"{pairs[0].ttft:g}", "--tbt-ms", f"{pairs[0].between:g}"]
            front = router(name, *options)
            made.append(GoodputSystem(name, [f"http://{HOST}:{front.port}"], engines, pairs, front))
    if "nixl" in plan.systems:
        engines = []
        for role, gpu in sides:
            transfer, side = theirs("nixl", role, next(ports), cpu=machine is CPU)
            name = f"nixl-{role}-{gpu}"
            engines.append(server(name, gpu, next(ports), transfer=transfer, environment=side))
        options = ["--serial"]
        for (role, _), engine in zip(sides, engines, strict=True):
            options += ["--prefill" if role == "kv_producer" else "--decode", engine.url]
        front = router("nixl", *options)
        made.append(GoodputSystem("nixl", [f"http://{HOST}:{front.port}"], engines, plan.objectives, front))
    return made


class GoodputBench:
    """Measures the systems that are up."""

    def __init__(
        self, plan: argparse.Namespace, machine: GoodputMachine, model: Path, clients: list[GoodputClient]
    ) -> None:
        self._plan = plan
        self._model = model
        self._clients = clients
        self._workload = WORKLOADS[plan.workload].shorter(machine.shorter)
        self._measurements = 0

    def measure(self, system: GoodputSystem, rate: float, seconds: float) -> dict[str, Any]:
        """Measures requests that arrive at a rate."""
        return self._load(system, self._trace(rate, seconds), rate, seconds)

    def measure_at_once(self, system: GoodputSystem, at_once: int, count: int) -> dict[str, Any]:
        """Measures a fixed number of requests in flight: a new one arrives when an earlier one has its
        answer."""
        rows = [{**row, "timestamp": 0.0} for row in self._trace(count, 1)]
        return self._load(system, rows, at_once, DRAIN_SECONDS, at_once)

    def _trace(self, rate: float, seconds: float) -> list[dict[str, Any]]:
        self._measurements += 1
        return trace(self._workload, rate, seconds, self._plan.seed, self._measurements)

    def _load(
        self, system: GoodputSystem, rows: list[dict[str, Any]], load: float, seconds: float, at_once: int = 0
    ) -> dict[str, Any]:
        # One process for each URL, with its part of the requests, because a process takes one URL only.
        shares = [rows[number :: len(system.urls)] for number in range(len(system.urls))]
        files = [self._plan.work / f"load-{self._measurements}-{n}.jsonl" for n in range(len(shares))]
        commands = []
        for file, share, url in zip(files, shares, system.urls, strict=True):
            file.write_text("".join(json.dumps(row) + "\n" for row in share))
            command = self._arguments(file, len(share), url, system.pairs[0])
            if at_once:
                command += ["--max-concurrency", str(at_once // len(shares))]
            commands.append(command)
        before = {} if system.router is None else system.router.counts()
        for client, command in zip(self._clients, commands, strict=False):
            client.begin(command)
        for client, _ in zip(self._clients, commands, strict=False):
            client.wait(seconds + DRAIN_SECONDS)
        results = [json.loads(file.with_suffix(".json").read_text()) for file in files]
        whole = [answer for pair in zip(results, shares, strict=True) for answer in answers(*pair)]
        duration = max(result["duration"] for result in results)
        line = {"workload": self._plan.workload, "system": system.name, "rate": load, "seconds": seconds}
        line |= {"at once": bool(at_once), **summary(whole, len(rows), duration, self._plan.objectives)}
        line["late"] = max(map(lateness, results, shares))
        if system.router is not None:
            now = system.router.counts()
            counted = {name: value - before.get(name, 0) for name, value in now.items()}
            line["router"] = {name: value for name, value in counted.items() if value}
        line["commands"] = [
            "PYTHONHASHSEED=0 vllm bench serve " + shlex.join(command) for command in commands
        ]
        return line

    def _arguments(self, file: Path, count: int, url: str, pair: LoadObjectives) -> list[str]:
        arguments = ["--base-url", url, "--model", str(self._model), "--served-model-name", "model"]
        arguments += ["--dataset-name", "timed_trace", "--dataset-path", str(file)]
        arguments += ["--timed-trace-chunk-hash-size", str(CHUNK), "--num-prompts", str(count)]
        arguments += ["--temperature", "0", "--goodput", f"ttft:{pair.ttft:g}", f"tpot:{pair.between:g}"]
        arguments += ["--metric-percentiles", "50,90,99", "--disable-tqdm"]
        arguments += ["--save-result", "--save-detailed"]
        return [*arguments, "--result-filename", str(file.with_suffix(".json"))]


def ladder(
    bench: GoodputBench, plan: argparse.Namespace, measured: Sequence[GoodputSystem]
) -> Iterator[dict[str, Any]]:
    """Measures one rate after the other, while there is time and a system that holds its objectives."""
    left = {system.name: {str(pair) for pair in system.pairs} for system in measured}
    longest = 0.0
    for rate in plan.rates:
        for system in measured:
            if not left[system.name] and not plan.all_rates:
                continue
            begin = time.monotonic()
            if begin + max(longest, plan.seconds) > plan.deadline:
                print(f"no time is left for {system.name} at {rate:g} a second, and what follows", flush=True)
                return
            line = bench.measure(system, rate, plan.seconds)
            longest = max(longest, time.monotonic() - begin)
            left[system.name] -= {pair for pair, held in line["holds"].items() if not held}
            yield line


def crowds(
    bench: GoodputBench, plan: argparse.Namespace, measured: Sequence[GoodputSystem]
) -> Iterator[dict[str, Any]]:
    """Measures numbers of requests in flight with every system, then the kills."""
    for at_once in plan.at_once:
        for system in measured:
            yield bench.measure_at_once(system, at_once, 4 * at_once + 32)
    for system in measured:
        if plan.kill and system.name == "ours":
            yield kill(bench, system, plan.at_once[-1])


def kill(bench: GoodputBench, system: GoodputSystem, at_once: int) -> dict[str, Any]:
    """Measures a load during which a decode and a prefill engine are killed.

    Both are started again, and all engines have to come to rest.
    """
    victims = [system.servers[-1], system.servers[0]]
    had: dict[str, float] = {}

    def strike() -> None:
        for victim in victims:
            time.sleep(KILL_SECONDS)
            assert victim.process is not None
            had[victim.name] = running(victim)
            victim.process.kill()

    striking = threading.Thread(target=strike)
    striking.start()
    line = bench.measure_at_once(system, at_once, 8 * at_once)
    striking.join()
    print(
        "killed, with requests: " + ", ".join(f"{name} {count:g}" for name, count in had.items()), flush=True
    )
    for victim in victims:
        victim.start()
    wait_ready(victims)
    rest = asyncio.run(at_rest(system.servers))
    print(f"started again, every block of every engine is free after {rest:.2f} s", flush=True)
    return {**line, "system": f"{system.name}, two killed", "killed": had}


def running(server: GpuServer) -> float:
    """Returns the requests that the engine has."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        return sum(float(value) for value in RUNNING.findall(response.read().decode()))


async def at_rest(servers: Sequence[GpuServer]) -> float:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        return max([await rests(client, server) for server in servers])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/kvc-bench-goodput"),
        help="folder for the model, loads and logs",
    )
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), help="file to which JSON lines are appended"
    )
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="print the tables of these JSON files and exit"
    )
    parser.add_argument("--systems", nargs="+", default=[*SYSTEMS], choices=SYSTEMS)
    parser.add_argument("--workload", default="random", choices=[*WORKLOADS])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[2, 3, 4, 5, 6, 7, 8, 10], help="arrivals a second"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of arrivals per measurement")
    parser.add_argument(
        "--at-once",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="requests in flight, in place of rates",
    )
    parser.add_argument(
        "--kill", action="store_true", help="then kill one of our prefill and decode engines under that load"
    )
    parser.add_argument(
        "--pairs", type=int, default=1, metavar="N", help="N prefill and N decode engines, on 2 N GPUs"
    )
    parser.add_argument(
        "--objectives",
        nargs="+",
        type=LoadObjectives.parse,
        default=[LoadObjectives(400, 15), LoadObjectives(1000, 25)],
        metavar="TTFT:BETWEEN",
        help="pairs of objectives in ms; system goodput has a router for each",
    )
    parser.add_argument(
        "--all-rates",
        action="store_true",
        help="measure every system at all rates, even if its objectives are missed",
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no measurement starts"
    )
    parser.add_argument(
        "--decode-tokens",
        type=int,
        default=256,
        help="prompt tokens in a step of our decode engine, whose steps have four times as many",
    )
    parser.add_argument(
        "--plain-tokens", type=int, default=None, help="tokens of a plain engine's step; default: vLLM's"
    )
    parser.add_argument("--engine", default="", metavar="ARGUMENTS", help="more arguments for every engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    plan = parser.parse_args()
    if plan.report:
        print(report([json.loads(line) for file in plan.report for line in file.read_text().splitlines()]))
        return
    begin = time.monotonic()
    plan.deadline = begin + plan.limit
    plan.rates = sorted(plan.rates)
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    machine = CPU if plan.cpu else GPU
    model = write_tiny(plan.work / "tiny") if plan.cpu else SHAPES["llama"].write(plan.work / "llama")
    write_tokenizer(model)
    # A trace's ids stand for the same tokens in each client, because they are the hash of a str.
    os.environ.update(ENVIRONMENT, PYTHONHASHSEED="0")
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for rests(), after the kills
    measured = systems(plan, machine, model)
    servers = list({server.name: server for system in measured for server in system.servers}.values())
    routers = [system.router for system in measured if system.router is not None]
    processes: list[GoodputRouter | GpuServer] = [*routers, *servers]
    clients = [GoodputClient(plan.work / f"client-{number}.log") for number in range(2 * plan.pairs)]
    lines = []
    try:
        for process in processes:
            process.start()
        for system in list(measured):
            try:
                wait_ready(system.servers)
                if system.router is not None:
                    system.router.wait()
            except StartError as error:
                if system.name not in RIVALS:
                    raise
                print(f"{system.name} is left out: {error}", flush=True)
                measured.remove(system)
        print(f"the engines are up after {time.monotonic() - begin:.0f} s", flush=True)
        bench = GoodputBench(plan, machine, model, clients)
        for system in measured:
            bench.measure(system, *machine.warm_up)
        print(f"and warm after {time.monotonic() - begin:.0f} s", flush=True)
        with plan.json.open("a", buffering=1) as sink:
            for line in (crowds if plan.at_once else ladder)(bench, plan, measured):
                sink.write(json.dumps(line) + "\n")
                lines.append(line)
                print(row(line, list(line["goodput"])), f"{line['late']:.0f} ms late", flush=True)
    finally:
        stop([process.process for process in processes if process.process is not None])
        print(report(lines))
        for line in {line["system"]: line for line in reversed(lines)}.values():
            print(f"\n{line['system']}, {line['rate']:g} a second:", *line["commands"], sep="\n    ")


if __name__ == "__main__":
    main()
