"""vLLM servers on GPUs, alone and in pairs, and requests to them. Benchmarks and tests share this module.

They need vLLM with its GPU dependencies and this package (installed or on PYTHONPATH).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from kv_connector.lab.process import Process, answers, wait_healthy
from kv_connector.lab.sse import Events

HOST = "127.0.0.1"
JSON = {"content-type": "application/json"}
START_SECONDS = 240.0
# Rest before each request that is timed alone. A GPU at its power limit runs slower right after another
# prefill (by 2 % on an H200), and the preceding request differs from mode to mode.
REST_SECONDS = 0.15
# An engine counts as dead after 5 s of silence. The end of a process of this machine is noticed at once.
AT_REST_SECONDS = 8.0
IN_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
# Lines of a traceback, alone or behind the head of a log line: "(EngineCore pid=1) ERROR ... [file:1] ".
_PLACE = re.compile(r'(?:^|\] ) +(File ".+", line \d+, in .+)')
_ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)$")
TEST_SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
"""Has a worker extension that flips a bit."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONSAFEPATH": "1",  # otherwise a checkout's package, without a native module, would come first
}
# For trying a benchmark on CPUs.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
RIVALS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
BEFORE = "before"  # another build of this package
VERIFIED = "verified"  # a pair whose decode engine has verify_pages
# float32: bfloat16 rounds differently in batches of another size, and random weights have ties.
TINY_ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
TINY_ARGUMENTS += ["--kv-cache-memory-bytes", str(1 << 30), "--max-num-batched-tokens", "1024"]
TINY_ARGUMENTS += ["--enable-prefix-caching"]  # for the single engine's second answer


@dataclass
class GpuServer:
    """One vLLM API server on one GPU, or on several with tensor parallelism."""

    name: str
    gpus: Sequence[int]
    port: int
    model: Path
    arguments: Sequence[str]
    logs: Path
    transfer: dict[str, Any] | None = None
    control_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    process: Process | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        if answers(f"{self.url}/health"):
            raise RuntimeError(
                f"{self.url} answers before {self.name} is started. End the server on that port"
            )
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        command += ["--served-model-name", "model", "--host", HOST, "--port", str(self.port)]
        command += ["--skip-tokenizer-init", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.3"]
        command += ["--tensor-parallel-size", str(len(self.gpus)), *self.arguments]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [visible.split(",")[gpu] if visible else str(gpu) for gpu in self.gpus]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **ENVIRONMENT, **self.environment}
        log = self.logs / f"{self.name}.log"
        log.unlink(missing_ok=True)
        self.process = Process(self.name, command, environment=environment, log=log)


def ours(role: str, control_port: int, provider: str, url: str, registration: int) -> dict[str, Any]:
    """Returns the connector's settings of an engine at ``url`` that registers at ``registration``."""
    settings = {"control_host": HOST, "control_port": control_port, "providers": [provider]}
    settings |= {"routers": [f"{HOST}:{registration}"], "api_url": url}
    return {
        "kv_connector": "WriteImmConnector",
        "kv_connector_module_path": "kv_connector.vllm.connector",
        "kv_role": role,
        "kv_connector_extra_config": settings,
    }


