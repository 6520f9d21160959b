"""Controller: what it asks of the engine and of the workers for a version, with stand-ins for both."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from weight_worker import FakeWorker

from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.controller import Controller
from kv_connector.weights.wire.links import LinkError, Links, News, questions
from kv_connector.weights.wire.messages import (
    Applied,
    Apply,
    Ask,
    Controls,
    Hold,
    NotApplied,
    Ping,
    Pong,
    Refused,
    Release,
    Seeded,
    State,
    Torn,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
ARENA_BYTES = 10


class Worker(FakeWorker):
    """A worker that answers the controller. It changes only as the test says. ``got``: messages that have no
    answer, but for PING."""

    def __init__(self) -> None:
        self.served, self.landed, self.problem, self.torn = "", "", "", False
        self.all: tuple[WorkerAddress, ...] = ()
        super().__init__()

    def take(self, source: Source, message: WeightMessage | None) -> WeightMessage | None:
        answer = self._answer(message)
        if answer is None:
            self.got.put(message)
        return answer

    def _answer(self, message: WeightMessage | None) -> WeightMessage | None:
        state = State(
            self.served,
            landed=self.landed,
            arena_bytes=ARENA_BYTES,
            problem=self.problem,
            torn=self.torn,
        )
        match message:
            case Ping():
                return Pong()
            case Workers():
                return WorkersAre(self.all)
            case Hold(version) if version != self.landed:
                return Refused(f"it has {self.landed}")
            case Hold() | Ask():
                return state
        return None

    def serve(self, version: str, problem: str = "", *, torn: bool = False) -> None:
        self.served = self.served if problem else version
        self.problem, self.torn = problem, torn

    def next(self) -> WeightMessage | None:
        return self.got.get(timeout=PATIENCE_S)


@dataclass
class Engine:
    """An engine whose workers take a version as `update_workers` says."""

    update_workers: Callable[[str], None]
    calls: list[str] = field(default_factory=list)
    label_problem: str = ""

    async def pause(self) -> None:
        self.calls.append("pause")

    async def update(self, version: str) -> None:
        self.calls.append("update")
        self.update_workers(version)

    async def label(self, version: str) -> None:
        if self.label_problem:
            raise RuntimeError(self.label_problem)
        self.calls.append(f"label {version}")

    async def resume(self) -> None:
        self.calls.append("resume")


class Site:
    """A controller, its engine, and two workers that have version v1."""

    def __init__(self) -> None:
        self.workers = [Worker(), Worker()]
        for worker in self.workers:
            worker.all = tuple(WorkerAddress(one.address.host, one.address.port) for one in self.workers)
            worker.landed = "v1"
        self.engine = Engine(self.all_take)
        self.address = Address("127.0.0.1", free_ports(1)[0])
        self.controller = Controller(self.engine, [self.workers[0].address], None)

    def all_take(self, version: str) -> None:
        for worker in self.workers:
            worker.serve(version)

    def ask(self, message: WeightMessage) -> WeightMessage:
        """The controller's answer to a trainer."""
        with questions(None) as links:
            link = links.dial(self.address)
            return links.wait(links.ask(link, message), link, PATIENCE_S)

    def push(self) -> News:
        """Has the controller apply version v1. Returns the first news that it sends to the trainer."""
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        links = Links(None, Timeouts(), heard=lambda _, one: news.put(one), lost=lambda *_: None)
        try:
            links.tell(links.dial(self.address), Apply("v1"))
            return news.get(timeout=PATIENCE_S)
        finally:
            links.close()

    def close(self) -> None:
        self.controller.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    try:
        await made.controller.start(made.address)
        for worker in made.workers:
            assert worker.next() == WorkersAre(worker.all)
        assert made.workers[0].next() == Controls(WorkerAddress(made.address.host, made.address.port))
        yield made
    finally:
        made.close()


async def test_version_is_applied_in_one_pause_and_released_after_it(site: Site) -> None:
    outcome = await site.controller.apply("v1")
    assert (outcome.problem, outcome.torn, outcome.nbytes) == ("", False, 2 * ARENA_BYTES)
    assert site.engine.calls == ["pause", "update", "label v1", "resume"]
    assert [worker.next() for worker in site.workers] == [Release()] * 2


