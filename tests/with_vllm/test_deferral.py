"""A decode engine with few blocks and a long queue at its prefill engine."""

import asyncio
from pathlib import Path

import pytest
from deployment import BLOCK, Client, ModelDeployment, StepHold, assert_quiescent, prompt, wait_until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
async def test_queued_prompts_leave_the_blocks_of_decode_to_other_requests(
    deployment: ModelDeployment, client: Client, tmp_path: Path
) -> None:
    """The prefill engine stops in the step of the first of eight prompts. Loads of four would fill the decode
    engine."""
    queued = [prompt(f"queued {index}", 25 * BLOCK) for index in range(8)]
    own = prompt("of the decode engine alone", 1500)
    expected = await asyncio.gather(
        *(client.complete(deployment.plain.url, one, 8) for one in (*queued, own))
    )
    in_hand = await client.load(deployment.decode) + len(queued)

    async def missing() -> str:
        load = await client.load(deployment.decode)
        return "" if load == in_hand else f"{in_hand} requests at D, not {load}"

    hold = StepHold(client, deployment.prefill, tmp_path)
    await hold.arm(1)
    try:
        tasks = [asyncio.create_task(client.complete(deployment.concurrent, one, 8)) for one in queued]
        await hold.reached()
        await wait_until(missing)
        # It takes 47 of 119 blocks.
        assert await client.complete(deployment.decode.url, own, 8) == expected[-1]
        assert not any(task.done() for task in tasks)
    finally:
        hold.release()
    assert await asyncio.gather(*tasks) == expected[:-1]
    await assert_quiescent(client, deployment.prefill, deployment.decode)
