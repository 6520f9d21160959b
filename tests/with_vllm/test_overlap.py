"""Pages are sent while P still computes."""

import asyncio
from pathlib import Path

import pytest
from deployment import (
    Client,
    ModelDeployment,
    PageCount,
    StepHold,
    assert_quiescent,
    decode_params,
    prefill_params,
    prompt,
    wait_live,
    wait_until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("deployment", ["llama"], indirect=True)]

PUSHED = "kv_connector_bytes_pushed_total"
PUSHED_BEFORE_END = "kv_connector_bytes_pushed_before_prefill_end_total"

PAGE_BYTES = 2 * 2 * 32 * 32 * 4  # key and value, heads, tokens, head_dim, float32


class Overlap:
    """Sends one prompt to D, and to P once P has D's reservation, so that no result depends on their
    speed."""

    def __init__(self, client: Client, deployment: ModelDeployment, one: list[int], transfer: str) -> None:
        self._client = client
        self._deployment = deployment
        self._one = one
        self._transfer = transfer
        self._pushed = deployment.prefill.metric(PUSHED)
        self._before_end = deployment.prefill.metric(PUSHED_BEFORE_END)

    async def run(self) -> None:
        client, prefill, decode = self._client, self._deployment.prefill, self._deployment.decode
        expected = await client.complete(self._deployment.plain.url, self._one, 4)
        count = await PageCount.begin(client, self._deployment)
        params = decode_params(self._transfer, prefill)
        decoding = asyncio.create_task(client.complete(decode.url, self._one, 4, kv_transfer_params=params))
        await wait_live(client, prefill)  # P has the reservation
        await client.complete(prefill.url, self._one, 1, kv_transfer_params=prefill_params(self._transfer))
        assert await decoding == expected
        assert await count.pages() == self._deployment.shape.pages(len(self._one))
        await assert_quiescent(client, prefill, decode)

    async def share_before_end(self) -> float:
        """Returns the share of the prompt's bytes that arrived before P's last layer was computed, by P's
        metrics."""
        prefill = self._deployment.prefill
        total = self._deployment.shape.pages(len(self._one)) * PAGE_BYTES

        async def missing() -> str:
            shown = prefill.metric(PUSHED) - self._pushed
            return "" if shown == total else f"{total} bytes pushed, not {shown}"

        await wait_until(missing)
        return (prefill.metric(PUSHED_BEFORE_END) - self._before_end) / total


async def test_most_bytes_leave_before_the_last_layer(deployment: ModelDeployment, client: Client) -> None:
    """The prompt has 19 chunks of 16 layers each."""
    overlap = Overlap(client, deployment, prompt("overlap of chunks", 1900), "overlap-of-chunks")
    await overlap.run()
    share = await overlap.share_before_end()
    print(f"{share:.1%} of the bytes had left before the last layer was computed")
    assert share > 0.5


async def test_layers_of_one_chunk_leave_one_by_one(
    deployment: ModelDeployment, client: Client, tmp_path: Path
) -> None:
    """While P is stopped in the 12th of its 16 layers, the pages of 12 layers arrive, and no others."""
    tokens, layers = 100, 12
    pages = deployment.shape.pages(tokens) * layers // deployment.shape.layers
    hold = StepHold(client, deployment.prefill, tmp_path)
    await hold.arm(layers)
    overlap = Overlap(client, deployment, prompt("overlap of layers", tokens), "overlap-of-layers")
    running = asyncio.create_task(overlap.run())
    try:
        await hold.reached(pages)
        assert hold.pages_arrived() == pages
    finally:
        hold.release()
    await running
    assert await overlap.share_before_end() >= layers / deployment.shape.layers
