"""The ``vllm.general_plugins`` entry point, which vLLM calls in each process, also without this connector."""

from __future__ import annotations

import os
import sys

CONNECTOR = "WriteImmConnector"
WEIGHTS = "write_imm"
KEEP_CACHE = "kv_connector_keep_cache"
"""The utility of vLLM's engine core that keeps its KV cache over an update (kept_cache.py)."""

_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_PREFIX = "KV_CONNECTOR_"


def register() -> None:
    """Registers WriteImmConnector, and write_imm for weights, with vLLM. Idempotent.

    This import of vLLM bypasses internals, which refuses unsupported versions. The refusal is for engines
    that use the connector, not for every vLLM on the machine. vLLM imports the connector's module when it is
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
    _copy_variables_to_ray_workers()
    _replace_expert_exchange()
    _keep_cache_over_updates()
    _register_with_dynamo()


def _copy_variables_to_ray_workers() -> None:
    """Has vLLM copy this package's variables to the workers that it starts as Ray actors.

    vLLM calls register() in the engine core before it starts workers, and reads this list when it starts
    them. A worker without the variables would use other ports, and no cluster key.
    """
    given = [prefix for prefix in os.environ.get(_PREFIXES, "").split(",") if prefix.strip()]
    if _PREFIX not in given:
        os.environ[_PREFIXES] = ",".join([*given, _PREFIX])


def _replace_expert_exchange() -> None:
    """Imports nothing if the variable is not set: an API server would pay for the import."""
    if os.environ.get("KV_CONNECTOR_MOE") == "1":
        from kv_connector.vllm.experts.manager import replace_exchange

        replace_exchange()


def _keep_cache_over_updates() -> None:
    """Imports nothing if the setting is not given, for the same reason."""
    if '"clear_cache"' in os.environ.get("KV_CONNECTOR_WEIGHTS", ""):
        from kv_connector.vllm.kept_cache import install

        install(KEEP_CACHE)


def _register_with_dynamo() -> None:
    """Adds the connector to the table of Dynamo's worker, which refuses connectors that are not in it.

    The table names the protocol between P and D. It is that of NIXL's connector, because D needs only P's
    answer. Only Dynamo's worker has the module loaded.
    """
    protocols = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    if protocols is not None:
        protocols.KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR, protocols.NixlConnectorProtocol)
