"""A model of an engine's controller, which runs on asyncio. It pauses, has all workers apply, and resumes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from kv_connector.protocol.actions import Source
from kv_connector.weights.wire.messages import (
    CODEC,
    Applied,
    Apply,
    Ask,
    Hold,
    NotApplied,
    Ping,
    Pong,
    Refused,
    Release,
    State,
    WeightMessage,
    WorkerAddress,
    Workers,
    WorkersAre,
)

from ..actor import Actor
from ..network import Port
from .worker import Worker

if TYPE_CHECKING:
    from .world import World

# As in controller.py.
_WORKER_S = 10.0

Work = Generator[float | None, None, None]
"""A coroutine. It yields the latest time of its continuation, by its own clock; None: it waits for an
event."""


class Controller(Actor):
    world: World

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world, name, life)
        self.world, self.engine = world, None
        self.port = Port(world, self, CODEC.encode, CODEC.decode)
        self.paused = False
        self.taking = ""  # version for which it is paused, or was last
        self.workers = [Worker(world, self, number, life) for number in range(world.scenario.workers)]
        addresses = [world.address(worker.name) for worker in self.workers]
        self._addresses = tuple(WorkerAddress(address.host, address.port) for address in addresses)
        self._asked: dict[Source, deque[list[WeightMessage]]] = {
            self.port.dial(address): deque() for address in addresses
        }
        self._work: deque[Work] = deque()
        self._trying = 0  # workers that are applying
        self._next_ping: float | None = None  # None: nothing is held

    def turn(self) -> None:
        for received in self.port.receive():
            self._received(received.source, received.message)
        while self._work:
            try:
                deadline = next(self._work[0])
            except StopIteration:
                self._work.popleft()
                continue
            if deadline is not None:
                self.wake_at(self.clock.true_time(deadline))
            break
        if self._next_ping is not None:
            if self.clock.now() >= self._next_ping:
                self._next_ping = self.clock.now() + self.world.times.heartbeat
                self._tell(Ping())
            self.wake_at(self.clock.true_time(self._next_ping))

    def _received(self, source: Source, message: WeightMessage | None) -> None:
        if source in self._asked:
            if isinstance(message, Pong):
                return
            if self._asked[source] and message is not None:
                self._asked[source].popleft().append(message)
            return
        match message:
            case None:
                pass
            case Ping():
                self.port.send(source, Pong())
            case Workers():
                self.port.send(source, WorkersAre(self._addresses))
            case Apply():
                self._work.append(self._told_to_apply(source, message.version))
            case _:
                self.port.send(
                    source, Refused("this is an engine's controller: send this message to a worker")
                )

    def _told_to_apply(self, source: Source, version: str) -> Work:
        answers: list[WeightMessage] = []
        try:
            yield from self._apply(version, answers)
        except TimeoutError:
            answers.append(NotApplied(version, "a worker does not answer", torn=True))
        self._next_ping = None
        self._tell(Release())
        self.port.send(source, answers[0])

    def _apply(self, version: str, answers: list[WeightMessage]) -> Work:
        self._next_ping = self.clock.now()
        held: list[WeightMessage] = []
        yield from self._ask(Hold(version), held)
        if missing := [answer for answer in held if isinstance(answer, Refused)]:
            answers.append(NotApplied(version, f"it has not landed at {len(missing)} workers"))
            return
        pausing = self.clock.now() + self.world.scenario.pausing * self.rng.random()
        while self.clock.now() < pausing:
            yield pausing
        states: list[State] = []
        self.paused, self.taking = True, version
        for last in (False, True):
            self._trying = len(self.workers)
            for worker in self.workers:
                worker.apply(version, self._tried)
            while self._trying:
                yield None
            states = []
            yield from self._states(states)
            bad = [state for state in states if state.served != version or state.problem]
            problem = "; ".join(state.problem or "it did not try to apply the version" for state in bad)
            if not problem or last or any(state.landed != version for state in states):
                break
        torn = any(state.torn for state in states) or len({state.served for state in states}) > 1
        if torn:
            self.world.books.ended["torn"] += 1
        else:
            self._resume()
        answers.append(NotApplied(version, problem, torn=torn) if problem else Applied(version))

    def _tried(self) -> None:
        self._trying -= 1
        self.wake(self.latency())

    def _resume(self) -> None:
        """Resumes the engine. No token may come from mixed weights."""
        models = {tag for worker in self.workers for tag in worker.model}
        self.world.books.check(len(models) == 1, "%s goes on with %s", self, models)
        self.world.books.ended["applied"] += 1
        self.paused = False

    def _states(self, found: list[State]) -> Work:
        answers: list[WeightMessage] = []
        yield from self._ask(Ask(), answers)
        found += [answer for answer in answers if isinstance(answer, State)]

    def _ask(self, question: WeightMessage, found: list[WeightMessage]) -> Work:
        answers: list[list[WeightMessage]] = []
        for worker, asked in self._asked.items():
            answers.append([])
            asked.append(answers[-1])
            self.port.send(worker, question)
        deadline = self.clock.now() + _WORKER_S
        while not all(answers):
            if self.clock.now() >= deadline:
                raise TimeoutError
            yield deadline
        found += [answer[0] for answer in answers]

    def _tell(self, message: WeightMessage) -> None:
        for worker in self._asked:
            self.port.send(worker, message)

    def die(self, silently: bool = False) -> None:
        """Ends all processes of the engine together."""
        if self.dead:
            return
        super().die(silently)
        for worker in self.workers:
            worker.die(silently)
