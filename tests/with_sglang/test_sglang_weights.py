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
from site_of_servers import Client, Pair, at_rest, body, metrics, prompts, sent, taking_weights
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
START_S = 600.0
"""Time in which a client waits for a server that starts."""
PROMPT = [1, 2, 3]
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


def state_of(takes: str) -> State:
    """Returns the state of the server that takes weights at this address."""
    with questions(None) as links:
        host, _, port = takes.rpartition(":")
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


async def push_until_killed(checkpoint: Path, version: str, takes: str) -> None:
    """Pushes to this server, from a process that is killed after half of its writes."""
    with WeightPusher(CheckpointSource(checkpoint), [takes], providers=("host", "tcp")) as pusher:
        await asyncio.to_thread(pusher.connect)
        writes = sum(1 for engine in pusher._engines for worker in engine.workers for _ in worker.sends)
    trainer = FORKSERVER.Process(target=main_until_killed, args=(checkpoint, version, [takes], writes // 2))
    trainer.start()
    await asyncio.to_thread(trainer.join)
    assert trainer.exitcode == -signal.SIGKILL


async def version_of(takes: str) -> str:
    """Returns the version that a server has once it has noticed that its trainer has died."""
    async with asyncio.timeout(PATIENCE_S):
        while (state := await asyncio.to_thread(state_of, takes)).senders or state.landing:
            pass
    assert not state.torn
    return shown(state.served)


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
    await push_until_killed(site.second, "half", site.takes)
    assert await version_of(site.takes) == "whole"
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
    async with pair_stream(client, pair, room=21) as answers:
        assert (await anext(answers))["meta_info"]["weight_version"] == "before"
        await push(site.first, "after", *pair.takes)
        await continues(answers, "after", client, site.server)
    await at_rest(pair.prefill, pair.decode)


async def continues(
    answers: AsyncIterator[dict[str, Any]], version: str, client: Client, one: SglangServer
) -> None:
    """Checks that a stream goes on with this version: with the tokens of `one`, a server that has it."""
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await anext(answers))["meta_info"]["weight_version"] != version:
            pass
        begin = len(answer["output_ids"])
        while len(tokens := answer["output_ids"]) < begin + 16:
            answer = await anext(answers)
    expected = await client.generate(one.url, [*PROMPT, *tokens[:begin]])
    assert tokens[begin : begin + 16] == expected


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page1"], indirect=True)
async def test_abort_ends_a_request_that_is_held_over_a_pause(pair: Pair, client: Client) -> None:
    async with pair_stream(client, pair, room=22, rid="held") as answers:
        await anext(answers)
        (transfers, _) = await sent(pair.prefill)
        await order(client, pair.decode, "pause_generation", mode="retract")
        await order(client, pair.decode, "abort_request", rid="held")
        async with asyncio.timeout(PATIENCE_S):
            last = [answer async for answer in answers][-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    await order(client, pair.decode, "continue_generation")
    await at_rest(pair.prefill, pair.decode)
    assert (await sent(pair.prefill))[0] == transfers, "the prefill server has computed it again"


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page1"], indirect=True)
async def test_trainer_that_is_killed_between_prefill_and_decode(
    pair: Pair, client: Client, llama: Path
) -> None:
    await push(llama, "whole", *pair.takes)
    expected = await client.both(pair.prefill, pair.decode, ASKED[0])
    await push(llama, "half", pair.takes[0])
    await push_until_killed(llama, "half", pair.takes[1])
    assert [await version_of(takes) for takes in pair.takes] == ["half", "whole"]
    with pytest.RaisesGroup(httpx.HTTPStatusError) as raised:
        await client.both(pair.prefill, pair.decode, ASKED[0])
    (error,) = raised.value.exceptions
    assert isinstance(error, httpx.HTTPStatusError)
    assert "weights: prefill engine has half, decode engine has whole" in error.response.text
    await at_rest(pair.prefill, pair.decode)
    await push(llama, "after", *pair.takes)
    assert await client.both(pair.prefill, pair.decode, ASKED[0]) == expected
    await at_rest(pair.prefill, pair.decode)


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page1"], indirect=True)
async def test_restarted_prefill_server_computes_held_requests_again(
    pair: Pair, one: SglangServer, llama: Path
) -> None:
    patient = Client(httpx.AsyncClient(timeout=START_S))
    async with pair_stream(patient, pair, room=23, rid="recomputed") as answers:
        before = (await anext(answers))["meta_info"]["weight_version"]
        await order(patient, pair.decode, "pause_generation", mode="retract")
        pair.prefill = await asyncio.to_thread(pair.cluster.restart, pair.prefill)
        await asyncio.to_thread(pair.cluster.wait_ready, pair.prefill)
        await push(llama, "restarted", *pair.takes)
        await continues(answers, "restarted", patient, one)
        await order(patient, pair.decode, "abort_request", rid="recomputed")
        last = [answer async for answer in answers][-1]
    spans = last["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, "restarted"]
    await at_rest(pair.prefill, pair.decode)


async def order(client: Client, server: SglangServer, endpoint: str, **more: str) -> None:
    (await client.http.post(f"{server.url}/{endpoint}", json=more)).raise_for_status()


@asynccontextmanager
async def pair_stream(
    client: Client, pair: Pair, *, room: int, **more: Any
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Does the same as stream(), with a prefill and a decode server."""
    where = {"bootstrap_host": HOST, "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": room}
    half = body(PROMPT, 1, **where)
    prefilled = asyncio.create_task(client.http.post(f"{pair.prefill.url}/generate", json=half))
    async with stream(client, pair.decode, **where, **more) as answers:
        yield answers
    await prefilled


@asynccontextmanager
async def stream(
    client: Client, server: SglangServer, **more: Any
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Yields the events of a request that does not end by itself. SGLang aborts it at the end."""
    events, asked = Events(), body(PROMPT, ENDLESS, stream=True, **more)
    async with client.http.stream("POST", f"{server.url}/generate", json=asked) as answer:
        answer.raise_for_status()
        yield (json.loads(event) async for chunk in answer.aiter_bytes() for event in events.feed(chunk))
