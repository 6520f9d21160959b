"""Shared engines for the tests. Each set starts once per session."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from deployment import (
    DATA_HOST,
    GEMMA3,
    LLAMA,
    SMALL,
    TIMEOUTS,
    CacheShape,
    ModelDeployment,
    engine_settings,
    make_small_llama,
    prefill_settings,
    publishing_events,
)
from otlp import ENVIRONMENT, SpanReceiver

from kv_connector.control.cluster_key import KEY_FILE_VARIABLE, ClusterKey
from kv_connector.lab.cluster import HOST, LocalCluster
from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_gemma3
from kv_connector.protocol.actions import Address

MODELS = ("llama", "gemma3")

collect_ignore = []
if "KVC_DATA_PARALLEL" not in os.environ:
    # Needs fifteen processes at a time, for two minutes: `make test-data-parallel`.
    collect_ignore += ["test_data_parallel.py", "test_data_parallel_weights.py"]
if "KVC_WEIGHT_FAULTS" not in os.environ:
    # Needs another three engines: `make test-weights`.
    collect_ignore += ["test_weights_experts.py"]


@pytest.fixture(scope="session")
def model_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "llama": make_small_llama(directory / "llama"),
        "gemma3": make_gemma3(
            directory / "gemma3",
            layers=GEMMA3.layers,
            full_attention_every=3,
            sliding_window=max(group.window or 0 for group in GEMMA3.groups),
            **SMALL,
        ),
    }


def _start(
    cluster: LocalCluster,
    events: Mapping[str, Path],
    shape: CacheShape,
    providers: tuple[str, ...],
    spans: SpanReceiver,
    *,
    prefill_blocks: int,
    decode_blocks: int,
    timelines: int = 0,
) -> ModelDeployment:
    """Starts P with a small pool, D with a larger one, a plain engine and two routers, without waiting for
    them."""
    extra = {
        "providers": providers,
        "data_host": DATA_HOST,
        "timeouts": TIMEOUTS,
        "timelines": timelines,
    }
    registration, listener = free_ports(2)
    routers = [f"{HOST}:{port}" for port in (registration, listener)]
    publishing = {name: publishing_events(path) for name, path in events.items()}
    prefill = cluster.start_engine(
        "prefill",
        role="kv_producer",
        routers=routers,
        extra=extra,
        settings=prefill_settings(blocks=prefill_blocks),
    )
    decode = cluster.start_engine(
        "decode",
        role="kv_consumer",
        routers=routers,
        extra=extra,
        settings=engine_settings(*publishing["decode"], blocks=decode_blocks),
    )
    plain = cluster.start_engine("plain", settings=engine_settings(*publishing["plain"]))
    engines: dict[str, Any] = {"prefill": [prefill], "decode": [decode]}
    return ModelDeployment(
        shape=shape,
        cluster=cluster,
        plain=plain,
        prefill=prefill,
        decode=decode,
        concurrent=cluster.start_router("router-concurrent", **engines),
        serial=cluster.start_router("router-serial", **engines, dispatch="serial"),
        early=cluster.start_router("router-early", registration=registration),
        listener=Address(HOST, listener),
        spans=spans,
        events=events,
    )


@pytest.fixture(params=MODELS, scope="session")
def deployment(
    request: pytest.FixtureRequest,
    model_directories: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    interpreter: tuple[str, ...],
) -> Iterator[ModelDeployment]:
    """The engines of one model.

    pytest runs all tests of one model before those of the next, so that only one set of engines is up at a
    time, of about 1.5 GB each. The engines are forked. `make test-examples` starts them as users do, which
    takes a minute each.
    """
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    with (
        SpanReceiver().serving() as spans,
        # The path of a socket has at most 107 bytes.
        tempfile.TemporaryDirectory(prefix="kvc-") as sockets,
        LocalCluster(directory, model_directories[name], engine_settings()) as cluster,
    ):
        events = {engine: Path(sockets) / engine for engine in ("plain", "decode")}
        cluster.interpreter = interpreter
        if name == "llama":
            deployment = _start(
                cluster, events, LLAMA, ("host", "tcp"), spans, prefill_blocks=64, decode_blocks=120
            )
        else:
            # This model's engines use a cluster key, keep timelines and send spans. The others do none of
            # this.
            key_file = directory / "key"
            ClusterKey.generate().write(key_file)
            cluster.environment = {KEY_FILE_VARIABLE: str(key_file), **ENVIRONMENT}
            cluster.otlp_traces_endpoint = spans.endpoint
            deployment = _start(
                cluster,
                events,
                GEMMA3,
                ("tcp",),
                spans,
                prefill_blocks=90,
                decode_blocks=160,
                timelines=64,
            )
        cluster.wait_ready()
        cluster.wait_joined(deployment.early, deployment.prefill, deployment.decode)
        yield deployment
