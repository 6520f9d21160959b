"""The order in which requests of a failed engine begin anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from router_setup import within

from kv_connector.router.engines.breaker import Breaker
from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side
from kv_connector.router.engines.pool import Pool
from kv_connector.router.observe.metrics import Metrics
from kv_connector.router.streams import restarts
from kv_connector.router.streams.restarts import Restarts

pytestmark = pytest.mark.anyio


async def test_turns_are_granted_in_order_of_arrival_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 2)
    dead, alike, other = (Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2, 3))
    decode, prefill = Pool(), Pool()
    for engine, model in ((dead, "m"), (alike, "m"), (other, "n")):
        decode.set_usable(engine, True, models=frozenset({model}))
    queue = Restarts({Side.PREFILL: prefill, Side.DECODE: decode}, Metrics().waiting_streams)
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
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 2)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in range(1, 6)]
    queue = Restarts(
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


def _join(pool: Pool) -> None:
    pool.set_usable(OTHER, True, models=frozenset({"m"}))


def _learn(pool: Pool) -> None:
    pool.set_usable(OTHER, True, models=frozenset({"n"}))
    pool.set_usable(OTHER, True, models=frozenset({"n", "m"}))


def _recover(pool: Pool) -> None:
    breaker = Breaker()
    pool.set_usable(OTHER, True, breaker=breaker, models=frozenset({"m"}))
    while not breaker.open:
        breaker.failed(0.0)
    pool.set_usable(OTHER, True, models=frozenset({"m"}))
    breaker.close()
    pool.set_usable(OTHER, True, models=frozenset({"m"}))


OTHER = Endpoint.parse("http://10.0.0.9:8000")


@pytest.mark.parametrize("change", [_join, _learn, _recover])
async def test_turn_is_granted_when_an_engine_comes(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Pool], None]
) -> None:
    """No other request ends meanwhile."""
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 1)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2)]
    decode = Pool(engines)
    queue = Restarts({Side.PREFILL: Pool(), Side.DECODE: decode}, Metrics().waiting_streams)
    async with contextlib.AsyncExitStack() as stack:
        await within(stack.enter_async_context(queue.turn(engines[0], "m")))
        second = asyncio.ensure_future(stack.enter_async_context(queue.turn(engines[0], "m")))
        await asyncio.sleep(0)
        assert not second.done()
        change(decode)
        await within(second)


async def test_turn_is_granted_when_the_full_side_has_no_engine_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode engines compute the prompts from then on."""
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 1)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2, 3, 4)]
    prefill = Pool(engines[:1])
    queue = Restarts({Side.PREFILL: prefill, Side.DECODE: Pool(engines[1:])}, Metrics().waiting_streams)
    async with contextlib.AsyncExitStack() as stack:
        await within(stack.enter_async_context(queue.turn(engines[1], None)))
        second = asyncio.ensure_future(stack.enter_async_context(queue.turn(engines[1], None)))
        await asyncio.sleep(0)
        assert not second.done()
        prefill.remove(engines[0], lost=False)
        await within(second)


async def test_turn_may_end_before_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 1)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2)]
    queue = Restarts({Side.PREFILL: Pool(), Side.DECODE: Pool(engines)}, Metrics().waiting_streams)
    async with contextlib.AsyncExitStack() as stack:
        end = await within(stack.enter_async_context(queue.turn(engines[0], None)))
        second = asyncio.ensure_future(stack.enter_async_context(queue.turn(engines[0], None)))
        await asyncio.sleep(0)
        assert not second.done()
        end()
        await within(second)
        end()  # ends no other turn
        assert sum(queue._taken.values()) == 1


async def test_requests_for_models_that_no_engine_serves_wait_in_one_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each arrival and end looks at every queue, and a client may name another model in each request."""
    monkeypatch.setattr(restarts, "MOST_AT_ENGINE", 1)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in (1, 2)]
    decode = Pool()
    for engine in engines:
        decode.set_usable(engine, True, models=frozenset({"m"}))
    queue = Restarts({Side.PREFILL: Pool(), Side.DECODE: decode}, Metrics().waiting_streams)
    begun: list[str] = []

    async def request(model: str) -> None:
        async with queue.turn(engines[0], model):
            begun.append(model)

    async with contextlib.AsyncExitStack() as stack:
        await within(stack.enter_async_context(queue.turn(engines[0], "m")))
        crowd = [asyncio.ensure_future(request(f"none {number}")) for number in range(10)]
        await asyncio.sleep(0)
        assert len(queue._waiting) == 1
    await within(asyncio.gather(*crowd))
    assert begun == [f"none {number}" for number in range(10)]


async def test_a_crowd_of_streams_does_not_stop_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each arrival, end and departure looks at a few streams, and not at all that wait."""
    looks = 0

    class Counted(restarts._Turn):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(restarts, "_Turn", Counted)
    engines = [Endpoint.parse(f"http://10.0.0.{number}:8000") for number in range(1, 4)]
    gauge = Metrics().waiting_streams
    queue = Restarts({Side.PREFILL: Pool(engines[:1]), Side.DECODE: Pool(engines[1:])}, gauge)

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
