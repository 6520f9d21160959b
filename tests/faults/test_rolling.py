"""Replaces one prefill and one decode engine after another under load, for any time."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest
from deployment import Client
from fault_site import Load, Site, judge
from nursery import nursery
from suite_numbers import positive_of, whole_of

from kv_connector.lab.cluster import HOST

pytestmark = pytest.mark.anyio

SITE = 6  # three of each side
MINUTES = positive_of("KVC_FAULT_MINUTES", 10.0)
# Successors that start at the same time. With more cores, one is ready every second.
STARTING = whole_of("KVC_FAULT_STARTING", 1)
# On a small machine, starting engines occupy one of the cores all the time.
CLIENTS = whole_of("KVC_FAULT_CLIENTS", 1)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("move", [False, True], ids=["waits", "moves"])
async def test_rolling_replacement(model: Path, client: Client, tmp_path: Path, move: bool) -> None:
    """A new engine joins, then the oldest of its side is drained and ends, without any failed request. With
    moves, an engine may end before its streams do."""
    moved = 0
    with nursery(tmp_path, {"OMP_NUM_THREADS": "1"}) as interpreter, Site(tmp_path, model) as site:
        site.cluster.interpreter = interpreter
        site.decode_role = "kv_both" if move else "kv_consumer"
        await site.begin(client, [_name(number) for number in range(SITE)])
        await site.until_ready()
        replaced, started = 0, SITE
        async with Load(site, clients=CLIENTS) as load:
            await load.answered(4)
            load.note_fault()
            end = time.monotonic() + MINUTES * 60
            while time.monotonic() < end:
                while started < replaced + SITE + STARTING:
                    site.start(_name(started))
                    started += 1
                await _join(site, _name(replaced + SITE))
                moved += await _leave(site, _name(replaced), move=move)
                replaced += 1
            await load.answered(8)
        what = f"{replaced} engines replaced in {MINUTES:g} min"
        judge(site, load.outcome, f"{what}, {moved} streams moved" if move else what, may_fail=False)
        assert bool(moved) is move
        await asyncio.to_thread(site.cluster.wait_ready)
        await site.assert_at_rest(client)


def _name(number: int) -> str:
    """Returns p0, d0, p1, d1, ..."""
    return f"{'pd'[number % 2]}{number // 2}"


async def _join(site: Site, name: str) -> None:
    await asyncio.to_thread(site.cluster.wait_ready, site.engines[name])
    await site.until_ready(name)


async def _leave(site: Site, name: str, *, move: bool) -> int:
    """Drains and ends an engine. Returns the number of moved streams."""
    leaving = site.engines.pop(name)
    command = [sys.executable, "-m", "kv_connector.cli.main", "drain", leaving.url, "--json"]
    drain = await asyncio.create_subprocess_exec(
        *command,
        "--router",
        f"{HOST}:{site.registration}",
        *(["--move"] if move else []),
        env={**os.environ, **site.cluster.environment},
        stdout=asyncio.subprocess.PIPE,
    )
    told, _ = await drain.communicate()
    assert drain.returncode == 0
    answer = json.loads(told)
    assert not answer.get("staying"), answer
    await asyncio.to_thread(site.cluster.stop, leaving)
    return int(answer.get("moved", 0))
