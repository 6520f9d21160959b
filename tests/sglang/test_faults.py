"""Aborts at any moment and servers that are killed: who is left answers on, and nothing stays taken."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from site_of_servers import Client, at_rest, prompts

from kv_connector.lab.model import make_llama
from kv_connector.lab.sglang_cluster import Server, ServerSettings, SglangCluster

SETTINGS = ServerSettings(chunked_prefill_size=128, arguments=("--enable-metrics",))
ABORTS = 100
# The agents' dead time, and what SGLang takes to tell a client.
KNOWN_S = 5.0 + 2.0


@dataclass
class Site:
    cluster: SglangCluster
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("faults")
    with SglangCluster(directory, make_llama(directory / "model"), SETTINGS) as cluster:
        prefill = cluster.start_server("prefill", role="prefill")
        decode = cluster.start_server("decode", role="decode")
        cluster.wait_ready()
        yield Site(cluster, prefill, decode)


@pytest.fixture
async def client(anyio_backend: str) -> Client:
    return Client()


async def right(site: Site, client: Client, asked: list[list[int]], expected: list[list[int]]) -> None:
    answers = [client.both(site.prefill, site.decode, prompt) for prompt in asked]
    assert await asyncio.gather(*answers) == expected


async def answers(site: Site, client: Client, asked: list[list[int]]) -> list[list[int]]:
    return [await client.both(site.prefill, site.decode, prompt) for prompt in asked]


@pytest.mark.anyio
async def test_aborts_at_random_moments(site: Site, client: Client) -> None:
    """Of the client, of P's half alone and of D's half alone."""
    asked = prompts(8, seed=1)
    expected = await answers(site, client, asked)
    rng = random.Random(2)
    failed = 0

    async def aborted(number: int, prompt: list[int]) -> None:
        nonlocal failed
        rid, moment = f"abort-{number}", rng.uniform(0, 0.6)
        ask = asyncio.create_task(client.both(site.prefill, site.decode, prompt, tokens=64, rid=rid))
        await asyncio.wait([ask], timeout=moment)
        match number % 3:
            case 0:
                ask.cancel()
            case 1:
                await client.http.post(f"{site.prefill.url}/abort_request", json={"rid": rid})
            case 2:
                await client.http.post(f"{site.decode.url}/abort_request", json={"rid": rid})
        (answer,) = await asyncio.gather(ask, return_exceptions=True)
        failed += isinstance(answer, BaseException)

    gate = asyncio.Semaphore(8)

    async def gated(number: int, prompt: list[int]) -> None:
        async with gate:
            await aborted(number, prompt)

    long = prompts(ABORTS, longest=900, seed=3)
    await asyncio.gather(*(gated(number, prompt) for number, prompt in enumerate(long)))
    assert failed > ABORTS // 4
    await at_rest(site.prefill, site.decode)
    await right(site, client, asked, expected)
    for server in (site.prefill, site.decode):
        assert "releasing anyway" not in server.log.read_text()


async def outcomes(site: Site, client: Client, kill: Server, asked: list[list[int]]) -> list[float | None]:
    """Asks for all at once and kills the server in the middle: of each answer, how long after that it
    failed."""
    asking = [asyncio.create_task(client.both(site.prefill, site.decode, prompt)) for prompt in asked]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    os.killpg(kill.pid, signal.SIGKILL)
    killed = time.monotonic()
    found: list[float | None] = []
    for one in asyncio.as_completed(asking):
        try:
            await one
            found.append(None)
        except (httpx.HTTPError, ExceptionGroup):
            found.append(time.monotonic() - killed)
    return found


@pytest.mark.anyio
async def test_decode_lives_on_when_prefill_is_killed(site: Site, client: Client) -> None:
    asked = prompts(4, seed=5)
    expected = await answers(site, client, asked)
    found = await outcomes(site, client, site.prefill, prompts(8, longest=2000, seed=6))
    failures = [seconds for seconds in found if seconds is not None]
    assert failures
    assert max(failures) < KNOWN_S
    await at_rest(site.decode)
    site.prefill = site.cluster.restart(site.prefill)
    site.cluster.wait_ready(site.prefill)
    await right(site, client, asked, expected)
    await at_rest(site.prefill, site.decode)


@pytest.mark.anyio
async def test_prefill_lives_on_when_decode_is_killed(site: Site, client: Client) -> None:
    asked = prompts(4, seed=5)
    expected = await answers(site, client, asked)
    found = await outcomes(site, client, site.decode, prompts(8, longest=2000, seed=6))
    assert any(seconds is not None for seconds in found)
    await at_rest(site.prefill)
    site.decode = site.cluster.restart(site.decode)
    site.cluster.wait_ready(site.decode)
    await right(site, client, asked, expected)
    await at_rest(site.prefill, site.decode)
