"""Joining: finds the workers of engines, has them describe what they load, and joins them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from kv_connector.engine import TransferError
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.mapping.geometry import digest
from kv_connector.weights.sources import Engines, WeightSource
from kv_connector.weights.trainer.writer import PieceSend, Writer
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.links import Link, LinkError, Links, RefusedError
from kv_connector.weights.wire.messages import (
    NOT_DESCRIBED,
    RETRY_LATER,
    Describe,
    Described,
    Join,
    Joined,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

logger = logging.getLogger("kv_connector")

_RETRY_S = 0.2
# Limit for a TCP connection to an engine that was lost. A kernel answers within a round trip, even for a
# process that is busy. An engine that is gone costs each push this time at most.
_PRESENT_S = 1.0
# A worker needs up to 2 ms a tensor to record its model's loaders, and large models have 37,000 tensors.
RECORD_S = 180.0


@dataclass(eq=False)
class TargetWorker:
    """A worker of an engine, as a target of this rank's writes."""

    address: Address
    number: int  # receiver number in the plan, among all workers of all engines
    link: Link | None = None
    peer: int = -1
    lane: str = ""
    region: int = -1
    offsets: tuple[int, ...] = ()
    senders: int = 0
    geometry: bytes = b""  # digest
    rounds: Sequence[Sequence[PieceSend]] = ()

    @property
    def sends(self) -> Iterator[PieceSend]:
        return (send for sends in self.rounds for send in sends)


@dataclass(eq=False)
class TargetEngine:
    """An engine, as a target of this rank's writes."""

    address: Address  # of its controller, or of its first worker
    link: Link | None = None
    workers: list[TargetWorker] = field(default_factory=list)


class MisfitError(LinkError):
    """A worker cannot load these tensors."""


@dataclass(frozen=True)
class EngineAnswer:
    """The answer of an engine: its workers' addresses, and what each of them loads, as MessagePack."""

    engine: TargetEngine
    workers: list[tuple[str, int]]
    geometries: list[bytes]


def engines_of(answers: Sequence[EngineAnswer]) -> Engines:
    """Returns the answers in the form in which ranks exchange them."""
    return Engines(
        [(one.engine.address.host, one.engine.address.port) for one in answers],
        [one.workers for one in answers],
        [geometry for one in answers for geometry in one.geometries],
    )


def absent(address: Address) -> str:
    """Returns the reason why an engine gets no version now: its machine or its process takes no connections.
    Empty: it does."""
    try:
        socket.create_connection((address.host, address.port), _PRESENT_S).close()
    except OSError as error:
        return f"it takes no connections ({error.strerror or error}): it gets the next version"
    return ""


