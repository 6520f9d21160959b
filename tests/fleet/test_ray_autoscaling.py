"""Ray Serve's autoscaler with the recipe of docs/operate/autoscaling.md, over stubs instead of engines."""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import cloudpickle, serve

ROOT = Path(__file__).parents[2]
APPLICATION, PREFILL, DECODE = "stubs", "Prefill:stub", "Decode:stub"
# Ray's own are 30 s, 10 s, 30 s and 600 s.
SHORT = {
    "look_back_period_s": 2.0,
    "metrics_interval_s": 0.2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 3.0,
}
PROMPT_SECONDS = 1.0
# Ray starts about ten processes.
SECONDS = 300.0

# The workers do not find this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Gate:
    """Holds streams, each until the test lets it end."""

    def __init__(self) -> None:
        self._open: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def wait(self, stream: int) -> None:
        await self._open[stream].wait()

    async def open(self, *streams: int) -> None:
        for stream in streams:
            self._open[stream].set()


class Prefill:
    """Computes one prompt at a time and answers with its replica's name."""

    def __init__(self) -> None:
        self._engine = asyncio.Lock()

    async def completions(self, seconds: float) -> AsyncIterator[str]:
        async with self._engine:
            await asyncio.sleep(seconds)
        yield serve.get_replica_context().replica_id.unique_id


class Decode:
    """Sends each request to a prefill replica that it has chosen before, as Ray's orchestrator does for
    WriteImmConnector, and then streams.
    """

    def __init__(self, prefill: Any, gate: Any) -> None:
        self._prefill = prefill.options(stream=True).completions
        self._gate = gate

    async def completions(self, seconds: float, stream: int | None) -> AsyncIterator[str]:
        async with self._prefill.choose_replica(seconds) as selection:
            async for name in self._prefill.dispatch(selection, seconds):
                yield name
        yield serve.get_replica_context().replica_id.unique_id
        if stream is not None:
            await self._gate.wait.remote(stream)
        yield "end"


def recipe() -> dict[str, Any]:
    """Returns the YAML of the page's section "Ray Serve"."""
    page = (ROOT / "docs" / "operate" / "autoscaling.md").read_text()
    section = page.split("\n## Ray Serve\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    sides: dict[str, Any] = yaml.safe_load("\n".join(lines))
    return sides


@pytest.fixture
def gate() -> Iterator[Any]:
    """Starts Ray and Serve, and yields a Gate."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": 0},
    )
    try:
        serve.start(proxy_location="Disabled")
        gate = ray.remote(Gate).options(num_cpus=0).remote()
        yield gate
        # Serve waits for the streams that a failed test has left.
        ray.kill(gate)
        serve.shutdown()
    finally:
        ray.shutdown()


def deployment(stub: type[Any], name: str, side: str) -> Any:
    """Returns the stub as a deployment with the recipe's options for this side."""
    options = copy.deepcopy(recipe()[side]["deployment_config"])
    options["autoscaling_config"] |= SHORT
    options |= {"max_ongoing_requests": 1000, "graceful_shutdown_wait_loop_s": 0.2}
    return serve.deployment(stub, name=name, ray_actor_options={"num_cpus": 0}, **options)


class Stubs:
    """The running stubs, and the replicas that Ray had for each deployment."""

    def __init__(self, gate: Any) -> None:
        prefill = deployment(Prefill, PREFILL, "prefill_config").bind()
        application = deployment(Decode, DECODE, "decode_config").bind(prefill, gate)
        self._handle = serve.run(application, name=APPLICATION, route_prefix=None).options(stream=True)
        self.most = {PREFILL: 1, DECODE: 1}

    async def request(self, seconds: float, stream: int | None = None) -> AsyncIterator[str]:
        async for item in self._handle.completions.remote(seconds, stream):
            yield item

    async def until(self, name: str, wanted: dict[str, int]) -> None:
        """Waits until the deployment's replicas have these states."""

        async def missing() -> str:
            status = await asyncio.to_thread(serve.status)
            deployments = status.applications[APPLICATION].deployments
            for each, found in deployments.items():
                stopping = found.replica_states.get("STOPPING", 0)
                self.most[each] = max(self.most[each], sum(found.replica_states.values()) - stopping)
            states = {state: number for state, number in deployments[name].replica_states.items() if number}
            return "" if states == wanted else f"{name}: {states}, not {wanted}"

        await wait_until(missing)


class Stream:
    """A request without a prompt to compute. Its answer ends when the gate opens for its number."""

    def __init__(self, stubs: Stubs, number: int) -> None:
        self.number = number
        self.replica = ""
        self._begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(stubs))

    async def _run(self, stubs: Stubs) -> list[str]:
        items = []
        async for item in stubs.request(0, self.number):
            items.append(item)
            if len(items) == 2:
                self.replica = item
                self._begun.set()
        return items

    @classmethod
    async def start(cls, stubs: Stubs, number: int) -> Stream:
        """Returns the stream once a decode replica has it."""
        stream = cls(stubs, number)
        await within(stream._begun.wait())
        return stream


