"""WeightPusher: the trainer's side.

Each rank writes its part straight into the engines' arenas, and rank 0 has each version applied once it has
landed.

    pusher = WeightPusher(module_source(model), ["10.0.0.5:5800"])
    pusher.connect()
    for step in range(steps):
        train(model)
        pusher.push(str(step)).wait("applied", timeout=60)

All ranks make the same calls in the same order. Nothing is gathered. Ranks wait for each other only in
connect(), at the start of a version until all have begun, and in the source's refresh().
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kv_connector.agent.reports.links import LinkWatch, PeerName
from kv_connector.control.addresses import parse_address
from kv_connector.control.cluster_key import ClusterKey, find_key
from kv_connector.engine import EngineConfig, TransferError
from kv_connector.engine.rank_placement import domains_of, place_nics
from kv_connector.engine.transfer_engine import TransferEngine, close_or_log
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.weight_version import MAX_NAME, identity, shown
from kv_connector.weights.mapping.coverage import left_out
from kv_connector.weights.mapping.geometry import Geometry
from kv_connector.weights.mapping.plan import PlanError, SenderPlan, TensorShard, check, make_plan
from kv_connector.weights.memory.buffer import device_of
from kv_connector.weights.sources import Engines, WeightSource
from kv_connector.weights.trainer.fleet import UNCHANGED, Fleet
from kv_connector.weights.trainer.joining import RECORD_S, Joining, TargetEngine, TargetWorker, workers_of
from kv_connector.weights.trainer.router_list import RouterList
from kv_connector.weights.trainer.version_news import VersionNews, WorkerNews
from kv_connector.weights.trainer.writer import STAGING_BYTES, Target, Writer
from kv_connector.weights.update import PushError, Update
from kv_connector.weights.wire.links import LinkError
from kv_connector.weights.wire.messages import REASON_S, Begin

logger = logging.getLogger("kv_connector")


@dataclass(frozen=True)
class WorkerPart:
    """The part of a version that this rank writes to one worker."""

    worker: str
    nbytes: int
    pages: int
    shortest_page: int
    packed_bytes: int  # converted or laid out before they are sent


@dataclass
class _Awaited:
    """The rounds of one worker that push() still waits for."""

    rounds: int  # rounds that the worker has not begun; 0: its link broke, and the reason has not arrived
    due: float
    late: str  # the error after this time


def _check(
    providers: Sequence[str],
    nics: Sequence[str],
    staging_bytes: int,
    begin_timeout: float | None,
    timeouts: Timeouts | None,
) -> None:
    """Raises ValueError, with the argument's name and a valid value."""
    for name, names, example in (("providers", providers, "verbs"), ("nics", nics, "mlx5_0")):
        if isinstance(names, str) or not all(isinstance(one, str) and one for one in names):
            raise ValueError(f'{name} is {names!r}. Give a sequence of names, such as ["{example}"].')
    if staging_bytes <= 0:
        raise ValueError(f"staging_bytes is {staging_bytes!r}. Give a positive number of bytes.")
    if begin_timeout is not None and not begin_timeout > 0:
        raise ValueError(f"begin_timeout is {begin_timeout!r}. Give a positive number of seconds, or None.")
    if timeouts is not None and not isinstance(timeouts, Timeouts):
        where = "kv_connector.protocol.timeouts"
        raise ValueError(f"timeouts is {timeouts!r}. Give Timeouts of {where}, such as Timeouts(dead=5).")


