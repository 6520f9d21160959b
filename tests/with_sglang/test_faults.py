"""Aborts at any moment and servers that are killed: the remaining servers answer, and free all resources."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import httpx
import pytest
from site_of_servers import Client, Pair, at_rest, prompts

from kv_connector.lab.sglang_cluster import SglangServer

# One of the two pairs is enough: the one whose prompts are in chunks.
pytestmark = pytest.mark.parametrize("pair", ["page16"], indirect=True)

ABORTS = 100
# The agents' dead time, and the time in which SGLang reports the failure to a client.
KNOWN_S = 5.0 + 2.0


async def right(pair: Pair, client: Client, asked: list[list[int]], expected: list[list[int]]) -> None:
    answers = [client.both(pair.prefill, pair.decode, prompt) for prompt in asked]
    assert await asyncio.gather(*answers) == expected


async def answers(pair: Pair, client: Client, asked: list[list[int]]) -> list[list[int]]:
    return [await client.both(pair.prefill, pair.decode, prompt) for prompt in asked]


@pytest.mark.anyio
async def test_aborts_at_random_moments(pair: Pair, client: Client) -> None:
    """The client, P's half alone, or D's half alone is aborted."""
    asked = prompts(8, seed=1)
    expected = await answers(pair, client, asked)
    rng = random.Random(2)
    failed = 0

    async def aborted(number: int, prompt: list[int]) -> None:
        nonlocal failed
        rid, moment = f"abort-{number}", rng.uniform(0, 0.6)
        ask = asyncio.create_task(client.both(pair.prefill, pair.decode, prompt, tokens=64, rid=rid))
        await asyncio.wait([ask], timeout=moment)
        match number % 3:
            case 0:
                ask.cancel()
            case 1:
                await client.http.post(f"{pair.prefill.url}/abort_request", json={"rid": rid})
            case 2:
                await client.http.post(f"{pair.decode.url}/abort_request", json={"rid": rid})
        answer: object
        (answer,) = await asyncio.gather(ask, return_exceptions=True)
        failed += isinstance(answer, BaseException)

    gate = asyncio.Semaphore(8)

    async def gated(number: int, prompt: list[int]) -> None:
        async with gate:
            await aborted(number, prompt)

    long = prompts(ABORTS, longest=900, seed=3)
    await asyncio.gather(*(gated(number, prompt) for number, prompt in enumerate(long)))
    assert failed > ABORTS // 4
    await at_rest(pair.prefill, pair.decode)
    await right(pair, client, asked, expected)
    for server in (pair.prefill, pair.decode):
        assert "releasing anyway" not in server.log.read_text()


async def outcomes(
    pair: Pair, client: Client, kill: SglangServer, asked: list[list[int]]
) -> list[float | None]:
    """Sends all requests at once and kills the server in the middle. Returns, for each answer, how long
    afterwards it failed."""
    asking = [asyncio.create_task(client.both(pair.prefill, pair.decode, prompt)) for prompt in asked]
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
async def test_decode_lives_on_when_prefill_is_killed(pair: Pair, client: Client) -> None:
    asked = prompts(4, seed=5)
    expected = await answers(pair, client, asked)
    found = await outcomes(pair, client, pair.prefill, prompts(8, longest=2000, seed=6))
    failures = [seconds for seconds in found if seconds is not None]
    assert failures
    assert max(failures) < KNOWN_S
    await at_rest(pair.decode)
    pair.prefill = pair.cluster.restart(pair.prefill)
    pair.cluster.wait_ready(pair.prefill)
    await right(pair, client, asked, expected)
    await at_rest(pair.prefill, pair.decode)


@pytest.mark.anyio
async def test_prefill_lives_on_when_decode_is_killed(pair: Pair, client: Client) -> None:
    asked = prompts(4, seed=5)
    expected = await answers(pair, client, asked)
    found = await outcomes(pair, client, pair.decode, prompts(8, longest=2000, seed=6))
    assert any(seconds is not None for seconds in found)
    await at_rest(pair.prefill)
    pair.decode = pair.cluster.restart(pair.decode)
    pair.cluster.wait_ready(pair.decode)
    await right(pair, client, asked, expected)
    await at_rest(pair.prefill, pair.decode)
