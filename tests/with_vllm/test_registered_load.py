"""The reports of engines to their routers: their speed and their workload."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import Client, ModelDeployment, assert_quiescent, prompt, wait_until

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.control.membership import MembershipSockets, Register, WorkloadReport
from kv_connector.protocol.wire.messages import Role

pytestmark = pytest.mark.anyio


class Listener:
    """Receives the registrations of P and D, and keeps the last of each."""

    def __init__(self, deployment: ModelDeployment) -> None:
        key_file = deployment.cluster.environment.get(KEY_FILE_VARIABLE)
        self._sockets = MembershipSockets(ClusterKey.read(Path(key_file)) if key_file else None)
        self._sockets.bind(deployment.listener)
        self._last: dict[Role, Register] = {}

    def last(self, role: Role) -> WorkloadReport | None:
        self._sockets.wait(0)
        for received in self._sockets.receive():
            if isinstance(received.message, Register):
                self._last[received.message.role] = received.message
        return self._last[role].load if role in self._last else None

    def close(self) -> None:
        self._sockets.close()


@pytest.fixture
def listener(deployment: ModelDeployment) -> Iterator[Listener]:
    made = Listener(deployment)
    yield made
    made.close()


async def test_prefill_engine_reports_the_cost_of_prompts(
    deployment: ModelDeployment, client: Client, listener: Listener
) -> None:
    for tokens in (500, 100, 300, 700, 200, 600, 400, 800, 150, 250):
        await client.complete(deployment.concurrent, prompt(f"cost {tokens}", tokens), 3)

    async def missing() -> str:
        load = listener.last(Role.PREFILL)
        known = load is not None and load.prompt is not None and (load.waiting, load.running) == (0, 0)
        return "" if known else f"P tells what a prompt costs, and that it has none: {load}"

    await wait_until(missing, 10)
    load = listener.last(Role.PREFILL)
    assert load is not None
    assert load.prompt is not None
    # A model of some megabytes, on the available cores.
    took = load.prompt.step_ns + load.prompt.token_ns * 500 + load.prompt.pair_ps * 500 * 250 / 1000
    assert 1e6 < took < 2e9, load
    assert load.cache_tokens > 800
    assert load.step_tokens >= load.prompt_tokens > 0
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_decode_engine_reports_its_streams(
    deployment: ModelDeployment, client: Client, listener: Listener
) -> None:
    one = asyncio.create_task(client.stream(deployment.concurrent, prompt("long stream", 100), 1800))

    async def missing() -> str:
        load = listener.last(Role.DECODE)
        told = load is not None and load.running == 1 and load.decode_ns is not None
        return "" if told else f"D tells of its stream and of its steps: {load}; {one}"

    await wait_until(missing, 30)
    one.cancel()

    async def busy() -> str:
        load = listener.last(Role.DECODE)
        return "" if load is not None and load.running == 0 else f"D tells that it has none: {load}"

    await wait_until(busy, 10)
    load = listener.last(Role.DECODE)
    assert load is not None
    assert load.decode_ns is not None
    assert 1e5 < load.decode_ns < 1e9
    assert load.waiting == 0
    await assert_quiescent(client, deployment.prefill, deployment.decode)