def theirs(name: str, role: str, port: int, *, cpu: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the --kv-transfer-config of another connector's engine, and its environment.

    Its ranks connect on ports from ``port`` on.
    """
    transfer = {"kv_connector": RIVALS[name], "kv_role": role}
    if cpu:
        transfer["kv_buffer_device"] = "cpu"
    return transfer, {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


@dataclass(frozen=True)
class GpuDeployment:
    """One engine, and pairs of a prefill and a decode engine by the name of their connector.

    Only one request is in flight at a time, or one deployment under load, because they share the GPUs.
    """

    alone: GpuServer
    pairs: Mapping[str, tuple[GpuServer, GpuServer]]

    @property
    def servers(self) -> list[GpuServer]:
        return [self.alone, *(server for pair in self.pairs.values() for server in pair)]


def deployment(
    prefix: str,
    port: int,
    model: Path,
    arguments: Sequence[str],
    logs: Path,
    *,
    tensor_parallel: int = 1,
    rivals: Sequence[str] = (),
    before: Path | None = None,
    verified: bool = False,
    planted: bool = False,
    provider: str = "nvlink",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> GpuDeployment:
    """Returns prefill engines on the first GPUs, the single engine beside them, and decode engines on the
    next GPUs. ``planted``: a test may flip bits in the pages of the verified pair."""
    first, second = range(tensor_parallel), range(tensor_parallel, 2 * tensor_parallel)

    def pair(name: str, port: int) -> tuple[GpuServer, GpuServer]:
        sides = []
        for number, (side, gpus) in enumerate((("prefill", first), ("decode", second))):
            role = "kv_producer" if side == "prefill" else "kv_consumer"
            # A rank's port is the engine's port plus the rank.
            control = port + 20 + 10 * number
            url, registration = f"http://{HOST}:{port + number}", port + 15
            transfer, more = ours(role, control, provider, url, registration), dict(environment)
            of_pair = list(arguments)
            if name in RIVALS:
                transfer, meeting = theirs(name, role, control)
                more |= meeting
            elif name == BEFORE:
                more["PYTHONPATH"] = os.pathsep.join([str(before), os.environ.get("PYTHONPATH", "")])
            elif name == VERIFIED:
                transfer["kv_connector_extra_config"]["verify_pages"] = True
                transfer["kv_load_failure_policy"] = "recompute"
                if planted:
                    of_pair += ["--worker-extension-cls", "worker_probe.WorkerProbe"]
                    paths = filter(None, (str(TEST_SUPPORT), os.environ.get("PYTHONPATH")))
                    more |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_SERVER_DEV_MODE": "1"}
            sides.append(
                GpuServer(
                    f"{prefix}-{name}-{side}",
                    gpus,
                    port + number,
                    model,
                    of_pair,
                    logs,
                    transfer,
                    control,
                    more,
                )
            )
        return sides[0], sides[1]

    names = ("ours", *([BEFORE] if before else []), *([VERIFIED] if verified else []), *rivals)
    return GpuDeployment(
        GpuServer(f"{prefix}-alone", first, port, model, arguments, logs, environment=environment),
        {name: pair(name, port + 50 * index) for index, name in enumerate(names, 1)},
    )


def cpu_seconds(server: GpuServer) -> float:
    """Returns the CPU seconds of all processes of the server, which are one session."""
    assert server.process is not None
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == server.process.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_ready(servers: Sequence[GpuServer], seconds: float = START_SECONDS) -> None:
    """Waits until all servers are healthy, for at most ``seconds``."""
    urls = {}
    for server in servers:
        assert server.process is not None
        urls[server.process] = f"{server.url}/health"
    wait_healthy(urls, deadline=time.monotonic() + seconds)


def first_error(log: Path) -> str:
    """Returns the first error in a server's log and its place, or "" if the log has no error."""
    place = ""
    for line in log.read_text(errors="replace").splitlines():
        if found := _PLACE.search(line):
            place = found[1]
        elif (found := _ERROR.search(line)) and "skip_tokenizer_init" not in line:  # a warning of each start
            return f"{found[1]} ({place})"
    return ""


def start_router(prefill: GpuServer, port: int, logs: Path) -> Process:
    """Starts a router. Returns once the engines of ``prefill``'s pair have registered with it."""
    command = [sys.executable, "-m", "kv_connector.cli.main", "router", "--host", HOST, "--port", str(port)]
    command += ["--registration", f"{HOST}:{prefill.port + 15}"]
    router = Process(f"router-{port}", command, environment=ENVIRONMENT, log=logs / f"router-{port}.log")
    # A router is healthy once it has engines of both roles.
    wait_healthy({router: f"http://{HOST}:{port}/health"}, deadline=time.monotonic() + START_SECONDS)
    return router


@dataclass(frozen=True)
class GpuAnswer:
    ttft: float
    seconds: float
    tokens: tuple[int, ...]
    second: float = 0.0
    """Seconds from the first token to the second."""
    prefill_seconds: float = 0.0  # until P's own answer; 0: one engine, or behind a router


class Body:
    """A request's JSON.

    The prompt is encoded before any clock starts, because that takes a client milliseconds.
    """

    def __init__(self, prompt: Sequence[int], tokens: int) -> None:
        self._prompt = json.dumps(list(prompt)).encode()
        self.tokens = tokens

    def json(self, *, tokens: int = 0, stream: bool = False, params: dict[str, Any] | None = None) -> bytes:
        """Returns the JSON. `tokens` overrides the request's own number."""
        rest: dict[str, Any] = {
            "model": "model",
            "max_tokens": tokens or self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "stream": stream,
        }
        if params is not None:
            rest["kv_transfer_params"] = params
        return b'{"prompt": ' + self._prompt + b", " + json.dumps(rest).encode()[1:]


async def stream(
    client: httpx.AsyncClient,
    url: str,
    body: Body,
    params: dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> GpuAnswer:
    begin = time.perf_counter()
    first = second = 0.0
    tokens: list[int] = []
    content, headers = body.json(stream=True, params=params), {**JSON, **(headers or {})}
    async with client.stream("POST", f"{url}/v1/completions", content=content, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
        events = Events()
        async for chunk in response.aiter_bytes():
            choices = [c for event in events.feed(chunk) for c in json.loads(event).get("choices", [])]
            for choice in choices:
                if choice.get("token_ids"):
                    first = first or time.perf_counter() - begin
                    tokens += choice["token_ids"]
                    if len(tokens) > 1:
                        second = second or time.perf_counter() - begin - first
    if len(tokens) != body.tokens:
        raise RuntimeError(f"{len(tokens)} tokens instead of {body.tokens}")
    return GpuAnswer(first, time.perf_counter() - begin, tuple(tokens), second)


async def prefilled(
    client: httpx.AsyncClient,
    url: str,
    body: Body,
    params: dict[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[float, dict[str, Any]]:
    """Returns a prefill engine's answer of one token, and the seconds until it arrived."""
    begin = time.perf_counter()
    content, headers = body.json(tokens=1, params=params), {**JSON, **(headers or {})}
    response = await client.post(f"{url}/v1/completions", content=content, headers=headers)
    response.raise_for_status()
    return time.perf_counter() - begin, response.json()


def transfer_params(prefill: GpuServer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the kv_transfer_params of one request: for the prefill engine, and for the decode engine."""
    transfer_id = uuid.uuid4().hex
    at_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    at_decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": HOST,
        "remote_port": prefill.control_port,
    }
    return at_prefill, at_decode


async def direct(client: httpx.AsyncClient, prefill: GpuServer, decode: GpuServer, body: Body) -> GpuAnswer:
    """Sends a request to both engines at once, like the router, but without its hop."""
    at_prefill, at_decode = transfer_params(prefill)
    (seconds, _), answer = await asyncio.gather(
        prefilled(client, prefill.url, body, at_prefill), stream(client, decode.url, body, at_decode)
    )
    return GpuAnswer(answer.ttft, answer.seconds, answer.tokens, answer.second, seconds)


async def serial(client: httpx.AsyncClient, prefill: GpuServer, decode: GpuServer, body: Body) -> GpuAnswer:
    """Sends a request to P and then to D with P's answer: NIXL's flow, without a router's hop."""
    begin = time.perf_counter()
    headers = {"X-Request-Id": uuid.uuid4().hex}  # NixlPushConnector's P finds the target of a push by it
    wanted = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    params = {"do_remote_decode": True, "do_remote_prefill": False, **wanted}
    _, done = await prefilled(client, prefill.url, body, params, headers)
    seconds = time.perf_counter() - begin
    answer = await stream(client, decode.url, body, done["kv_transfer_params"], headers)
    return GpuAnswer(seconds + answer.ttft, seconds + answer.seconds, answer.tokens, answer.second, seconds)


async def used(client: httpx.AsyncClient, server: GpuServer) -> float:
    """Returns the part of the engine's KV blocks that is in use."""
    found = IN_USE.findall((await client.get(f"{server.url}/metrics")).text)
    return sum(float(value) for value in found)


async def rests(client: httpx.AsyncClient, server: GpuServer) -> float:
    """Returns the seconds until no block is in use and the connector has no work (otherwise it refuses the
    reset)."""
    begin = time.monotonic()
    while True:
        answer = await client.post(f"{server.url}/reset_prefix_cache?reset_external=true")
        seconds = time.monotonic() - begin
        if answer.status_code == 200 and answer.json().get("success") and await used(client, server) == 0:
            return seconds
        if seconds > AT_REST_SECONDS:
            raise AssertionError(f"{server.name} is not at rest after {seconds:.1f} s: {answer.text}")
        await asyncio.sleep(0.05)


def write_tiny(directory: Path) -> Path:
    """Makes a model that every engine computes in the same way, with weights that make its tokens differ."""
    from kv_connector.lab.model import make_llama

    return make_llama(directory, layers=8, hidden=512, heads=8, kv_heads=4, head_dim=64)
