"""Imports of vLLM's encoder-cache connectors, which only engines with such a connector load."""

from __future__ import annotations

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import get_encoder_output_width
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

__all__ = [
    "ECConnectorBase",
    "ECConnectorMetadata",
    "ECConnectorPromMetrics",
    "ECConnectorRole",
    "ECConnectorStats",
    "ECConnectorWorkerMetadata",
    "PlaceholderMetadataResolver",
    "get_encoder_output_width",
]