async def wait_until(missing: Callable[[], Awaitable[str]]) -> None:
    """Polls until ``missing`` returns an empty text."""
    deadline = time.monotonic() + SECONDS
    while what := await missing():
        assert time.monotonic() < deadline, what
        # Each query is a call of Ray's controller: there is no event to wait for.
        await asyncio.sleep(0.2)


async def within(waited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waited, SECONDS)


@pytest.mark.anyio
async def test_autoscaler_starts_and_removes_the_replicas_of_the_recipe(gate: Any) -> None:
    stubs = await asyncio.to_thread(Stubs, gate)
    # Eleven streams, ten for a replica. One after the other: their prompts need no second prefill replica.
    streams = [await Stream.start(stubs, number) for number in range(11)]
    await stubs.until(DECODE, {"RUNNING": 2})
    # The empty replica receives the next request, unless a replica's answer about its queue took over 0.1 s.
    while streams[-1].replica == streams[0].replica:
        streams.append(await Stream.start(stubs, len(streams)))
        if streams[-1].replica == streams[0].replica:
            await gate.open.remote(streams[-1].number)
            await within(streams[-1].task)
    await stubs.until(PREFILL, {"RUNNING": 1})

    # Five prompts, two for a replica.
    ended = asyncio.Event()
    computed: set[str] = set()

    async def ask_again() -> None:
        while not ended.is_set():
            items = [item async for item in stubs.request(PROMPT_SECONDS)]
            assert items[-1] == "end"
            computed.add(items[0])

    load = [asyncio.create_task(ask_again()) for _ in range(5)]
    await stubs.until(PREFILL, {"RUNNING": 3})

    async def unused() -> str:
        return "" if len(computed) >= 3 else f"three replicas compute prompts, not {computed}"

    await wait_until(unused)
    await stubs.until(DECODE, {"RUNNING": 2})
    ended.set()
    await within(asyncio.gather(*load))
    await stubs.until(PREFILL, {"RUNNING": 1})

    # A stream runs on each decode replica when Ray removes one of them.
    last = (streams[0], streams[-1])
    await gate.open.remote(*(stream.number for stream in streams if stream not in last))
    await stubs.until(DECODE, {"RUNNING": 1, "STOPPING": 1})
    await gate.open.remote(*(stream.number for stream in last))
    answers = await within(asyncio.gather(*(stream.task for stream in streams)))
    assert {items[-1] for items in answers} == {"end"}
    await stubs.until(DECODE, {"RUNNING": 1})
    assert stubs.most == {PREFILL: 3, DECODE: 2}


def test_the_recipe_is_what_ray_reads() -> None:
    from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
    from ray.llm._internal.serve.core.server.builder import DEFAULT_DEPLOYMENT_OPTIONS
    from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs

    file = yaml.safe_load((ROOT / "examples" / "ray" / "serve.yaml").read_text())
    arguments = file["applications"][0]["args"]
    for side, changed in recipe().items():
        arguments[side] |= changed
    args = PDServingArgs.model_validate(arguments)
    read = []
    for config in (args.prefill_config, args.decode_config):
        # As Ray's builder does. The rest of it reads the model.
        options = maybe_apply_llm_deployment_config_defaults(
            DEFAULT_DEPLOYMENT_OPTIONS, config.deployment_config
        )
        found = serve.deployment(Prefill, name="stub", **options)._deployment_config
        scaling = found.autoscaling_config
        read.append(
            (
                scaling.min_replicas,
                scaling.max_replicas,
                scaling.target_ongoing_requests,
                found.graceful_shutdown_timeout_s,
            )
        )
    assert read == [(1, 8, 2, 120), (1, 8, 10, 600)]
    # The page has these defaults.
    assert DEFAULT_DEPLOYMENT_OPTIONS["autoscaling_config"] == {"target_ongoing_requests": 10**9}
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (30, 600)
    assert serve.deployment(Prefill)._deployment_config.graceful_shutdown_timeout_s == 20
