"""The ``vllm.endpoint_plugins`` entry point: the controller of an engine that takes weights.

It adds no route. vLLM loads it in the API server, where the engine can be paused, if VLLM_PLUGINS names it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import zmq

from kv_connector.protocol.actions import Address
from kv_connector.vllm.plugin import WEIGHTS

logger = logging.getLogger("kv_connector")


class _Client:
    """vLLM's engine client, with the operations that the controller needs."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def pause(self) -> None:
        from kv_connector.vllm.process import pause_keeping_requests

        # Frozen requests are computed anew with the new weights, and so are cached prefixes.
        await pause_keeping_requests(self._client)

    async def update(self, version: str) -> None:
        from kv_connector.vllm.internals import WeightTransferUpdateRequest

        await self._client.start_weight_update()
        try:
            await self._client.update_weights(WeightTransferUpdateRequest({"version": version}))
        finally:
            await self._client.finish_weight_update()

    async def label(self, version: str) -> None:
        await self._client.update_weight_version(version)

    async def resume(self) -> None:
        await self._client.resume_generation()


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
        config = None if engine_client is None else engine_client.vllm_config.weight_transfer_config
        if config is None or config.backend != WEIGHTS:
            return
        from kv_connector.vllm.process import adopt_vllm_logging, default_host
        from kv_connector.weights.controller import Controller
        from kv_connector.weights.metrics import WeightMetrics
        from kv_connector.weights.seed import seed_at_start
        from kv_connector.weights.settings import SETTINGS_VARIABLE, weight_settings

        del args
        adopt_vllm_logging()
        device = engine_client.vllm_config.device_config.device_type
        given = weight_settings(os.environ, device)
        settings = given.agent
        key = settings.key()
        host = settings.host(default_host(), key)
        parallel = engine_client.vllm_config.parallel_config
        server, servers = parallel._api_process_rank, parallel._api_process_count
        if given.seed_from and servers > 1:
            raise ValueError(
                f"{SETTINGS_VARIABLE}: seed_from needs one API server, but this engine has {servers}: some "
                "would answer requests before the engine is seeded. Add --api-server-count 1"
            )
        if server > 0:
            logger.info("weights: API server 0 of %d runs the controller of this engine", servers)
            return
        if parallel.data_parallel_size_local != parallel.data_parallel_size:
            raise ValueError(
                f"weights reach all data-parallel ranks of an engine through one API server, but only "
                f"{parallel.data_parallel_size_local} of {parallel.data_parallel_size} ranks run on its "
                "host. Run all ranks on one host, without --data-parallel-rank and "
                "--data-parallel-hybrid-lb, or start several engines"
            )
        firsts = [
            Address(host, settings.port(data_parallel_index=index, ranks=parallel.world_size, rank=1))
            for index in range(parallel.data_parallel_size)
        ]
        timeouts = settings.agent_timeouts()
        controller = Controller(_Client(engine_client), firsts, key, WeightMetrics(), timeouts)
        address = Address(host, settings.control_port)
        try:
            await controller.start(address)
        except zmq.ZMQError as error:
            raise ValueError(
                f"the weights controller cannot listen on {address}: {error}. Set control_port in "
                f"{SETTINGS_VARIABLE} to a free port"
            ) from error
        state.kv_connector_weights = controller
        if given.seed_from:
            # The engine gets no requests before this ends: its tokens are the fleet's from the first one on.
            dummy = engine_client.vllm_config.load_config.load_format == "dummy"
            await asyncio.to_thread(seed_at_start, given.seed_from, address, key, required=dummy)
