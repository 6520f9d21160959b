"""Requests to P and D of routers that no package index offers: replays of their bodies.

The fields are those that the projects' sources build, for a P whose control port is known.
tests/unit/vllm_adapter/test_dialects.py names the commits.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deployment import Client, completion_body

from kv_connector.lab.cluster import HOST, EngineProcess

Params = dict[str, Any]

OF_NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


@dataclass(frozen=True)
class Flow:
    name: str
    concurrent: bool
    """Whether P and D are requested at once."""
    to_prefill: Callable[[str], Params]
    """Function of a new id."""
    to_decode: Callable[[str, EngineProcess, Params], Params]
    """Function of the id, of P, and of P's answer (empty if both are requested at once)."""
    beside: Params = field(default_factory=dict)
    """Fields of P's body beyond vLLM's own field for one token."""

    async def ask(
        self,
        client: Client,
        prefill: EngineProcess,
        decode: EngineProcess,
        prompt: list[int],
        max_tokens: int,
    ) -> list[int]:
        fresh = str(uuid.uuid1())
        body = completion_body(prompt, 1, kv_transfer_params=self.to_prefill(fresh), **self.beside)
        prefilling = asyncio.create_task(client.post(f"{prefill.url}/v1/completions", body))
        try:
            answered = {} if self.concurrent else (await prefilling)["kv_transfer_params"]
            params = self.to_decode(fresh, prefill, answered)
            return await client.complete(decode.url, prompt, max_tokens, kv_transfer_params=params)
        finally:
            await prefilling


def _answer(_: str, __: EngineProcess, answered: Params) -> Params:
    return answered


def _answer_with_host(_: str, prefill: EngineProcess, answered: Params) -> Params:
    return {**answered, "remote_host": prefill.host}


def _moriio(host: str, handshake_port: int, fresh: str) -> Params:
    """Returns what both halves report of the other side in llm-d's moriio mode."""
    return {
        "remote_host": host,
        "remote_notify_port": 61005,
        "remote_dp_rank": 0,
        "remote_dp_rank_override": True,
        "remote_handshake_port": handshake_port,
        "transfer_id": f"tx{fresh}",
        "tp_size": 1,
        "remote_dp_size": 1,
    }


def _moriio_to_prefill(fresh: str) -> Params:
    return {**OF_NIXL, **_moriio(HOST, 6301, fresh)}


def _moriio_to_decode(fresh: str, prefill: EngineProcess, _: Params) -> Params:
    assert prefill.control_port is not None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{prefill.host}:{prefill.control_port}",
        "remote_block_ids": [],
        "remote_port": prefill.control_port,
        **_moriio(prefill.host, prefill.control_port, fresh),
    }


def _offloading_to_prefill(fresh: str) -> Params:
    return {"remote_decoder": {"kv_request_id": fresh}}


def _offloading_to_decode(fresh: str, prefill: EngineProcess, _: Params) -> Params:
    where = {"remote_host": prefill.host, "remote_port": prefill.control_port}
    return {"remote_prefiller": {"kv_request_id": fresh, **where}}


FLOWS = (
    Flow("toy proxy of vLLM", False, lambda _: OF_NIXL, _answer),
    Flow("llm-d nixlv2", False, lambda _: OF_NIXL, _answer),
    Flow("llm-d nixlv2 moriio", True, _moriio_to_prefill, _moriio_to_decode),
    # v0.10 requests P and D at once. Later versions request D after P.
    Flow("llm-d offloading", True, _offloading_to_prefill, _offloading_to_decode),
    Flow("llm-d offloading, D after P", False, _offloading_to_prefill, _offloading_to_decode),
    Flow("production-stack orchestrated", False, lambda _: OF_NIXL, _answer_with_host),
    Flow("AIBrix shfs", False, lambda _: OF_NIXL, _answer_with_host, {"max_completion_tokens": 1}),
)
