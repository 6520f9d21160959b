"""vLLM's pause and resume while requests are between P and D: all end with the right tokens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deployment import (
    Client,
    ModelDeployment,
    StepHold,
    assert_quiescent,
    decode_params,
    prefill_params,
    prompt,
    wait_live,
    wait_until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def resumed(deployment: ModelDeployment, client: Client) -> AsyncIterator[None]:
    """Resumes the engines after a failed test."""
    yield
    for engine in (deployment.prefill, deployment.decode):
        await client.post(f"{engine.url}/resume")


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
@pytest.mark.parametrize("clear", [True, False])
async def test_keep(deployment: ModelDeployment, client: Client, tmp_path: Path, clear: bool) -> None:
    """Both engines are paused while P is in the middle of a prompt that D loads, and D decodes another
    request."""
    prefill, decode = deployment.prefill, deployment.decode
    one, other = prompt(f"paused {clear}", 1200), prompt(f"decoding {clear}", 300)
    expected = await asyncio.gather(
        client.complete(deployment.plain.url, one, 8), client.complete(deployment.plain.url, other, 160)
    )
    started = asyncio.Event()
    decoding = asyncio.create_task(
        client.stream(deployment.concurrent, other, 160, lambda tokens: started.set())
    )
    await started.wait()
    hold = StepHold(client, prefill, tmp_path)
    # After the release P runs slowly, so that the pause comes within the prompt.
    await hold.arm(2 * deployment.shape.layers + 1, prompts=2)
    transfer = f"pause {clear}"
    halves = [
        asyncio.create_task(client.complete(url, one, tokens, kv_transfer_params=params))
        for url, tokens, params in (
            (decode.url, 8, decode_params(transfer, prefill)),
            (prefill.url, 1, prefill_params(transfer)),
        )
    ]
    try:
        await hold.reached()
        await wait_live(client, decode)
        mode = f"mode=keep&clear_cache={str(clear).lower()}"
        await client.post(f"{decode.url}/pause?{mode}")
        pausing = asyncio.create_task(client.post(f"{prefill.url}/pause?{mode}"))
    finally:
        hold.release()
    await pausing
    assert not halves[0].done()
    assert not decoding.done()
    await client.probe(prefill, "probe_unhold")
    for engine in (prefill, decode):
        await client.post(f"{engine.url}/resume")
    tokens, _ = await asyncio.gather(*halves)
    assert [tokens, await decoding] == expected
    await assert_quiescent(client, prefill, decode)


@pytest.mark.parametrize("deployment", ["llama"], indirect=True)
@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_wait_and_abort(deployment: ModelDeployment, client: Client, mode: str) -> None:
    """Requests that are sent while D is paused wait in its queue. P has finished their prompts by then."""
    prefill, decode = deployment.prefill, deployment.decode
    prompts = [prompt(f"{mode} {index}", 200) for index in range(3)]
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, 8) for one in prompts))
    in_hand = await client.load(decode) + len(prompts)
    await client.post(f"{decode.url}/pause?mode={mode}")
    queued = [asyncio.create_task(client.complete(deployment.concurrent, one, 8)) for one in prompts]
    await wait_live(client, prefill)

    async def missing() -> str:
        load = await client.load(decode)
        return "" if load == in_hand else f"{in_hand} requests at D, not {load}"

    await wait_until(missing)
    await client.post(f"{decode.url}/pause?mode={mode}")
    if mode == "abort":
        # Both engines have ended all earlier requests. Requests that vLLM aborts have no answer.
        answers = await asyncio.gather(*queued, return_exceptions=True)
        assert all(isinstance(answer, Exception) for answer in answers)
    await client.post(f"{prefill.url}/pause?mode={mode}")
    for engine in (prefill, decode):
        await client.post(f"{engine.url}/resume")
    if mode == "wait":
        assert await asyncio.gather(*queued) == expected
    assert (
        await asyncio.gather(*(client.complete(deployment.concurrent, one, 8) for one in prompts)) == expected
    )
    await assert_quiescent(client, prefill, decode)
