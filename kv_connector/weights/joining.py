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
from kv_connector.weights.geometry import digest
from kv_connector.weights.links import Link, LinkError, Links
from kv_connector.weights.messages import (
    NOT_DESCRIBED,
    Describe,
    Described,
    Join,
    Joined,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)
from kv_connector.weights.sources import Engines, Source
from kv_connector.weights.update import PushError
from kv_connector.weights.writer import Send, Writer

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
    rounds: Sequence[Sequence[Send]] = ()

    @property
    def sends(self) -> Iterator[Send]:
        return (send for sends in self.rounds for send in sends)


@dataclass(eq=False)
class TargetEngine:
    """An engine, as a target of this rank's writes."""

    address: Address  # of its controller, or of its first worker
    link: Link | None = None
    workers: list[TargetWorker] = field(default_factory=list)


class Joining:
    """Connects one rank of a trainer with engines. Blocks; one thread calls it."""

    def __init__(
        self,
        source: Source,
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
        self._links = links
        self._engine = engine
        self._writer = writer
        self._timeouts = timeouts
        self._name = name
        self._seeds = seeds
        self._end = end

    def ask_engines(self) -> Engines | str:
        """Returns the engines' workers and what each of them loads, or the error."""
        try:
            return self._ask_geometries()
        except LinkError as error:
            return str(error)
        except Exception as error:  # the other ranks wait for this rank's result
            logger.exception("%s: querying the engines failed", self._name)
            return f"{type(error).__name__}: {error}"

    def _ask_geometries(self) -> Engines:
        workers: list[list[tuple[str, int]]] = []
        asked: list[tuple[Link, Future[WeightMessage]]] = []
        describe = Describe(tuple(self._source.tensors()))
        geometries = []
        try:
            for engine in self._engines:
                here = self.reach(engine)
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
                self._links.end(link, "its query was answered")
        return Engines(workers, geometries)

    def reach(self, engine: TargetEngine) -> Sequence[WorkerAddress]:
        """Makes a link to the controller, and returns the engine's workers. Raises LinkError."""
        engine.link = self._links.dial(engine.address)
        answer = self._links.ask(engine.link, Workers())
        here = self._links.wait(answer, engine.link, self._timeouts.connect)
        assert isinstance(here, WorkersAre)
        self._links.watch(engine.link)
        return here.workers

    def reach_again(self, engine: TargetEngine) -> None:
        """Makes a new link to the controller, if its machine and process still take connections. Raises
        LinkError."""
        address = engine.address
        try:
            socket.create_connection((address.host, address.port), _PRESENT_S).close()
        except OSError as error:
            gone = f"it takes no connections ({error.strerror or error}): it gets the next version"
            raise LinkError(f"{address}: {gone}") from None
        self.reach(engine)

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


def workers_of(engines: Sequence[TargetEngine]) -> Iterator[TargetWorker]:
    """Yields all workers of the engines."""
    for engine in engines:
        yield from engine.workers
