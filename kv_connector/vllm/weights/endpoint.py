"""The ``vllm.endpoint_plugins`` entry point: the controller of an engine that takes weights.

It adds no route. vLLM loads it in the API server, where the engine can be paused, if VLLM_PLUGINS names it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from kv_connector.vllm.plugin import WEIGHTS

logger = logging.getLogger("kv_connector")


class WeightsEndpoint:
    """The plugin that vLLM calls."""

    name = "kv_connector"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Does nothing: the plugin has no routes."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Starts the controller if the engine takes weights through write_imm.

        Has it seeded if another engine can.

        Raises as the controller does. If the engine has several API servers, the first one runs the
        controller. Its client reaches all engine cores, which pause and label the requests of all servers.
        """
        config = None if engine_client is None else engine_client.vllm_config
        if config is None or getattr(config.weight_transfer_config, "backend", None) != WEIGHTS:
            return
        from kv_connector.vllm.weights.serving import AsyncEngine, start_controller
        from kv_connector.weights.settings import SETTINGS_VARIABLE, weight_settings

        del args
        parallel = config.parallel_config
        server, servers = parallel._api_process_rank, parallel._api_process_count
        if servers > 1 and weight_settings(os.environ, config.device_config.device_type).seed_from:
            raise ValueError(
                f"{SETTINGS_VARIABLE}: seed_from needs one API server, but this engine has {servers}: some "
                "would answer requests before the engine is seeded. Add --api-server-count 1"
            )
        if server > 0:
            logger.info("weights: API server 0 of %d runs the controller of this engine", servers)
            return
        state.kv_connector_weights = await start_controller(AsyncEngine(engine_client), config)
