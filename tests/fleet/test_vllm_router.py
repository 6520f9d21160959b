"""vllm-router 0.1.17 itself, with the engines in its options (nixl), or announced by themselves (moriio)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import Client, RefusedCall, assert_quiescent, prompt, wait_until
from fleet import OUTPUT, Fleet, assert_as_d_alone

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", ["nixl", "moriio"])
async def test_tokens_equal_those_of_a_lone_decode_engine(
    fleet: Fleet, client: Client, mode: str, tmp_path: Path
) -> None:
    """nixl requests D after P, moriio both at once."""
    url: str = getattr(fleet, mode)

    async def ask(one: list[int]) -> list[int]:
        return await client.complete(url, one, OUTPUT)

    await assert_as_d_alone(client, fleet, tmp_path, ask, concurrent=mode == "moriio")


@pytest.mark.parametrize("mode", ["nixl", "moriio"])
async def test_streams_beside_each_other(fleet: Fleet, client: Client, mode: str) -> None:
    url: str = getattr(fleet, mode)
    prompts = [prompt(f"{mode} stream {index}", 100 + 37 * index) for index in range(6)]
    answers = await asyncio.gather(*(client.stream(url, one, OUTPUT) for one in prompts))
    await assert_quiescent(client, fleet.prefill, fleet.decode)
    alone = [await client.complete(fleet.decode.url, one, OUTPUT) for one in prompts]
    assert answers == alone
    await assert_quiescent(client, fleet.prefill, fleet.decode)


async def test_a_drained_engine_is_announced_no_more(fleet: Fleet, client: Client) -> None:
    """Runs last, because the engine stays drained."""
    command = [sys.executable, "-m", "kv_connector.cli.main", "drain", "--force", fleet.decode.url]
    drained = await asyncio.to_thread(
        subprocess.run, [*command, "--router", fleet.registration], capture_output=True, text=True, timeout=60
    )
    assert drained.returncode == 0, drained.stdout + drained.stderr

    async def missing() -> str:
        try:
            await client.complete(fleet.moriio, prompt("drained", 40), OUTPUT)
        except RefusedCall as refusal:
            return "" if refusal.status == 503 else f"HTTP 503, not {refusal}"
        return "a refusal: the router still has a decode engine"

    await wait_until(missing, 30)
    # A router with the engine in its options may still send requests to it.
    assert len(await client.complete(fleet.nixl, prompt("drained", 40), OUTPUT)) == OUTPUT
