"""The systems that `gpu_conversations.py` compares: their engines, their routers, and the machines' loads."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from gpu_engines import CPU_ENVIRONMENT, HOST, GpuServer, ours, theirs
from gpu_goodput import GoodputRouter

from kv_connector.bench.conversations.client import CompletionServer, TimedAnswer, TurnError, Usage
from kv_connector.bench.conversations.workload import PRESETS, ConversationShape, Pace
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import stop, wait_healthy

SESSION = "X-Session-ID"
SYSTEMS = ("plain", "ours", "nixl", "bidirectional", "no-prefetch")
# Longer than any pause of a user, and short enough for ended conversations to leave the decode engine.
BIDIRECTIONAL = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 10}
LOG_LINES = 25
TIMEOUT = 60.0


@dataclass(frozen=True)
class Lost:
    """The conversation of the phase `lost`, in tokens."""

    prompt: int
    answer: int
    message: int
    rounds: int


@dataclass(frozen=True)
class ConversationMachine:
    arguments: Sequence[str]
    """Arguments of every engine."""
    provider: str
    chat: ConversationShape
    pace: Pace
    agent: ConversationShape
    lost: Lost
    at_once: int
    """Systems whose engines fit side by side."""
    seconds: Mapping[str, float]
    """Longest time of a measurement, by phase."""
    environment: Mapping[str, str] = field(default_factory=dict)


# The tokenizer is real, because the first token from a prefill engine is text, too.
_COMMON = ["--no-skip-tokenizer-init", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
# Three engines per GPU with 16 GB of weights and 22 GiB of KV each, which hold 180,224 tokens of the Llama
# shape. Two agents of six turns have 130,510 tokens.
GPU = ConversationMachine(
    [
        *_COMMON,
        "--load-format=dummy",
        "--max-model-len=73728",
        "--gpu-memory-utilization=0.28",
        f"--kv-cache-memory-bytes={22 << 30}",
    ],
    "nvlink",
    dataclasses.replace(PRESETS["chat"], conversations=34),
    Pace(rate=1.0, think_seconds=0.5),
    dataclasses.replace(PRESETS["agent"], conversations=2, turns=6),
    Lost(32_000, 100, 300, 4),
    3,
    {"chat": 75.0, "lost": 40.0, "agent": 60.0},
)
CPU = ConversationMachine(
    [
        *_COMMON,
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=4096",
        "--block-size=32",
        f"--kv-cache-memory-bytes={1 << 29}",
        "--max-num-batched-tokens=512",
    ],
    "host",
    ConversationShape(conversations=5, turns=4, system=200, first=60, message=60, answer=48),
    Pace(rate=0.4, think_seconds=0.2),
    ConversationShape(conversations=2, turns=3, system=300, first=1_500, message=100, answer=48),
    Lost(2_000, 64, 60, 2),
    1,
    {"chat": 240.0, "lost": 120.0, "agent": 120.0},
    CPU_ENVIRONMENT,
)


@dataclass
class ConversationSystem:
    """The engines of one contestant, and its router."""

    name: str
    servers: Sequence[GpuServer]
    router: GoodputRouter | None = None
    steady: bool = False
    """Its engines keep running while others are measured."""
    up: bool = False

    @property
    def prefill(self) -> GpuServer:
        """The engine that loses its cache."""
        return self.servers[0]

    def start(self) -> None:
        for server in self.servers:
            server.start()
        if self.router is not None and self.steady:
            self.router.start()

    def wait(self, deadline: float) -> None:
        """Waits until the engines answer. StartError: one of them does not."""
        urls = {server.process: f"{server.url}/health" for server in self.servers if server.process}
        wait_healthy(urls, deadline=deadline)
        if self.router is not None and self.steady:
            self._wait_for_router(deadline)
        self.up = True

    def _wait_for_router(self, deadline: float) -> None:
        assert self.router is not None
        assert self.router.process is not None
        url = f"http://{HOST}:{self.router.port}/health"
        wait_healthy({self.router.process: url}, deadline=deadline)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the engines run during a block. They are stopped otherwise, except steady ones.

        A router starts with the block, because it would count stopped engines as dead.
        """
        if self.steady:
            yield
            return
        self._signal(signal.SIGCONT)
        try:
            if self.router is not None:
                self.router.start()
                self._wait_for_router(time.monotonic() + 30.0)
            yield
        finally:
            if self.router is not None and self.router.process is not None:
                stop([self.router.process])
            self._signal(signal.SIGSTOP)

    def rest(self) -> None:
        if not self.steady:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for server in self.servers:
            if server.process is not None:
                server.process.signal(number)

    def end(self) -> None:
        self.up = False
        self._signal(signal.SIGCONT)  # a stopped process does not receive the request to end
        processes = [server.process for server in self.servers]
        processes += [self.router.process] if self.router is not None else []
        stop([process for process in processes if process is not None])

    def dead(self) -> list[GpuServer]:
        """Returns the engines that ended by themselves."""
        return [one for one in self.servers if one.process is not None and not one.process.running()]

    def logs(self) -> str:
        """Returns the end of each log."""
        return "\n".join(
            f"--- {one.process.log}\n{one.process.log_tail(LOG_LINES)}" for one in self.servers if one.process
        )

    def endpoints(self, http: aiohttp.ClientSession) -> list[CompletionServer]:
        if self.name == "bidirectional":
            return [Bidirectional(http, *self.servers)]
        urls = [server.url for server in self.servers]
        if self.router is not None:
            urls = [f"http://{HOST}:{self.router.port}"]
        return [CompletionServer(http, url, timeout=TIMEOUT, headers={}) for url in urls]


