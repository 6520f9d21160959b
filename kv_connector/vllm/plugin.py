"""The ``vllm.general_plugins`` entry point: vLLM calls it in each of its processes, with us in use or not."""

from __future__ import annotations

CONNECTOR = "WriteImmConnector"


def register() -> None:
    """Makes the name WriteImmConnector known to vLLM. Idempotent.

    The one import of vLLM that does not go through internals: that refuses unsupported versions, and that is
    for engines that use the connector, not for every vLLM on the machine. vLLM imports our module when it is
    first used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kv_connector.vllm.connector", CONNECTOR)
