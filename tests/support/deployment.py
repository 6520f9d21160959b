"""Real vLLM engines in separate processes, and the queries that tests send to them."""

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from kv_connector.lab.cluster import HOST, MODEL_NAME, EngineProcess, EngineSettings, LocalCluster
from kv_connector.lab.model import make_llama
from kv_connector.lab.sse import Events
from kv_connector.protocol.actions import Address

if TYPE_CHECKING:
    from otlp import SpanReceiver

# Time limit of a condition on a busy machine. Every awaited condition comes true far sooner.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.02

BLOCK = 32

# Seconds. Tests wait for the end of a prompt that no engine fetches, and of a reservation whose prompt never
# comes. An engine that gets no CPU time on a busy machine must not count as dead. What prefill engines have
# measured of a lender counts for the time `remember`, so that they borrow whatever it was.
TIMEOUTS = {
    "hold": 12.0,
    "orphan": 12.0,
    "connect": 30.0,
    "suspect": 15.0,
    "dead": 30.0,
    "ask": 10.0,
    "remember": 0.001,
}

HOST_TIER = {"spec_name": "HostTierSpec", "spec_module_path": "host_tier", "cpu_bytes_to_use": 64 << 20}
"""Settings of vLLM's OffloadingConnector on a CPU."""

# Only the data plane listens at this address.
DATA_HOST = "127.0.0.2"


@dataclass(frozen=True)
class CacheGroup:
    """A KV cache group of a model: its layers, and its sliding window where it has one."""

    layers: int
    window: int | None = None


