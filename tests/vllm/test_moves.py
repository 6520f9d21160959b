"""Running streams move between decode engines: each is what one engine says, and no block is lost."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deployment import (
    TIMEOUTS,
    Client,
    Hold,
    assert_quiescent,
    completion_body,
    engine_settings,
    prompt,
)

from kv_connector.lab.cluster import HOST, Engine, LocalCluster
from kv_connector.lab.free_ports import free_ports

pytestmark = pytest.mark.anyio

# Long enough to be under way while an engine starts, which takes the other one's core.
OUTPUT = 900
STREAMS = 8


@dataclass
class Site:
    cluster: LocalCluster
    prefill: Engine
    decodes: list[Engine]
    router: str
    registration: int

    async def drain(self, engine: Engine) -> dict[str, Any]:
        """What it says, and how many seconds it took."""
        command = [sys.executable, "-m", "kv_connector.cli.main", "drain", engine.url, "--move", "--json"]
        began = time.monotonic()
        drain = await asyncio.create_subprocess_exec(
            *command, "--router", f"{HOST}:{self.registration}", stdout=asyncio.subprocess.PIPE
        )
        told, _ = await drain.communicate()
        assert drain.returncode == 0
        answer: dict[str, Any] = json.loads(told)
        return answer | {"seconds": time.monotonic() - began}

    async def restart(self, engine: Engine) -> Engine:
        again = self.cluster.restart(engine)
        self.decodes[self.decodes.index(engine)] = again
        await asyncio.to_thread(self.cluster.wait_ready, again)
        await asyncio.to_thread(self.cluster.wait_joined, self.router, again)
        return again


@pytest.fixture(scope="module")
def site(
    model_directories: dict[str, Path],
    interpreter: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A P, two engines of both roles, and a router that they join."""
    directory = tmp_path_factory.mktemp("moves")
    with LocalCluster(directory, model_directories["llama"], engine_settings(blocks=600)) as cluster:
        cluster.interpreter = interpreter
        registration, port = free_ports(2)
        joining: dict[str, Any] = {
            "routers": [f"{HOST}:{registration}"],
            "extra": {"providers": ["host", "tcp"], "timeouts": TIMEOUTS},
        }
        prefill = cluster.start_engine("prefill", role="kv_producer", **joining)
        decodes = [cluster.start_engine(f"decode {n}", role="kv_both", **joining) for n in (1, 2)]
        router = cluster.start_router("router", registration=registration, port=port)
        cluster.wait_ready()
        cluster.wait_joined(router, prefill, *decodes)
        yield Site(cluster, prefill, decodes, router, registration)


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Completions and chats, some of which are told ids, and some how many tokens there were."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(STREAMS):
        body = completion_body(prompt(number, 40 + 60 * number), OUTPUT, stream=True)
        body["return_token_ids"] = number % 4 < 2
        body["stream_options"] = {"include_usage": number % 3 == 0}
        if number % 2:
            del body["prompt"]
            text = "".join(chr(97 + number + step % 7) for step in range(50 * number))
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append(("/v1/completions", body))
    return found


@dataclass
class Reading:
    """A client's stream."""

    events: list[dict[str, Any]] = field(default_factory=list)
    pause: float = 0.0
    """The longest between two events."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: Client, url: str, body: dict[str, Any]) -> Reading:
        last = None
        async with client._http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                self.events.append(json.loads(line.removeprefix("data: ")))
                assert "error" not in self.events[-1], line
                if len(self.events) > 20:
                    self.begun.set()
                self.pause = max(self.pause, now - (last or now))
                last = now
        return self

    def said(self) -> tuple[str, list[int], list[str], list[Any]]:
        """Text, ids, ends and counts."""
        choices = [choice for event in self.events for choice in event["choices"]]
        assert len({(event["id"], event["created"], event["object"]) for event in self.events}) == 1
        return (
            "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices),
            [token for choice in choices for token in choice.get("token_ids") or ()],
            [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            [event["usage"] for event in self.events if event.get("usage")],
        )


async def moves(client: Client, site: Site) -> dict[str, float]:
    """{outcome: how many}"""
    text = await client.get(f"{site.router}/metrics")
    found = re.findall(r'^kv_connector_router_moves_total{outcome="(\w+)"} (\S+)', text, re.MULTILINE)
    return {outcome: float(count) for outcome, count in found}


async def streams(client: Client, url: str) -> tuple[list[Reading], asyncio.Future[list[Reading]]]:
    """Of all requests, each of which has begun."""
    readings = [Reading() for _ in range(STREAMS)]
    reading = asyncio.gather(
        *(one.read(client, url + path, body) for one, (path, body) in zip(readings, requests(), strict=True))
    )
    begun = asyncio.gather(*(one.begun.wait() for one in readings))
    await asyncio.wait({reading, begun}, return_when=asyncio.FIRST_COMPLETED)
    assert begun.done(), reading.result()
    return readings, reading


async def test_streams_move_to_and_fro_and_stay_where_the_target_dies(
    site: Site, client: Client, tmp_path: Path
) -> None:
    first, second = site.decodes
    _, alone = await streams(client, first.url)
    expected = [one.said() for one in await alone]
    await assert_quiescent(client, first)

    # To: half of them are at the second one. And fro: all are at the first one.
    readings, reading = await streams(client, site.router)
    one = await site.drain(second)
    second = await site.restart(second)
    assert not reading.done()
    other = await site.drain(first)
    assert (one["moved"], other["moved"]) == (STREAMS // 2, STREAMS)
    assert [stream.said() for stream in await reading] == expected
    assert await moves(client, site) == {"moved": STREAMS * 3 / 2}
    for drain in (one, other):
        print(f"\nMOVES {drain['moved']} streams in {drain['seconds']:.2f} s")
    print("longest pauses of the streams:", *(f"{stream.pause:.2f}" for stream in readings), "s")
    await assert_quiescent(client, site.prefill, first, second)

    # The target has got the pages of some when it dies.
    readings, reading = await streams(client, site.router)
    first = await site.restart(first)
    held = Hold(client, first, tmp_path)
    await held.arm(1)
    draining = asyncio.create_task(site.drain(second))
    await held.reached()
    first.kill()
    assert [stream.said() for stream in await reading] == expected
    assert (await draining)["moved"] == 0
    print("moves where the target died:", await moves(client, site))
    await assert_quiescent(client, site.prefill, second)
