"""Processes that are killed, stopped and restarted, under steady load through the router."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deployment import Client
from fault_site import Load, Site, judge

pytestmark = pytest.mark.anyio

NAMES = ("p0", "p1", "d0", "d1")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    with Site(tmp_path_factory.mktemp("faults"), model) as site:
        async with Client() as client:
            await site.begin(client, NAMES)
        await site.until_ready()
        yield site


@pytest.mark.parametrize("victim", ["d0", "p0"])
async def test_kill_and_restart_at_the_same_port(site: Site, client: Client, victim: str) -> None:
    """P's requests are retried with the other P. Streams from D fail at once. Both engines return and
    serve."""
    engine = site.engines[victim]
    async with Load(site) as load:
        await load.answered(8)
        load.note_fault()
        engine.kill()
        await asyncio.sleep(8)
        await load.answered(8)
    judge(site, load.outcome, f"kill -9 of {victim}", may_fail=victim.startswith("d"))
    await site.assert_at_rest(client, *(name for name in NAMES if name != victim))

    restarted = site.start(victim, like=engine)
    async with Load(site, seed=1) as load:
        load.note_fault()
        await asyncio.to_thread(site.cluster.wait_ready)
        await site.until_ready()
        await load.answered(16)
        assert await client.load(restarted) >= 0
    judge(site, load.outcome, f"restart of {victim} at its port", may_fail=False)
    await site.assert_at_rest(client)


async def test_kill_the_router(site: Site, client: Client) -> None:
    """The router's requests break. After its restart all engines register again."""
    async with Load(site) as load:
        await load.answered(6)
        load.note_fault()
        site.cluster.routers[site.router].kill()
        began = time.monotonic()
        site.start_router()
        await site.until_ready(seconds=30)
        away = time.monotonic() - began
        await load.answered(8)
    judge(site, load.outcome, f"kill -9 of the router, {away:.1f} s away", may_fail=True, dead=away + 1)
    await site.assert_at_rest(client)


@pytest.mark.parametrize("victim", ["d0", "p0"])
async def test_stopped_for_3_seconds(site: Site, client: Client, victim: str) -> None:
    """The stop is shorter than the dead time: no request fails."""
    engine = site.engines[victim]
    async with Load(site) as load:
        await load.answered(6)
        load.note_fault()
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(3)
        engine.signal(signal.SIGCONT)
        await load.answered(10)
    judge(site, load.outcome, f"SIGSTOP of {victim} for 3 s", may_fail=False)
    await site.assert_at_rest(client)


@pytest.mark.parametrize("victim", ["d0", "p0"])
async def test_stopped_for_60_seconds(site: Site, client: Client, victim: str) -> None:
    """The engine is given up, fenced, and used again when it wakes up."""
    engine = site.engines[victim]
    others = [name for name in NAMES if name != victim]
    async with Load(site) as load:
        await load.answered(6)
        load.note_fault()
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(60)
        engine.signal(signal.SIGCONT)
        await site.until_ready(seconds=60)
        await load.answered(10)
    judge(site, load.outcome, f"SIGSTOP of {victim} for 60 s", may_fail=True)
    await site.assert_at_rest(client, *others)
    await site.assert_at_rest(client)
