"""A trainer: its ranks with the shipped Links, and a model of the WeightPusher, whose calls block."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kv_connector.engine import ErrorCode, EventKind, TransferError
from kv_connector.weights.mapping.geometry import digest
from kv_connector.weights.wire.links import Link, LinkError, Links, News
from kv_connector.weights.wire.messages import (
    CODEC,
    NOT_DESCRIBED,
    Applied,
    Apply,
    Begin,
    Begun,
    Describe,
    Dropped,
    Join,
    Joined,
    NotApplied,
    Ready,
    WeightMessage,
    Workers,
    WorkersAre,
)

from ..actor import Actor
from ..books import Violation
from ..network import Port
from .arena import CELL_BYTES, TENSORS, Tag, WeightsEngine, cells_of, round_of
from .scenario import BEGIN_S, PATIENCE_S, Trainer

if TYPE_CHECKING:
    from .world import World

# As in pusher.py, except the second: loading takes as long for three tensors, and longer for 37,000.
_RETRY_S = 0.2
_RECORD_S = 10.0
_FENCE_S = 0.05
_TRIES = 3

Script = Generator[float | None, None, Any]
"""A coroutine. It yields the latest time of its continuation, by its own clock; None: it waits for an
event."""


class PushError(Exception):
    pass


class _Ended(Exception):
    """The process ends itself."""


class _Immediately:
    """A Loop that runs calls on the caller's thread."""

    def __init__(self, sockets: Port) -> None:
        self.sockets: Any = sockets

    def call(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(command())
        return future


class _Links(Links):
    def __post_init__(self) -> None:
        """Skips the creation of a loop: the model provides one."""


@dataclass(eq=False)
class _Worker:
    name: str
    number: int
    senders: int
    cells: Sequence[int]
    link: Link | None = None
    peer: int = -1


@dataclass(eq=False)
class _Engine:
    name: str
    workers: list[_Worker] = field(default_factory=list)
    link: Link | None = None


@dataclass
class _Update:
    version: str
    ready: set[str] = field(default_factory=set)  # workers
    taken: set[str] = field(default_factory=set)
    applied: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


class Job:
    """All ranks of one life of a trainer, and the messages between them."""

    def __init__(self, world: World, plan: Trainer, life: int, engines: Sequence[str], at: float) -> None:
        self.world, self.plan, self.life, self.engines = world, plan, life, engines
        self.last: str = ""  # final action once all is quiet: "push" once more and close, or "close"
        self.waiting: set[int] = set()  # ranks that have finished their work
        self.connected = False
        self.ending = False
        self.problems: dict[int, dict[str, str]] = {}  # problems of the last push, by rank
        self._said: dict[Hashable, dict[int, Any]] = {}
        self.ranks = [Rank(world, self, rank, at) for rank in range(plan.ranks)]

    def __str__(self) -> str:
        return f"{self.plan.name}.{self.life}"

    @property
    def lives(self) -> bool:
        return not any(rank.dead for rank in self.ranks)

    def gather(self, what: Hashable, rank: int, value: Any) -> Script:
        """A collective. Returns the values of all ranks, in order. If one is dead, the others end."""
        said = self._said.setdefault(what, {})
        said[rank] = value
        if len(said) == len(self.ranks):
            self.wake()
        while len(said) < len(self.ranks):
            if not self.lives:
                raise _Ended
            yield None
        return [said[rank] for rank in range(len(self.ranks))]

    def wake(self) -> None:
        for rank in self.ranks:
            rank.wake(rank.latency())


class Rank(Actor):
    world: World

    def __init__(self, world: World, job: Job, rank: int, at: float) -> None:
        super().__init__(world, f"{job.plan.name}/{rank}", job.life)
        self.world, self.job, self.rank = world, job, rank
        self.port = Port(world, self, CODEC.encode, CODEC.decode)
        self.engine = WeightsEngine(self, random.Random(f"{world.seed} {self.name} {job.life} engine"))
        self.step = 0
        self._links = _Links(None, world.times, self._heard, self._lost, self.clock.now)
        self._links.loop = _Immediately(self.port)  # type: ignore[assignment]
        self._engines: list[_Engine] = []
        self._update: _Update | None = None
        self._carriers: set[Link] = set()
        self._begun: deque[tuple[_Worker, Link, Begun | None]] = deque()
        self._run = ""
        self._failures: dict[int, str] = {}  # by transfer
        self._fencing: list[int] = []
        self._calls: Counter[str] = Counter()
        self._script = self._live(at)
        world.clock.at(at, lambda: self.wake(0.0))

    @property
    def tag(self) -> Tag:
        """Returns the weights that this rank has."""
        return str(self.job), self.step

    def turn(self) -> None:
        now = self.clock.now()
        try:
            for received in self.port.receive():
                self._links.received(now, received)  # type: ignore[arg-type]
            for event in self.engine.poll_events(1000):
                if event.kind in (EventKind.TRANSFER_FAILED, EventKind.TRANSFER_CANCELLED):
                    self._failures[event.id] = str(event.error)
            due = self._links.tick(now)
            for peer in list(self._fencing):
                self._fence(peer)
            deadline = next(self._script)
        except (StopIteration, _Ended):
            self._close()
            return
        except Violation:
            raise
        except Exception as error:
            self.world.books.fail(f"{self} raises {error!r}")
            return
        if due is not None:
            self.wake(due + 1e-6)
        if self._fencing:
            self.wake(_FENCE_S)
        if deadline is not None:
            self.wake_at(self.clock.true_time(deadline))

    # --- The training loop

    def _live(self, at: float) -> Script:
        while self.world.clock.now < at:
            yield None
        plan, job = self.job.plan, self.job
        connected = False
        for _ in range(_TRIES):
            try:
                yield from self._connect()
                connected = True
            except PushError as error:
                self.world.books.note("%s: %s", self, error)
            connected = all((yield from job.gather(self._next("connected"), self.rank, connected)))
            if connected:
                break
            yield from self._sleep(plan.again)
        job.connected = job.connected or connected
        for push in range(plan.pushes if connected else 0):
            yield from self._sleep(self.rng.expovariate(1 / plan.training) if plan.training else 0.0)
            yield from self._train()
            for attempt in range(_TRIES):
                gives_up = plan.gives_up == (self.rank, push) and job.life == 1 and not attempt
                problems = yield from self._serve(
                    f"{job} step {self.step} try {attempt}", plan.patience, gives_up
                )
                fine = not problems or not self.world.scenario.untroubled or plan.seeds
                self.world.books.check(fine, "nothing is wrong, and %s cannot push: %s", self, problems)
                failed = any((yield from job.gather(("pushed", self.step, attempt), self.rank, problems)))
                if not failed or plan.seeds:
                    break
                yield from self._sleep(plan.again)
        if plan.seeds:
            self.world.books.ended["seeded"] += connected and not problems
            return
        job.waiting.add(self.rank)
        while not job.last:
            yield None
        if job.last == "push" and connected:
            yield from self._train()
            job.problems[self.rank] = yield from self._serve(f"{job} step {self.step}", PATIENCE_S)

    def _train(self) -> Script:
        """Runs a step of all ranks together."""
        yield from self.job.gather(("trained", self.step), self.rank, None)
        self.step += 1

    def _serve(self, version: str, patience: float, gives_up: bool = False) -> Script:
        """Pushes a version and waits. Returns, by engine, why it does not serve the version."""
        self.world.versions[version] = self.tag
        update = yield from self._push(version, gives_up)
        mine = {engine.name for engine in self._engines if self.rank == 0 or self._writes(engine)}
        yield from self._until(lambda: update.applied | set(update.failed) >= mine, patience)
        for name in mine - update.applied - set(update.failed):
            update.failed[name] = "not applied in time"
        for name in (mine & update.applied) - set(update.failed):
            self.world.served(self, name, version)
        return dict(update.failed)  # losses from now on are no failure of this push

    # --- WeightPusher

    def _connect(self) -> Script:
        for engine in self._engines:
            for link in [engine.link, *(worker.link for worker in engine.workers)]:
                if link is not None:
                    self._links.end(link, "the trainer connects again")
            for worker in engine.workers:
                self._fence(worker.peer)
        self._engines = []
        said = yield from self.job.gather(self._next("run"), self.rank, f"{self} at {self.clock.now():.6f}")
        self._run = said[0]
        found: Any = None
        engines = [_Engine(name) for name in self.job.engines]
        if self.rank == 0:
            try:
                found = yield from self._ask_geometries(engines)
            except LinkError as error:
                found = str(error)
        found = (yield from self.job.gather(self._next("geometries"), self.rank, found))[0]
        if isinstance(found, str):
            raise PushError(found)
        self._engines = engines
        ranks = self.job.plan.ranks
        for engine, names in zip(engines, found, strict=True):
            for number, name in enumerate(names):
                wants = [cells_of(rank, ranks, number) for rank in range(ranks)]
                senders = sum(rank == 0 or bool(cells) for rank, cells in enumerate(wants))
                engine.workers.append(_Worker(name, number, senders, wants[self.rank]))
        for worker in self._workers():
            if self.rank == 0 or worker.cells:
                yield from self._join(worker)

    def _ask_geometries(self, engines: Sequence[_Engine]) -> Script:
        names, asked = [], []
        for engine in engines:
            names.append((yield from self._reach(engine)))
            for name in names[-1]:
                link = self._links.dial(self.world.address(name))
                asked.append((link, self._links.ask(link, Describe(TENSORS))))
        for link, answer in asked:
            yield from self._answer(answer, link, _RECORD_S)
            self._links.end(link, "its query was answered")
        return names

    def _reach(self, engine: _Engine) -> Script:
        engine.link = self._links.dial(self.world.address(engine.name))
        answer = self._links.ask(engine.link, Workers())
        here = yield from self._answer(answer, engine.link, self.world.times.connect)
        assert isinstance(here, WorkersAre)
        self._links.watch(engine.link)
        return [worker.host for worker in here.workers]

    def _join(self, worker: _Worker) -> Script:
        deadline = self.clock.now() + _RECORD_S
        while not (yield from self._joined(worker)):
            if self.rank == 0:
                link = self._links.dial(self.world.address(worker.name))
                try:
                    asked = self._links.ask(link, Describe(TENSORS))
                    yield from self._answer(asked, link, _RECORD_S)
                except LinkError as error:
                    raise PushError(f"cannot join {worker.name}: {error}") from error
                finally:
                    self._links.end(link, "its query was answered")
            elif self.clock.now() >= deadline:
                raise PushError(f"cannot join {worker.name}: {NOT_DESCRIBED}")
            else:
                yield from self._sleep(_RETRY_S)

    def _joined(self, worker: _Worker) -> Script:
        link = self._links.dial(self.world.address(worker.name))
        peer = None
        try:
            shaken = self.engine.offer(worker.name)
            peer = shaken.peer
            join = Join(self._run, self.rank, self.name, digest(TENSORS), shaken.data, self.job.plan.seeds)
            joined = yield from self._answer(self._links.ask(link, join), link, self.world.times.connect)
            assert isinstance(joined, Joined)
            self.engine.complete(peer, joined.answer)
            self.engine.import_region(peer, joined.region)
        except (LinkError, TransferError) as error:
            if peer is not None:
                self._fence(peer)
            self._links.end(link, str(error))
            if NOT_DESCRIBED in str(error):
                return False
            raise PushError(f"cannot join {worker.name}: {error}") from error
        if worker.link is not None:
            self._fence(worker.peer)
        worker.link, worker.peer = link, peer
        self._links.watch(link, sends=True)
        return True

    def _push(self, version: str, gives_up: bool) -> Script:
        update = self._update = _Update(version)
        self._begun.clear()
        self._carriers = set()
        awaited = yield from self._begin(version, update)
        transfers: dict[int, _Worker] = {}
        due = dict.fromkeys(awaited, self.clock.now() + BEGIN_S)
        while awaited:
            first = min(due[worker] for worker in awaited)
            yield from self._until(lambda: bool(self._begun), max(first - self.clock.now(), 0))
            if not self._begun:
                late = {worker for worker in awaited if due[worker] <= self.clock.now()}
                for engine in self._engines:
                    for worker in engine.workers if late & set(engine.workers) else ():
                        self._over(worker, "not begun in time")
                        awaited.pop(worker, None)
            while self._begun:
                worker, link, begun = self._begun.popleft()
                if link is not worker.link:
                    continue  # it has been joined again since
                if begun is None:
                    awaited.pop(worker, None)
                    for engine in self._engines:
                        for other in engine.workers if worker in engine.workers else ():
                            self._over(other, f"{worker.name} of its engine is lost")
                if begun is None or worker not in awaited:
                    continue
                try:
                    transfers[self._write(worker, begun)] = worker
                except TransferError as error:
                    self._over(worker, str(error))
                if gives_up:
                    self.world.books.ended["given up"] += 1
                    raise _Ended
                awaited[worker] -= 1
                due[worker] = self.clock.now() + BEGIN_S
                if not awaited[worker]:
                    del awaited[worker]
        if gives_up:
            self.world.books.ended["given up"] += 1
            raise _Ended
        yield from self._until(lambda: not self.engine.in_flight(list(transfers)), None)
        for number, worker in transfers.items():
            if number in self._failures:
                self._over(worker, self._failures.pop(number))
        return update

    def _over(self, worker: _Worker, reason: str) -> None:
        """Drops a worker, which is joined again for the next version."""
        if worker.link is not None and not worker.link.over:
            self._links.end(worker.link, reason)
            self._lost(worker.link, reason)

    def _write(self, worker: _Worker, begun: Begun) -> int:
        number: int = self.engine.open_transfer(worker.peer)
        try:
            if cells := self._cells(worker, begun.round):
                self.engine.write(number, cells, begun.immediate)
        finally:
            self.engine.seal(number)
        return number

    def _cells(self, worker: _Worker, round: int) -> list[int]:
        return [cell for cell in worker.cells if round_of(cell, self.world.scenario.rounds) == round]

    def _begin(self, version: str, update: _Update) -> Generator[float | None, None, dict[_Worker, int]]:
        asked: dict[_Worker, int] = {}
        rounds = self.world.scenario.rounds
        for engine in self._engines:
            try:
                if engine.link is not None and engine.link.over:
                    yield from self._reach(engine)
                if engine.link is not None:
                    self._carry(engine.link)
                for worker in engine.workers:
                    if self.rank == 0 or worker.cells:
                        if worker.link is None or worker.link.over:
                            yield from self._join(worker)
                        assert worker.link is not None
                        self._carry(worker.link)
                        pages = tuple(len(self._cells(worker, round)) for round in range(rounds))
                        asked[worker] = rounds
                        begin = Begin(version, b"plan", worker.senders, pages, sum(pages) * CELL_BYTES)
                        self._links.tell(worker.link, begin)
            except (LinkError, PushError) as error:
                update.failed.setdefault(engine.name, str(error))
                for worker in engine.workers:
                    if asked.pop(worker, None) is not None:
                        self._over(worker, str(error))
        return asked

    def _carry(self, link: Link) -> None:
        self._carriers.add(link)
        if link.over:
            raise LinkError(f"{link.address}: {link.over}")

    def _workers(self) -> list[_Worker]:
        return [worker for engine in self._engines for worker in engine.workers]

    def _writes(self, engine: _Engine) -> bool:
        return any(worker.cells for worker in engine.workers)

    def _heard(self, link: Link, news: News) -> None:
        update = self._update
        if update is None or news.version != update.version:
            return
        for engine in self._engines:
            if link is engine.link and isinstance(news, Applied):
                update.applied.add(engine.name)
            elif link is engine.link and isinstance(news, NotApplied):
                update.failed.setdefault(engine.name, news.reason)
            elif any(worker.link is link for worker in engine.workers):
                self._from_worker(update, engine, link, news)

    def _from_worker(self, update: _Update, engine: _Engine, link: Link, news: News) -> None:
        if isinstance(news, Dropped):
            return
        if isinstance(news, Begun):
            self._begun += [(worker, link, news) for worker in engine.workers if worker.link is link]
            return
        reached = update.ready if isinstance(news, Ready) else update.taken
        mine = {worker.name for worker in engine.workers if worker.link is not None}
        reached |= {w.name for w in engine.workers if w.link is link}
        if not mine <= reached:
            return
        if isinstance(news, Applied):
            if self.rank != 0:
                update.applied.add(engine.name)
        elif self.rank == 0 and engine.link is not None:
            self._links.tell(engine.link, Apply(update.version))

    def _lost(self, link: Link, reason: str) -> None:
        for engine in self._engines:
            if link is engine.link or any(worker.link is link for worker in engine.workers):
                self.world.books.note("%s: lost %s: %s", self, link.address, reason)
                if self._update is not None and link in self._carriers:
                    self._update.failed.setdefault(engine.name, f"{link.address}: {reason}")
            for worker in engine.workers:
                if worker.link is link:
                    self._fence(worker.peer)
                    self._begun.append((worker, link, None))

    # --- Steps

    def _next(self, what: str) -> Hashable:
        """Returns which call of a repeated collective this is."""
        self._calls[what] += 1
        return what, self._calls[what]

    def _until(self, condition: Callable[[], bool], seconds: float | None) -> Script:
        deadline = None if seconds is None else self.clock.now() + seconds
        while not condition() and (deadline is None or self.clock.now() < deadline):
            yield deadline

    def _sleep(self, seconds: float) -> Script:
        yield from self._until(lambda: False, seconds)

    def _answer(self, answer: Future[WeightMessage], link: Link, seconds: float) -> Script:
        yield from self._until(answer.done, seconds)
        return self._links.wait(answer, link, 0.0)

    def _fence(self, peer: int) -> None:
        """Stands in for Writer.fence()."""
        try:
            self.engine.fence(peer, 0.0)
        except TransferError as error:
            if error.code is ErrorCode.TIMEOUT:
                if peer not in self._fencing:
                    self._fencing.append(peer)
                return
        if peer in self._fencing:
            self._fencing.remove(peer)

    # --- Its end

    def leave(self) -> None:
        self.leaving = True
        self._close()

    def _close(self) -> None:
        if self.dead:
            return
        for link in list(self._links._links.values()):
            self._links.end(link, "it closed the connection")
        self.die()

    def die(self, silently: bool = False) -> None:
        super().die(silently)
        self.world.rank_ended(self)
