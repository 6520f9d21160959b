"""One prefill and one decode engine after another is replaced, for as long as one likes, under load."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from pathlib import Path

import pytest
from deployment import Client
from fault_site import Load, Site, judge

from kv_connector.cluster.cluster import HOST

pytestmark = pytest.mark.anyio

MINUTES = float(os.environ.get("KVC_FAULT_MINUTES", "10"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_rolling_replacement(model: Path, client: Client, tmp_path: Path) -> None:
    """The new one joins, the old one is drained and ends: nobody notices."""
    with Site(tmp_path, model) as site:
        await site.begin(client, ("p0", "p1", "p2", "d0", "d1", "d2"))
        await site.until_ready()
        replaced = 0
        # One client: engines that start take both cores of a small machine for a minute as it is.
        async with Load(site, clients=1) as load:
            await load.answered(4)
            load.note_fault()
            end = time.monotonic() + MINUTES * 60
            for number in itertools.count(3):
                if time.monotonic() > end:
                    break
                for side in ("p", "d"):
                    await _replace(site, f"{side}{number - 3}", f"{side}{number}")
                    replaced += 1
            await load.answered(8)
        judge(site, load.outcome, f"{replaced} engines replaced in {MINUTES:g} min", may_fail=False)
        await site.assert_at_rest(client)


async def _replace(site: Site, old: str, new: str) -> None:
    site.start(new)
    await asyncio.to_thread(site.cluster.wait_ready)
    await site.until_ready()
    leaving = site.engines.pop(old)
    command = [sys.executable, "-m", "kv_connector.cli.main", "drain", leaving.url]
    drain = await asyncio.create_subprocess_exec(
        *command,
        "--router",
        f"{HOST}:{site.registration}",
        env={**os.environ, **site.cluster.environment},
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await drain.wait() == 0
    await asyncio.to_thread(site.cluster.stop, leaving)
