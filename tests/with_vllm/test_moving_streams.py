"""Running streams move between decode engines, or leave one that is killed: each has one engine's answer, and
no block is lost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployment import (
    PATIENCE_SECONDS,
    TIMEOUTS,
    Client,
    StepHold,
    assert_quiescent,
    completion_body,
    engine_settings,
    prompt,
)

from kv_connector.lab.cluster import HOST, EngineProcess, LocalCluster, Role
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.moving import Moved, move_away
from kv_connector.lab.sse import Events
from kv_connector.protocol.actions import Address

pytestmark = pytest.mark.anyio

STREAMS = 8
# Tokens of the two streams that end. The others run while an engine starts, twice, and are left then.
SHORT = 300
LONG = 2000


class Site:
    def __init__(self, cluster: LocalCluster, router: str, registration: Address) -> None:
        self.cluster, self.router, self.registration = cluster, router, registration
        self.prefill: EngineProcess
        self.first: EngineProcess

    def start(self, name: str, role: Role = "kv_both") -> EngineProcess:
        extra = {"providers": ["host", "tcp"], "timeouts": TIMEOUTS}
        return self.cluster.start_engine(name, role=role, routers=[str(self.registration)], extra=extra)

    async def joined(self, engine: EngineProcess) -> None:
        await asyncio.to_thread(self.cluster.wait_ready, engine)
        await asyncio.to_thread(self.cluster.wait_joined, self.router, engine)

    async def restart(self, engine: EngineProcess) -> EngineProcess:
        """Restarts an engine that serves nothing."""
        await asyncio.to_thread(self.cluster.stop, engine)
        again = self.cluster.restart(engine)
        await self.joined(again)
        return again

    async def drain(self, engine: EngineProcess) -> Moved:
        return await asyncio.to_thread(move_away, self.registration, engine.url, PATIENCE_SECONDS)


@pytest.fixture
def site(model_directories: dict[str, Path], interpreter: tuple[str, ...], tmp_path: Path) -> Iterator[Site]:
    """A P, an engine of both roles, and a router that they join."""
    # Blocks for the longest answers of six streams, behind their prompts.
    settings = replace(engine_settings(blocks=600), max_model_len=LONG + 512)
    with LocalCluster(tmp_path, model_directories["llama"], settings) as cluster:
        cluster.interpreter = interpreter
        registration = Address(HOST, free_ports(1)[0])
        router = cluster.start_router("router", registration=registration.port)
        site = Site(cluster, router, registration)
        site.prefill, site.first = site.start("prefill", "kv_producer"), site.start("first")
        cluster.wait_ready()
        cluster.wait_joined(router, site.prefill, site.first)
        yield site


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Returns completions and chats. Some request token ids. Those that end request the number of tokens."""
    body = completion_body(prompt(number, 40 + 60 * number), SHORT if number < 2 else LONG)
    # Printable characters only: parts of others would be awaited in a loop for the length of the stream.
    body |= {"stream": True, "return_token_ids": number % 4 > 1, "allowed_token_ids": list(range(94))}
    if number < 2:
        body["stream_options"] = {"include_usage": True}
    if number % 2 == 0:
        return "/v1/completions", body
    del body["prompt"]
    text = "".join(chr(97 + number + step % 7) for step in range(50 * number))
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


