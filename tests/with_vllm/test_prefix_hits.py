"""Prefix caches: P pushes cached pages, and D requests only pages that it does not hold."""

import asyncio
from dataclasses import dataclass

import pytest
from deployment import BLOCK, Client, ModelDeployment, PageCount, assert_quiescent, prompt

from kv_connector.lab.cluster import EngineProcess

pytestmark = pytest.mark.anyio

OUTPUT = 12
HITS = "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class Observed:
    """The effects of one request through the router."""

    pages: int
    prefill_hits: float
    decode_hits: float


async def observe(client: Client, deployment: ModelDeployment, one: list[int]) -> Observed:
    """Sends a prompt through P and D, and checks its output."""
    engines = (deployment.prefill, deployment.decode)
    hits_before = [engine.metric(HITS) for engine in engines]
    count = await PageCount.begin(client, deployment)
    output, expected = await asyncio.gather(
        client.complete(deployment.concurrent, one, OUTPUT),
        client.complete(deployment.plain.url, one, OUTPUT),
    )
    assert output == expected
    pages = await count.pages()
    hits = [engine.metric(HITS) - hit for engine, hit in zip(engines, hits_before, strict=True)]
    return Observed(pages, *hits)


async def forget(client: Client, engine: EngineProcess) -> None:
    """Empties the engine's prefix cache."""
    await assert_quiescent(client, engine)


async def test_hit_on_prefill(deployment: ModelDeployment, client: Client) -> None:
    """Cached pages are sent too, though no forward pass writes them."""
    one = prompt("hit on P", 610)
    await observe(client, deployment, one)
    await forget(client, deployment.decode)
    again = await observe(client, deployment, one)
    assert again.prefill_hits == 608
    assert again.decode_hits == 0
    assert again.pages == deployment.shape.pages(610)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_partial_hit_on_prefill(deployment: ModelDeployment, client: Client) -> None:
    first = prompt("partial hit on P", 610)
    other = first[:333] + prompt("another end", 200)
    await observe(client, deployment, first)
    await forget(client, deployment.decode)
    hit = await observe(client, deployment, other)
    # If the older blocks of a sliding window are freed, a hit cannot reach so far back.
    assert hit.prefill_hits in (
        {320} if deployment.shape.layers == deployment.shape.groups[0].layers else {0, 320}
    )
    assert hit.pages == deployment.shape.pages(533)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


@pytest.mark.parametrize("length", [610, 577, 639])
async def test_full_hit_on_decode(deployment: ModelDeployment, client: Client, length: int) -> None:
    """D holds all but the last block, or all it needs (577: 18 blocks and the token it computes itself)."""
    one = prompt(f"full hit on D {length}", length)
    await observe(client, deployment, one)
    again = await observe(client, deployment, one)
    assert again.decode_hits == (length - 1) // BLOCK * BLOCK
    assert again.pages == deployment.shape.pages(length, cached=int(again.decode_hits))
    assert (again.pages == 0) == (length == 577)
    # If D needs nothing, it notifies P, which does not wait for its hold time.
    await assert_quiescent(client, deployment.prefill, deployment.decode, seconds=5)


async def test_full_hit_on_decode_alone(deployment: ModelDeployment, client: Client) -> None:
    """D holds the prompt, P has dropped it."""
    one = prompt("hit on D alone", 610)
    await observe(client, deployment, one)
    await forget(client, deployment.prefill)
    again = await observe(client, deployment, one)
    assert (again.prefill_hits, again.decode_hits) == (0, 608)
    assert again.pages == deployment.shape.pages(610, cached=608)
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_partial_hit_on_decode(deployment: ModelDeployment, client: Client) -> None:
    """The prompt continues one that D holds: D requests only the rest."""
    first = prompt("partial hit on D", 333)
    await observe(client, deployment, first)
    hit = await observe(client, deployment, first + prompt("its continuation", 300))
    assert hit.decode_hits in (320, 288)
    assert hit.pages == deployment.shape.pages(633, cached=int(hit.decode_hits))
    await assert_quiescent(client, deployment.prefill, deployment.decode)


async def test_shared_prefix_in_one_step(deployment: ModelDeployment, client: Client) -> None:
    """P treats blocks as cached that another request of the same step has not written yet."""
    shared = prompt("shared", 96)
    prompts = [shared + prompt(f"end {index}", 10 + 7 * index) for index in range(6)]
    expected = await asyncio.gather(*(client.complete(deployment.plain.url, one, OUTPUT) for one in prompts))
    for url in (deployment.concurrent, deployment.serial):
        outputs = await asyncio.gather(*(client.complete(url, one, OUTPUT) for one in prompts))
        assert outputs == expected
        await assert_quiescent(client, deployment.prefill, deployment.decode)
