"""Clients that leave at random moments on either side: no leak, no wrong token, no dead engine."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from deployment import Client, RefusedCall, decode_params, prefill_params, prompt
from fault_site import Load, Site, judge
from suite_numbers import whole_of

pytestmark = pytest.mark.anyio

ABORTS = whole_of("KVC_FAULT_ABORTS", 500)
AT_ONCE = 6
SIDES = ("client", "prefill", "decode")
# On two busy cores: from before the request is scheduled until some tokens are decoded.
LONGEST_SECONDS = 3.0


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    with Site(tmp_path_factory.mktemp("aborts"), model) as site:
        async with Client() as client:
            await site.begin(client, ("p0", "d0"))
        await site.until_ready()
        yield site


async def test_random_aborts_at_every_state_on_each_side(site: Site, client: Client) -> None:
    pick, permits = random.Random(7), asyncio.Semaphore(AT_ONCE)

    async def one(number: int, side: str, after: float, tokens: int) -> None:
        async with permits:
            await _abort(site, client, number, side, after, tokens)

    async with Load(site, clients=2) as load:
        load.note_fault()
        plans = [
            (
                pick.choice(SIDES),
                pick.uniform(0, LONGEST_SECONDS),
                pick.randrange(20, 1500),
            )
            for _ in range(ABORTS)
        ]
        await asyncio.gather(*(one(number, *plan) for number, plan in enumerate(plans)))
        await load.answered(4)
    judge(site, load.outcome, f"{ABORTS} random aborts", may_fail=False)
    assert all(engine.running() for engine in site.engines.values())
    await site.assert_at_rest(client)


async def _abort(site: Site, client: Client, number: int, side: str, after: float, tokens: int) -> None:
    """Sends a request, and leaves as the client of the router, of P, or of D. Waits for the other side."""
    ids = prompt(f"abort {number}", tokens)
    if side == "client":
        tasks = {"client": asyncio.create_task(client.stream(site.router, ids, 200))}
    else:
        transfer, p, d = uuid.uuid4().hex, site.engines["p0"], site.engines["d0"]
        tasks = {
            "prefill": asyncio.create_task(
                client.complete(p.url, ids, 1, kv_transfer_params=prefill_params(transfer))
            ),
            "decode": asyncio.create_task(
                client.complete(d.url, ids, 8, kv_transfer_params=decode_params(transfer, p))
            ),
        }
    leaving = tasks.pop(side)
    await asyncio.wait({leaving}, timeout=after)
    leaving.cancel()
    for task in (leaving, *tasks.values()):
        # The side that stays fails, or had all its pages already.
        with suppress(asyncio.CancelledError, RefusedCall, httpx.HTTPError):
            await task
