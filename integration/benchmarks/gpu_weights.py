"""Weights from a trainer's GPU into an engine's, beside vLLM's own backends, for docs/performance.md.

Needs what gpu_pd.py needs. An arm is a trainer and its engines. The arms are ours (shadow mode), streaming
(ours, without room for a second copy), nccl, nccl-single (not packed) and ipc (both on one GPU: --gpus 0 0).
It has a GPU for each of --trainers ranks and for each rank of --engines engines of --tensor-parallel ranks.
Arms get the GPUs of --gpus in turn, and share them if these are fewer, because arms take turns. Engines have
a shape of shapes.py in bfloat16. So have trainers (with rows of each tensor at each rank), or they have
float32 masters.

A round draws new weights, and sends them while a request is decoded. The table has medians, and the worst
values in brackets. The engines' answers before and after the rounds are compared: exits with status 1 if
tokens are wrong. Each push appends a line of JSON to --json. --cpu tries our side on CPUs with a small model,
not to measure.
"""
# ruff: noqa: T201  (its output is a table)

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from gpu_engines import (
    CPU_ENVIRONMENT,
    HOST,
    JSON,
    REST_SECONDS,
    Body,
    GpuServer,
    stream,
    wait_ready,
    write_tiny,
)
from gpu_trainer import THEIRS, Figures, GpuTrainer, Order, nccl_environment
from shapes import SHAPES

from kv_connector.lab.process import StartError, stop
from kv_connector.lab.sse import Events

# Seconds of a stream before weights are sent, for its speed, and after it, for the end of the longest gap.
BEFORE_SECONDS, AFTER_SECONDS = 1.0, 0.3
# Seconds during which versions land one after the other, for the speed of decoding meanwhile: dozens of
# tokens.
AGAIN_SECONDS = 2.0
PROMPTS, ANSWER_TOKENS = (1, 7, 33, 150), 24
STREAM_TOKENS = 4000 if "--cpu" in sys.argv else 8000
CHECKSUM_SECONDS = 300.0  # vLLM hashes 16 GB in 10 s, on a CPU
NAMED = 4  # differing parameters that are printed
ARGUMENTS = ["--load-format", "dummy", "--max-num-seqs", "64"]
GPU_ARGUMENTS = ["--dtype", "bfloat16", "--max-model-len", "8192", "--kv-cache-memory-bytes", str(2 << 30)]
CPU_ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
CPU_ARGUMENTS += ["--kv-cache-memory-bytes", str(256 << 20)]
APPLIED = re.compile(r"applied version (\S+), in (\d+) ms")
SERVES = re.compile(r"serves version (\S+), after a pause of (\d+) ms")
ARENA = re.compile(r"by ([\d.]+) GB beside the model")
MODES = {"ours": "shadow", "streaming": "streaming"}
ARMS = (*MODES, *THEIRS)
MEMORY_QUERY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]


@dataclass
class Arm:
    name: str
    gpus: tuple[Sequence[int], Sequence[int]]  # the trainer's, and the engines'
    servers: list[GpuServer]
    trainer: GpuTrainer
    pushes: list[Figures] = field(default_factory=list)
    once: Figures = field(default_factory=dict)
    tokens: list[list[tuple[int, ...]]] = field(default_factory=list)
    """Answers: before all versions, after the first, and after the last, which equals the first."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Checksums after the last version, of the model's parameters as its kernels have them."""

    @property
    def server(self) -> GpuServer:
        """The engine whose stream is measured."""
        return self.servers[0]

    async def ask(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.trainer.ask, method, *arguments)


