"""Events and messages awaited in an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from kv_connector.engine import DomainConfig, EngineConfig, EventKind
from kv_connector.engine.aio import AsyncEvents
from kv_connector.engine.transfer_engine import SharedMemory, TransferEngine

LIMIT = 30.0


class Loopback:
    """A transfer engine that is its own peer."""

    def __init__(self) -> None:
        self.engine = TransferEngine(EngineConfig("engine", [DomainConfig("sim")]))
        self.memory = SharedMemory("test", 4096)
        self.region = self.engine.register_buffer(self.memory)
        offer = self.engine.offer("itself")
        answer = self.engine.accept("itself", offer.data)
        self.engine.complete(offer.peer, answer.data)
        self.peer, self.mirror = offer.peer, answer.peer
        self.target = self.engine.import_region(self.peer, self.engine.region_descriptor(self.region))

    def write(self, immediate: int | None = None) -> int:
        return self.engine.write_one(self.peer, self.region, 0, self.target, 64, 64, immediate)


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    loopback = Loopback()
    yield loopback
    loopback.engine.close()


def run(loopback: Loopback, body: Callable[[AsyncEvents], Awaitable[None]]) -> None:
    async def main() -> None:
        with AsyncEvents(loopback.engine) as events:
            await asyncio.wait_for(body(events), LIMIT)

    asyncio.run(main())


def test_transfers_and_counters_are_awaited_by_their_ids(loopback: Loopback) -> None:
    async def body(events: AsyncEvents) -> None:
        counters = loopback.engine.alloc_counters(1)
        loopback.engine.expect(counters.id, [10])
        transfers = [loopback.write(counters.immediates[0]) for _ in range(10)]
        # The last transfer is awaited first. The other events arrive meanwhile, and are kept.
        for transfer in reversed(transfers):
            event = await events.transfer(transfer)
            assert (event.kind, event.id) == (EventKind.TRANSFER_DONE, transfer)
        assert (await events.counters(counters.id)).kind is EventKind.COUNTERS_REACHED

    run(loopback, body)


def test_a_loop_awaits_many_at_once(loopback: Loopback) -> None:
    async def body(events: AsyncEvents) -> None:
        transfers = [loopback.write() for _ in range(50)]
        done = await asyncio.gather(*(events.transfer(transfer) for transfer in transfers))
        assert [event.id for event in done] == transfers

    run(loopback, body)


def test_messages_are_awaited_and_wait_for_their_reader(loopback: Loopback) -> None:
    async def body(events: AsyncEvents) -> None:
        awaited = [asyncio.create_task(events.message()) for _ in range(2)]
        await asyncio.sleep(0)
        for number in range(4):
            loopback.engine.send(loopback.peer, bytes([number]))
        got = [await task for task in awaited] + [await events.message(), await events.message()]
        assert sorted(message.data[0] for message in got) == [0, 1, 2, 3]
        assert {message.peer for message in got} == {loopback.mirror}

    run(loopback, body)


def test_a_cancelled_await_loses_nothing(loopback: Loopback) -> None:
    async def body(events: AsyncEvents) -> None:
        for delay in (0, 1, 2, 5):
            transfer = loopback.write()
            task = asyncio.create_task(events.transfer(transfer))
            message = asyncio.create_task(events.message())
            loopback.engine.send(loopback.peer, b"hello", lambda event: None)
            for _ in range(delay):
                await asyncio.sleep(0)
            for cancelled in (task, message):
                cancelled.cancel()
            results = await asyncio.gather(task, message, return_exceptions=True)
            if isinstance(results[0], asyncio.CancelledError):
                assert (await events.transfer(transfer)).id == transfer
            if isinstance(results[1], asyncio.CancelledError):
                assert (await events.message()).data == b"hello"

    run(loopback, body)


def test_unawaited_event_is_returned_by_other(loopback: Loopback) -> None:
    async def body(events: AsyncEvents) -> None:
        other = asyncio.create_task(events.other())
        await asyncio.sleep(0)
        # The two ends of the loopback are two peers of one engine: one disconnects, and the other is
        # notified.
        await asyncio.to_thread(loopback.engine.disconnect, loopback.peer, LIMIT)
        event = await other
        assert (event.kind, event.id) == (EventKind.PEER_LEFT, loopback.mirror)

    run(loopback, body)
