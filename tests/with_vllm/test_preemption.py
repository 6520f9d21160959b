"""A KV pool too small for the running requests: vLLM preempts in the middle of a prefill, or of a decode."""

import asyncio
from pathlib import Path

import pytest
from deployment import Client, ModelDeployment, PageCount, StepHold, assert_quiescent, prompt, wait_until

pytestmark = pytest.mark.anyio

PREEMPTIONS = "vllm:num_preemptions_total"


@pytest.mark.parametrize("dispatch", ["concurrent", "serial"])
async def test_on_prefill(deployment: ModelDeployment, client: Client, tmp_path: Path, dispatch: str) -> None:
    """P's pool is too small for a local prompt and one for D, which are computed at the same time.

    Each fits when it is admitted, and both need more blocks with each chunk. The one for D came second, so it
    is preempted with most of its prompt computed.
    """
    url = deployment.concurrent if dispatch == "concurrent" else deployment.serial
    own = prompt(f"of P's own {dispatch}", 1500)
    prompts = [prompt(f"for D {dispatch} {index}", 1200) for index in range(2)]
    expected = await asyncio.gather(
        client.complete(deployment.plain.url, own, 4),
        *(client.complete(deployment.plain.url, one, 8) for one in prompts),
    )
    preemptions = deployment.prefill.metric(PREEMPTIONS)
    count = await PageCount.begin(client, deployment)
    in_hand = await client.load(deployment.prefill) + 1 + len(prompts)

    async def missing() -> str:
        load = await client.load(deployment.prefill)
        return "" if load == in_hand else f"{in_hand} requests at P, not {load}"

    hold = StepHold(client, deployment.prefill, tmp_path)
    await hold.arm(1, prompts=1)
    try:
        first = asyncio.create_task(client.complete(deployment.prefill.url, own, 4))
        await hold.reached()
        rest = [asyncio.create_task(client.complete(url, one, 8)) for one in prompts]
        await wait_until(missing)
    finally:
        hold.release()
    assert await asyncio.gather(first, *rest) == expected
    assert deployment.prefill.metric(PREEMPTIONS) > preemptions
    # Pages that were pushed before the preemption are not pushed again.
    assert await count.pages() == sum(deployment.shape.pages(len(one)) for one in prompts)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


@pytest.mark.parametrize("deployment", ["gemma3"], indirect=True)
async def test_on_decode(deployment: ModelDeployment, client: Client) -> None:
    """16 outputs grow until D's pool is full. D computes prompt and output so far of each preempted request
    again."""
    prompts = [prompt(f"preempted on D {index}", 270 + index) for index in range(16)]
    length = 128
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, length) for one in prompts))
    preemptions = deployment.decode.metric(PREEMPTIONS)
    count = await PageCount.begin(client, deployment)
    outputs = await asyncio.gather(*(client.complete(deployment.concurrent, one, length) for one in prompts))
    assert outputs == expected
    assert deployment.decode.metric(PREEMPTIONS) > preemptions
    assert await count.pages() == sum(deployment.shape.pages(len(one)) for one in prompts)
    await assert_quiescent(client, deployment.prefill, deployment.decode)
