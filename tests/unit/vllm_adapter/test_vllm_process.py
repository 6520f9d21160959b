"""The processes of an engine: a pause that keeps its requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine import async_llm

from kv_connector.vllm.process import pause_keeping_requests


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_pause_that_keeps_requests_is_vllms_own_without_its_sleep(
    monkeypatch: pytest.MonkeyPatch, clear_cache: bool
) -> None:
    """The test compares all calls that this release's pause makes to its engine, in their order."""
    asked: list[tuple[object, ...]] = []

    class Part:
        def __getattr__(self, name: str) -> object:
            async def ask(**arguments: object) -> None:
                asked.append((name, arguments))

            return ask

    class Clock:
        async def sleep(self, seconds: float) -> None:
            asked.append(("sleep", seconds))

    client = SimpleNamespace(renderer=Part(), engine_core=Part())
    monkeypatch.setattr(async_llm, "asyncio", Clock())
    asyncio.run(async_llm.AsyncLLM.pause_generation(client, mode="keep", clear_cache=clear_cache))
    theirs, ours = [*asked], asked
    asked.clear()
    asyncio.run(pause_keeping_requests(client, clear_cache=clear_cache))
    assert [*ours, ("sleep", 0.02)] == theirs
