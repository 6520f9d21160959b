"""A decode engine is killed under 100 streams: those that can continue do, and the others say why not."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployment import Client, completion_body, engine_settings, prompt
from fault_site import Site
from nursery import nursery

from kv_connector.lab.sse import Events

pytestmark = pytest.mark.anyio

STREAMS = 100
TOKENS = 200
# Requests that no other engine can continue, of each ten.
STAY: tuple[dict[str, Any], ...] = ({"seed": 7, "temperature": 1.0}, {"stop": ["\n\n\n"]})


class Reading:
    """A client's stream."""

    def __init__(self, client: Client, router: str, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.error = ""
        self.times: list[float] = []
        self.task = asyncio.create_task(self._read(client, router))

    @property
    def stays(self) -> bool:
        return self.number % 10 < len(STAY)

    def body(self) -> dict[str, Any]:
        """Returns the request. Its tokens are printable characters, so it has text at each."""
        ids = prompt(f"stream {self.number}", 20 + 3 * self.number)
        more = STAY[self.number % 10] if self.stays else {}
        return completion_body(ids, TOKENS, allowed_token_ids=list(range(94)), **more)

    async def _read(self, client: Client, router: str) -> None:
        events = Events()
        body = self.body() | {"stream": True}
        async with client._http.stream("POST", f"{router}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for chunk in response.aiter_bytes():
                for event in map(json.loads, events.feed(chunk)):
                    if "error" in event:
                        self.error = event["error"]["message"]
                        continue
                    self.tokens += event["choices"][0].get("token_ids") or []
                    self.times.append(time.monotonic())

    def pause(self, since: float) -> float:
        """Returns the longest pause that ended after this moment, in seconds."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


async def test_streams_of_a_killed_decode_engine(model: Path, client: Client, tmp_path: Path) -> None:
    with nursery(tmp_path, {"OMP_NUM_THREADS": "1"}) as interpreter, Site(tmp_path, model) as site:
        site.cluster.interpreter = interpreter
        site.cluster.settings = replace(engine_settings(blocks=2000), max_seqs=STREAMS)
        await site.begin(client, ("p0", "d0", "d1"))
        await site.until_ready()
        readings = [Reading(client, site.router, number) for number in range(STREAMS)]
        async with asyncio.timeout(300):
            while any(len(one.tokens) < 10 for one in readings):
                await asyncio.sleep(0.05)
        killed = time.monotonic()
        running = [one for one in readings if not one.task.done()]
        site.engines["d0"].kill()
        await asyncio.gather(*(one.task for one in readings))
        outcomes = await _outcomes(client, site)
        url, able = f"{site.engines['d1'].url}/v1/completions", [one for one in readings if not one.stays]
        right = await asyncio.gather(*(client.post(url, one.body()) for one in able))
        resumed = sorted(one.pause(killed) for one in running if not one.stays)[-outcomes["resumed"] :]
        row: dict[str, Any] = {
            "fault": f"kill -9 of one of two decode engines under {len(running)} streams",
            **outcomes,
            "pause_median_s": round(resumed[len(resumed) // 2], 2),
            "pause_p99_s": round(resumed[int(len(resumed) * 0.99)], 2),
        }
        print(f"\nRELIABILITY {json.dumps(row)}", flush=True)

        for reading, answer in zip(able, right, strict=True):
            assert not reading.error, reading.error
            assert reading.tokens == answer["choices"][0]["token_ids"]
        for reading in (one for one in readings if one.stays):
            assert not reading.error or "The stream did not continue on another engine" in reading.error
        assert outcomes.keys() == {"resumed", "seed", "stop_strings"}
        assert outcomes["resumed"] > STREAMS // 4
        assert sum(outcomes.values()) - outcomes["resumed"] == sum(bool(one.error) for one in readings)
        await site.assert_at_rest(client, "p0", "d1")


async def _outcomes(client: Client, site: Site) -> Counter[str]:
    """Returns {outcome: streams whose engine has failed}."""
    name = "kv_connector_router_broken_streams_total{"
    text = await client.get(f"{site.router}/metrics")
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return Counter({line.split('"')[1]: int(float(line.split()[-1])) for line in lines})
