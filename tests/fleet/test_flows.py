"""Requests as sent by llm-d's sidecar, production-stack, AIBrix and vLLM's toy proxy."""

from __future__ import annotations

from pathlib import Path

import pytest
from deployment import Client
from fleet import OUTPUT, Fleet, assert_as_d_alone
from flows import FLOWS, Flow

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name.replace(" ", "-"))
async def test_tokens_equal_those_of_a_lone_decode_engine(
    fleet: Fleet, client: Client, flow: Flow, tmp_path: Path
) -> None:
    async def ask(one: list[int]) -> list[int]:
        return await flow.ask(client, fleet.prefill, fleet.decode, one, OUTPUT)

    await assert_as_d_alone(client, fleet, tmp_path, ask, concurrent=flow.concurrent)
