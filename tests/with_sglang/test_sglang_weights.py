"""New weights for a server that serves: its tokens are those of a server that was started with them."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from site_of_servers import Client, Pair, at_rest, body, metrics, prompts, taking_weights
from weight_trainer import FORKSERVER, main_until_killed

from kv_connector.lab.model import make_llama
from kv_connector.lab.sglang_cluster import HOST, SglangCluster, SglangServer
from kv_connector.lab.sse import Events
from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import CheckpointSource
from kv_connector.weights.wire.links import questions
from kv_connector.weights.wire.messages import Ask, State

PATIENCE_S = 180.0
ASKED = prompts(12, seed=21)
ENDLESS = 3500
"""Tokens of a stream that does not end during an update."""


@dataclass
class Site:
    """A server that takes weights, started with `first`, and a server that was started with `second`."""

    server: SglangServer
    takes: str
    """Address where the server takes weights."""
    one: SglangServer
    first: Path
    second: Path

    def state(self) -> State:
        with questions(None) as links:
            host, _, port = self.takes.rpartition(":")
            controller = links.dial(Address(host, int(port)))
            state = links.wait(links.ask(controller, Ask()), controller, PATIENCE_S)
        assert isinstance(state, State)
        return state


@pytest.fixture(scope="module")
def site(
    cluster: SglangCluster, one: SglangServer, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    first = make_llama(tmp_path_factory.mktemp("weights") / "model", seed=1)
    settings, takes = taking_weights(cluster.settings)
    model, cluster.model = cluster.model, first
    server = cluster.start_server("takes-weights", ranks=2, settings=settings)
    cluster.model = model
    cluster.wait_ready(one, server)
    yield Site(server, takes, one, first, llama)
    cluster.stop(server)


async def push(checkpoint: Path, version: str, *takes: str) -> None:
    """Pushes to these servers, which take turns."""

    def push() -> None:
        lanes = ("host", "tcp")
        with WeightPusher(CheckpointSource(checkpoint), takes, providers=lanes, in_turn=True) as pusher:
            pusher.connect()
            pusher.push(version).wait("applied", PATIENCE_S)

    await asyncio.to_thread(push)


@pytest.mark.anyio
async def test_tokens_after_a_push_are_those_of_the_checkpoint(site: Site, client: Client) -> None:
    expected, before = await client.all(site.one.url, ASKED), await client.all(site.server.url, ASKED)
    assert all(one != other for one, other in zip(expected, before, strict=True)), "they tell both apart"
    async with stream(client, site.server) as answers:
        assert (await anext(answers))["meta_info"]["weight_version"] == "default"
        await push(site.second, "second", site.takes)
        # The stream goes on over the update.
        async with asyncio.timeout(PATIENCE_S):
            while (await anext(answers))["meta_info"]["weight_version"] != "second":
                pass
    # The cached prefixes of the earlier weights are gone.
    assert await client.all(site.server.url, ASKED, at_once=4) == expected
    await push(site.first, "first", site.takes)
    assert await client.all(site.server.url, ASKED, at_once=4) == before
    found = await metrics(site.server)
    assert found["kv_connector_weights_updates_total"] == found["kv_connector_weights_version"] + 1 == 2
    assert found["kv_connector_weights_pause_seconds_count"] == 2


@pytest.mark.anyio
async def test_trainer_that_is_killed_leaves_the_old_version(site: Site, client: Client) -> None:
    await push(site.first, "whole", site.takes)
    before = await client.all(site.server.url, ASKED)
    with WeightPusher(CheckpointSource(site.second), [site.takes], providers=("host", "tcp")) as pusher:
        await asyncio.to_thread(pusher.connect)
        writes = sum(1 for engine in pusher._engines for worker in engine.workers for _ in worker.sends)
    trainer = FORKSERVER.Process(
        target=main_until_killed, args=(site.second, "half", [site.takes], writes // 2)
    )
    trainer.start()
    await asyncio.to_thread(trainer.join)
    assert trainer.exitcode == -signal.SIGKILL
    async with asyncio.timeout(PATIENCE_S):
        while (state := await asyncio.to_thread(site.state)).senders or state.landing:
            pass
    assert (shown(state.served), state.torn) == ("whole", False)
    assert await client.all(site.server.url, ASKED) == before
    expected = await client.all(site.one.url, ASKED)
    await push(site.second, "after", site.takes)
    assert await client.all(site.server.url, ASKED) == expected


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page1"], indirect=True)
async def test_prefill_and_decode_pair_only_with_one_version(pair: Pair, site: Site, client: Client) -> None:
    await push(site.first, "both", site.takes)
    other, expected = await client.all(site.server.url, ASKED), await client.all(site.one.url, ASKED)
    assert await client.all_of_both(pair.prefill, pair.decode, ASKED, at_once=4) == expected
    await at_rest(pair.prefill, pair.decode)
    prefill, decode = pair.takes
    await push(site.first, "both", prefill)
    with pytest.RaisesGroup(httpx.HTTPStatusError):
        await client.both(pair.prefill, pair.decode, ASKED[0])
    await push(site.first, "both", decode)
    assert await client.all_of_both(pair.prefill, pair.decode, ASKED, at_once=4) == other
    await push(site.second, "back", *pair.takes)
    assert await client.all_of_both(pair.prefill, pair.decode, ASKED, at_once=4) == expected
    await at_rest(pair.prefill, pair.decode)


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page1"], indirect=True)
async def test_stream_of_a_pair_goes_on_with_the_new_weights(pair: Pair, site: Site, client: Client) -> None:
    await push(site.second, "before", *pair.takes)
    await push(site.first, "after", site.takes)
    asked = [1, 2, 3]
    room = {"bootstrap_host": HOST, "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": 21}
    half = body(asked, 1, **room)
    prefilled = asyncio.create_task(client.http.post(f"{pair.prefill.url}/generate", json=half))
    async with stream(client, pair.decode, **room) as answers:
        assert (await anext(answers))["meta_info"]["weight_version"] == "before"
        await push(site.first, "after", *pair.takes)
        tokens: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await anext(answers))["meta_info"]["weight_version"] != "after":
                pass
            begin = len(answer["output_ids"])
            while len(tokens := answer["output_ids"]) < begin + 16:
                answer = await anext(answers)
    await prefilled
    # From here on the tokens are those of a server with the new weights.
    expected = await client.generate(site.server.url, [*asked, *tokens[:begin]])
    assert tokens[begin : begin + 16] == expected
    await at_rest(pair.prefill, pair.decode)


@asynccontextmanager
async def stream(
    client: Client, server: SglangServer, **more: Any
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yields the events of a request that does not end by itself. SGLang aborts it at the end."""
    events, asked = Events(), body([1, 2, 3], ENDLESS, stream=True, **more)
    async with client.http.stream("POST", f"{server.url}/generate", json=asked) as answer:
        answer.raise_for_status()
        yield (json.loads(event) async for chunk in answer.aiter_bytes() for event in events.feed(chunk))
