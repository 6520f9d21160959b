"""WriteImmEncoderConnector: vLLM's encoder-cache connector over the transfer engine. Experimental.

vLLM loads it with ``--ec-transfer-config``, whose ``ec_connector_module_path`` names this module. The
scheduler's process has the arena and the transfer engine, and the workers map the arena.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import zmq

from kv_connector.agent.settings import SettingsError
from kv_connector.protocol.session.fingerprint import engine_fingerprint, model_identity
from kv_connector.protocol.wire.messages import Fingerprint
from kv_connector.vllm.encoder.arena import EmbeddingArena
from kv_connector.vllm.encoder.consumer import ConsumerScheduler
from kv_connector.vllm.encoder.internals import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
    PlaceholderMetadataResolver,
    get_encoder_output_width,
)
from kv_connector.vllm.encoder.metadata import EncoderMetadata, Loaded
from kv_connector.vllm.encoder.metrics import EmbeddingMetrics, EmbeddingReporter, EmbeddingStats
from kv_connector.vllm.encoder.producer import ProducerScheduler
from kv_connector.vllm.encoder.receiver import EmbeddingReceiver
from kv_connector.vllm.encoder.sender import EmbeddingSender
from kv_connector.vllm.encoder.settings import parse_encoder_settings
from kv_connector.vllm.encoder.worker import EncoderWorker
from kv_connector.vllm.internals import VLLM_VERSION, current_platform, get_tensor_model_parallel_rank
from kv_connector.vllm.model.configuration import UnsupportedConfiguration
from kv_connector.vllm.process import adopt_vllm_logging, default_host

logger = logging.getLogger(__name__)


class WriteImmEncoderConnector(ECConnectorBase):  # type: ignore[misc]
    """One instance for the scheduler, and one for each worker."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        adopt_vllm_logging()
        check_encoder_configuration(vllm_config)
        self._worker: EncoderWorker | None = None
        self._producer: ProducerScheduler | None = None
        self._consumer: ConsumerScheduler | None = None
        self._reporter: EmbeddingReporter | None = None
        self._ends: EmbeddingSender | EmbeddingReceiver | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._start_scheduler(vllm_config)

    def _start_scheduler(self, vllm_config: Any) -> None:
        transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
        settings = parse_encoder_settings(transfer.ec_connector_extra_config)
        link = settings.link(transfer.engine_id, default_host(), _fingerprint(vllm_config))
        if link.key is None:
            logger.warning(
                "NO CLUSTER KEY: any process that reaches the encoder connector on %s can read and write its "
                "embeddings. Set control_key_file.",
                link.data_host,
            )
        arena = EmbeddingArena("kvc-embeddings", int(transfer.ec_buffer_size))
        itemsize = vllm_config.model_config.dtype.itemsize
        if self.is_producer:
            port = transfer.ec_port + parallel.data_parallel_index
            wanted = settings.address(default_host(), port)
            sender = EmbeddingSender(link, arena)
            try:
                address = sender.start(wanted)
            except zmq.ZMQError as error:
                raise SettingsError(
                    f"the encoder connector cannot listen on {wanted}: {error}. Set another ec_port, or "
                    "control_host"
                ) from error
            logger.info("encoder: embeddings are served at %s", address)
            self._ends = sender
            self._producer = ProducerScheduler(
                arena, address, lambda modality: get_encoder_output_width(vllm_config, modality) * itemsize
            )
        else:
            resolver = PlaceholderMetadataResolver(vllm_config.model_config)
            receiver = EmbeddingReceiver(link, arena)
            self._ends = receiver
            self._consumer = ConsumerScheduler(
                arena,
                receiver,
                row_unit=itemsize,
                timeout=settings.timeout,
                workers=parallel.tensor_parallel_size,
                has_input=lambda feature: _has_input(feature, resolver),
            )

        self._reporter = EmbeddingReporter(arena, self._ends.counts)

    def shutdown(self) -> None:
        if self._ends is not None:
            self._ends.close()

    # --- Worker side

    def start_save_caches(self, **kwargs: Any) -> None:
        self._own_worker().save_cached(self._metadata(), kwargs["encoder_cache"])

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer:  # model runner V1 calls it on prefill engines, too
            self._own_worker().save(encoder_cache, mm_hash)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._own_worker().load(self._metadata(), encoder_cache)

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.take_loaded()

    def _own_worker(self) -> EncoderWorker:
        """Made with the first step, when ranks and devices are set."""
        if self._worker is None:
            device = torch.device(current_platform.device_type)
            if device.type == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            saves = get_tensor_model_parallel_rank() == 0
            self._worker = EncoderWorker(self._vllm_config.model_config.dtype, device, saves=saves)
        return self._worker

    def _metadata(self) -> EncoderMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EncoderMetadata)
        return metadata

    # --- Metrics

    def get_ec_connector_stats(self) -> EmbeddingStats | None:
        return None if self._reporter is None else self._reporter.take()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EmbeddingStats:
        return EmbeddingStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EmbeddingMetrics:
        return EmbeddingMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- Scheduler side

    def has_cache_item(self, identifier: str) -> bool:
        return self._consumer is not None and self._consumer.has(identifier)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._consumer is None or self._consumer.available(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return set() if self._consumer is None else self._consumer.take_unavailable()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._consumer is not None:
            self._consumer.load(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        if self._producer is not None:
            new = scheduler_output.scheduled_new_reqs
            return self._producer.plan((request.req_id, request.mm_features) for request in new)
        assert self._consumer is not None
        return self._consumer.plan()

    def update_connector_output(self, connector_output: Any) -> None:
        loaded = connector_output.ec_connector_worker_meta
        if self._consumer is not None and isinstance(loaded, Loaded):
            self._consumer.loaded(loaded)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._producer is not None:
            return False, self._producer.finished(request.request_id)
        if self._consumer is not None:
            self._consumer.finished(request.request_id)
        return False, None


def check_encoder_configuration(vllm_config: Any) -> None:
    """Raises UnsupportedConfiguration for engines whose embeddings cannot be transferred correctly."""
    transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
    problem = None
    if transfer.is_ec_producer and transfer.is_ec_consumer:
        problem = "ec_role ec_both. Set ec_producer on encoder engines and ec_consumer on prefill engines"
    elif vllm_config.model_config.is_encoder_decoder:
        problem = "models whose decoder reads the encoder's output by cross attention"
    elif parallel.pipeline_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problem = "pipeline parallelism and prefill context parallelism. Use tensor parallelism"
    elif parallel.nnodes > 1 or parallel.distributed_executor_backend not in (None, "mp", "uni"):
        problem = "workers on other hosts or in Ray. Use --distributed-executor-backend mp on one host"
    elif vllm_config.weight_transfer_config is not None:
        problem = "new weights while it runs: embeddings of older weights would be used. Leave them out"
    if problem is not None:
        raise UnsupportedConfiguration(f"WriteImmEncoderConnector does not support {problem}.")


def _fingerprint(vllm_config: Any) -> Fingerprint:
    model = vllm_config.model_config
    identity = model_identity(model.architectures, model.hf_config.to_dict())
    return engine_fingerprint(f"vllm {VLLM_VERSION}", identity, str(model.dtype))


def _has_input(feature: Any, resolver: Any) -> bool:
    """Whether the request has the picture, or only the shape of its embedding."""
    if not feature.data:
        return False
    shape_only = resolver.fields_for(feature.modality)
    return any(value.data is not None for key, value in feature.data.items() if key not in shape_only)
