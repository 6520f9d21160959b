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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kv_connector.control.addresses import parse_address
from kv_connector.control.cluster_key import ClusterKey, find_key
from kv_connector.engine import DomainConfig, EngineConfig
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timers import Timeouts
from kv_connector.protocol.version import MAX_NAME, identity, shown
from kv_connector.weights.coverage import left_out
from kv_connector.weights.geometry import Geometry
from kv_connector.weights.joining import Joining, TargetEngine, TargetWorker, workers_of
from kv_connector.weights.links import LinkError
from kv_connector.weights.messages import (
    Begin,
)
from kv_connector.weights.plan import Plan, PlanError, make_plan
from kv_connector.weights.sources import Source
from kv_connector.weights.update import PushError, Update
from kv_connector.weights.version_news import VersionNews, WorkerNews
from kv_connector.weights.writer import STAGING_BYTES, Target, Writer

logger = logging.getLogger("kv_connector")


@dataclass(frozen=True)
class Part:
    """What this rank writes to one worker for a version."""

    worker: str
    nbytes: int
    pages: int
    shortest_page: int
    packed_bytes: int  # converted or laid out before they are sent


@dataclass
class _Awaited:
    """The rounds that push() still awaits of one worker."""

    rounds: int  # that it has not begun
    due: float
    late: str  # said of it when that time has come


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
        self._content, self._pushes = "", 0
        self._partial = partial
        self._seeds = seeds
        self._name = f"{name}/{source.rank}"
        self._apply = apply
        addresses = [parse_address(engine) for engine in engines]
        for number, address in enumerate(addresses):
            if address in addresses[:number]:
                raise ValueError(f"the engine {address} is given twice. Give each address once.")
        self._engines = [TargetEngine(address) for address in addresses]
        self._plan: Plan | None = None
        chosen = tuple(providers) or (("nvlink",) if source.device.type == "cuda" else ("host", "tcp"))
        self._engine = TransferEngine(
            EngineConfig(self._name, [DomainConfig(provider, address=data_host) for provider in chosen])
        )
        self._writer = Writer(self._engine, source, staging_bytes)
        self._news = VersionNews(
            source.rank, self._engines, self._writer, key, self._timeouts, self._name, apply
        )
        self._links = self._news.links
        self._joining = Joining(
            source,
            self._engines,
            self._links,
            self._engine,
            self._writer,
            self._timeouts,
            self._name,
            seeds,
            self._end,
        )

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
                    self._links.end(link, "the trainer connects again")
            for worker in engine.workers:
                self._writer.fence(worker.peer)
        agreed = self._source.agree(self._joining.ask_engines)
        if isinstance(agreed.engines, str):
            raise PushError(agreed.engines)
        self._joining.run, self._content, self._pushes = agreed.run, agreed.content, 0
        geometries = [msgspec.msgpack.decode(one, type=Geometry) for one in agreed.engines.geometries]
        for engine, workers in zip(self._engines, agreed.engines.workers, strict=True):
            engine.workers = [TargetWorker(Address(*worker), -1) for worker in workers]
        for number, worker in enumerate(workers_of(self._engines)):
            worker.number = number
        for engine in self._engines:
            if not any(geometries[worker.number].writes for worker in engine.workers):
                raise PushError(
                    f"{engine.address} would load none of the {len(self._source.tensors())} tensors: give "
                    "them the names of the checkpoint that the engine was started from"
                )
        self._plan = make_plan(self._source.tensors(), agreed.held, geometries, self._source.rank)
        self._check_coverage(geometries)
        for worker in workers_of(self._engines):
            by_sender = [of[worker.number] for of in self._plan.nbytes]
            worker.senders = sum(rank == 0 or nbytes > 0 for rank, nbytes in enumerate(by_sender))
            worker.geometry = geometries[worker.number].digest()
            sends = self._writer.prepare(self._plan.pieces[worker.number], geometries[worker.number])
            worker.rounds = [
                [send for send in sends if send.round == round]
                for round in range(geometries[worker.number].rounds)
            ]
            if self._writes_to(worker):
                self._joining.join(worker)

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
            for worker in workers_of(self._engines)
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

    def _writes_to(self, worker: TargetWorker) -> bool:
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
            raise PushError("the pusher is not connected: call connect() before push()")
        if not 0 < len(shown(version)) <= MAX_NAME:
            raise PushError(f"the version {version!r} needs a name of 1 to {MAX_NAME} characters")
        self._pushes += 1
        content = self._content or f"{self._joining.run}/{self._pushes}"
        named = version if self._seeds else identity(version, content)
        update = Update(shown(version), [str(engine.address) for engine in self._engines], named)
        self._news.begin(update)
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
                    late = f"it began no further round within {limit:g} s"
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

    def _begin(self, version: str, update: Update) -> dict[TargetWorker, _Awaited]:
        """Asks all workers to begin. Returns the workers that will say BEGUN, once a round."""
        limit = self._begin_timeout
        late = f"not begun within {limit:g} s (begin_timeout): the engine gets the next version"
        asked: dict[TargetWorker, _Awaited] = {}
        for engine in self._engines:
            if not any(map(self._writes_to, engine.workers)):
                # There is no link over which this rank would hear of it.
                update.reached(str(engine.address), "landed")
                update.reached(str(engine.address), "applied")
                continue
            try:
                if engine.link is not None and engine.link.over:
                    self._joining.reach(engine)
                if engine.link is not None:
                    self._news.carry(engine.link)
                for worker in engine.workers:
                    if self._writes_to(worker):
                        if worker.link is None or worker.link.over:
                            self._joining.join(worker)
                        assert worker.link is not None
                        self._news.carry(worker.link)
                        asked[worker] = _Awaited(len(worker.rounds), time.monotonic() + limit, late)
                        self._links.tell(worker.link, self._begins(worker, version))
            except (LinkError, PushError) as error:
                update.failed(str(engine.address), str(error))
                for worker in engine.workers:
                    if asked.pop(worker, None) is not None:
                        self._end(worker, str(error))
        return asked

    def _wait_for(self, awaited: Mapping[TargetWorker, _Awaited]) -> list[WorkerNews]:
        """Blocks until somebody has begun a round, or is lost; all who have. An engine with a late worker is
        lost, and no other one."""
        left = min(one.due for one in awaited.values()) - time.monotonic()
        try:
            heard = [self._news.begun.get(timeout=min(max(left, 0), threading.TIMEOUT_MAX))]
        except queue.Empty:
            return self._end_late(awaited)
        while not self._news.begun.empty():
            heard.append(self._news.begun.get())
        # Not all ranks at the same receiver at once.
        first = self._source.rank % len(heard)
        return [*heard[first:], *heard[:first]]

    def _end_late(self, awaited: Mapping[TargetWorker, _Awaited]) -> list[WorkerNews]:
        now = time.monotonic()
        lost: list[WorkerNews] = []
        for engine in self._engines:
            waits = [worker for worker in engine.workers if worker in awaited]
            late = next((awaited[worker].late for worker in waits if awaited[worker].due <= now), None)
            if late is not None:
                for worker in engine.workers:
                    self._end(worker, late)
                # Also of links that were over before, of which there is no news.
                lost += [(worker, worker.link, None) for worker in waits]
        return lost

    def _end_engine_of(self, lost: TargetWorker) -> None:
        """The engine of a worker that is lost does not get the version any more. Its other workers do not
        wait for it, as another sender's version may wait for them."""
        assert lost.link is not None
        for engine in self._engines:
            for worker in engine.workers if lost in engine.workers else ():
                self._end(worker, f"worker {lost.link.address} of its engine is lost")

    def _end_failed(self) -> None:
        for worker in workers_of(self._engines):
            if (failure := self._writer.failures.get(worker.peer)) is not None:
                self._end(worker, failure)

    def _end(self, worker: TargetWorker, reason: str) -> None:
        """It is joined anew for the next version."""
        if worker.link is not None and not worker.link.over:
            self._links.end(worker.link, reason)
            self._news.lost(worker.link, reason)

    def cancel(self, reason: str) -> None:
        """For good: a push that is under way returns soon, and its Update gives the reason. Any thread, also
        while it is closed, and after."""
        self._joining.cancelled = reason
        for worker in workers_of(self._engines):
            self._end(worker, reason)
        self._links.end_all(reason)  # of who is only asked

    def _begins(self, worker: TargetWorker, version: str) -> Begin:
        assert self._plan is not None
        pages = tuple(sum(send.pages for send in sends) for sends in worker.rounds)
        nbytes = self._plan.nbytes[self._source.rank][worker.number]
        return Begin(version, self._plan.digest, worker.senders, pages, nbytes)
