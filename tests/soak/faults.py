"""The faults of the soak, in turn: emptied prefix caches, drains, and a decode engine that is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from deployment import Client, RefusedCall

from kv_connector.lab.cluster import HOST
from kv_connector.lab.process import StartError
from tests.faults.fault_site import Site

# With these engines each role keeps one that never ends: its samples last for the whole run.
ENGINES = ("p0", "d0", "d1")
LASTING = ("p0", "d0")
KILLED = "d1"
# Time for which an engine stays drained.
DRAINED_SECONDS = 3.0
# A drain waits for running requests, which take seconds here.
DRAIN_SECONDS = 60
START_SECONDS = 300.0


class Faults:
    """Causes one fault after another. ``seconds``: pause between two of them."""

    def __init__(self, site: Site, seconds: float, log: Callable[[str], None]) -> None:
        self._site = site
        self._seconds = seconds
        self._log = log
        self.caused: Counter[str] = Counter()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        turns = itertools.cycle((self._reset, self._kill, self._drain_decode, self._drain_prefill))
        async with Client() as client:
            for turn in turns:
                await asyncio.sleep(self._seconds)
                began = time.monotonic()
                name = turn.__name__.lstrip("_")
                try:
                    await turn(client)
                except (RefusedCall, httpx.HTTPError, StartError, AssertionError) as error:
                    self.caused[f"{name}: {type(error).__name__}"] += 1
                    self._log(f"fault {name} did not end as expected: {error!s:.500}")
                else:
                    self.caused[name] += 1
                    self._log(f"fault {name}: over after {time.monotonic() - began:.1f} s")

    async def _reset(self, client: Client) -> None:
        for name in ENGINES:
            await client.post(f"{self._site.engines[name].url}/reset_prefix_cache")

    async def _kill(self, _: Client) -> None:
        killed = self._site.engines[KILLED]
        await asyncio.to_thread(killed.kill)
        again = self._site.start(KILLED, like=killed)
        await asyncio.to_thread(self._site.cluster.wait_ready, again, seconds=START_SECONDS)
        await self._site.until_ready(KILLED)

    async def _drain_decode(self, _: Client) -> None:
        await self._drain("d0")

    async def _drain_prefill(self, _: Client) -> None:
        await self._drain("p0")

    async def _drain(self, name: str) -> None:
        url = self._site.engines[name].url
        await self._command("drain", url, "--force", "--timeout", f"{DRAIN_SECONDS}")
        await asyncio.sleep(DRAINED_SECONDS)
        await self._command("undrain", url)

    async def _command(self, *words: Any) -> None:
        command = [sys.executable, "-m", "kv_connector.cli.main", *words]
        process = await asyncio.create_subprocess_exec(
            *command,
            "--router",
            f"{HOST}:{self._site.registration}",
            env={**os.environ, **self._site.cluster.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, f"{' '.join(words)}: {output.decode()}"
