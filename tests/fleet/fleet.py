"""One P and one D as processes, queries of tests to them, and other projects' routers in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment import (
    DATA_HOST,
    LLAMA,
    TIMEOUTS,
    Client,
    StepHold,
    assert_quiescent,
    completion_body,
    engine_settings,
    make_small_llama,
    prefill_settings,
    prompt,
    wait_until,
)

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.process import POLL_SECONDS, Process, StartError, starting

PUSHED = "kv_connector_bytes_pushed_total"
PUSHED_BEFORE_END = "kv_connector_bytes_pushed_before_prefill_end_total"
PAGE_BYTES = 2 * 2 * 32 * 32 * 4  # key and value, heads, tokens, head_dim, float32
OUTPUT = 8
LONG = 1900

Asked = Coroutine[Any, Any, list[int]]
Ask = Callable[[], Asked]


class FleetCluster(LocalCluster):
    """A LocalCluster with a vllm-router of each mode."""

    def start_vllm_router(self, mode: str, *arguments: str) -> str:
        """Starts vllm-router in P/D mode and returns its URL at once."""
        port, metrics = free_ports(2)
        command = [str(Path(sys.executable).parent / "vllm-router"), "--vllm-pd-disaggregation"]
        command += ["--kv-connector", mode, "--host", HOST, "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--policy", "round_robin", *arguments]
        name = f"vllm-router-{mode}"
        url = f"http://{HOST}:{port}"
        with starting():
            router = Process(name, command, environment={}, log=self.directory / f"{name}.log")
            # Its /readiness knows only the engines of its options, not those that announce themselves.
            self._adopt(router, f"{url}/{'health' if mode == 'moriio' else 'readiness'}")
        return url

    def wait_announced(self, url: str, seconds: float = 30.0) -> None:
        """Blocks until this vllm-router knows a P and a D. Until then it answers 503."""
        body = json.dumps(completion_body(prompt("announced", 40), 1)).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(request, timeout=seconds).close()
                return
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:
                    raise StartError(f"{url}: HTTP {error.code}, {error.read()[:500]!r}") from error
            time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class Fleet:
    prefill: EngineProcess
    decode: EngineProcess
    nixl: str
    """URL of a vllm-router with both engines in its options."""
    moriio: str
    """URL of a vllm-router to which both announce themselves."""
    registration: str
    """Registration address of kv-connector's router, which both have joined too."""
    log: Path


@contextlib.contextmanager
def start(directory: Path, interpreter: tuple[str, ...]) -> Iterator[Fleet]:
    model = make_small_llama(directory / "llama")
    registration, discovery = free_ports(2)
    with FleetCluster(directory, model, engine_settings()) as cluster:
        cluster.interpreter = interpreter
        ours = f"{HOST}:{registration}"
        extra = {
            "providers": ("host", "tcp"),
            "data_host": DATA_HOST,
            "timeouts": TIMEOUTS,
            "announce": [f"{HOST}:{discovery}"],
        }
        prefill = cluster.start_engine(
            "prefill", role="kv_producer", extra=extra, settings=prefill_settings(blocks=120), routers=[ours]
        )
        decode = cluster.start_engine(
            "decode", role="kv_consumer", extra=extra, settings=engine_settings(blocks=120), routers=[ours]
        )
        router = cluster.start_router("router", registration=registration)
        nixl = cluster.start_vllm_router("nixl", "--prefill", prefill.url, "--decode", decode.url)
        moriio = cluster.start_vllm_router("moriio", "--vllm-discovery-address", f"{HOST}:{discovery}")
        cluster.wait_ready()
        cluster.wait_joined(router, prefill, decode)
        cluster.wait_announced(moriio)
        yield Fleet(prefill, decode, nixl, moriio, ours, directory)


@dataclass(frozen=True)
class Observed:
    tokens: list[int]
    pages: int
    share_before_end: float
    """Share of the bytes that had arrived before P's last layer was computed."""


async def observe(client: Client, fleet: Fleet, ask: Ask) -> Observed:
    """Sends one request to P and D, and returns what it did."""
    prefill, decode = fleet.prefill, fleet.decode
    # A transfer is counted at its end, and caches are empty then.
    await assert_quiescent(client, prefill, decode)
    before = prefill.metric(PUSHED), prefill.metric(PUSHED_BEFORE_END)
    pages = (await client.stats(prefill))["pages_pushed"]
    answer = await ask()
    await assert_quiescent(client, prefill, decode)
    pages = int((await client.stats(prefill))["pages_pushed"] - pages)

    async def missing() -> str:
        shown = prefill.metric(PUSHED) - before[0]
        return "" if shown == pages * PAGE_BYTES else f"{pages * PAGE_BYTES} bytes pushed, not {shown}"

    await wait_until(missing)
    early = prefill.metric(PUSHED_BEFORE_END) - before[1]
    return Observed(answer, pages, early / (pages * PAGE_BYTES) if pages else 0.0)


async def held_until_the_first_page(client: Client, fleet: Fleet, directory: Path, ask: Ask) -> list[int]:
    """Sends ``ask`` while P stops in its first layer until a page has reached D.

    If D is requested while P still computes, that is the router's doing and not chance. The wait is in vain
    if D is requested after P.
    """
    hold = StepHold(client, fleet.prefill, directory)
    await hold.arm(1)

    async def release() -> None:
        try:
            await hold.reached(1)
        finally:
            hold.release()

    # The first failure is reported.
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(release())
        asking = tasks.create_task(ask())
    return asking.result()


async def assert_as_d_alone(
    client: Client,
    fleet: Fleet,
    directory: Path,
    ask: Callable[[list[int]], Asked],
    *,
    concurrent: bool,
) -> None:
    """Sends prompts of one chunk, of several and of 19.

    The answers are those of D alone, and D computes none of the prompts. If P and D are requested at once,
    pages are sent while P computes.
    """
    for tokens in (40, 300, LONG):
        one = prompt(f"{directory} {tokens}", tokens)
        place = directory / str(tokens)
        place.mkdir()

        async def plainly(one: list[int] = one) -> list[int]:
            return await ask(one)

        async def held(place: Path = place, plainly: Ask = plainly) -> list[int]:
            return await held_until_the_first_page(client, fleet, place, plainly)

        seen = await observe(client, fleet, held if concurrent else plainly)
        print(f"{tokens} tokens: {seen.share_before_end:.0%} of the bytes before the prefill's end")
        assert seen.tokens == await client.complete(fleet.decode.url, one, OUTPUT)
        assert seen.pages == LLAMA.pages(tokens)
        if not concurrent:
            assert seen.share_before_end == 0
        elif tokens == LONG:
            assert seen.share_before_end > 0.5
    await assert_quiescent(client, fleet.prefill, fleet.decode)
