"""Data-parallel engines with experts on both ranks: kv-connector's exchange beside vLLM's own over gloo."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import (
    PATIENCE_SECONDS,
    Client,
    RefusedCall,
    completion_body,
    engine_settings,
    prompt,
    wait_until,
)

from kv_connector.lab.cluster import EngineProcess, LocalCluster
from kv_connector.lab.model import make_mixtral

pytestmark = pytest.mark.anyio

RANKS = 2
TOKENS = 8
LAYERS = 2
# Six experts on two ranks. The model computes in bfloat16, as GPU engines do.
SHAPE = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 128, "experts": 6}
# A step may have more tokens than the exchange supports.
BATCHED_TOKENS = 1984
LONG_PROMPT = 1400


@dataclass(frozen=True)
class Site:
    ours: EngineProcess
    theirs: EngineProcess
    directory: Path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, interpreter: tuple[str, ...]) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("experts")
    model = make_mixtral(directory / "model", layers=LAYERS, **SHAPE)
    settings = engine_settings(
        "--data-parallel-size",
        str(RANKS),
        "--enable-expert-parallel",
        "--worker-extension-cls",
        "moe_on_cpu.Worker",
        "--dtype",
        "bfloat16",
    )
    settings = replace(settings, max_batched_tokens=BATCHED_TOKENS)
    with_ours = replace(settings, environment={**settings.environment, "KV_CONNECTOR_MOE": "1"})
    with LocalCluster(directory, model, settings) as cluster:
        cluster.interpreter = interpreter
        ours = cluster.start_engine("ours", settings=with_ours)
        theirs = cluster.start_engine("theirs")
        cluster.wait_ready()
        yield Site(ours, theirs, directory)


async def tokens_of(client: Client, engine: EngineProcess, rank: int, tokens: list[int]) -> list[int]:
    """Returns the greedy output of one rank."""
    headers = {"x-data-parallel-rank": str(rank)}
    answer = await client.post(f"{engine.url}/v1/completions", completion_body(tokens, TOKENS), headers)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def ranks_of(client: Client, engine: EngineProcess, directory: Path) -> list[dict[str, Any]]:
    """Returns the counters of each rank."""
    await client.post(
        f"{engine.url}/collective_rpc", {"method": "write_exchange_counts", "args": [str(directory)]}
    )
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


async def test_idle_and_uneven_ranks_return_the_tokens_of_vllms_exchange(
    site: Site, client: Client, tmp_path: Path
) -> None:
    for rank in range(RANKS):  # the other rank runs dummy steps
        alone = prompt(f"alone {rank}", 40)
        assert await tokens_of(client, site.ours, rank, alone) == await tokens_of(
            client, site.theirs, rank, alone
        )
    uneven = [
        (rank, prompt(f"uneven {rank} {n}", 10 + 150 * n + 31 * rank))
        for rank in range(RANKS)
        for n in range(3)
    ]
    found = {}
    for engine in (site.ours, site.theirs):
        found[engine.name] = await asyncio.gather(
            *(tokens_of(client, engine, rank, tokens) for rank, tokens in uneven)
        )
    assert found["ours"] == found["theirs"]
    counted = await ranks_of(client, site.ours, tmp_path)
    assert {one["manager"] for one in counted} == {"KvConnectorAll2AllManager"}
    assert all(one["counts"]["taken"] >= LAYERS * TOKENS * 3 for one in counted)


async def test_a_step_that_is_too_large_goes_to_vllms_exchange_on_all_ranks(
    site: Site, client: Client, tmp_path: Path
) -> None:
    before = [Counter(one["counts"]) for one in await ranks_of(client, site.ours, tmp_path)]
    long = prompt("long", LONG_PROMPT)
    assert await tokens_of(client, site.ours, 0, long) == await tokens_of(client, site.theirs, 0, long)
    after = [Counter(one["counts"]) for one in await ranks_of(client, site.ours, tmp_path)]
    counted = [new - old for new, old in zip(after, before, strict=True)]
    assert {one["size"] for one in counted} == {LAYERS}
    assert all(one["taken"] >= LAYERS * (TOKENS - 1) for one in counted)
    assert all(one.keys() == {"size", "taken"} for one in counted)


async def test_without_the_variable_the_manager_is_vllms(site: Site, client: Client, tmp_path: Path) -> None:
    counted = await ranks_of(client, site.theirs, tmp_path)
    assert {one["manager"] for one in counted} == {"AgRsAll2AllManager"}


async def test_a_killed_rank_ends_the_engine_with_its_name(
    site: Site, client: Client, tmp_path: Path
) -> None:
    """Runs last, because the engine ends."""
    ranks = await ranks_of(client, site.ours, tmp_path)
    begun = asyncio.Event()
    streams = asyncio.create_task(
        client.stream(site.ours.url, prompt("killed", 40), 1500, lambda _: begun.set())
    )
    await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    with pytest.raises((httpx.HTTPError, RefusedCall)):
        await streams

    async def missing() -> str:
        return "" if not site.ours.running() else "the engine has ended"

    await wait_until(missing)
    # vLLM ends all ranks after one, sometimes before the step's error is logged. The watcher logs first.
    pid = ranks[1]["pid"]
    named = rf"rank 1 \(process {pid}\) (has ended|ended without leaving the group)"
    assert re.search(named, site.ours.log.read_text())
