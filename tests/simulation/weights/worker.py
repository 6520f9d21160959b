"""A worker: the shipped Landing, and a model of the WeightReceiver that executes its decisions."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kv_connector.engine import ErrorCode, EventKind, TransferError
from kv_connector.weights.mapping.geometry import digest
from kv_connector.weights.wire.messages import CODEC, Described, Joined, Seed, WorkerAddress
from kv_connector.weights.worker.landing import Landing, LandingPhase
from kv_connector.weights.worker.landing_actions import (
    Action,
    GiveUp,
    HandOver,
    LandingAccept,
    LandingCloseCounter,
    LandingFence,
    LandingLog,
    LandingOpenCounter,
    LandingReply,
    Record,
)

from ..actor import Actor
from ..books import Violation
from ..network import Port
from .arena import CELL_BYTES, CELLS, Arena, Tag, WeightsEngine, geometry, round_of

if TYPE_CHECKING:
    from .controller import Controller
    from .world import World

_FENCE_RETRY_S = 0.05  # as in receiver.py
_RECORD_S = 0.5  # typical time of a model's loaders
_ROUND_S = 60.0  # as in receiver.py
_SLOTS = 2  # as in arena.py
_LENDS_S = 2.0  # typical time between two engines that it seeds
_LENT_S = 4.0  # maximum


class Worker(Actor):
    world: World

    def __init__(self, world: World, controller: Controller, number: int, life: int) -> None:
        super().__init__(world, f"{controller.name}/{number}", life)
        self.world, self.controller, self.number = world, controller, number
        self.port = Port(world, self, CODEC.encode, CODEC.decode)
        self.engine = WeightsEngine(self, random.Random(f"{world.seed} {self.name} {life} engine"))
        self.landing = Landing(world.times.dead, slots=_SLOTS if world.scenario.streaming else 0)
        self.arena = Arena(world.scenario.rounds)
        self.model: list[Tag | None] = [None] * CELLS  # weights in use; None: those of its start
        self._counters: dict[int, tuple[int, int]] = {}  # counter and immediate of each open round
        self._handed: deque[HandOver | GiveUp] = deque()
        self._reading: set[int] = set()  # rounds that have been handed over
        self._waits: Callable[[], None] | None = None  # continuation of an update that waits for a round
        self._since: object = None
        self._fencing: dict[int, str] = {}
        self._held: list[Callable[[], None]] = []  # calls held by SIGSTOP
        self.wake(0.0)
        if world.scenario.lends:
            self._lend_later()

    # --- WeightReceiver

    def turn(self) -> None:
        now = self.clock.now()
        try:
            for received in self.port.receive():
                if received.message is None:
                    self._run(self.landing.lost(received.source, "it sent a malformed message"))
                else:
                    self._run(self.landing.receive(now, received.source, received.message))
            for event in self.engine.poll_events(1000):
                rounds = [of for of, (counter, _) in self._counters.items() if counter == event.id]
                if event.kind is EventKind.COUNTERS_REACHED and rounds:
                    self._run(self.landing.reached(rounds[0]))
                elif event.kind in (EventKind.PEER_DOWN, EventKind.PEER_LEFT):
                    self.landing.peer_lost(now, event.id, str(event.error or "it has left"))
            self._run(self.landing.tick(now))
            for peer in list(self._fencing):
                self._fence(peer)
        except Violation:
            raise
        except Exception as error:
            self.world.books.fail(f"{self} raises {error!r}")
        deadline = self.landing.next_deadline()
        if deadline is not None:
            self.wake_at(self.clock.true_time(deadline))
        if self._fencing:
            self.wake(_FENCE_RETRY_S)

    def _run(self, actions: Sequence[Action]) -> None:
        pending = list(actions)
        while pending:
            pending = [*self._execute(pending[0]), *pending[1:]]

    def _execute(self, action: Action) -> Sequence[Action]:
        match action:
            case LandingReply(source, message):
                self.port.send(source, message)
            case Record(tensors):
                took = self.rng.expovariate(1 / _RECORD_S)
                self.world.clock.after(took, lambda: self._later(lambda: self._recorded(digest(tensors))))
            case LandingAccept(source, name, offer):
                return self._accept(source, name, offer)
            case LandingOpenCounter(peers, pages, round):
                return self._open_counter(peers, pages, round)
            case LandingCloseCounter(round):
                if round in self._counters:
                    self.engine.release_counters(self._counters.pop(round)[0])
            case HandOver() | GiveUp():
                self._handed.append(action)
                if isinstance(action, HandOver):
                    self._reading.add(action.round)
                if (waits := self._waits) is not None:
                    self._waits = None
                    self.world.clock.after(self.latency(), lambda: self._later(waits))
            case LandingFence(peer, reason):
                self._fencing[peer] = reason
                self._fence(peer)
            case LandingLog(_, text):
                self.world.books.note("%s: %s", self, text)
        return ()

    def _recorded(self, tensors: bytes) -> None:
        if self.engine.not_recorded:
            self.engine.not_recorded -= 1
            self._run(self.landing.not_recorded("there is no memory for it"))
            return
        answer = Described(geometry(self.arena.rounds))
        self._run(self.landing.recorded(tensors, answer, CELLS * CELL_BYTES))

    def _accept(self, source: bytes, name: str, offer: bytes) -> Sequence[Action]:
        try:
            shaken = self.engine.accept(name, offer)
        except TransferError as error:
            return self.landing.not_accepted(source, str(error))
        return self.landing.accepted(source, shaken.peer, Joined(shaken.data, b"region", (0,), "sim"))

    def _open_counter(self, peers: tuple[int, ...], pages: int, round: int) -> Sequence[Action]:
        shared = [other for other in (*self._counters, *self._reading) if (other - round) % _SLOTS == 0]
        self.world.books.check(not shared, "%s opens round %s in the room of %s", self, round, shared)
        self.arena.clear(round)
        try:
            counters = self.engine.alloc_counters(1, peers)
        except TransferError as error:
            return self.landing.not_opened(str(error))
        self._counters[round] = counters.id, counters.immediates[0]
        self.engine.expect(counters.id, [pages])
        self.world.ambush("landing", self.world.scenario.wire)
        return self.landing.opened(counters.immediates[0], round)

    def _fence(self, peer: int) -> None:
        try:
            self.engine.fence(peer, 0.0)
        except TransferError as error:
            if error.code is ErrorCode.TIMEOUT:
                return
        del self._fencing[peer]
        self._run(self.landing.fenced(peer))

    # --- Lending to the workers that it seeds

    def _lend_later(self) -> None:
        self.world.clock.after(self.rng.expovariate(1 / _LENDS_S), lambda: self._later(self._lend))

    def _lend(self) -> None:
        seed = Seed("a run", self.landing.served or "none", WorkerAddress("elsewhere", 1))
        lent = list(self.arena.content)
        if self.world.quiet:
            return
        if self.landing.lend(seed, "elsewhere"):
            self._lend_later()
            return

        def give_back() -> None:
            same = self.arena.content == lent
            self.world.books.check(same, "%s writes to %s, which it has lent", self, lent)
            self.world.books.ended["lent"] += 1
            self._run(self.landing.returned(seed))
            self.wake(self.latency())
            self._lend_later()

        self.world.clock.after(self.rng.uniform(0, _LENT_S), lambda: self._later(give_back))

    # --- The arena

    def land(self, cells: Sequence[int], tag: Tag, immediate: int) -> None:
        """Checks a write, and stores it. Cells of a discarded version may land until the arena belongs to the
        next one."""
        check = self.world.books.check
        rounds = {round_of(cell, self.arena.rounds) for cell in cells}
        # With rounds, no complete version is in the arena that a write could damage.
        whole = self.landing.phase is LandingPhase.READY or (
            self.landing.phase is LandingPhase.APPLYING and not self.landing.slots
        )
        check(not whole, "%s of %s lands at %s, where a version has landed", cells, tag, self)
        for round in rounds:
            shares = [other for other in self._reading if (other - round) % _SLOTS == 0]
            check(not shares, "%s of %s lands at %s, where round %s is read", cells, tag, self, shares)
            late = any(
                immediate != of for other, (_, of) in self._counters.items() if (other - round) % _SLOTS == 0
            )
            check(not late, "%s of %s lands at %s, which has been given to another", cells, tag, self)
        for cell in cells:
            self.arena.content[cell] = tag

    # --- vLLM's side: the engine is paused

    def apply(self, version: str, tried: Callable[[], None]) -> None:
        """Has every worker apply the version. ``tried`` is called with any outcome."""
        self.world.clock.after(self.latency(), lambda: self._later(lambda: self._take(version, tried)))

    def _take(self, version: str, tried: Callable[[], None]) -> None:
        self._handed.clear()
        # Rounds, unlike a whole version, end together with their senders.
        held = self.landing._holder is not None and not self.landing.slots
        self._run(self.landing.take(version))
        there = not any(isinstance(what, GiveUp) for what in self._handed)
        self.world.books.check(there or not held, "%s has not %s, which is held", self, version)
        self._next(version, self.arena.rounds, False, tried)

    def _next(self, version: str, left: int, touched: bool, tried: Callable[[], None]) -> None:
        """Models the main thread of vLLM's worker: takes what has been handed over, round by round."""
        if not left:
            self._finish("", touched, tried)
            return
        if not self._handed:
            since = object()
            self._waits = lambda: self._next(version, left, touched, tried)
            self._since = since
            self.world.clock.after(
                _ROUND_S, lambda: self._later(lambda: self._overdue(since, touched, tried))
            )
            return
        what = self._handed.popleft()
        if isinstance(what, GiveUp):
            self._finish(what.reason, touched, tried)
            return
        tag = self.arena.whole(what.round)
        check = self.world.books.check
        check(tag is not None, "%s takes %s, of which it has %s", self, version, self.arena.content)
        check(self.world.versions.get(version) == tag, "%s takes %s for %s", self, tag, version)
        took = self.rng.uniform(0, self.world.scenario.apply / self.arena.rounds)
        self.world.ambush("applying", took)

        def taken() -> None:
            self._taken(version, what.round, tag, left, tried)

        self.world.clock.after(took, lambda: self._later(taken))

    def _overdue(self, since: object, touched: bool, tried: Callable[[], None]) -> None:
        if self._waits is not None and self._since is since:
            self._waits = None
            self._finish("no round has come", touched, tried)

    def _taken(self, version: str, round: int, tag: Tag | None, left: int, tried: Callable[[], None]) -> None:
        check = self.world.books.check
        check(self.controller.paused, "%s changes its weights while the engine runs", self)
        check(self.arena.whole(round) == tag, "%s: what lies there has changed while it was read", self)
        if self.engine.not_applied:
            self.engine.not_applied -= 1
            self._finish("the kernels do not like it", True, tried)
            return
        for cell in self.arena.cells(round):
            self.model[cell] = tag
        self._reading.discard(round)
        self._run(self.landing.released(round))
        self.wake(self.latency())
        self._next(version, left - 1, True, tried)

    def _finish(self, problem: str, torn: bool, tried: Callable[[], None]) -> None:
        if problem:
            self.world.books.note("%s: %s", self, problem)
        self._reading.clear()
        self._run(self.landing.applied(problem, torn=torn))
        self.wake(self.latency())
        tried()

    # --- Its end

    def _later(self, step: Callable[[], None]) -> None:
        if self.dead:
            return
        if self.stopped:
            self._held.append(step)
            return
        step()

    def resume(self) -> None:
        super().resume()
        held, self._held = self._held, []
        for step in held:
            step()

    def die(self, silently: bool = False) -> None:
        super().die(silently)
        self.controller.die(silently)

    def left(self) -> dict[str, object]:
        """Returns what must be empty in a worker at rest."""
        found = self.engine.leftovers() | {
            "senders": len(self.landing._senders),
            "fencing": len(self._fencing) + len(self.landing._fencing),
        }
        return {what: count for what, count in found.items() if count}
