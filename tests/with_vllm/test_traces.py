"""The optional records of a request: spans of one trace, and its transfer's timeline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from deployment import Client, ModelDeployment, completion_body, prompt, wait_until
from otlp import Span

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.control.timelines import WorkerTimelines, ask_workers
from kv_connector.lab.cluster import EngineProcess
from kv_connector.protocol.actions import Address

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("deployment", ["gemma3"], indirect=True)]

TOKENS = 500
"""Tokens of the prompt, in chunks of 100."""


async def ask(client: Client, deployment: ModelDeployment) -> tuple[str, list[Span]]:
    """Sends one request through the router. Returns its client's trace id and its spans, once they have
    arrived."""
    trace, span = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    body = completion_body(prompt(trace, TOKENS), 4)
    headers = {"traceparent": f"00-{trace}-{span}-01", "x-request-id": f"of-{trace}"}
    await client.post(f"{deployment.concurrent}/v1/completions", body, headers)
    expected = {"POST /v1/completions", "prefill", "decode", "llm_request", "kv.push", "kv.receive"}

    def spans() -> list[Span]:
        return [span for span in deployment.spans.spans if span.trace == trace]

    async def missing() -> str:
        names = [span.name for span in spans()]
        lacking = expected - set(names)
        if names.count("llm_request") < 2:
            lacking.add("llm_request")
        return f"{lacking} of {names}" if lacking else ""

    await wait_until(missing)
    return trace, spans()


async def test_router_both_engines_and_the_transfer_are_one_trace(
    deployment: ModelDeployment, client: Client
) -> None:
    _, spans = await ask(client, deployment)
    by_name = {span.name: span for span in spans}
    server, prefill, decode = by_name["POST /v1/completions"], by_name["prefill"], by_name["decode"]
    push, receive = by_name["kv.push"], by_name["kv.receive"]
    assert prefill.parent == decode.parent == server.id
    assert {s.parent for s in spans if s.name == "llm_request"} == {prefill.id, decode.id}
    assert (push.parent, receive.parent) == (prefill.id, decode.id)
    transfer = server.attributes["kv.transfer_id"]
    for span in (push, receive):
        assert span.attributes["kv.transfer_id"] == transfer
        assert span.attributes["kv.lane"] == "tcp"
        assert span.attributes["kv.outcome"] == "completed"
        assert span.attributes["kv.pages"] == deployment.shape.pages(TOKENS)
        assert server.begin < span.begin < span.end
    assert push.begin <= push.events["first push"] < push.events["last landing"] <= push.end
    assert receive.events["last landing"] == receive.end < server.end
    assert push.attributes["kv.bytes"] > 0


def recall(engine: EngineProcess, key: ClusterKey, text: str) -> WorkerTimelines:
    assert engine.control_port is not None
    (worker,) = ask_workers([Address(engine.host, engine.control_port)], key, text, 9, 30.0)
    return worker


async def test_a_timeline_has_each_layer_of_each_chunk(deployment: ModelDeployment, client: Client) -> None:
    trace, spans = await ask(client, deployment)
    key = ClusterKey.read(Path(deployment.cluster.environment[KEY_FILE_VARIABLE]))
    prefill, decode = (recall(engine, key, trace) for engine in (deployment.prefill, deployment.decode))
    (sending,), (receiving,) = prefill.recalled.sent, decode.recalled.received
    pages = deployment.shape.pages(TOKENS)
    assert sum(span.pages for span in sending.spans) == receiving.pages == receiving.counts[-1][1] == pages
    assert {span.layer for span in sending.spans} == set(range(deployment.shape.layers))
    assert len(sending.steps) <= TOKENS // 100
    for span in sending.spans:
        assert 0 < span.computed <= span.first_post <= span.last_post <= span.landed
    # The layers of the last chunk follow each other in the model's order.
    last = [span for span in sending.spans if span.computed > sending.steps[-1]]
    assert len({span.computed for span in last}) == deployment.shape.layers
    transfers = {span.attributes["kv.transfer_id"] for span in spans if span.name.startswith("kv.")}
    assert transfers == {sending.about.transfer_id} == {receiving.about.transfer_id}


async def test_the_trace_command_draws_it(
    deployment: ModelDeployment, client: Client, tmp_path: Path
) -> None:
    trace, _ = await ask(client, deployment)
    file = tmp_path / "trace.json"
    engines = [f"{e.host}:{e.control_port}" for e in (deployment.prefill, deployment.decode)]
    key_file = deployment.cluster.environment[KEY_FILE_VARIABLE]
    command = [sys.executable, "-m", "kv_connector.cli.main", "trace", *engines, "--request", f"of-{trace}"]
    command += ["--key-file", key_file, "--output", str(file)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    events = json.loads(file.read_text())["traceEvents"]
    landed = [event for event in events if event["name"] == "landed"]
    computed = [event for event in events if event["name"] == "computed"]
    assert len(landed) == len(computed) > deployment.shape.layers
    assert any(event["name"] == "step" for event in events)