class Bidirectional(CompletionServer):
    """The client of NixlConnector's bidirectional mode: sends a turn to both engines, and remembers the
    decode engine's blocks for the next turn."""

    def __init__(self, http: aiohttp.ClientSession, prefill: GpuServer, decode: GpuServer) -> None:
        super().__init__(http, prefill.url, timeout=TIMEOUT, headers={})
        self._session, self._prefill, self._decode = http, prefill, decode
        self._blocks: dict[str, dict[str, Any]] = {}
        """The decode engine's kv_transfer_params of the turn before, by conversation."""

    async def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> TimedAnswer:
        name = headers.get(SESSION, "")
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        blocks = self._blocks.pop(name, {**nothing, "do_remote_decode": True, "do_remote_prefill": False})
        whole = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        begin = time.perf_counter()
        prompt = {**whole, "max_tokens": 1, "kv_transfer_params": blocks}
        computed = await self._post(self._prefill, path, prompt)
        seconds = time.perf_counter() - begin
        params = computed.get("kv_transfer_params")
        if not params:
            raise TurnError("no kv_transfer_params", f"{self._prefill.name} sent no kv_transfer_params")
        answer = await self._post(self._decode, path, {**whole, "kv_transfer_params": params})
        if answer.get("kv_transfer_params"):
            self._blocks[name] = answer["kv_transfer_params"]
        return bidirectional_answer(seconds, computed, answer)

    async def _post(self, server: GpuServer, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(
                server.url + path, json=body, timeout=aiohttp.ClientTimeout(total=TIMEOUT)
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise TurnError(f"HTTP {response.status}", f"{server.name}: {text}")
                found: dict[str, Any] = await response.json()
                return found
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TurnError("broken", f"{server.name}: {type(error).__name__}: {error}") from error


def bidirectional_answer(
    seconds: float, computed: Mapping[str, Any], answer: Mapping[str, Any]
) -> TimedAnswer:
    """Returns the answer of both engines. ``seconds``: until the prefill engine's answer ``computed``.

    TurnError: the decode engine reports no times.
    """
    times = answer.get("metrics") or {}
    queued, first = times.get("queue_time_ms"), times.get("time_to_first_token_ms")
    if queued is None or first is None:
        raise TurnError("no metrics", "the decode engine sent no metrics. Set --enable-per-request-metrics")
    usage = msgspec.convert({**answer["usage"]}, Usage)
    usage.prompt_tokens_details = msgspec.convert(computed["usage"], Usage).prompt_tokens_details
    mean = times.get("mean_itl_ms")
    return TimedAnswer(
        text="",
        said="",
        token_ids=answer["choices"][0]["token_ids"],
        first=seconds + (queued + first) / 1e3,
        gaps=[] if mean is None else [mean / 1e3],
        usage=usage,
    )


def systems(
    plan: argparse.Namespace, machine: ConversationMachine, model: Path
) -> dict[str, ConversationSystem]:
    """Returns the systems by name, each with one engine on both GPUs."""
    ports = iter(free_ports(40))
    common = [*machine.arguments, *shlex.split(plan.engine)]

    def server(name: str, gpu: int, port: int, *more: str, **rest: Any) -> GpuServer:
        environment = {**machine.environment, "VLLM_SERVER_DEV_MODE": "1", **rest.pop("environment", {})}
        arguments = [*common, *more]
        return GpuServer(name, [gpu], port, model, arguments, plan.work, environment=environment, **rest)

    made = {
        "plain": ConversationSystem("plain", [server(f"plain-{gpu}", gpu, next(ports)) for gpu in (0, 1)])
    }

    for system in ("ours", "no-prefetch"):
        registration = next(ports)
        engines = []
        for gpu, role in enumerate(("kv_producer", "kv_consumer")):
            port, control = next(ports), next(ports)
            transfer = ours(role, control, machine.provider, f"http://{HOST}:{port}", registration)
            more = ["--no-async-scheduling"] if role == "kv_producer" else []
            name = f"{system}-prefill" if role == "kv_producer" else f"{system}-decode"
            engines.append(server(name, gpu, port, *more, transfer=transfer, control_port=control))
        options = ["--registration", f"{HOST}:{registration}"]
        options += ["--no-prefetch-answers"] if system == "no-prefetch" else []
        router = GoodputRouter(f"router-{system}", next(ports), options, plan.work)
        made[system] = ConversationSystem(system, engines, router, steady=True)

    for system in ("nixl", "bidirectional"):
        engines = []
        for gpu, role in enumerate(("kv_producer", "kv_consumer")):
            transfer, side = theirs("nixl", role, next(ports), cpu=machine.provider == "host")
            more = []
            if system == "bidirectional":
                transfer["kv_connector_extra_config"] = BIDIRECTIONAL
                more = ["--enable-per-request-metrics"]
            name = f"{system}-prefill" if role == "kv_producer" else f"{system}-decode"
            engines.append(server(name, gpu, next(ports), *more, transfer=transfer, environment=side))
        made[system] = ConversationSystem(system, engines)
    prefill, decode = made["nixl"].servers
    options = ["--serial", "--prefill", prefill.url, "--decode", decode.url]
    made["nixl"].router = GoodputRouter("router-nixl", next(ports), options, plan.work)
    return made