class Watch:
    """A request that is decoded until the block ends, with the number of tokens over time."""

    def __init__(self, client: httpx.AsyncClient, server: GpuServer) -> None:
        self._client, self._url = client, f"{server.url}/v1/completions"
        self.times: list[float] = []
        self.counts: list[int] = []
        self._begun = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read())
        begun = asyncio.create_task(self._begun.wait())
        await asyncio.wait({self._task, begun}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(BEFORE_SECONDS + REST_SECONDS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await asyncio.sleep(AFTER_SECONDS)
        ended = self._task.done()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if ended and kind is None:
            raise RuntimeError(f"{self._url}: the stream was over after {self.counts[-1:]} tokens")

    async def _read(self) -> None:
        body = Body([*range(1, 17)], STREAM_TOKENS).json(stream=True)
        async with self._client.stream("POST", self._url, content=body, headers=JSON) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
            events = Events()
            async for chunk in response.aiter_bytes():
                choices = [c for event in events.feed(chunk) for c in json.loads(event).get("choices", [])]
                if tokens := sum(len(choice.get("token_ids") or ()) for choice in choices):
                    self.times.append(time.monotonic())
                    self.counts.append((self.counts[-1] if self.counts else 0) + tokens)
                    self._begun.set()

    def rate(self, begin: float, end: float) -> float:
        """Returns the tokens a second between two times, up to the last token before the end; NaN: there was
        none."""
        if not (inside := [t for t in self.times if begin < t <= end]):
            return float("nan")
        counts = np.interp([begin, inside[-1]], self.times, self.counts)
        return float((counts[1] - counts[0]) / (inside[-1] - begin))

    def gaps(self, begin: float, end: float) -> list[float]:
        """Returns the gaps between tokens that overlap the time from ``begin`` to ``end``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if b > begin and a < end]

    def figures(self, begin: float, end: float) -> Figures:
        return {
            "gap": max(self.gaps(begin, end)),
            "ordinary gap": statistics.median(self.gaps(begin - BEFORE_SECONDS, begin)),
            "tokens/s before": self.rate(begin - BEFORE_SECONDS, begin),
        }


class Memory:
    """Measures the largest use of GPU memory beyond the use at the block's start: MiB, by GPU."""

    def __init__(self, gpus: Sequence[int], log: Path) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._names = {visible.split(",")[gpu] if visible else str(gpu): gpu for gpu in gpus}
        self._query = [*MEMORY_QUERY, "-i", ",".join(self._names)]
        self._log = log
        self.extra: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._before = self._read(
            subprocess.run(self._query, check=True, capture_output=True, text=True).stdout
        )
        with self._log.open("w") as output:
            self._sampler = subprocess.Popen([*self._query, "-lms", "20"], stdout=output)
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.terminate()
        self._sampler.wait()
        most = self._read(self._log.read_text())
        self.extra = {gpu: most.get(gpu, 0) - used for gpu, used in self._before.items()}

    def _read(self, text: str) -> dict[int, int]:
        most: dict[int, int] = {}
        for index, used in re.findall(r"^(\d+), (\d+)$", text, re.MULTILINE):
            gpu = self._names[index]
            most[gpu] = max(most.get(gpu, 0), int(used))
        return most


def make_arms(plan: argparse.Namespace, model: Path, config: Mapping[str, Any]) -> list[Arm]:
    """Makes the arms and starts their servers."""
    arms = []
    workers = plan.engines * plan.tensor_parallel
    needs = plan.trainers + workers
    for number, name in enumerate(plan.arms):
        first = number % max(len(plan.gpus) // needs, 1) * needs
        gpus = plan.gpus[first : first + needs]
        of_trainer, of_engines = gpus[: plan.trainers], gpus[plan.trainers :]
        port = plan.port + 100 * number
        servers, engines = [], []
        for engine in range(plan.engines):
            own = port + 20 * engine
            environment = dict(CPU_ENVIRONMENT) if plan.cpu else {}
            if name in MODES:
                backend = "write_imm"
                engines.append(f"{HOST}:{own + 1}")
                settings = {
                    "control_host": HOST,
                    "control_port": own + 1,
                    "providers": ["host" if plan.cpu else "nvlink"],
                    "mode": MODES[name],
                }
                environment |= {"VLLM_PLUGINS": "kv_connector", "KV_CONNECTOR_WEIGHTS": json.dumps(settings)}
            else:
                backend, _ = THEIRS[name]
                engines.append(f"http://{HOST}:{own}")
                environment |= nccl_environment()
                environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for ipc's handles
            environment |= {"VLLM_SERVER_DEV_MODE": "1"}  # for vLLM's own backends, and for checksums
            arguments = [*ARGUMENTS, *(CPU_ARGUMENTS if plan.cpu else GPU_ARGUMENTS)]
            arguments += ["--weight-transfer-config", json.dumps({"backend": backend})]
            here = of_engines[engine * plan.tensor_parallel :][: plan.tensor_parallel]
            servers.append(
                GpuServer(
                    f"weights-{name}-{engine}",
                    here,
                    own,
                    model,
                    arguments,
                    plan.work,
                    environment=environment,
                )
            )
            servers[-1].start()
        devices = ["cpu" if plan.cpu else f"cuda:{gpu}" for gpu in of_trainer]
        order = Order(name, config, devices, plan.dtype_master, engines, workers, port + 90)
        arms.append(Arm(name, (of_trainer, of_engines), servers, GpuTrainer(order)))
    return arms


async def answers(client: httpx.AsyncClient, arm: Arm) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 256, length).tolist() for length in PROMPTS]
    """Records the answers of all the arm's engines."""
    arm.tokens.append(
        [
            (await stream(client, server.url, Body(prompt, ANSWER_TOKENS))).tokens
            for server in arm.servers
            for prompt in prompts
        ]
    )


async def checksums(client: httpx.AsyncClient, arm: Arm) -> None:
    url = f"{arm.server.url}/weight_checker"
    response = await client.post(url, json={"action": "checksum"}, timeout=CHECKSUM_SECONDS)
    arm.checksums = response.raise_for_status().json()["checksums"]


async def connect(client: httpx.AsyncClient, arm: Arm, plan: argparse.Namespace) -> None:
    """Pushes a first version to warm up, and measures the most memory that it takes."""

    async def first() -> None:
        async with Watch(client, arm.server) as watch:
            took = await arm.ask("connect")
        arm.once |= {"making": took["made"] - took["begin"], "connecting": took["end"] - took["begin"]}
        arm.once["connecting gap"] = watch.figures(took["begin"], took["end"])["gap"]
        await push(client, arm, "warm-up")
        arm.pushes.clear()

    if plan.cpu:
        await first()
        return
    with Memory([gpu for gpus in arm.gpus for gpu in gpus], plan.work / f"memory-{arm.name}.csv") as memory:
        await first()
    arm.once["trainer MiB"], arm.once["engine MiB"] = (memory.extra[gpus[0]] for gpus in arm.gpus)


async def push(client: httpx.AsyncClient, arm: Arm, version: str) -> None:
    async with Watch(client, arm.server) as watch:
        took: Figures = await arm.ask("push", version)
    begin, end = took["begin"], took["end"]
    figures = {"whole": end - begin, "sender cpu": took["cpu"]} | watch.figures(begin, end)
    if arm.name in MODES:
        figures["sending"] = took["sent"] - begin
        figures["landing"] = took["landed"] - begin
        figures["applying"] = end - took["landed"]
        if not np.isnan(rate := watch.rate(begin, took["landed"])):
            figures["tokens/s while landing"] = rate
        said = log(arm)
        figures["pause"] = float(dict(SERVES.findall(said))[version]) / 1e3
        figures["model"] = float(dict(APPLIED.findall(said))[version]) / 1e3
    else:
        figures["landing"] = took["sent"] - took["paused"]
        figures["pause"] = figures["whole"]
    figures["bytes/s"] = arm.once["bytes"] / figures["landing"]
    if "extra bytes" in took:
        figures["extra"] = took["extra bytes"]
    arm.pushes.append(figures)


def log(arm: Arm) -> str:
    return (arm.server.logs / f"{arm.server.name}.log").read_text(errors="replace")


async def land_again(client: httpx.AsyncClient, arm: Arm) -> None:
    """Pushes versions that are not applied, one after the other.

    Measures their cost for a decoded request, and how fast they land without one.
    """
    took = await arm.ask("connect", False)
    arm.once["connecting again"] = took["end"] - took["begin"]
    async with Watch(client, arm.server) as watch:
        took = await arm.ask("push_for", AGAIN_SECONDS)
    begin, end = took["begin"], took["end"]
    arm.once["again bytes/s"] = arm.once["bytes"] * took["pushes"] / (end - begin)
    arm.once["again tokens/s"] = watch.rate(begin, end)
    arm.once["again tokens/s before"] = watch.rate(begin - BEFORE_SECONDS, begin)
    arm.once["again gap"] = max(watch.gaps(begin, end))
    took = await arm.ask("push_for", AGAIN_SECONDS)
    arm.once["quiet bytes/s"] = arm.once["bytes"] * took["pushes"] / (took["end"] - took["begin"])


async def in_turn(arms: list[Arm], work: Callable[[Arm], Awaitable[None]]) -> None:
    """Measures the arms. An arm with a backend of vLLM that fails is left out."""
    for arm in [*arms]:
        try:
            await work(arm)
        except (RuntimeError, httpx.HTTPError) as error:
            if arm.name in MODES:
                raise
            print(f"{arm.name} is left out: {type(error).__name__}: {error}", flush=True)
            arms.remove(arm)


async def measure(arms: list[Arm], plan: argparse.Namespace, sink: Any) -> None:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:

        async def first(arm: Arm) -> None:
            arm.once["bytes"] = await arm.ask("nbytes")
            await answers(client, arm)
            await arm.ask("draw", 0)
            await connect(client, arm, plan)
            await answers(client, arm)
            print(f"{arm.name}: connected in {arm.once['connecting']:.2f} s", flush=True)

        async def next_round(number: int, seed: int, arm: Arm) -> None:
            await arm.ask("draw", seed)
            await push(client, arm, f"round{number}")
            sink.write(json.dumps({"arm": arm.name, "round": number, **arm.pushes[-1]}) + "\n")

        await in_turn(arms, first)
        for number, seed in enumerate([*range(1, plan.rounds), 0]):
            await in_turn(arms, functools.partial(next_round, number, seed))
        await in_turn(arms, functools.partial(answers, client))
        if not plan.cpu:  # on CPUs parameters are empty, and their packed copies are not hashed
            await asyncio.gather(*(checksums(client, arm) for arm in arms))
        if (mine := next((arm for arm in arms if arm.name == "ours"), None)) is not None:
            profile = await arm_profile(mine)
            await land_again(client, mine)
            print(f"ours: a push under cProfile, by the functions' own time{profile}", flush=True)
        if not plan.cpu:
            for arm in arms:
                engines = [f"cuda:{gpu}" for gpu in arm.gpus[1]]
                arm.once["copy bytes/s"] = await arm.ask("copy_peak", engines)
        for arm in arms:
            if sizes := ARENA.findall(log(arm)):
                arm.once["arena bytes"] = float(sizes[-1]) * 1e9
            sink.write(
                json.dumps({"arm": arm.name, "gpus": arm.gpus, "tokens": arm.tokens, **arm.once}) + "\n"
            )


async def arm_profile(arm: Arm) -> str:
    text: str = await arm.ask("profile", "profiled")
    return "\n".join(line for line in text.splitlines()[4:] if line.strip())


# Rows of the table: title, key, divisor, digits, and whether more is worse.
ROUNDS = (
    ("push to landed (theirs: send_weights), ms", "landing", 1e-3, 1, True),
    ("  GB/s", "bytes/s", 1e9, 1, False),
    ("push until sources may change, ms", "sending", 1e-3, 1, True),
    ("landed to applied, ms", "applying", 1e-3, 1, True),
    ("whole update, ms", "whole", 1e-3, 1, True),
    ("pause (theirs: pause to resume), ms", "pause", 1e-3, 0, True),
    ("  of which the worker's model takes, ms", "model", 1e-3, 0, True),
    ("longest gap between a stream's tokens, ms", "gap", 1e-3, 1, True),
    ("  its ordinary gap, ms", "ordinary gap", 1e-3, 2, True),
    ("tokens/s in the second before", "tokens/s before", 1, 1, False),
    ("tokens/s while it lands", "tokens/s while landing", 1, 1, False),
    ("the pushing thread's CPU, ms", "sender cpu", 1e-3, 1, True),
    ("the trainer's memory beside its weights, MiB", "extra", 1 << 20, 0, True),
)
ONCE = (
    ("checkpoint, GB", "bytes", 1e9, 2),
    ("plain copies from each trainer's GPU, GB/s", "copy bytes/s", 1e9, 1),
    ("the trainer's end is made, s", "making", 1, 2),
    ("  and connected, s", "connecting", 1, 2),
    ("  again, s", "connecting again", 1, 2),
    ("longest gap of a stream while it connects, ms", "connecting gap", 1e-3, 1),
    ("landing again and again, GB/s", "again bytes/s", 1e9, 1),
    ("  tokens/s before", "again tokens/s before", 1, 1),
    ("  tokens/s meanwhile", "again tokens/s", 1, 1),
    ("  longest gap, ms", "again gap", 1e-3, 1),
    ("  GB/s while nothing is decoded", "quiet bytes/s", 1e9, 1),
    ("arena, GB", "arena bytes", 1e9, 2),
    ("first update: more in use on the trainer's GPU, MiB", "trainer MiB", 1, 0),
    ("  on the engine's GPU, MiB", "engine MiB", 1, 0),
)


def report(arms: Sequence[Arm]) -> bool:
    """Prints the tables. Returns whether all tokens are right."""
    print(f"{'':56}" + "".join(f"{arm.name:>22}" for arm in arms))

    def row(title: str, cells: list[str]) -> None:
        if any(cells):
            print(f"{title:56}" + "".join(f"{cell:>22}" for cell in cells))

    for title, key, unit, digits in ONCE:
        row(title, [f"{arm.once[key] / unit:.{digits}f}" if key in arm.once else "" for arm in arms])
    for title, key, unit, digits, more_is_worse in ROUNDS:
        cells = []
        for arm in arms:
            values = [figures[key] / unit for figures in arm.pushes if key in figures]
            worst = max if more_is_worse else min
            median = statistics.median(values) if values else 0.0
            cells.append(f"{median:.{digits}f} ({worst(values):.{digits}f})" if values else "")
        row(title, cells)
    good = True
    for arm in arms:
        before, first, last = arm.tokens
        others = sum(a != b for a, b in zip(before, first, strict=True))
        same = sum(a == b for a, b in zip(first, last, strict=True))
        print(f"{arm.name}: {others} of {len(before)} answers are others than before, and {same} come again")
        good &= others == same == len(before)
    for arm in arms[1:]:
        same = sum(a == b for a, b in zip(arm.tokens[-1], arms[0].tokens[-1], strict=True))
        print(f"{arm.name} and {arms[0].name}: {same} of {len(arm.tokens[-1])} answers are the same")
        good &= same == len(arm.tokens[-1])
        differ = sorted(name for name, sum in arm.checksums.items() if arms[0].checksums[name] != sum)
        named = ", ".join(differ[:NAMED])
        print(
            f"  {len(differ)} of {len(arm.checksums)} parameters differ"
            + (f": {named} ..." if differ else "")
        )
        good &= not differ
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/kvc-bench-gpu"), help="folder for models and logs"
    )
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--port", type=int, default=8700, help="first of 400 ports")
    parser.add_argument(
        "--gpus", nargs="+", type=int, default=[0, 1], help="GPUs of a trainer, of its engines, ..."
    )
    parser.add_argument("--arms", nargs="+", default=["ours", "nccl"], choices=ARMS)
    parser.add_argument("--shape", default="llama", choices=["llama", "qwen3-moe"])
    parser.add_argument(
        "--layers", type=int, default=None, metavar="N", help="layers of the shape, for less memory"
    )
    parser.add_argument("--trainers", type=int, default=1, metavar="RANKS")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="RANKS", help="ranks of each engine"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype-master", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--cpu", action="store_true")
    plan = parser.parse_args()
    plan.work = plan.work.resolve()
    plan.work.mkdir(parents=True, exist_ok=True)
    if plan.cpu:
        plan.arms, plan.dtype_master = [arm for arm in plan.arms if arm in MODES], "float32"
        plan.gpus = list(range(plan.trainers + plan.engines * plan.tensor_parallel))
    model = write_tiny(plan.work / "tiny") if plan.cpu else SHAPES[plan.shape].write(plan.work / plan.shape)
    config = json.loads((model / "config.json").read_text())
    if plan.layers is not None:
        config["num_hidden_layers"] = plan.layers
        (model / "config.json").write_text(json.dumps(config))
    arms: list[Arm] = []
    try:
        begin = time.monotonic()
        arms = make_arms(plan, model, config)
        taking_part = []
        for arm in arms:
            try:
                wait_ready(arm.servers)
                taking_part.append(arm)
            except StartError as error:
                if arm.name in MODES:
                    raise
                print(f"{arm.name} is left out: {error}", flush=True)
        print(f"{len(taking_part)} engines up after {time.monotonic() - begin:.0f} s", flush=True)
        with (plan.json or Path(os.devnull)).open("w", buffering=1) as sink:
            asyncio.run(measure(taking_part, plan, sink))
        if not report(taking_part):
            sys.exit(1)
    finally:
        for arm in arms:
            arm.trainer.close()
        stop([server.process for arm in arms for server in arm.servers if server.process is not None])


if __name__ == "__main__":
    main()
