"""A trainer's end: each rank writes what it holds straight into the engines' arenas, and rank 0 has each
version applied once all of it has landed.

    pusher = WeightPusher(module_source(model), ["10.0.0.5:5800"])
    pusher.connect()
    for step in range(steps):
        train(model)
        pusher.push(str(step)).wait("applied", timeout=60)

Each rank calls the same in the same order. Nothing is gathered, and no rank waits for another but in
connect() and, for a version, until all have begun, or in its source's refresh().
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kv_connector.control.addresses import parse_address
from kv_connector.control.cluster_key import ClusterKey, find_key
from kv_connector.engine import DomainConfig, EngineConfig, TransferError
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timers import Timeouts
from kv_connector.protocol.version import MAX_NAME, identity, shown
from kv_connector.weights.coverage import left_out
from kv_connector.weights.geometry import Geometry, digest
from kv_connector.weights.landing import NOT_DESCRIBED
from kv_connector.weights.links import Link, LinkError, Links, News
from kv_connector.weights.messages import (
    Applied,
    Apply,
    Begin,
    Begun,
    Describe,
    Described,
    Dropped,
    Join,
    Joined,
    NotApplied,
    Ready,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)
from kv_connector.weights.plan import Plan, PlanError, make_plan
from kv_connector.weights.sources import Engines, Source
from kv_connector.weights.writer import STAGING_BYTES, Send, Target, Writer

logger = logging.getLogger("kv_connector")

Stage = Literal["landed", "applied"]

_RETRY_S = 0.2
# To look at a model's loaders takes a worker up to 2 ms a tensor, of which large ones have 37,000.
RECORD_S = 180.0


class PushError(RuntimeError):
    """A version did not get where it should; the message says which engine, where it stopped, and why."""


@dataclass(frozen=True)
class Part:
    """What this rank writes to one worker for a version."""

    worker: str
    nbytes: int
    pages: int
    shortest_page: int
    packed_bytes: int  # converted or laid out before they are sent


@dataclass(eq=False)
class _Worker:
    """Of an engine, as this rank writes to it."""

    address: Address
    number: int  # among all workers of all engines: the plan's receiver
    link: Link | None = None
    peer: int = -1
    region: int = -1
    offsets: tuple[int, ...] = ()
    senders: int = 0
    geometry: bytes = b""  # digest
    rounds: Sequence[Sequence[Send]] = ()

    @property
    def sends(self) -> Iterator[Send]:
        return (send for sends in self.rounds for send in sends)


@dataclass
class _Awaited:
    """The rounds that push() still awaits of one worker."""

    rounds: int  # that it has not begun
    due: float
    late: str  # said of it when that time has come


_News = tuple[_Worker, Link | None, Begun | None]
"""Over that link a worker has begun a round, or is lost (None)."""


@dataclass(eq=False)
class _Engine:
    address: Address  # of its controller, or of its first worker
    link: Link | None = None
    workers: list[_Worker] = field(default_factory=list)


class Update:
    """A version under way. Of each engine it is known by itself how far it has come."""

    def __init__(self, version: str, engines: Sequence[str], identity: str = "") -> None:
        """``identity``: as engines call it; default: the name."""
        self.version = version
        self.identity = identity or version
        self.pause_seconds: dict[str, float] = {}
        """By engine that has applied it, where its controller did, at rank 0."""
        self._done: dict[Stage, dict[str, Future[None]]] = {
            "landed": {engine: Future() for engine in engines},
            "applied": {engine: Future() for engine in engines},
        }

    def wait(self, stage: Stage = "applied", timeout: float = 60.0) -> None:
        """Blocks until all engines are there; raises PushError with all that are not, and why. At an engine
        that has no room beside what it serves a version has landed when it is applied.

        Other ranks than the first hear of it from the workers that they write to; where there are none of an
        engine, they do not wait for it.
        """
        deadline = time.monotonic() + timeout
        problems = []
        for engine, future in self._done[stage].items():
            try:
                future.result(max(deadline - time.monotonic(), 0))
            except FutureTimeoutError:
                problems.append(f"{engine}: not {stage} within {timeout:g} s")
            except LinkError as error:
                problems.append(f"{engine}: {error}")
        if problems:
            raise PushError(f"version {self.version}: {'; '.join(problems)}")

    def reached(self, engine: str, stage: Stage) -> None:
        """Also what comes before it."""
        for futures in [self._done["landed"], self._done[stage]]:
            _resolve(futures[engine], None)

    def failed(self, engine: str, reason: str) -> None:
        for futures in self._done.values():
            _resolve(futures[engine], LinkError(reason))


def _resolve(future: Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class WeightPusher:
    """One for each rank. Its methods are called by one thread."""

    def __init__(
        self,
        source: Source,
        engines: Sequence[str],
        *,
        key_file: str | None = None,
        providers: Sequence[str] = (),
        data_host: str = "127.0.0.1",
        staging_bytes: int = STAGING_BYTES,
        timeouts: Timeouts | None = None,
        name: str = "trainer",
        apply: Callable[[str], None] | None = None,
        key: ClusterKey | None = None,
        partial: Sequence[str] = (),
        begin_timeout: float | None = None,
        seeds: bool = False,
    ) -> None:
        """``engines``: the controllers' addresses, ``host:port``. ``providers``: lanes in order of
        preference; default: ``host`` and ``tcp``, of weights in a GPU ``nvlink``. ``data_host``: this
        machine's address for them. ``apply``: called by rank 0 with a version's identity, on a thread that
        must not wait, when all engines that are left may be paused for it; default: each one's controller is
        told. ``key``: what is in ``key_file``, where it has been read. ``partial``: names, or patterns as of
        a shell, of tensors that engines may load in part or not at all, and of engines' parameters that may
        keep what they have. ``begin_timeout``: seconds that push() waits until an engine begins a version,
        which takes it as long as its pause for the one before and the latest rank; a slower engine takes the
        next version; default: ``timeouts.orphan``. ``seeds``: this is an engine, beside which a trainer may
        come; the joiner keeps what it was not sent, as this engine did.

        KeyFileError; ValueError where an address is none, or given twice; TransferError where a lane does not
        open.
        """
        key = key or find_key(key_file)
        self._source = source
        self._timeouts = timeouts or Timeouts()
        self._begin_timeout = self._timeouts.orphan if begin_timeout is None else begin_timeout
        self._run, self._content, self._pushes = "", "", 0
        self._partial = partial
        self._seeds = seeds
        self._cancelled = ""
        self._name = f"{name}/{source.rank}"
        self._apply = apply
        addresses = [parse_address(engine) for engine in engines]
        for number, address in enumerate(addresses):
            if address in addresses[:number]:
                raise ValueError(f"the engine {address} is given twice. Give each address once.")
        self._engines = [_Engine(address) for address in addresses]
        self._update: Update | None = None
        self._carriers: set[Link] = set()
        """Links over which the last version was begun. The loss of an earlier link does not concern it."""
        self._asked_for: Update | None = None
        self._asking = threading.Lock()
        self._ready: set[int] = set()
        self._applied: set[int] = set()
        self._begun: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._plan: Plan | None = None
        chosen = tuple(providers) or (("nvlink",) if source.device.type == "cuda" else ("host", "tcp"))
        self._engine = TransferEngine(
            EngineConfig(self._name, [DomainConfig(provider, address=data_host) for provider in chosen])
        )
        self._writer = Writer(self._engine, source, staging_bytes)
        self._links = Links(key, self._timeouts, self._heard, self._lost)

    def close(self) -> None:
        """Ends all links; engines drop a version under way. TransferError: that of TransferEngine.close()."""
        self._links.close()
        self._engine.close()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._links.end_all(str(error) or type(error).__name__)  # which engines tell the other ranks
            self._links.close()
            close_or_log(self._engine, self._name)  # its error would take the place of this one
        else:
            self.close()

    # --- Connecting

    def connect(self) -> None:
        """Learns what the engines load, plans who writes what, and joins the workers. A collective; where it
        was called before, anew.

        Raises PushError, on every rank where rank 0 could not; PlanError, also where an engine would not load
        all of a tensor, or would keep parameters, that ``partial`` does not name; SourceError where weights
        have no memory.
        """
        self._plan = None
        for engine in self._engines:
            for link in [engine.link, *(worker.link for worker in engine.workers)]:
                if link is not None:
                    self._links.end(link, "it connects anew")
            for worker in engine.workers:
                self._writer.fence(worker.peer)
        agreed = self._source.agree(self._ask_engines)
        if isinstance(agreed.engines, str):
            raise PushError(agreed.engines)
        self._run, self._content, self._pushes = agreed.run, agreed.content, 0
        geometries = [msgspec.msgpack.decode(one, type=Geometry) for one in agreed.engines.geometries]
        for engine, workers in zip(self._engines, agreed.engines.workers, strict=True):
            engine.workers = [_Worker(Address(*worker), -1) for worker in workers]
        for number, worker in enumerate(self._workers()):
            worker.number = number
        for engine in self._engines:
            if not any(geometries[worker.number].writes for worker in engine.workers):
                raise PushError(
                    f"{engine.address} would load none of the {len(self._source.tensors())} tensors: give "
                    "them the names of the checkpoint that the engine was started from"
                )
        self._plan = make_plan(self._source.tensors(), agreed.held, geometries, self._source.rank)
        self._check_coverage(geometries)
        for worker in self._workers():
            by_sender = [of[worker.number] for of in self._plan.nbytes]
            worker.senders = sum(rank == 0 or nbytes > 0 for rank, nbytes in enumerate(by_sender))
            worker.geometry = geometries[worker.number].digest()
            sends = self._writer.prepare(self._plan.pieces[worker.number], geometries[worker.number])
            worker.rounds = [
                [send for send in sends if send.round == round]
                for round in range(geometries[worker.number].rounds)
            ]
            if self._writes_to(worker):
                self._join(worker)

    def _check_coverage(self, geometries: Sequence[Geometry]) -> None:
        """Raises PlanError."""
        tensors = self._source.tensors()
        groups = [
            (str(engine.address), [geometries[worker.number] for worker in engine.workers])
            for engine in self._engines
        ]
        if self._apply is not None:
            # Addresses are those of first workers, of which an engine of several data-parallel ranks has
            # several, each with its own experts.
            groups = [(", ".join(name for name, _ in groups), list(geometries))]
        for name, workers in groups:
            if problem := left_out(name, tensors, workers, self._partial, keeps=self._seeds):
                self._plan = None
                raise PlanError(problem)

    def parts(self) -> list[Part]:
        """By worker, once connected."""
        return [
            Part(
                str(worker.address),
                sum(send.nbytes for send in worker.sends),
                sum(send.pages for send in worker.sends),
                min((send.page_bytes for send in worker.sends), default=0),
                sum(send.nbytes for send in worker.sends if send.runs.packed),
            )
            for worker in self._workers()
        ]

    def progress(self) -> dict[str, tuple[int, int]]:
        """By engine: bytes of the last version that this rank has written, and all that it writes. Any
        thread."""
        return {
            str(engine.address): (
                sum(self._writer.posted.get(worker.peer, 0) for worker in engine.workers),
                sum(send.nbytes for worker in engine.workers for send in worker.sends),
            )
            for engine in self._engines
        }

    def _ask_engines(self) -> Engines | str:
        """Their workers, and what each of them loads."""
        try:
            return self._ask_geometries()
        except LinkError as error:
            return str(error)
        except Exception as error:  # the other ranks wait for what this one says
            logger.exception("%s: asking engines", self._name)
            return f"{type(error).__name__}: {error}"

    def _ask_geometries(self) -> Engines:
        workers: list[list[tuple[str, int]]] = []
        asked: list[tuple[Link, Future[WeightMessage]]] = []
        describe = Describe(tuple(self._source.tensors()))
        geometries = []
        try:
            for engine in self._engines:
                here = self._reach(engine)
                workers.append([(worker.host, worker.port) for worker in here])
                for address in workers[-1]:
                    link = self._links.dial(Address(*address))
                    asked.append((link, self._links.ask(link, describe)))
            for link, answer in asked:
                described = self._links.wait(answer, link, RECORD_S)
                assert isinstance(described, Described)
                geometries.append(msgspec.msgpack.encode(described.geometry))
        finally:
            for link, _ in asked:
                self._links.end(link, "it was only asked")
        return Engines(workers, geometries)

    def _reach(self, engine: _Engine) -> Sequence[WorkerAddress]:
        """A link to the controller, and who its workers are. Raises LinkError."""
        engine.link = self._links.dial(engine.address)
        answer = self._links.ask(engine.link, Workers())
        here = self._links.wait(answer, engine.link, self._timeouts.connect)
        assert isinstance(here, WorkersAre)
        self._links.watch(engine.link)
        return here.workers

    def _join(self, worker: _Worker) -> None:
        """Of an engine that was started again rank 0 has it look at the checkpoint; the others wait."""
        deadline = time.monotonic() + RECORD_S
        while not self._joined(worker):
            if self._source.rank == 0:
                self._describe_again(worker)
            elif time.monotonic() >= deadline:
                raise PushError(f"{self._name} cannot join {worker.address}: {NOT_DESCRIBED}")
            else:
                time.sleep(_RETRY_S)

    def _describe_again(self, worker: _Worker) -> None:
        link = self._links.dial(worker.address)
        try:
            answer = self._links.ask(link, Describe(tuple(self._source.tensors())))
            described = self._links.wait(answer, link, RECORD_S)
        except LinkError as error:
            raise PushError(f"{self._name} cannot join {worker.address}: {error}") from error
        finally:
            self._links.end(link, "it was only asked")
        assert isinstance(described, Described)
        if described.geometry.digest() != worker.geometry:
            raise PushError(f"{worker.address} has another shape since it was started again: connect anew")

    def _joined(self, worker: _Worker) -> bool:
        """False: the worker has not looked at this checkpoint yet."""
        if self._cancelled:
            raise PushError(self._cancelled)
        link = self._links.dial(worker.address)
        shaken = self._engine.offer(str(worker.address))
        join = Join(
            self._run,
            self._source.rank,
            self._name,
            digest(tuple(self._source.tensors())),
            shaken.data,
            self._seeds,
        )
        try:
            joined = self._links.wait(self._links.ask(link, join), link, self._timeouts.connect)
            assert isinstance(joined, Joined)
            self._engine.complete(shaken.peer, joined.answer)
            worker.region = self._engine.import_region(shaken.peer, joined.region)
        except (LinkError, TransferError) as error:
            self._writer.fence(shaken.peer)
            self._links.end(link, str(error))
            if NOT_DESCRIBED in str(error):
                return False
            raise PushError(f"{self._name} cannot join {worker.address}: {error}") from error
        if worker.link is not None:
            self._writer.fence(worker.peer)  # of the link that is over
        worker.link, worker.peer, worker.offsets = link, shaken.peer, joined.offsets
        if self._cancelled:
            self._end(worker, self._cancelled)
            raise PushError(self._cancelled)
        self._links.watch(link, sends=True)
        logger.info("%s: sends weights to %s, over %s", self._name, worker.address, joined.lane)
        return True

    def _workers(self) -> Iterator[_Worker]:
        for engine in self._engines:
            yield from engine.workers

    def _writes_to(self, worker: _Worker) -> bool:
        """Rank 0 has to hear from each when all has landed."""
        assert self._plan is not None
        return self._source.rank == 0 or bool(self._plan.pieces[worker.number])

    # --- A version

    def push(self, version: str) -> Update:
        """Writes this rank's part of all engines' weights, and returns once the sources may change again.

        Blocks until then, for an engine that does not begin the version for ``begin_timeout`` at most; what
        follows is the Update's. A version that is not applied when all ranks push the
        next is not applied any more. Raises PushError where connect() was not called, SourceError where the
        source has other tensors than then. An engine that fails fails in its Update alone.

        ``version`` is a name of 119 characters at most. Engines compare more than the name: each push is
        another version, except pushes of the same unchanged checkpoint under the same name. Give engines that
        exchange KV to one pusher.
        """
        if self._plan is None:
            raise PushError("connect() comes first")
        if not 0 < len(shown(version)) <= MAX_NAME:
            raise PushError(f"the version {version!r} needs a name of 1 to {MAX_NAME} characters")
        self._pushes += 1
        content = self._content or f"{self._run}/{self._pushes}"
        named = version if self._seeds else identity(version, content)
        update = Update(shown(version), [str(engine.address) for engine in self._engines], named)
        self._ready, self._applied, self._begun = set(), set(), queue.SimpleQueue()
        self._carriers = set()
        self._update = update
        self._writer.start()
        awaited = self._begin(named, update)
        self._writer.deregister_freed()  # meanwhile the workers begin
        while awaited:
            for worker, link, begun in self._wait_for(awaited):
                if link is not worker.link:
                    continue  # it has been joined anew since
                if begun is None:
                    awaited.pop(worker, None)
                    self._end_engine_of(worker)
                    continue
                if worker not in awaited:
                    continue  # it is lost
                sends = worker.rounds[begun.round]
                self._writer.write(Target(worker.peer, worker.region, worker.offsets, begun.immediate, sends))
                left = awaited[worker].rounds - 1
                if left:
                    limit = self._timeouts.orphan
                    late = f"no further round begun within {limit:g} s"
                    awaited[worker] = _Awaited(left, time.monotonic() + limit, late)
                else:
                    del awaited[worker]
            self._end_failed()
        self._writer.finish()
        self._end_failed()
        return update

    def release(self) -> None:
        """Deregisters the weights' memory, so that it can be freed. Blocks. Call it between two pushes,
        before weights are offloaded or their storages are resized. The next push registers what it sends.

        Each push itself deregisters the memory of freed tensors. It does not see a storage that was
        resized, or memory that an allocator replaced under the same address: after these a NIC would send the
        memory of before. Raises TransferError where some memory is still registered.
        """
        self._writer.release()

    def _begin(self, version: str, update: Update) -> dict[_Worker, _Awaited]:
        """Asks all workers to begin. Returns the workers that will say BEGUN, once a round."""
        limit = self._begin_timeout
        late = f"not begun within {limit:g} s (begin_timeout): it takes the next version"
        asked: dict[_Worker, _Awaited] = {}
        for engine in self._engines:
            if not any(map(self._writes_to, engine.workers)):
                # There is no link over which this rank would hear of it.
                update.reached(str(engine.address), "landed")
                update.reached(str(engine.address), "applied")
                continue
            try:
                if engine.link is not None and engine.link.over:
                    self._reach(engine)
                if engine.link is not None:
                    self._carry(engine.link)
                for worker in engine.workers:
                    if self._writes_to(worker):
                        if worker.link is None or worker.link.over:
                            self._join(worker)
                        assert worker.link is not None
                        self._carry(worker.link)
                        asked[worker] = _Awaited(len(worker.rounds), time.monotonic() + limit, late)
                        self._links.tell(worker.link, self._begins(worker, version))
            except (LinkError, PushError) as error:
                update.failed(str(engine.address), str(error))
                for worker in engine.workers:
                    if asked.pop(worker, None) is not None:
                        self._end(worker, str(error))
        return asked

    def _carry(self, link: Link) -> None:
        """From now on the link's loss fails its engine's part of the version. Raises LinkError."""
        self._carriers.add(link)
        if link.over:  # _lost() may have come before
            raise LinkError(f"{link.address}: {link.over}")

    def _wait_for(self, awaited: Mapping[_Worker, _Awaited]) -> list[_News]:
        """Blocks until somebody has begun a round, or is lost; all who have. An engine with a late worker is
        lost, and no other one."""
        left = min(one.due for one in awaited.values()) - time.monotonic()
        try:
            heard = [self._begun.get(timeout=min(max(left, 0), threading.TIMEOUT_MAX))]
        except queue.Empty:
            return self._end_late(awaited)
        while not self._begun.empty():
            heard.append(self._begun.get())
        # Not all ranks at the same receiver at once.
        first = self._source.rank % len(heard)
        return [*heard[first:], *heard[:first]]

    def _end_late(self, awaited: Mapping[_Worker, _Awaited]) -> list[_News]:
        now = time.monotonic()
        lost: list[_News] = []
        for engine in self._engines:
            waits = [worker for worker in engine.workers if worker in awaited]
            late = next((awaited[worker].late for worker in waits if awaited[worker].due <= now), None)
            if late is not None:
                for worker in engine.workers:
                    self._end(worker, late)
                # Also of links that were over before, of which there is no news.
                lost += [(worker, worker.link, None) for worker in waits]
        return lost

    def _end_engine_of(self, lost: _Worker) -> None:
        """The engine of a worker that is lost does not get the version any more. Its other workers do not
        wait for it, as another sender's version may wait for them."""
        assert lost.link is not None
        for engine in self._engines:
            for worker in engine.workers if lost in engine.workers else ():
                self._end(worker, f"{lost.link.address} of its engine is lost")

    def _end_failed(self) -> None:
        for worker in self._workers():
            if (failure := self._writer.failures.get(worker.peer)) is not None:
                self._end(worker, failure)

    def _end(self, worker: _Worker, reason: str) -> None:
        """It is joined anew for the next version."""
        if worker.link is not None and not worker.link.over:
            self._links.end(worker.link, reason)
            self._lost(worker.link, reason)

    def cancel(self, reason: str) -> None:
        """For good: a push that is under way returns soon, and its Update gives the reason. Any thread, also
        while it is closed, and after."""
        self._cancelled = reason
        for worker in self._workers():
            self._end(worker, reason)
        self._links.end_all(reason)  # of who is only asked

    def _begins(self, worker: _Worker, version: str) -> Begin:
        assert self._plan is not None
        pages = tuple(sum(send.pages for send in sends) for sends in worker.rounds)
        nbytes = self._plan.nbytes[self._source.rank][worker.number]
        return Begin(version, self._plan.digest, worker.senders, pages, nbytes)

    # --- What engines say, on the links' thread

    def _heard(self, link: Link, news: News) -> None:
        update = self._update
        if update is None or news.version != update.identity:
            return
        for engine in self._engines:
            name = str(engine.address)
            if link is engine.link and isinstance(news, Applied):
                update.pause_seconds[name] = news.pause_seconds
                update.reached(name, "applied")
            elif link is engine.link and isinstance(news, NotApplied):
                update.failed(name, news.reason)
            elif any(worker.link is link for worker in engine.workers):
                self._from_worker(update, engine, link, news)

    def _from_worker(self, update: Update, engine: _Engine, link: Link, news: News) -> None:
        name = str(engine.address)
        if isinstance(news, Dropped):
            return  # the link is over with it, which _lost() hears
        mine = [worker for worker in engine.workers if worker.link is not None]
        if isinstance(news, Begun):
            for worker in mine:
                if worker.link is link:
                    self._begun.put((worker, link, news))
            return
        reached = self._ready if isinstance(news, Ready) else self._applied
        reached |= {worker.number for worker in mine if worker.link is link}
        if not all(worker.number in reached for worker in mine):
            return
        if isinstance(news, Applied):
            # Rank 0 hears it of the controller, where that applies it: when the engine has gone on.
            if self._source.rank != 0 or self._apply is not None:
                update.reached(name, "applied")
            return
        if all(len(worker.rounds) == 1 for worker in mine):
            update.reached(name, "landed")
        if self._apply is not None:
            self._apply_once()
        elif self._source.rank == 0 and engine.link is not None:
            self._links.tell(engine.link, Apply(update.identity))

    def _apply_once(self) -> None:
        """Any thread may call it: the links' own, and those of push() and cancel()."""
        update = self._update
        if self._apply is None or self._source.rank != 0 or update is None:
            return
        left = [worker for worker in self._workers() if worker.link is not None and not worker.link.over]
        if not left or any(worker.number not in self._ready for worker in left):
            return
        with self._asking:
            if update is self._asked_for:
                return
            self._asked_for = update
        self._apply(update.identity)

    def _lost(self, link: Link, reason: str) -> None:
        for engine in self._engines:
            if link is engine.link or any(worker.link is link for worker in engine.workers):
                logger.warning("%s: lost %s: %s", self._name, link.address, reason)
                if self._update is not None and link in self._carriers:
                    self._update.failed(str(engine.address), f"{link.address}: {reason}")
        for worker in self._workers():
            if worker.link is link:
                self._writer.fence(worker.peer)
                self._begun.put((worker, link, None))
        self._apply_once()