class Reading:
    """A client's stream."""

    def __init__(self, client: Client, url: str, number: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.pause = 0.0
        """The longest pause between two events, in seconds."""
        self._grown = asyncio.Condition()
        path, body = request(number)
        self.task = asyncio.create_task(self._read(client, url + path, body))

    async def _read(self, client: Client, url: str, body: dict[str, Any]) -> None:
        last = None
        async with client._http.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            events = Events()
            async for chunk in response.aiter_bytes():
                for event in events.feed(chunk):
                    now = time.monotonic()
                    self.pause, last = max(self.pause, now - (last or now)), now
                    async with self._grown:
                        self.events.append(json.loads(event))
                        self._grown.notify_all()
                    assert "error" not in self.events[-1], event

    async def grow(self, events: int) -> None:
        """Waits for this many more events. Fails if the stream has ended."""
        wanted = len(self.events) + events
        async with asyncio.timeout(PATIENCE_SECONDS), self._grown:
            await self._grown.wait_for(lambda: len(self.events) >= wanted or self.task.done())
        assert len(self.events) >= wanted

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def said(self) -> tuple[str, list[int], list[str], list[Any]]:
        """Returns text, ids, finish reasons and counts."""
        choices = [choice for event in self.events for choice in event["choices"]]
        assert len({(event["id"], event["created"], event["object"]) for event in self.events}) == 1
        return (
            "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices),
            [token for choice in choices for token in choice.get("token_ids") or ()],
            [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            [event["usage"] for event in self.events if event.get("usage")],
        )


async def outcomes_of(client: Client, site: Site, metric: str) -> dict[str, int]:
    """Returns {outcome: count} of a metric of the router."""
    text = await client.get(f"{site.router}/metrics")
    found = re.findall(rf'^{metric}{{outcome="(\w+)"}} (\S+)', text, re.MULTILINE)
    return {outcome: int(float(count)) for outcome, count in found}


async def grow(readings: Iterable[Reading], events: int) -> None:
    await asyncio.gather(*(reading.grow(events) for reading in readings))


async def assert_right(client: Client, engine: EngineProcess, readings: Sequence[Reading]) -> None:
    """Checks that each stream is what this engine alone gives, up to the point where it was left."""
    asked = [request(number) for number in range(len(readings))]
    # An event may have several tokens, so this limits only streams that were left.
    longest = max(len(reading.events) for reading in readings)
    whole = {"stream": False, "stream_options": None, "return_token_ids": True}
    limits = [{} if number < 2 else {"max_tokens": min(LONG, longest)} for number in range(len(readings))]
    answers = await asyncio.gather(
        *(
            client.post(engine.url + path, body | whole | limit)
            for (path, body), limit in zip(asked, limits, strict=True)
        )
    )
    for number, (reading, answer) in enumerate(zip(readings, answers, strict=True)):
        choice = answer["choices"][0]
        text, ids = (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["token_ids"],
        )
        if number < 2:
            counts = {key: count for key, count in answer["usage"].items() if count is not None}
            assert reading.said() == (text, [], ["length"], [counts])
            continue
        said, told, *_ = reading.said()
        # The last characters of a cut text may be incomplete, and events may have several tokens.
        both = min(len(said), len(text)) - 4
        assert both > 200
        assert said[:both] == text[:both]
        assert told[: len(ids)] == ids[: len(told)]
        assert bool(told) == (number % 4 > 1)


async def test_streams_move_and_stay_where_the_target_dies(
    site: Site, client: Client, tmp_path: Path
) -> None:
    first = site.first
    readings = [Reading(client, site.router, number) for number in range(STREAMS)]
    await grow(readings, 5)
    # All streams are on the only engine. It restarts later, and has none then.
    second = site.start("second")
    await site.joined(second)
    moved = await site.drain(first)
    pauses = [reading.pause for reading in readings]
    await grow(readings[2:], 20)

    # The target has received pages when it dies.
    first = await site.restart(first)
    held = StepHold(client, first, tmp_path)
    await held.arm(1)
    draining = asyncio.create_task(site.drain(second))
    await held.reached()
    first.kill()
    assert (await draining).streams == 0
    await grow(readings[2:], 20)

    outcomes = await outcomes_of(client, site, "kv_connector_router_moves_total")
    await asyncio.gather(*(reading.task for reading in readings[:2]))
    await asyncio.gather(*(reading.leave() for reading in readings[2:]))
    print(f"\n{moved.streams} streams moved in {moved.seconds:.2f} s")
    print("longest pauses of the streams:", *(f"{pause:.2f}" for pause in pauses), "s; moves:", outcomes)
    assert moved.streams >= STREAMS - 2
    assert outcomes["engine_failed"] > 0
    await assert_quiescent(client, site.prefill, second)
    await assert_right(client, second, readings)


async def test_streams_continue_when_their_decode_engine_is_killed(site: Site, client: Client) -> None:
    second = site.start("second", "kv_consumer")
    await site.joined(second)
    readings = [Reading(client, site.router, number) for number in range(STREAMS)]
    await grow(readings, 5)
    site.first.kill()
    await grow(readings[2:], 40)
    pauses = [reading.pause for reading in readings]

    await asyncio.gather(*(reading.task for reading in readings[:2]))
    await asyncio.gather(*(reading.leave() for reading in readings[2:]))
    outcomes = await outcomes_of(client, site, "kv_connector_router_broken_streams_total")
    print("\nlongest pauses of the streams:", *(f"{pause:.2f}" for pause in pauses), "s;", outcomes)
    assert outcomes.keys() == {"resumed"}
    await assert_quiescent(client, site.prefill, second)
    await assert_right(client, second, readings)