class WeightPusher:
    """The pusher of one rank. One thread calls its methods."""

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[str] = (),
        *,
        router: str | None = None,
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
        nics: Sequence[str] = (),
        in_turn: bool = False,
    ) -> None:
        """``engines``: addresses of the controllers, ``host:port``. ``router``: in their place, the address
        at which a router takes registrations. Each version goes to the engines that the router lists then.

        ``providers``: lanes in order of preference. Default: ``nvlink`` for weights in a GPU, else ``host``
        and ``tcp``. ``data_host``: this machine's address for them. ``nics``: NICs of this rank for ``verbs``
        or ``libfabric``, such as ``["mlx5_0"]``. Default: the NICs nearest to the weights' GPU.

        ``apply``: called by rank 0 with a version's identity, once all engines that are left may be paused
        for it. Its thread must not block. Default: each engine's controller applies the version. ``key``: the
        content of ``key_file``, if it was read already.

        ``partial``: names or shell patterns of tensors that engines may load in part or not at all, and of
        engines' parameters that may keep their values.

        ``begin_timeout``: seconds that push() waits until an engine begins a version. The engine needs the
        time of its pause for the previous version and of the latest rank. A slower engine gets the next
        version. Default: ``timeouts.orphan``.

        ``seeds``: this pusher belongs to an engine that seeds another one. A trainer may join beside it, and
        the seeded engine keeps parameters that it was not sent, as this engine did.

        ``in_turn``: an engine applies a version once those before it have, or are gone. If one does not apply
        it, those after it do not either. SGLang's servers need this, with the prefill servers first.

        Raises KeyFileError, ValueError if an argument is invalid or an address is given twice, and
        TransferError if a lane does not open.
        """
        _check(providers, nics, staging_bytes, begin_timeout, timeouts)
        if bool(engines) == bool(router):
            raise ValueError('give either engines (["10.0.0.5:5800"]) or router ("10.0.0.9:8500")')
        if in_turn and (router or apply is not None):
            raise ValueError("in_turn needs engines. Leave it out with router or apply.")
        key = key or find_key(key_file)
        self._source = source
        self._in_turn = in_turn
        self._timeouts = timeouts or Timeouts()
        self._begin_timeout = self._timeouts.orphan if begin_timeout is None else begin_timeout
        self._content, self._pushes = "", 0
        self._partial = partial
        self._seeds = seeds
        self._name = f"{name}/{source.rank}"
        self._apply = apply
        addresses = [parse_address(engine) for engine in engines]
        registration = parse_address(router) if router else None
        for number, address in enumerate(addresses):
            if address in addresses[:number]:
                raise ValueError(f"the engine {address} is given twice. Give each address once.")
        self._engines = [TargetEngine(address) for address in addresses]
        self._plan: SenderPlan | None = None
        chosen = tuple(providers) or (("nvlink",) if source.device.type == "cuda" else ("host", "tcp"))
        placed = place_nics(device_of(source.device), providers=chosen, nics=tuple(nics))
        self._engine = TransferEngine(EngineConfig(self._name, domains_of(chosen, data_host, placed)))
        self._link_watch = LinkWatch(self._engine)
        self._writer = Writer(self._engine, source, staging_bytes)
        self._news = VersionNews(
            source.rank, self._engines, self._writer, key, self._timeouts, self._name, apply, in_turn
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
        self._by_router = registration is not None
        self._fleet: Fleet | None = None
        if registration is not None and source.rank == 0:
            listed = RouterList(registration, key)
            self._fleet = Fleet(registration, listed, self._joining, self._engines, self._name)

    def close(self) -> None:
        """Ends all links. Engines discard a version that is in flight.

        Raises TransferError as TransferEngine.close() does.
        """
        self._links.close()
        self._close_fleet()
        self._engine.close()

    def __enter__(self) -> WeightPusher:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._links.end_all(str(error) or type(error).__name__)  # engines report it to the other ranks
            self._links.close()
            self._close_fleet()
            close_or_log(self._engine, self._name)  # its error would replace this one
        else:
            self.close()

    def _close_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    # --- Connecting

    def connect(self) -> None:
        """Queries what the engines load, plans which rank writes what, and joins the workers.

        A collective of all ranks. A second call connects anew.

        Of a router's engines, those that do not answer or do not load the tensors are left out: each push
        names them. Raises PushError if none is left.

        Raises PushError, on every rank if rank 0 could not connect. Raises PlanError, also if an engine would
        load a tensor only in part or keep parameters, and ``partial`` does not name them. Raises SourceError
        if weights have no memory.
        """
        self._plan = None
        for engine in self._engines:
            self._disconnect(engine, "the trainer connects again")
        agreed = self._source.agree(lambda: self._joining.safely(self._ask_all))
        if isinstance(agreed.engines, str):
            raise PushError(agreed.engines)
        self._joining.run, self._content, self._pushes = agreed.run, agreed.content, 0
        misfits = self._use(agreed.engines, agreed.held)
        if not self._engines:
            self._plan = None
            raise PushError("; ".join(misfits.values()))
        if not self._by_router:  # else an engine that cannot be joined must not stop the others: see _begin()
            for worker in workers_of(self._engines):
                if self._writes_to(worker):
                    self._joining.join(worker)

    def _ask_all(self) -> Engines | str:
        return self._joining.ask_engines() if self._fleet is None else self._fleet.all()

    def _follow_router(self) -> None:
        """Takes the engines for the next version from the router's list. A collective of all ranks."""
        fleet, limit = self._fleet, min(self._begin_timeout, RECORD_S)

        def ask() -> Engines | str:
            return UNCHANGED if fleet is None else fleet.changes(limit)

        try:
            agreed = self._source.agree(lambda: self._joining.safely(ask))
        except PlanError as error:
            # All ranks have the same answers, and the same error. The earlier engines have fitted.
            if fleet is not None:
                fleet.refuse_joined(str(error))
            return
        if not isinstance(agreed.engines, str):
            self._use(agreed.engines, agreed.held)
        elif agreed.engines != UNCHANGED:
            raise PushError(agreed.engines)

    def _use(self, answers: Engines, held: Sequence[Sequence[TensorShard]]) -> Mapping[str, str]:
        """Plans who writes what to these engines. Sessions with workers that stay the same go on.

        Returns the reasons why some of a router's engines cannot take the weights. Those are left out.
        """
        self._plan = None
        self._news.begin(None)  # the workers get other numbers
        found = iter(msgspec.msgpack.decode(one, type=Geometry) for one in answers.geometries)
        before = {worker.address: worker for worker in workers_of(self._engines)}
        chosen: list[TargetEngine] = []
        geometries: list[Geometry] = []
        misfits: dict[str, str] = {}
        for address, workers in zip(answers.engines, answers.workers, strict=True):
            engine = self._joining.target(Address(*address))
            of_engine = [next(found) for _ in workers]
            if self._by_router and (why := self._misfit(engine.address, of_engine)):
                misfits[str(engine.address)] = why
                self._disconnect(engine, why)
                continue
            known = [before.get(Address(*worker)) for worker in workers]
            if [worker and worker.geometry for worker in known] != [one.digest() for one in of_engine]:
                self._drop_workers(engine, "they are others than before")
                known = [TargetWorker(Address(*worker), -1) for worker in workers]
            engine.workers = [worker for worker in known if worker is not None]
            chosen.append(engine)
            geometries += of_engine
        for engine in self._engines:
            if engine not in chosen:
                self._disconnect(engine, "the router lists it no more")
        self._engines[:] = chosen
        if self._fleet is not None:
            self._fleet.refuse(misfits)
        for number, worker in enumerate(workers_of(self._engines)):
            worker.number = number
        if not self._by_router:
            for engine in self._engines:
                if not any(geometries[worker.number].writes for worker in engine.workers):
                    raise PushError(self._loads_none(engine.address))
        plan = make_plan(self._source.tensors(), held, geometries, self._source.rank)
        if not self._by_router:
            self._check_coverage(geometries)
        self._plan = plan
        for worker in workers_of(self._engines):
            by_sender = [of[worker.number] for of in plan.nbytes]
            worker.senders = sum(rank == 0 or nbytes > 0 for rank, nbytes in enumerate(by_sender))
            worker.geometry = geometries[worker.number].digest()
            sends = self._writer.prepare(plan.pieces[worker.number], geometries[worker.number])
            worker.rounds = [
                [send for send in sends if send.round == round]
                for round in range(geometries[worker.number].rounds)
            ]
        self._check_turns()
        return misfits

    def _check_turns(self) -> None:
        """Raises PlanError if an engine cannot hold a version until its turn."""
        streaming = [str(worker.address) for worker in workers_of(self._engines) if len(worker.rounds) > 1]
        if self._in_turn and streaming:
            self._plan = None
            raise PlanError(f"in_turn needs engines in mode shadow: {', '.join(streaming)} is in streaming")

    def _disconnect(self, engine: TargetEngine, reason: str) -> None:
        """Ends the sessions with an engine. It keeps the version that it serves."""
        if engine.link is not None:
            self._links.end(engine.link, reason)
        self._drop_workers(engine, reason)

    def _drop_workers(self, engine: TargetEngine, reason: str) -> None:
        for worker in engine.workers:
            if worker.link is not None:
                self._links.end(worker.link, reason)
            self._writer.fence(worker.peer)
        engine.workers = []

    def _loads_none(self, engine: Address) -> str:
        return (
            f"{engine} would load none of the {len(self._source.tensors())} tensors: give "
            "them the names of the checkpoint that the engine was started from"
        )

    def _misfit(self, engine: Address, workers: Sequence[Geometry]) -> str:
        """Returns the reason why an engine of these workers cannot take the weights, or ""."""
        tensors = self._source.tensors()
        if not any(geometry.writes for geometry in workers):
            return self._loads_none(engine)
        try:
            for geometry in workers:
                check(tensors, geometry)
        except ValueError as error:
            return f"{engine}: {error}"
        return left_out(str(engine), tensors, workers, self._partial)

    def _check_coverage(self, geometries: Sequence[Geometry]) -> None:
        """Raises PlanError if an engine would not load all that is sent, or keeps parameters."""
        tensors = self._source.tensors()
        groups = [
            (str(engine.address), [geometries[worker.number] for worker in engine.workers])
            for engine in self._engines
        ]
        if self._apply is not None:
            # Addresses are those of first workers. An engine of several data-parallel ranks has several of
            # them, each with its own experts.
            groups = [(", ".join(name for name, _ in groups), list(geometries))]
        for name, workers in groups:
            if problem := left_out(name, tensors, workers, self._partial, keeps=self._seeds):
                raise PlanError(problem)

    def parts(self) -> list[WorkerPart]:
        """Returns this rank's part for each worker. Call connect() first."""
        return [
            WorkerPart(
                str(worker.address),
                sum(send.nbytes for send in worker.sends),
                sum(send.pages for send in worker.sends),
                min((send.page_bytes for send in worker.sends), default=0),
                sum(send.nbytes for send in worker.sends if send.runs.packed),
            )
            for worker in workers_of(self._engines)
        ]

    def progress(self) -> dict[str, tuple[int, int]]:
        """Returns, for each engine, the written bytes of the last version and the bytes that this rank
        writes.

        Any thread may call it.
        """
        return {
            str(engine.address): (
                sum(self._writer.posted.get(worker.peer, 0) for worker in engine.workers),
                sum(send.nbytes for worker in engine.workers for send in worker.sends),
            )
            for engine in self._engines
        }

    def _writes_to(self, worker: TargetWorker) -> bool:
        """Returns whether this rank joins the worker.

        Rank 0 joins all, as each worker reports to it what has landed.
        """
        assert self._plan is not None
        return self._source.rank == 0 or bool(self._plan.pieces[worker.number])

    # --- A version

    def push(self, version: str) -> Update:
        """Writes this rank's part of all engines' weights, and returns once the sources may change again.

        Blocks until then, but at most ``begin_timeout`` for an engine that does not begin the version. The
        Update reports what follows. Once all ranks push the next version, an unapplied version is not applied
        any more.

        Raises PushError without connect(), and SourceError if the source's tensors differ from those at
        connect(). The failure of an engine is reported in its Update only.

        ``version`` is a name of 119 characters at most. Engines compare more than the name: each push is
        another version, except pushes of the same unchanged checkpoint under the same name. Give engines that
        exchange KV to one pusher.
        """
        if self._plan is None:
            raise PushError("the pusher is not connected: call connect() before push()")
        if not 0 < len(shown(version)) <= MAX_NAME:
            raise PushError(f"the version {version!r} needs a name of 1 to {MAX_NAME} characters")
        if self._by_router:
            self._follow_router()
        self._pushes += 1
        content = self._content or f"{self._joining.run}/{self._pushes}"
        named = version if self._seeds else identity(version, content)
        missed = {} if self._fleet is None else self._fleet.left_out
        update = Update(shown(version), [*(str(engine.address) for engine in self._engines), *missed], named)
        for name, reason in missed.items():
            update.failed(name, reason)
        self._news.begin(update)
        self._writer.start()
        awaited = self._begin(named, update)
        self._news.request_applying()  # engines that could not begin have had their turn
        self._writer.deregister_freed()  # while the workers begin
        self._write_all(awaited)
        self._writer.finish()
        self._write_all({})  # only the reasons of links that broke meanwhile are awaited
        self._look_at_links()
        return update

    def _look_at_links(self) -> None:
        """Logs the links to workers that broke or returned while others carried the weights."""
        names = {w.peer: PeerName(str(w.address), w.lane) for w in workers_of(self._engines)}
        with suppress(TransferError):  # closed meanwhile
            self._link_watch.look(names)

    def _write_all(self, awaited: dict[TargetWorker, _Awaited]) -> None:
        """Writes each round that a worker begins, until nothing is awaited any more."""
        self._end_failed(awaited)
        while awaited:
            for worker, link, begun in self._wait_for(awaited):
                if link is not worker.link:
                    continue  # it was joined again since
                if begun is None:
                    awaited.pop(worker, None)
                    self._end_engine_of(worker)
                    continue
                if worker not in awaited or not awaited[worker].rounds:
                    continue  # it was lost
                sends = worker.rounds[begun.round]
                self._writer.write(Target(worker.peer, worker.region, worker.offsets, begun.immediate, sends))
                left = awaited[worker].rounds - 1
                if left:
                    limit = self._timeouts.orphan
                    late = f"it began no further round within {limit:g} s"
                    awaited[worker] = _Awaited(left, time.monotonic() + limit, late)
                else:
                    del awaited[worker]
            self._end_failed(awaited)

    def release(self) -> None:
        """Deregisters the weights' memory, so that it can be freed. Blocks.

        Call it between two pushes, before weights are offloaded or their storages are resized. The next push
        registers what it sends.

        Each push itself deregisters the memory of freed tensors. It does not notice a resized storage, or
        memory that an allocator replaced under the same address: a NIC would then send the old memory.

        Raises TransferError if some memory is still registered.
        """
        self._writer.release()

    def _begin(self, version: str, update: Update) -> dict[TargetWorker, _Awaited]:
        """Has all workers begin the version. Returns those that will answer BEGUN, once for each round."""
        limit = self._begin_timeout
        late = f"not begun within {limit:g} s (begin_timeout): the engine gets the next version"
        asked: dict[TargetWorker, _Awaited] = {}
        for engine in self._engines:
            if not any(map(self._writes_to, engine.workers)):
                # This rank has no link over which it would receive the engine's news.
                update.reached(str(engine.address), "landed")
                update.reached(str(engine.address), "applied")
                continue
            try:
                if engine.link is not None and engine.link.over:
                    self._joining.reach_again(engine)
                if engine.link is not None:
                    self._news.carry(engine.link, engine)
                targets = [worker for worker in engine.workers if self._writes_to(worker)]
                for worker in targets:
                    # All of them join before one begins: a worker without a link counts as no target, and
                    # the engine would be paused without it.
                    if worker.link is None or worker.link.over:
                        self._joining.join(worker)
                for worker in targets:
                    assert worker.link is not None
                    self._news.carry(worker.link, engine)
                    asked[worker] = _Awaited(len(worker.rounds), time.monotonic() + limit, late)
                    self._links.tell(worker.link, self._begins(worker, version))
            except (LinkError, PushError) as error:
                update.failed(str(engine.address), str(error))
                for worker in engine.workers:
                    if asked.pop(worker, None) is not None:
                        self._end(worker, str(error))
        return asked

    def _wait_for(self, awaited: Mapping[TargetWorker, _Awaited]) -> list[WorkerNews]:
        """Blocks until a worker has begun a round or is lost, and returns the news of all such workers.

        If a worker is late, only its engine is lost.
        """
        left = min(one.due for one in awaited.values()) - time.monotonic()
        try:
            heard = [self._news.begun.get(timeout=min(max(left, 0), threading.TIMEOUT_MAX))]
        except queue.Empty:
            return self._end_late(awaited)
        while not self._news.begun.empty():
            heard.append(self._news.begun.get())
        # Not all ranks write to the same receiver at once.
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
                # Links that ended earlier send no news, and count as well.
                lost += [(worker, worker.link, None) for worker in waits]
        return lost

    def _end_engine_of(self, lost: TargetWorker) -> None:
        """Takes the version from the engine of a lost worker.

        The engine's other workers do not wait for it, because another sender's version may wait for them.
        """
        assert lost.link is not None
        for engine in self._engines:
            for worker in engine.workers if lost in engine.workers else ():
                self._end(worker, f"worker {lost.link.address} of its engine is lost")

    def _end_failed(self, awaited: dict[TargetWorker, _Awaited]) -> None:
        """Ends the sessions with workers that do not get all. If only a link broke, the worker's reason is
        awaited first."""
        for worker in workers_of(self._engines):
            failure = self._writer.failures.get(worker.peer)
            if failure is None or worker.link is None or worker.link.over:
                continue
            if worker.peer not in self._writer.broken:
                self._end(worker, failure)
            elif worker not in awaited or awaited[worker].rounds:
                awaited[worker] = _Awaited(0, time.monotonic() + REASON_S, failure)

    def _end(self, worker: TargetWorker, reason: str) -> None:
        """Ends the session. The worker is joined again for the next version."""
        if worker.link is not None and not worker.link.over:
            self._links.end(worker.link, reason)
            self._news.lost(worker.link, reason)

    def cancel(self, reason: str) -> None:
        """Cancels this pusher for good. A running push returns soon, and its Update has the reason.

        Any thread may call it, also during close() and after it.
        """
        self._joining.cancelled = reason
        for worker in workers_of(self._engines):
            self._end(worker, reason)
        self._links.end_all(reason)  # also of links that only query

    def _begins(self, worker: TargetWorker, version: str) -> Begin:
        assert self._plan is not None
        pages = tuple(sum(send.pages for send in sends) for sends in worker.rounds)
        nbytes = self._plan.nbytes[self._source.rank][worker.number]
        return Begin(version, self._plan.digest, worker.senders, pages, nbytes)
