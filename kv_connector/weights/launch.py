"""Starts the controller of an engine, whatever the engine's program, and has the engine seeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from kv_connector.protocol.actions import Address
from kv_connector.weights.controller import Controller, PausableEngine, VersionOutcome
from kv_connector.weights.metrics import WeightMetrics
from kv_connector.weights.seeding.start_seeding import seed_at_start
from kv_connector.weights.settings import SETTINGS_VARIABLE, WeightSettings


async def launch_controller(
    engine: PausableEngine,
    given: WeightSettings,
    host: str,
    *,
    ranks: int,
    replicas: int = 1,
    dummy: bool,
    ended: Callable[[str, VersionOutcome], None] | None = None,
) -> Controller:
    """Returns when trainers can connect and, with ``seed_from``, the engine is seeded.

    ``host``: address of this machine. ``ranks``: workers of each of the ``replicas`` data-parallel ranks.
    ``dummy``: the engine has no weights, so it must be seeded. ``ended``: as for Controller. Raises
    ValueError if the settings are wrong or the port is in use, and TimeoutError if no worker answers.
    """
    settings = given.agent
    key = settings.key()
    host = settings.host(host, key)
    firsts = [
        Address(host, settings.port(data_parallel_index=index, ranks=ranks, rank=1))
        for index in range(replicas)
    ]
    controller = Controller(engine, firsts, key, WeightMetrics(), settings.agent_timeouts(), ended)
    address = Address(host, settings.control_port)
    try:
        await controller.start(address)
        if given.seed_from:
            # The engine gets no requests before this ends: its tokens are the fleet's from the first one on.
            await asyncio.to_thread(seed_at_start, given.seed_from, address, key, required=dummy)
    except zmq.ZMQError as error:
        controller.close()
        raise ValueError(
            f"the weights controller cannot listen on {address}: {error}. Set control_port in "
            f"{SETTINGS_VARIABLE} to a free port"
        ) from error
    except BaseException:
        controller.close()
        raise
    return controller