@dataclass(frozen=True)
class CacheShape:
    """The sizes that decide how many pages a prompt takes."""

    groups: tuple[CacheGroup, ...]

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    def pages(self, tokens: int, cached: int = 0) -> int:
        """Returns the pages, summed over all layers, that D needs of a prompt of `tokens`; D has the first
        `cached`.

        D computes the prompt's last token itself, and attends to the `window` tokens up to and with that one.
        """
        loaded = tokens - 1
        total = 0
        for group in self.groups:
            first = cached // BLOCK
            if group.window is not None:
                first = max(first, (tokens - group.window) // BLOCK)
            total += group.layers * max(-(-loaded // BLOCK) - first, 0)
        return total


@dataclass(frozen=True)
class ModelDeployment:
    """One model on a prefill, a decode and a plain engine, with a router of each kind for P and D."""

    shape: CacheShape
    cluster: LocalCluster
    plain: EngineProcess
    prefill: EngineProcess
    decode: EngineProcess
    concurrent: str
    serial: str
    early: str
    """URL of the router at which P and D have registered, which enables the early first token."""
    listener: Address
    """Second registration address of P and D, where a test may listen."""
    spans: "SpanReceiver"
    """Receiver of the spans of Gemma's engines and routers."""
    events: Mapping[str, Path]
    """Sockets from which KV cache events are read, by engine ("plain", "decode")."""


def prompt(seed: float | str, tokens: int) -> list[int]:
    """Returns `tokens` random token ids without special tokens. The same seed gives the same ids."""
    return random.Random(f"{seed}").choices(range(256), k=tokens)


class RefusedCall(Exception):
    """An engine or a router answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:2000]}")
        self.status = status
        self.text = text


def completion_body(prompt_ids: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


class Client:
    """An HTTP client of engines and routers. Cancelling a call closes its connection."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=PATIENCE_SECONDS * 2, limits=limits, trust_env=False)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(
        self, url: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Posts `body` and returns the JSON answer. Raises RefusedCall if the answer is an error."""
        response = await self._http.post(url, json=body, headers=headers)
        if response.status_code >= 400:
            raise RefusedCall(response.status_code, response.text)
        answer = response.json() if response.content else {}
        assert isinstance(answer, dict)
        return answer

    async def get(self, url: str) -> str:
        response = await self._http.get(url)
        if response.status_code >= 400:
            raise RefusedCall(response.status_code, response.text)
        return response.text

    async def choices(self, url: str, prompt_ids: Any, max_tokens: int, **more: Any) -> list[list[int]]:
        """Returns the output tokens of each choice of a completion."""
        answer = await self.post(f"{url}/v1/completions", completion_body(prompt_ids, max_tokens, **more))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        for choice in choices:
            if choice["finish_reason"] != "length":
                raise RefusedCall(200, f"finish_reason {choice['finish_reason']}: {answer}")
        return [choice["token_ids"] for choice in choices]

    async def complete(self, url: str, prompt_ids: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """Returns the output tokens of a completion."""
        (tokens,) = await self.choices(url, prompt_ids, max_tokens, **more)
        assert len(tokens) == max_tokens
        return tokens

    async def log_probabilities(self, url: str, prompt_ids: Sequence[int], max_tokens: int) -> list[float]:
        """Returns the log probabilities of a completion's output tokens. They show the contents of the KV
        cache more finely than the tokens do."""
        body = completion_body(prompt_ids, max_tokens, logprobs=1)
        answer = await self.post(f"{url}/v1/completions", body)
        found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
        return found

    async def stream(
        self,
        url: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        on_tokens: Callable[[list[int]], None] = lambda tokens: None,
        **more: Any,
    ) -> list[int]:
        """Returns the output tokens of a streamed completion. `on_tokens` receives the tokens of each event
        as it arrives."""
        tokens: list[int] = []
        body = completion_body(prompt_ids, max_tokens, stream=True, **more)
        async with self._http.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code >= 400:
                raise RefusedCall(response.status_code, (await response.aread()).decode())
            events = Events()
            async for chunk in response.aiter_bytes():
                for told in events.feed(chunk):
                    event = json.loads(told)
                    if "error" in event:
                        raise RefusedCall(200, told.decode())
                    new = event["choices"][0].get("token_ids") or []
                    tokens += new
                    if new:
                        on_tokens(new)
        return tokens

    async def events(self, url: str, body: Any) -> list[dict[str, Any]]:
        """Returns the events of a streamed answer. Raises RefusedCall if one is an error."""
        response = await self._http.post(url, json=body)
        if response.status_code >= 400:
            raise RefusedCall(response.status_code, response.text)
        found = [json.loads(event) for event in Events().feed(response.content)]
        for event in found:
            if "error" in event:
                raise RefusedCall(200, json.dumps(event))
        return found

    async def status(self, url: str, body: Any) -> int:
        return (await self._http.post(url, json=body)).status_code

    async def load(self, engine: EngineProcess) -> int:
        """Returns the count of completions that the engine's server is processing.

        Compare it only with an earlier count: vLLM decrements it twice if a client leaves and its request
        ends with an error.
        """
        return int(json.loads(await self.get(f"{engine.url}/load"))["server_load"])

    async def probe(self, engine: EngineProcess, method: str, *args: str) -> dict[str, Any]:
        """Calls a method of WorkerProbe in the engine's only worker."""
        (result,) = await self.probe_workers(engine, method, *args)
        return result

    async def probe_workers(self, engine: EngineProcess, method: str, *args: str) -> list[dict[str, Any]]:
        """Calls a method of WorkerProbe in each worker of the engine."""
        answer = await self.post(f"{engine.url}/collective_rpc", {"method": method, "args": args})
        return [result or {} for result in answer.get("results", [None])]

    async def stats(self, engine: EngineProcess) -> dict[str, float]:
        return await self.probe(engine, "probe_stats")

    async def live(self, engine: EngineProcess) -> dict[str, int]:
        """Returns what the connector's agents are processing, without their sessions with peers and the ends
        that they remember. It is empty when they are idle.
        """
        counts: Counter[str] = Counter()
        for worker in await self.probe_workers(engine, "probe_live"):
            counts.update(worker)
        kept = ("peers", "remembered")
        return {name: count for name, count in counts.items() if count and name not in kept}


async def wait_until(missing: Callable[[], Awaitable[str]], seconds: float = PATIENCE_SECONDS) -> None:
    """Polls until `missing` returns an empty text. Fails with the last text after `seconds`."""
    deadline = time.monotonic() + seconds
    while what := await missing():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        await asyncio.sleep(POLL_SECONDS)


async def wait_live(client: Client, engine: EngineProcess) -> None:
    """Waits until the engine's agent has a prompt to send, a peer's reservation, or its own reservation."""

    async def missing() -> str:
        live = await client.live(engine)
        requests = live.keys() & {"prefill_requests", "decode_requests"}
        return "" if requests else f"{engine.name} has a request in hand, not {live}; see {engine.log}"

    await wait_until(missing)


async def wait_idle(client: Client, engine: EngineProcess) -> None:
    """Waits until the engine's agent is idle."""

    async def missing() -> str:
        live = await client.live(engine)
        return f"{engine.name} still has {live} in hand; see {engine.log}" if live else ""

    await wait_until(missing)


async def wait_logged(engine: EngineProcess, pattern: str, since: int = 0) -> None:
    """Waits until the engine's log has a line that matches, after the first `since` bytes."""

    async def missing() -> str:
        log = engine.log.read_bytes()[since:].decode(errors="replace")
        return "" if re.search(pattern, log) else f"{pattern!r} in {engine.log}:\n{engine.log_tail()}"

    await wait_until(missing, 10)


class PageCount:
    """Counts the pages that were sent from P to D since this object was made."""

    def __init__(self, client: Client, deployment: ModelDeployment, pushed: float, received: float) -> None:
        self._client = client
        self._deployment = deployment
        self._pushed = pushed
        self._received = received

    @classmethod
    async def begin(cls, client: Client, deployment: ModelDeployment) -> "PageCount":
        # A transfer is counted at its end.
        await wait_idle(client, deployment.prefill)
        await wait_idle(client, deployment.decode)
        pushed = (await client.stats(deployment.prefill))["pages_pushed"]
        received = (await client.stats(deployment.decode))["received_pages"]
        return cls(client, deployment, pushed, received)

    async def pages(self) -> int:
        """Waits until both agents are idle and returns the pages. The two counts must agree."""
        prefill, decode = self._deployment.prefill, self._deployment.decode
        await wait_idle(self._client, prefill)
        await wait_idle(self._client, decode)
        pushed = (await self._client.stats(prefill))["pages_pushed"] - self._pushed
        received = (await self._client.stats(decode))["received_pages"] - self._received
        assert pushed == received, "pages pushed by P, pages that D waited for"
        return int(pushed)


async def assert_quiescent(
    client: Client, *engines: EngineProcess, seconds: float = PATIENCE_SECONDS
) -> None:
    """Checks that each engine becomes idle: no KV block in use, no request in either half of the connector.

    vLLM's reset_prefix_cache succeeds only if every block but the null block is in the free list, and with
    reset_external only if the connector's reset_cache does. It also makes the next test start with empty
    caches.
    """
    for engine in engines:
        await wait_until(partial(_unrest, client, engine), seconds)


async def _unrest(client: Client, engine: EngineProcess) -> str:
    if live := await client.live(engine):
        return f"{engine.name} still has {live} in hand; see {engine.log}"
    answer = await client.post(f"{engine.url}/reset_prefix_cache?reset_external=true")
    return "" if answer["success"] else f"{engine.name} has not freed all its KV blocks; see {engine.log}"


def engine_settings(*arguments: str, blocks: int = 400) -> EngineSettings:
    """Returns the settings of every engine of the suite. `blocks`: size of its KV cache, with the null
    block."""
    path = (str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")]))
    arguments = (
        "--worker-extension-cls",
        "worker_probe.WorkerProbe",
        "--enable-server-load-tracking",
        "--enable-log-requests",
        "--max-log-len",
        "0",
        "--num-gpu-blocks-override",
        str(blocks),
        # vLLM accepts tools only with this option. The call that vLLM must make is the same JSON with every
        # parser.
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        *arguments,
    )
    return EngineSettings(
        max_model_len=1984,
        max_batched_tokens=320,
        max_seqs=16,
        block_size=BLOCK,
        kv_cache_bytes=256 << 20,
        arguments=arguments,
        environment={"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(path)},
    )


def publishing_events(socket: Path) -> tuple[str, str]:
    """Returns the arguments of an engine whose KV cache events can be read from this socket."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{socket}.live",
        "replay_endpoint": f"ipc://{socket}",
    }
    return "--kv-events-config", json.dumps(events)


def prefill_settings(blocks: int) -> EngineSettings:
    """Returns the settings of P. Chunks end inside blocks, and two long prompts are prefilled at a time."""
    chunk = 100
    settings = engine_settings("--long-prefill-token-threshold", str(chunk), blocks=blocks)
    return replace(settings, max_batched_tokens=2 * chunk)


LLAMA = CacheShape((CacheGroup(layers=16),))
GEMMA3 = CacheShape(
    (CacheGroup(layers=2), CacheGroup(layers=2, window=128), CacheGroup(layers=2, window=128))
)
SMALL = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
"""The widths of both models."""


def make_small_llama(directory: Path) -> Path:
    """Writes a model of the shape LLAMA."""
    return make_llama(directory, layers=LLAMA.layers, **SMALL)


def prefill_params(transfer_id: str) -> dict[str, Any]:
    """Returns the kv_transfer_params that a router sends to P."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def decode_params(transfer_id: str, prefill: EngineProcess) -> dict[str, Any]:
    """Returns the kv_transfer_params that a router sends to D."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": HOST,
        "remote_port": prefill.control_port,
    }


class StepHold:
    """Stops an engine's forward pass in the middle of a step. Its control plane continues.

    Until the hold is released, the engine answers no probe.
    """

    def __init__(self, client: Client, engine: EngineProcess, directory: Path) -> None:
        self._client = client
        self._engine = engine
        self._directory = directory

    async def arm(self, layer_calls: int, *, prompts: int = 0) -> None:
        """Stops the engine after it has computed `layer_calls` more layers.

        After the release the engine runs slowly until it has `prompts` prompts to push.
        """
        arguments = (str(layer_calls), str(self._directory), str(prompts))
        await self._client.probe(self._engine, "probe_hold", *arguments)

    async def arm_lending(self, layer_calls: int) -> None:
        """Stops the engine after so many layers of the next step that lends a prefix."""
        await self._client.probe(self._engine, "probe_hold_lending", str(layer_calls), str(self._directory))

    async def reached(self, pages: int = 0) -> None:
        """Waits until the engine has stopped and this many pages of its open transfers have arrived."""

        async def missing() -> str:
            held = self._directory / "held"
            if not held.exists():
                return f"{self._engine.name} computes the layer that was named"
            arrived = int(held.read_text())
            return "" if arrived >= pages else f"{pages} pages have arrived, not {arrived}"

        await wait_until(missing)

    def pages_arrived(self) -> int:
        """Returns the pages that had arrived when the engine stopped."""
        return int((self._directory / "held").read_text())

    def release(self) -> None:
        (self._directory / "release").touch()
