"""An engine's controller: has all workers of the engine apply a landed version, in one pause.

The controller runs beside the API server, where the engine can be paused. It has its own control sockets for
trainers.

All workers hold a version before the engine is paused for it, so that none leaves it for the next version.
Either all workers apply a version, or the engine goes on without it. If a worker fails and the version still
lies in the arenas, it is applied once more. If only some workers have it after that, or one has half of it,
the engine stays paused and reports it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Received
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import clip
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.metrics import WeightMetrics
from kv_connector.weights.wire.loop import Loop
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
    State,
    Torn,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

logger = logging.getLogger("kv_connector")

# A worker answers within one turn of its loop.
_WORKER_S = 10.0
_TRIES = 2

_STAYS_PAUSED = "the engine stays paused until a whole version is pushed or seeded to it"


class PausableEngine(Protocol):
    """The operations of the engine that the controller needs. They may raise any exception."""

    async def pause(self) -> None:
        """Pauses the engine until resume(). It computes no step. New requests use no earlier results."""

    async def update(self, version: str) -> None:
        """Has all workers try to apply the version. Their states report the result."""

    async def label(self, version: str) -> None:
        """Makes this version the one that the engine serves: for new requests, and in its answers."""

    async def resume(self) -> None: ...


@dataclass(frozen=True)
class VersionOutcome:
    problem: str = ""
    torn: bool = False
    pause_s: float = 0.0
    nbytes: int = 0  # bytes of the version, of all workers


class Controller:
    """The controller of one engine.

    Call start() once, on the event loop of the engine's client, and close() once.
    """

    def __init__(
        self,
        engine: PausableEngine,
        first_workers: Sequence[Address],
        key: ClusterKey | None,
        metrics: WeightMetrics | None = None,
        timeouts: Timeouts | None = None,
        ended: Callable[[str, VersionOutcome], None] | None = None,
    ) -> None:
        """``first_workers``: the first worker of each data-parallel rank. ``timeouts``: the timeouts of the
        workers. ``ended`` is called, on the event loop, with each version that a trainer or seeder has had
        this engine apply, and its outcome."""
        self._ended = ended
        self._engine = engine
        self._metrics = metrics
        self._firsts = first_workers
        self._heartbeat = (timeouts or Timeouts()).heartbeat
        self._next_ping: float | None = None  # None: no version is held
        self._loop = Loop("kvc-weights-controller", key)
        self._workers: dict[Source, deque[Future[WeightMessage]]] = {}
        """Requests that each worker has not answered yet, in order."""
        self._addresses: WorkersAre | None = None
        self._first_sources: Sequence[Source] = ()
        self._served = ""
        self._problem = ""
        self._torn = False
        self._taking = ""
        self._applying: asyncio.Lock

    async def start(self, address: Address) -> None:
        """Connects to the workers and listens for trainers.

        Raises zmq.ZMQError if the address cannot be bound, and TimeoutError if no worker answers.
        """
        self._asyncio = asyncio.get_running_loop()
        self._applying = asyncio.Lock()
        bound = self._loop.sockets.bind(address)
        self._loop.start(self)
        self._first_sources = self._dial(self._firsts)
        workers: dict[WorkerAddress, None] = {}
        for first in self._first_sources:
            here = await self._ask(first, Workers())
            assert isinstance(here, WorkersAre)
            workers |= dict.fromkeys(here.workers)
        others = [Address(worker.host, worker.port) for worker in workers]
        self._dial([worker for worker in others if worker not in self._firsts])
        self._addresses = WorkersAre(tuple(workers))
        self._tell(list(self._workers), self._addresses)
        self._tell(self._first_sources, Controls(WorkerAddress(bound.host, bound.port)))
        logger.info("weights: the controller listens on %s, for %d workers", bound, len(workers))

    def close(self) -> None:
        self._loop.stop()

    async def apply(self, version: str) -> VersionOutcome:
        """Pauses the engine, has all workers apply the version, and resumes."""
        async with self._applying:
            try:
                if missing := await self._hold(version):
                    return VersionOutcome(
                        f"version {shown(version)} has not landed at {len(missing)} workers: {missing[0]}"
                    )
                return await self._apply_held(version)
            finally:
                self._release()

    async def _apply_held(self, version: str) -> VersionOutcome:
        began = time.monotonic()
        self._taking = version
        try:
            # A torn engine stays torn and paused until its workers have a whole version.
            await self._engine.pause()
            self._torn = True  # until the workers' states show otherwise
            problem, states = await self._update(version)
            torn = any(state.torn for state in states) or len({state.served for state in states}) > 1
            if not problem:
                problem = await self._label(version)
                torn = bool(problem)
            elif any(state.served != self._served for state in states):
                # All workers have an earlier version, which the engine could not report.
                torn = True
            self._torn = torn
        finally:
            self._taking = ""
            if not self._torn:
                await self._engine.resume()
        self._problem = problem
        nbytes = sum(state.arena_bytes for state in states)
        return VersionOutcome(problem, torn, time.monotonic() - began, nbytes)

    async def _label(self, version: str) -> str:
        """Reports the version that all workers have. Returns the reason if that failed, or "".

        An engine that computes with this version and reports another one must not go on. Other engines would
        take its KV as computed with their own version.
        """
        try:
            await self._engine.label(version)
        except Exception as error:
            logger.exception("weights: the engine cannot report version %s", shown(version))
            return (
                f"all workers have version {shown(version)}, but the engine cannot report it "
                f"({type(error).__name__}: {error}): push a version again"
            )
        self._served = version
        return ""

    async def _update(self, version: str) -> tuple[str, list[State]]:
        """Has the workers apply the version.

        Returns the reason why it is not served, or "", and the workers' states.
        """
        for _ in range(_TRIES):
            await self._engine.update(version)
            states = await self._states()
            problem = "; ".join(
                f"worker {rank}: {state.problem or 'it did not try to apply the version'}"
                for rank, state in enumerate(states)
                if state.served != version or state.problem
            )
            if not problem:
                break
            logger.error("weights: version %s was not applied by all workers: %s", shown(version), problem)
            if any(state.landed != version for state in states):
                break
        return problem, states

    async def _states(self) -> list[State]:
        states = await asyncio.gather(*(self._ask(worker, Ask()) for worker in self._workers))
        return [state for state in states if isinstance(state, State)]

    # --- Workers

    async def _hold(self, version: str) -> list[str]:
        """Has all workers keep the version until _release().

        Returns the answers of the workers that do not have it.
        """
        self._loop.call(self._ping)
        answers = await asyncio.gather(*(self._ask(worker, Hold(version)) for worker in self._workers))
        return [answer.reason for answer in answers if isinstance(answer, Refused)]

    def _release(self) -> None:
        def release() -> None:
            self._next_ping = None
            for worker in self._workers:
                self._send(worker, Release())

        self._loop.call(release)

    def _ping(self) -> None:
        self._next_ping = time.monotonic() + self._heartbeat
        for worker in self._workers:
            self._send(worker, Ping())

    def _dial(self, addresses: Sequence[Address]) -> list[Source]:
        def dial() -> list[Source]:
            sources = [self._loop.sockets.dial(address) for address in addresses]
            self._workers |= {source: deque() for source in sources}
            return sources

        return self._loop.call(dial).result()

    async def _ask(self, worker: Source, message: WeightMessage) -> WeightMessage:
        answer: Future[WeightMessage] = Future()

        def ask() -> None:
            self._workers[worker].append(answer)
            self._loop.sockets.send(worker, message)

        self._loop.call(ask)
        return await asyncio.wait_for(asyncio.wrap_future(answer), _WORKER_S)

    # --- Called by the loop

    def received(self, now: float, received: Received[WeightMessage]) -> None:
        del now
        source, message = received.source, received.message
        if source in self._workers:
            if isinstance(message, Pong):
                return
            asked = self._workers[source]
            # A requester that no longer waits has cancelled its future.
            if asked and message is not None and (answer := asked.popleft()).set_running_or_notify_cancel():
                answer.set_result(message)
            return
        match message:
            case None:
                pass
            case Ping():
                self._send(source, Pong())
            case Workers():
                self._send(source, self._addresses or Refused("the engine is starting"))
            case Apply():
                self._later(self._told_to_apply(source, message.version))
            case Ask():
                self._later(self._asked(source))
            case _:
                self._send(source, Refused("this is an engine's controller: send this message to a worker"))

    def readable(self, now: float) -> None:
        del now

    def tick(self, now: float) -> float | None:
        if self._next_ping is None:
            return None
        if now >= self._next_ping:
            self._ping()
        return self._next_ping - now

    def _later(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._asyncio)

    def _send(self, source: Source, message: WeightMessage) -> None:
        self._loop.sockets.send(source, message)

    def _tell(self, sources: Sequence[Source], message: WeightMessage) -> None:
        def tell() -> None:
            for source in sources:
                self._send(source, message)

        self._loop.call(tell)

    async def _told_to_apply(self, source: Source, version: str) -> None:
        try:
            outcome = await self.apply(version)
        except Exception as error:
            logger.exception("weights: applying version %s failed", shown(version))
            self._problem = f"{type(error).__name__}: {error}"
            outcome = VersionOutcome(self._problem, torn=self._torn)
        if outcome.problem:
            said = f"{_STAYS_PAUSED}: {outcome.problem}" if outcome.torn else outcome.problem
            logger.error("weights: version %s is not served: %s", shown(version), said)
            answer: WeightMessage = NotApplied(version, clip(said), outcome.torn)
        else:
            logger.info(
                "weights: the engine serves version %s, after a pause of %.0f ms",
                shown(version),
                outcome.pause_s * 1e3,
            )
            answer = Applied(version, outcome.pause_s)
        if self._metrics is not None:
            if outcome.problem:
                self._metrics.not_applied(outcome.pause_s, torn=outcome.torn)
            else:
                self._metrics.applied(shown(version), outcome.nbytes, outcome.pause_s)
        if self._ended is not None:
            self._ended(version, outcome)
        if outcome.torn or not outcome.problem:
            self._tell(self._first_sources, Torn(clip(outcome.problem)))
        self._loop.call(lambda: self._send(source, answer))

    async def _asked(self, source: Source) -> None:
        try:
            states = await self._states()
            one = next((state for state in states if state.problem), states[0])
            answer: WeightMessage = State(
                self._served or one.served,
                landing=self._taking or one.landing,
                landed=one.landed,
                senders=max(state.senders for state in states),
                arena_bytes=sum(state.arena_bytes for state in states),
                problem=self._problem or one.problem,
                torn=self._torn,
                seeding=next((state.seeding for state in states if state.seeding), ""),
            )
        except TimeoutError:
            answer = Refused("a worker does not answer")
        self._loop.call(lambda: self._send(source, answer))
