"""Encoder, prefill and decode engine answer as one engine does, also when the encoder engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deployment import Client, assert_quiescent, decode_params, prefill_params, wait_until
from site_of_case import CaseCluster, Models, Site
from test_requests import MESSAGES, PICTURES, Message, chat

from kv_connector.lab.cluster import EngineProcess, LocalCluster
from kv_connector.lab.free_ports import free_ports

pytestmark = pytest.mark.anyio

TEXT = Message(9, ())
SENT = "kv_connector_embeddings_sent_total"
RECEIVED = "kv_connector_embeddings_received_total"
FAILED = "kv_connector_embedding_fetches_failed_total"
IN_USE = "kv_connector_embeddings_in_use"


def encoder_flags(role: str, port: int) -> str:
    """Returns the arguments of an engine's encoder connector."""
    transfer = {
        "ec_connector": "WriteImmEncoderConnector",
        "ec_connector_module_path": "kv_connector.vllm.encoder.connector",
        "ec_role": role,
        "ec_port": port,
        "ec_buffer_size": 1 << 20,
        # Only the death of the encoder engine ends a fetch here.
        "ec_connector_extra_config": {"fetch_timeout": 600},
    }
    return "--ec-transfer-config " + json.dumps(transfer, separators=(",", ":"))


async def encode(client: Client, engine: EngineProcess, message: Message) -> dict[str, Any]:
    """Has the pictures of a message encoded, and returns their announcements."""
    body = {**message.body(), "max_tokens": 1}
    answer = await client.post(f"{engine.url}/v1/chat/completions", body)
    return answer["ec_transfer_params"] or {}


async def past_the_router(
    client: Client, site: Site, message: Message, announced: dict[str, Any]
) -> tuple[list[int], int]:
    """Sends the requests of a router that has announcements. Returns the same as chat()."""
    transfer = uuid.uuid4().hex
    halves = {"ec_transfer_params": announced, "kv_transfer_params": prefill_params(transfer)}
    await client.post(
        f"{site.prefill.url}/v1/chat/completions", {**message.body(), "max_tokens": 1, **halves}
    )
    params = decode_params(transfer, site.prefill)
    return await chat(client, site.decode.url, message, kv_transfer_params=params)


async def runs(client: Client, *engines: EngineProcess) -> list[int]:
    """Returns how often each engine ran its picture encoder since the first call."""
    return [(await client.probe(engine, "probe_encoder_runs"))["runs"] for engine in engines]


async def assert_metric(engine: EngineProcess, name: str, value: float) -> None:
    """Waits until a metric has this value. An engine shows it after its next step."""

    async def differs() -> str:
        found = await asyncio.to_thread(engine.metric, name)
        return "" if found == value else f"{name} of {engine.name} is {found}, not {value}; see {engine.log}"

    await wait_until(differs)


async def wait_for_request(client: Client, router: str, engine: EngineProcess) -> None:
    """Waits until the router has a request at this engine."""
    line = f'kv_connector_router_engine_requests{{engine="{engine.url}"}} 1.0'

    async def missing() -> str:
        return "" if line in await client.get(f"{router}/metrics") else f"{engine.name} has no request"

    await wait_until(missing)


async def test_encoder_prefill_and_decode_engine_answer_as_one_engine(
    models: Models, interpreter: tuple[str, ...], client: Client, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    receives, sends = (encoder_flags(role, port) for role in ("ec_consumer", "ec_producer"))
    case = replace(PICTURES, prefill=replace(PICTURES.prefill, flags=receives))
    with LocalCluster(tmp_path, models["llava"]) as cluster:
        cluster.interpreter = interpreter
        starter = CaseCluster(cluster, case, models)
        encoder = starter.start_engine("encoder", replace(PICTURES.prefill, flags=sends), None)
        site = starter.start(with_alone=True, encoders=[encoder])
        assert site.alone is not None
        computing = (encoder, site.prefill, site.decode)
        assert await runs(client, *computing) == [0, 0, 0]
        ask = partial(chat, client, site.router)
        right = [await chat(client, site.alone.url, message) for message in MESSAGES]
        for message, answer in zip(MESSAGES, right, strict=True):
            assert await ask(message) == answer, message
            await assert_quiescent(client, site.prefill, site.decode)
        assert await asyncio.gather(*map(ask, MESSAGES)) == right
        # Each of the two pictures is encoded once and sent once, however often it is in a prompt.
        assert await runs(client, *computing) == [2, 0, 0]
        await assert_metric(site.prefill, RECEIVED, 2)
        await assert_metric(site.prefill, IN_USE, 0)
        await assert_metric(encoder, SENT, 2)
        await assert_metric(encoder, IN_USE, 0)

        # It dies while a prefill engine waits for an embedding, and while the router waits for its answer.
        fetching, encoding = Message(5, (2,)), Message(5, (3,))
        right = [await chat(client, site.alone.url, message) for message in (fetching, encoding, TEXT)]
        announced = await encode(client, encoder, fetching)
        assert announced
        group = (await client.probe(encoder, "probe_process"))["group"]
        os.killpg(group, signal.SIGSTOP)
        fetched = asyncio.create_task(past_the_router(client, site, fetching, announced))
        encoded = asyncio.create_task(ask(encoding))
        await wait_for_request(client, site.router, encoder)

        async def missing() -> str:
            assert await ask(TEXT) == right[2]  # other requests go on
            found = await asyncio.to_thread(site.prefill.metric, IN_USE)
            return "" if found == 1 else f"{found} embeddings are fetched, not 1; see {site.prefill.log}"

        await wait_until(missing)
        assert not fetched.done()
        os.killpg(group, signal.SIGKILL)
        assert await asyncio.gather(fetched, encoded) == right[:2]
        assert await ask(TEXT) == right[2]
        assert await ask(encoding) == right[1]
        await assert_metric(site.prefill, FAILED, 1)
        await assert_metric(site.prefill, IN_USE, 0)
        assert await runs(client, site.prefill, site.decode) == [2, 0]
        await assert_quiescent(client, site.prefill, site.decode)