async def test_engine_is_not_paused_for_a_version_that_has_not_landed_everywhere(site: Site) -> None:
    site.workers[1].landed = "v0"
    outcome = await site.controller.apply("v1")
    assert "has not landed at 1 workers: it has v0" in outcome.problem
    assert not outcome.torn
    assert site.engine.calls == []
    assert [worker.next() for worker in site.workers] == [Release()] * 2


async def test_version_that_a_worker_could_not_take_is_tried_once_more(site: Site) -> None:
    def one_fails_once(version: str) -> None:
        site.workers[0].serve(version)
        site.workers[1].serve(version, "" if site.engine.calls.count("update") > 1 else "no room")

    site.engine.update_workers = one_fails_once
    outcome = await site.controller.apply("v1")
    assert outcome.problem == ""
    assert site.engine.calls == ["pause", "update", "update", "label v1", "resume"]


async def test_engine_goes_on_if_no_worker_has_the_version(site: Site) -> None:
    def all_fail(version: str) -> None:
        for worker in site.workers:
            worker.serve(version, "no room")

    site.engine.update_workers = all_fail
    outcome = await site.controller.apply("v1")
    assert "worker 0: no room; worker 1: no room" in outcome.problem
    assert not outcome.torn
    assert site.engine.calls == ["pause", "update", "update", "resume"]


@pytest.mark.parametrize("half", [True, False], ids=["half of a version", "one of two workers"])
async def test_engine_stays_paused_until_all_workers_have_a_whole_version(site: Site, half: bool) -> None:
    def one_fails(version: str) -> None:
        site.workers[0].serve(version, "no room" if half else "")
        site.workers[1].serve(version, "no room", torn=half)

    site.engine.update_workers = one_fails
    outcome = await site.controller.apply("v1")
    assert outcome.torn
    assert "resume" not in site.engine.calls
    site.engine.update_workers = site.all_take
    assert not (await site.controller.apply("v1")).torn
    assert site.engine.calls[-1] == "resume"


async def test_engine_that_cannot_report_its_version_stays_paused(site: Site) -> None:
    site.engine.label_problem = "no route"
    outcome = await site.controller.apply("v1")
    assert outcome.torn
    assert "no route" in outcome.problem
    assert "resume" not in site.engine.calls


async def test_engine_without_a_reported_version_stays_paused_if_a_push_fails(
    site: Site,
) -> None:
    site.engine.label_problem = "no route"
    assert (await site.controller.apply("v1")).torn
    site.engine.label_problem = ""
    for worker in site.workers:
        worker.landed = "v2"

    def all_fail(version: str) -> None:
        for worker in site.workers:
            worker.serve(version, "no room")

    site.engine.update_workers = all_fail
    assert (await site.controller.apply("v2")).torn
    assert "resume" not in site.engine.calls
    site.engine.update_workers = site.all_take
    assert not (await site.controller.apply("v2")).torn
    assert site.engine.calls[-2:] == ["label v2", "resume"]


async def test_trainer_gets_the_outcome_and_the_first_worker_whether_the_engine_is_torn(site: Site) -> None:
    assert isinstance(await asyncio.to_thread(site.push), Applied)
    assert [site.workers[0].next() for _ in range(2)] == [Release(), Torn("")]
    site.engine.label_problem = "no route"
    failed = await asyncio.to_thread(site.push)
    assert isinstance(failed, NotApplied)
    assert failed.torn
    release, torn = (site.workers[0].next() for _ in range(2))
    assert release == Release()
    assert isinstance(torn, Torn)
    assert "no route" in torn.reason
    state = await asyncio.to_thread(site.ask, Ask())
    assert isinstance(state, State)
    assert (state.served, state.torn, state.arena_bytes) == ("v1", True, 2 * ARENA_BYTES)


async def test_trainer_gets_the_addresses_of_all_workers_and_a_refusal_of_other_messages(site: Site) -> None:
    assert await asyncio.to_thread(site.ask, Workers()) == WorkersAre(site.workers[0].all)
    with pytest.raises(LinkError, match="send this message to a worker"):
        await asyncio.to_thread(site.ask, Seeded("v1"))
