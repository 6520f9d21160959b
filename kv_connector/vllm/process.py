"""The processes of an engine: ranks, addresses, connectors, the pause and the log."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kv_connector.vllm.internals import (
    KVConnectorBase_V1,
    get_ip,
    get_kv_transfer_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_world_group,
    has_kv_transfer_group,
    release,
)


def pipeline_and_tensor_parallel_rank() -> tuple[int, int]:
    return int(get_pp_group().rank_in_group), int(get_tensor_model_parallel_rank())


def default_host() -> str:
    """Returns VLLM_HOST_IP, else the address of the interface that leads outside, else loopback."""
    host: str = get_ip()
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def worker_connectors() -> list[KVConnectorBase_V1]:
    """Returns this worker's KV connectors, also those within a MultiConnector."""
    return connectors_within(get_kv_transfer_group()) if has_kv_transfer_group() else []


def connectors_within(connector: Any) -> list[KVConnectorBase_V1]:
    """Returns vLLM's connector and, if it is a MultiConnector, the connectors within it."""
    return [connector, *getattr(connector, "_connectors", ())]


def gather_from_workers(value: Any) -> list[Any]:
    """Gathers a value of each of this engine's workers, by rank. All workers must call it."""
    values = [None] * get_world_group().world_size
    torch.distributed.all_gather_object(values, value, group=get_world_group().cpu_group)
    return values


async def pause_keeping_requests(client: Any, *, clear_cache: bool) -> None:
    """Pauses as ``client.pause_generation(mode="keep", clear_cache=...)`` does, without the sleep of 20 ms
    at the end.

    The sleep lets the caller see outputs in their order. All clients wait for these.
    """
    if clear_cache:
        await client.renderer.clear_mm_cache_async()
    await getattr(client.engine_core, release.PAUSE)(mode="keep", clear_cache=clear_cache)


def adopt_vllm_logging() -> None:
    """Sends this project's log lines where vLLM sends its own. No other code configures its logging there."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kv_connector")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
