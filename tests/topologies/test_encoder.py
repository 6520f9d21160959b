"""Encoder, prefill and decode engine answer as one engine does, also after the encoder engine has died."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployment import Client, assert_quiescent, decode_params, prefill_params
from site_of_case import CaseCluster, Models, Site
from test_requests import MESSAGES, PICTURES, Message, chat

from kv_connector.lab.cluster import Engine, LocalCluster
from kv_connector.lab.free_ports import free_ports

pytestmark = pytest.mark.anyio


def encoder_flags(role: str, port: int) -> str:
    """Returns the arguments of an engine's encoder connector."""
    transfer = {
        "ec_connector": "WriteImmEncoderConnector",
        "ec_connector_module_path": "kv_connector.vllm.encoder.connector",
        "ec_role": role,
        "ec_port": port,
        "ec_buffer_size": 1 << 20,
    }
    return "--ec-transfer-config " + json.dumps(transfer, separators=(",", ":"))


async def encode(client: Client, url: str, message: Message) -> dict[str, Any]:
    """Has the pictures of a message encoded, and returns their announcements."""
    body = {**message.body(), "max_tokens": 1}
    answer = await client.post(f"{url}/v1/chat/completions", body)
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
        site = starter.start(with_alone=True)
        assert site.alone is not None
        for engine in (site.prefill, site.decode):
            await client.probe(engine, "probe_encoder_runs")
        right = [await chat(client, site.alone.url, message) for message in MESSAGES]
        for message, answer in zip(MESSAGES, right, strict=True):
            announced = await encode(client, encoder.url, message)
            assert len(announced) == len(message.pictures)
            got = await past_the_router(client, site, message, announced)
            assert got == answer, message
            await assert_quiescent(client, site.prefill, site.decode)
        assert await runs(client, site.prefill, site.decode) == [0, 0]
        last = Message(5, (2,))
        announced = await encode(client, encoder.url, last)
        assert announced
        encoder.kill()
        right_last = await chat(client, site.alone.url, last)
        assert await past_the_router(client, site, last, announced) == right_last
        assert await runs(client, site.prefill, site.decode) == [1, 0]
        await assert_quiescent(client, site.prefill, site.decode)


async def runs(client: Client, *engines: Engine) -> list[int]:
    """Returns how often each engine ran its picture encoder."""
    return [(await client.probe(engine, "probe_encoder_runs"))["runs"] for engine in engines]
