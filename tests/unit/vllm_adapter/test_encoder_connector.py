"""The encoder connector as vLLM loads and calls it, without engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

from kv_connector.agent.settings import SettingsError
from kv_connector.vllm.encoder import connector as connector_module
from kv_connector.vllm.encoder.connector import WriteImmEncoderConnector, check_encoder_configuration
from kv_connector.vllm.encoder.exposition import EMBEDDING_NAMES
from kv_connector.vllm.encoder.metrics import EmbeddingStats
from kv_connector.vllm.metrics import unregister
from kv_connector.vllm.model.configuration import UnsupportedConfiguration

WIDTH = 8


class HfConfig:
    def to_dict(self) -> dict[str, Any]:
        return {"vision": 1}


def config(role: str, port: int = 0, **parallel: Any) -> Any:
    transfer = ECTransferConfig(
        ec_connector="WriteImmEncoderConnector",
        ec_connector_module_path="kv_connector.vllm.encoder.connector",
        ec_role=role,  # type: ignore[arg-type]
        ec_port=port,
        ec_buffer_size=1 << 16,
        ec_connector_extra_config={"fetch_timeout": 60.0},
    )
    transfer.mm_encoder_output_widths = {"image": WIDTH}
    model = SimpleNamespace(
        architectures=["M"], hf_config=HfConfig(), dtype=torch.bfloat16, is_encoder_decoder=False
    )
    ranks = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "uni",
        "data_parallel_index": 0,
        **parallel,
    }
    return SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=model,
        parallel_config=SimpleNamespace(**ranks),
        weight_transfer_config=None,
    )


class Half:
    """The two instances of one engine."""

    def __init__(self, stack: ExitStack, vllm_config: Any) -> None:
        made = (ECConnectorFactory.create_connector(vllm_config, role) for role in reversed(ECConnectorRole))
        self.worker, self.scheduler = made
        stack.callback(self.scheduler.shutdown)
        stack.callback(self.worker.shutdown)
        self.cache: dict[str, torch.Tensor] = {}

    def step(self, new: list[Any], encodes: dict[str, torch.Tensor]) -> None:
        """Makes the calls of one step, in the order of vLLM."""
        meta = self.scheduler.build_connector_meta(SimpleNamespace(scheduled_new_reqs=new))
        self.worker.bind_connector_metadata(meta)
        if self.worker.is_producer:
            self.worker.start_save_caches(encoder_cache=self.cache)
        if self.worker.is_consumer:
            self.worker.start_load_caches(self.cache)
        for key, embedding in encodes.items():
            self.cache[key] = embedding
            self.worker.save_caches(encoder_cache=self.cache, mm_hash=key)
        output = SimpleNamespace(ec_connector_worker_meta=self.worker.build_connector_worker_meta())
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: 0)
    with ExitStack() as stack:
        yield stack


def numbers(half: Half, awaited: str) -> dict[str, int]:
    """Returns the numbers that an engine has shown once it shows the awaited one, without the zeros."""
    total = EmbeddingStats()
    deadline = time.monotonic() + 60.0
    while awaited not in total.data:
        assert time.monotonic() < deadline
        if (stats := half.scheduler.get_ec_connector_stats()) is not None:
            total.aggregate(stats)
    return {name: number for name, number in total.data.items() if number}


def request(params: Any) -> Any:
    position = SimpleNamespace(offset=0, length=4, get_num_embeds=lambda: 4)
    feature = SimpleNamespace(identifier="a", mm_position=position, modality="image", data=None)
    return SimpleNamespace(request_id="r", req_id="r", mm_features=[feature], ec_transfer_params=params)


def test_vllm_moves_an_embedding_through_the_connector(stack: ExitStack) -> None:
    encoder, prefill = Half(stack, config("ec_producer")), Half(stack, config("ec_consumer"))
    embedding = torch.randn(4, WIDTH).to(torch.bfloat16)
    encoder.step([request(None)], {"a": embedding})
    delayed, params = encoder.scheduler.request_finished(request(None))
    assert not delayed
    assert params is not None
    received = request(params)
    while not prefill.scheduler.ensure_cache_available(received, 0):
        assert prefill.scheduler.take_unavailable_requests() == set()
        prefill.step([], {})
    assert prefill.scheduler.has_cache_item("a")
    prefill.scheduler.update_state_after_alloc(received, 0)
    prefill.step([received], {"b": torch.zeros(1, WIDTH)})
    assert torch.equal(prefill.cache["a"], embedding)
    assert prefill.scheduler.request_finished(received) == (False, None)
    assert not encoder.scheduler.has_cache_item("a")
    assert numbers(encoder, "embeddings_sent") == {"embeddings_stored": 1, "embeddings_sent": 1}
    found = {"embeddings_stored": 1, "embeddings_received": 1}
    assert numbers(prefill, "embeddings_received") == found
    assert prefill.worker.get_ec_connector_stats() is None


def test_unused_encoder_connector_reports_no_numbers(stack: ExitStack) -> None:
    assert Half(stack, config("ec_consumer")).scheduler.get_ec_connector_stats() is None


def test_numbers_of_intervals_become_metrics() -> None:
    connector = WriteImmEncoderConnector
    for _ in range(2):  # an API server may start a second engine
        shown = connector.build_prom_metrics(
            config("ec_consumer"),
            {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
            ["engine"],
            {3: ["3"]},
        )
    total = connector.build_ec_connector_stats({"embeddings_sent": 2, "embeddings_in_use": 4})
    total.aggregate(EmbeddingStats({"embeddings_sent": 1, "embeddings_in_use": 1}))
    assert total.reduce() == {"embeddings_sent": 3, "embeddings_in_use": 1}
    shown.observe(total.data, 3)
    shown.observe({"embeddings_sent": 4, "embeddings_in_use": 0}, 3)
    text = generate_latest().decode()
    unregister(EMBEDDING_NAMES)
    assert 'kv_connector_embeddings_sent_total{engine="3"} 7.0' in text
    assert 'kv_connector_embeddings_in_use{engine="3"} 0.0' in text
    assert 'kv_connector_embedding_fetches_failed_total{engine="3"} 0.0' in text


@pytest.mark.parametrize(
    ("role", "parallel", "named"),
    [
        ("ec_both", {}, "ec_both"),
        ("ec_consumer", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ("ec_consumer", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("ec_consumer", {"nnodes": 2}, "other hosts"),
        ("ec_producer", {"distributed_executor_backend": "ray"}, "Ray"),
    ],
)
def test_unsupported_engine_is_refused_by_name(role: str, parallel: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfiguration, match=named):
        check_encoder_configuration(config(role, **parallel))


def test_unsupported_model_and_new_weights_are_refused_by_name() -> None:
    refused = config("ec_producer")
    refused.model_config.is_encoder_decoder = True
    with pytest.raises(UnsupportedConfiguration, match="cross attention"):
        check_encoder_configuration(refused)
    refused = config("ec_producer")
    refused.weight_transfer_config = object()
    with pytest.raises(UnsupportedConfiguration, match="new weights"):
        check_encoder_configuration(refused)


def test_port_in_use_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}.*Set another ec_port"):
            WriteImmEncoderConnector(config("ec_producer", port), ECConnectorRole.SCHEDULER)
