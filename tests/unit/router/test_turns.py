"""The order in which broken streams begin anew."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from router_setup import within

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.streams import turns
from kv_connector.router.streams.turns import Turns

pytestmark = pytest.mark.anyio


async def test_turns_are_granted_in_order_of_arrival_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_AT_ENGINE", 2)
    dead, alike, other = (Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2, 3))
    decode, prefill = Pool(), Pool()
    for engine, model in ((dead, "m"), (alike, "m"), (other, "n")):
        decode.set_usable(engine, True, models=frozenset({model}))
    queue = Turns({Side.PREFILL: prefill, Side.DECODE: decode}, Metrics().waiting_streams)
    begun: list[str] = []
    ends: dict[str, asyncio.Event] = {}

    async def stream(name: str, model: str) -> None:
        ends[name] = asyncio.Event()
        async with queue.turn(dead, model):
            begun.append(name)
            await ends[name].wait()

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(stream(name, name[0])) for name in ("m1", "m2", "m3", "m4", "m5", "n1")
        }
        await settle()
        # A model whose engines are full holds up no other model.
        assert begun == ["m1", "m2", "n1"]
        tasks["m3"].cancel()
        ends["m2"].set()
        await settle()
        assert begun == ["m1", "m2", "n1", "m4"]
        # A stream that leaves gives back its place.
        tasks["m1"].cancel()
        await settle()
        assert begun == ["m1", "m2", "n1", "m4", "m5"]
        for end in ends.values():
            end.set()


async def test_turns_are_bounded_by_the_side_with_fewer_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_AT_ENGINE", 2)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in range(1, 6)]
    queue = Turns(
        {Side.PREFILL: Pool(engines[:1]), Side.DECODE: Pool(engines[1:])}, Metrics().waiting_streams
    )
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await within(stack.enter_async_context(queue.turn(engines[1], None)))
        third = asyncio.ensure_future(stack.enter_async_context(queue.turn(engines[1], None)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


async def test_a_crowd_of_streams_does_not_stop_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arrival, end and departure looks at a few streams, and not at all that wait."""
    looks = 0

    class Counted(turns._Turn):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(turns, "_Turn", Counted)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in range(1, 4)]
    gauge = Metrics().waiting_streams
    queue = Turns({Side.PREFILL: Pool(engines[:1]), Side.DECODE: Pool(engines[1:])}, gauge)

    async def stream() -> None:
        async with queue.turn(engines[1], None):
            await asyncio.sleep(0)

    crowd = [asyncio.ensure_future(stream()) for _ in range(1000)]
    await asyncio.sleep(0)
    for one in crowd[1::2]:
        one.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    assert sum(not one.cancelled() for one in crowd) == 500
    assert looks < 20 * len(crowd)
    assert not queue._waiting
    assert not queue._taken, "an engine that has left takes no memory"
