"""The ``vllm.general_plugins`` entry point: vLLM calls it in each of its processes, with us in use or not."""

from __future__ import annotations

import os
import sys

CONNECTOR = "WriteImmConnector"
WEIGHTS = "write_imm"


def register() -> None:
    """Makes the names WriteImmConnector, and write_imm for weights, known to vLLM. Idempotent.

    The one import of vLLM that does not go through internals: that refuses unsupported versions, and that is
    for engines that use the connector, not for every vLLM on the machine. vLLM imports our module when it is
    first used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kv_connector.vllm.connector", CONNECTOR)
    if WEIGHTS not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHTS, "kv_connector.vllm.weights.backend", "WriteImmWeightTransferEngine"
        )
    _replace_expert_exchange()
    _register_with_dynamo()


def _replace_expert_exchange() -> None:
    """Imports nothing where the variable is not set: an API server would pay for the import."""
    if os.environ.get("KV_CONNECTOR_MOE") == "1":
        from kv_connector.vllm.experts.manager import replace_exchange

        replace_exchange()


def _register_with_dynamo() -> None:
    """Dynamo's worker refuses connectors that are not in a table of its own, of what P and D get: with ours
    what they get with NIXL's, as what P answers is all that D needs. Only that worker has it loaded.
    """
    protocols = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    if protocols is not None:
        protocols.KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR, protocols.NixlConnectorProtocol)