class Joining:
    """Connects one rank of a trainer with engines. Blocks; one thread calls it."""

    def __init__(
        self,
        source: WeightSource,
        engines: Sequence[TargetEngine],
        links: Links,
        engine: TransferEngine,
        writer: Writer,
        timeouts: Timeouts,
        name: str,
        seeds: bool,
        end: Callable[[TargetWorker, str], None],
    ) -> None:
        """``end``: ends the session with a worker, and the writes to it."""
        self.run = ""
        """The id of the trainer's run, once all ranks have agreed on it."""
        self.cancelled = ""
        """The reason why no worker is joined any more. Empty: workers are joined."""
        self._source = source
        self._engines = engines
        self._targets = {engine.address: engine for engine in engines}
        self._links = links
        self._engine = engine
        self._writer = writer
        self._timeouts = timeouts
        self._name = name
        self._seeds = seeds
        self._end = end

    def ask_engines(self) -> Engines | str:
        """Returns the workers of all engines and what each of them loads, or the errors."""
        answers, problems = self.query(self._engines, RECORD_S, needs_all=True)
        return "; ".join(map(str, problems.values())) or engines_of(answers)

    def safely(self, ask: Callable[[], Engines | str]) -> Engines | str:
        """Returns the result of ``ask``, or its error: the other ranks wait for this rank's result."""
        try:
            return ask()
        except LinkError as error:
            return str(error)
        except Exception as error:
            logger.exception("%s: querying the engines failed", self._name)
            return f"{type(error).__name__}: {error}"

    def target(self, address: Address) -> TargetEngine:
        """Returns the engine whose controller has this address."""
        return self._targets.setdefault(address, TargetEngine(address))

    def query(
        self, engines: Sequence[TargetEngine], limit: float, *, needs_all: bool = False
    ) -> tuple[list[EngineAnswer], dict[Address, LinkError]]:
        """Queries the workers of these engines and what each of them loads, of all at the same time.

        ``limit``: seconds until all have answered. ``needs_all``: if a controller does not answer, no worker
        is queried. Returns the answers, and the problem of each other engine.
        """
        found, problems = self._find(engines)
        if needs_all and problems:
            return [], problems
        answers: list[EngineAnswer] = []
        asked: list[tuple[TargetEngine, list[tuple[Link, Future[WeightMessage]]]]] = []
        describe = Describe(tuple(self._source.tensors()))
        try:
            for engine, workers in found:
                links = [self._links.dial(Address(worker.host, worker.port)) for worker in workers]
                asked.append((engine, [(link, self._links.ask(link, describe)) for link in links]))
            deadline = time.monotonic() + limit
            for engine, of_workers in asked:
                try:
                    geometries = [
                        self._described(link, answer, _left(deadline)) for link, answer in of_workers
                    ]
                except LinkError as error:
                    problems[engine.address] = error
                    continue
                addresses = [(link.address.host, link.address.port) for link, _ in of_workers]
                answers.append(EngineAnswer(engine, addresses, geometries))
        finally:
            for _, of_workers in asked:
                for link, _ in of_workers:
                    self._links.end(link, "its query was answered")
        return answers, problems

    def _find(
        self, engines: Sequence[TargetEngine]
    ) -> tuple[list[tuple[TargetEngine, Sequence[WorkerAddress]]], dict[Address, LinkError]]:
        """Queries the workers of these engines, of all at the same time."""
        found: list[tuple[TargetEngine, Sequence[WorkerAddress]]] = []
        problems: dict[Address, LinkError] = {}
        asked = [(engine, self._dial(engine)) for engine in engines]
        deadline = time.monotonic() + self._timeouts.connect
        for engine, answer in asked:
            try:
                found.append((engine, self._reached(engine, answer, _left(deadline))))
            except LinkError as error:
                problems[engine.address] = error
        return found, problems

    def _described(self, link: Link, answer: Future[WeightMessage], limit: float) -> bytes:
        try:
            described = self._links.wait(answer, link, limit)
        except RefusedError as error:
            if RETRY_LATER in str(error):
                raise
            raise MisfitError(str(error)) from None
        assert isinstance(described, Described)
        return msgspec.msgpack.encode(described.geometry)

    def _dial(self, engine: TargetEngine) -> Future[WeightMessage]:
        if engine.link is None or engine.link.over:
            engine.link = self._links.dial(engine.address)
        return self._links.ask(engine.link, Workers())

    def _reached(
        self, engine: TargetEngine, answer: Future[WeightMessage], limit: float
    ) -> Sequence[WorkerAddress]:
        assert engine.link is not None
        here = self._links.wait(answer, engine.link, limit)
        assert isinstance(here, WorkersAre)
        self._links.watch(engine.link)
        return here.workers

    def reach_again(self, engine: TargetEngine) -> None:
        """Makes a new link to the controller, if its machine and process still take connections. Raises
        LinkError."""
        if gone := absent(engine.address):
            raise LinkError(f"{engine.address}: {gone}")
        self._reached(engine, self._dial(engine), self._timeouts.connect)

    def join(self, worker: TargetWorker) -> None:
        """Makes a session with the worker. Raises PushError.

        If its engine was restarted, rank 0 has it describe the checkpoint again, and the other ranks wait.
        """
        deadline = time.monotonic() + RECORD_S
        while not self._joined(worker):
            if self._source.rank == 0:
                self._describe_again(worker)
            elif time.monotonic() >= deadline:
                raise PushError(f"{self._name} cannot join {worker.address}: {NOT_DESCRIBED}")
            else:
                time.sleep(_RETRY_S)

    def _describe_again(self, worker: TargetWorker) -> None:
        link = self._links.dial(worker.address)
        try:
            answer = self._links.ask(link, Describe(tuple(self._source.tensors())))
            described = self._links.wait(answer, link, RECORD_S)
        except LinkError as error:
            raise PushError(f"{self._name} cannot join {worker.address}: {error}") from error
        finally:
            self._links.end(link, "its query was answered")
        assert isinstance(described, Described)
        if described.geometry.digest() != worker.geometry:
            raise PushError(
                f"{worker.address} loads this checkpoint differently since its engine was restarted: call "
                "connect() again"
            )

    def _joined(self, worker: TargetWorker) -> bool:
        """Tries to join once. False: the worker has not recorded this checkpoint yet."""
        if self.cancelled:
            raise PushError(self.cancelled)
        link = self._links.dial(worker.address)
        shaken = self._engine.offer(str(worker.address))
        join = Join(
            self.run,
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
            self._writer.fence(worker.peer)  # of the link that has ended
        worker.link, worker.peer, worker.lane = link, shaken.peer, joined.lane
        worker.offsets = joined.offsets
        if self.cancelled:
            self._end(worker, self.cancelled)
            raise PushError(self.cancelled)
        self._links.watch(link, sends=True)
        logger.info("%s: sends weights to %s, over %s", self._name, worker.address, joined.lane)
        return True


def _left(deadline: float) -> float:
    """Returns the seconds until then, in tenths: errors show them."""
    return max(round(deadline - time.monotonic(), 1), 0.0)


def workers_of(engines: Sequence[TargetEngine]) -> Iterator[TargetWorker]:
    """Yields all workers of the engines."""
    for engine in engines:
        yield from engine.workers
