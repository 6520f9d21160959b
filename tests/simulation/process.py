"""One life of one engine process: the agent's thread with the real machines, beside a model of vLLM's two
halves.

``turn`` is Agent._turn and ``preempt`` is Agent.preempt, without threads: calls that may block are awaited in
virtual time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kv_connector.agent.loop.effects import Action, Effects
from kv_connector.agent.reports.ledger import Ledger, Timing
from kv_connector.agent.reports.page_checks import PageChecks
from kv_connector.protocol.actions import (
    Ended,
    Outcome,
    PrefixAnswered,
    PrefixDecided,
    PrefixRequested,
    PromptDue,
    State,
)
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import Identity
from kv_connector.protocol.wire.messages import LendOutcome, Role, fingerprint

from .actor import Actor
from .books import Violation
from .fabric import SimEngine
from .lending import LendingSide, prefix_id
from .network import Port
from .older import OlderPeers
from .pool import Pool
from .receiving import DecodeSide
from .scenario import engine_of
from .sending import PrefillSide
from .shape import Worker
from .summing import SimSummer

if TYPE_CHECKING:
    from .world import World

_OVER = (State.DONE, State.FAILED)

FINGERPRINT = fingerprint({"engine": "simulated"})


class _Ledger(Ledger):
    """A ledger that also notes the outcome of each question."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def news(self, news: PrefixRequested | PrefixAnswered | PrefixDecided | PromptDue) -> None:
        if isinstance(news, PrefixAnswered):
            self._process.outcomes[news.transfer_id] = news.outcome
        super().news(news)

    def checked(self, pages: int, corrupt: int, unverified: bool) -> None:
        books = self._process.world.books
        books.check(corrupt == 0, "%s: a page differs from the prefill engine's", self._process)
        books.ended["verified" if pages and not unverified else "not verified"] += 1
        super().checked(pages, corrupt, unverified)


class Process(Actor):
    world: World

    def __init__(self, world: World, name: str, role: Role, worker: Worker, life: int) -> None:
        super().__init__(world, name, life)
        self.world, self.worker = world, worker
        self.place = engine, rank = engine_of(name)
        self.incarnation = f"{name} life {life}"
        self.pool = Pool(worker, world.scenario.spare if role is Role.DECODE else None)
        self.port = Port(world, self)
        self.engine = SimEngine(self, random.Random(f"{world.scenario.seed} {name} {life} engine"))
        self.ledger = _Ledger(self)
        self.outcomes: dict[str, LendOutcome] = {}  # of its questions for prefixes, by transfer id
        prefill = PrefillMachine(worker.layout, world.times)
        decode = DecodeMachine(worker.layout, world.times, verify=world.scenario.verify)
        page_checks = PageChecks(name, SimSummer(self), prefill, decode, self.ledger)
        page_checks.submit = self.submit
        self.effects = Effects(
            engine=self.engine,
            signal=self.engine.signal,
            regions=(1,),
            layout=worker.layout,
            control=self.port,
            peers=(OlderPeers if engine in world.scenario.older else PeerTable)(
                Identity(engine, self.incarnation, role, rank, FINGERPRINT, worker.layout, (b"memory",)),
                world.times,
            ),
            prefill=prefill,
            decode=decode,
            page_checks=page_checks,
            ledger=self.ledger,
        )
        self.effects.transfer_over = self._transfer_over
        ranks = world.ranks(engine)
        self.effects.peers.set_ranks(ranks)
        self.effects.decode.set_ranks(rank, ranks)
        self.prefill = PrefillSide(self)
        self.decode = DecodeSide(self)
        self.lending = LendingSide(self)
        self._commands: deque[Callable[[float], Sequence[Action]]] = deque()
        self._states: Mapping[str, State | None] = {}  # states of its requests after the last turn
        self._leave_by = 0.0

    # --- The agent

    def submit(self, command: Callable[[float], Sequence[Action]]) -> None:
        """Stands in for Agent._submit."""
        self._commands.append(command)
        self.wake(self.latency())

    def turn(self) -> None:
        """Stands in for Agent._turn."""
        effects, now = self.effects, self.clock.now
        try:
            effects.receive(now())
            effects.engine_events(now())
            while self._commands:
                effects.run(now(), self._commands.popleft()(now()))
            effects.tick(now())
        except Violation:
            raise
        except Exception as error:
            self.world.books.fail(f"{self} raises {error!r}")
        self._check_deferred()
        self._take_reports()
        if self.leaving and self._may_leave(now()):
            self._leave()
            return
        deadlines = [effects.next_deadline(), self._leave_by if self.leaving else None]
        times = [self.clock.true_time(deadline) for deadline in deadlines if deadline is not None]
        if times:
            self.wake_at(min(times))

    def has_session_with(self, process: Process) -> bool:
        """Returns whether it has a session with this very process, not with an earlier one at its address."""
        for session in self.effects.peers._sessions.peers.values():
            if session.address is not None and self.world.name_at(session.address) == process.name:
                return True
            if session.engine == process.place and session.incarnation == process.incarnation:
                return True
        return False

    def busy(self) -> dict[str, int]:
        """Returns counts of unfinished work; empty at rest."""
        effects = self.effects
        counts = {
            "prefill": len(effects.prefill),
            "decode": len(effects.decode),
            "fences": effects.fences,
            "counter sets": effects.counter_sets,
            "outgoing": len(effects.writes.open),
            "commands": len(self._commands),
            "prompts": len(self.prefill),
            "loads": len(self.decode),
            "lent": len(self.lending),
            "questions": len(effects.decode.borrowing),
            "deferred": len(effects.decode.deferring),
        }
        return {what: count for what, count in counts.items() if count}

    def leftovers(self) -> dict[str, int]:
        """Returns counts that are 0 at rest, from the agent's internals."""
        effects, sessions = self.effects, len(self.effects.peers)
        engine = self.engine.leftovers()
        peers, prefill, decode = effects.peers, effects.prefill, effects.decode
        callers = sum(len(caller.sessions) for caller in peers._sessions.callers.values())
        counts = self.busy() | {
            "blocks": len(self.pool.owner),
            "blocks that await pages": len(self.pool.awaited),
            "links": len(effects._links) - sessions,
            "transfer ids": len(effects.writes),
            "counting": len(effects._counting),
            "sent": len(effects._sent),
            "sources": len(peers._sessions.by_source) - sessions,
            "dialled peers": len(peers._sessions.by_address) - len(self.port.dialled),
            "connections": len(self.port.dialled) + callers - sessions,
            "states": self.ledger.states,
            "timers of peers": len(peers._sessions.timers) - sessions,
            "timers of prefill": len(prefill._timers),
            "timers of decode": len(decode._timers),
            "attempts": len(decode._attempts),
            "summing": len(decode._summing - peers._sessions.peers.keys()),
            "timers of questions": len(decode.borrowing._timers),
            "timers of deferred": len(decode.deferring._timers),
            "notices": len(prefill._due_notices),
            "timers of notices": len(prefill._due_notices._timers),
            "questions of borrowers": len(prefill._lendings),
            "timers of lendings": len(prefill._lendings._timers),
            "releases": len(decode._releases),
            "engines looked for": len(peers._sessions.finding),
            "prefill's peers": len(prefill._peers) - callers,
            **engine,
            "peers": engine["peers"] - sessions,
        }
        return {what: count for what, count in counts.items() if count}

    def _check_deferred(self) -> None:
        """Checks that each deferred load waits for an event that comes."""
        sessions, decode = self.effects.peers._sessions, self.effects.decode
        for one in decode.deferring._deferred.values():
            if one.peer is not None:
                waits = one.peer in sessions.peers
            else:
                waits = (
                    one.engine in decode._engines if one.worker is None else one.worker in sessions.by_address
                )
            self.world.books.check(waits, "%s: %s waits for a notice that cannot come", self, one.transfer_id)

    def _transfer_over(self, ended: Ended, _: Timing) -> None:
        scenario, books = self.world.scenario, self.world.books
        for plan in scenario.plans:
            if plan.transfer_id == ended.transfer_id and plan.left and scenario.undisturbed(plan):
                bad = ended.outcome in (Outcome.FAILED, Outcome.EXPIRED)
                books.check(not bad, "%s: %s was left, and counts as failed: %s", self, plan.name, ended)
                books.ended[f"left, {ended.outcome.value}"] += 1

    def _take_reports(self) -> None:
        ledger, check = self.ledger, self.world.books.check
        ledger.take_reserved()
        for requested in ledger.take_prefix_requests():
            self.lending.requested(requested)
        prompts = [*self.prefill.requests(), *self.lending.requests()]
        loads = [*self.decode.requests(), *self.prefill.loads()]
        states = {request: ledger.state(request) for request in (*prompts, *loads)}
        reports = ledger.take_reports()
        for request, state in states.items():
            before = self._states.get(request)
            forth = before is None or state is before or (before is State.MOVING and state in _OVER)
            check(forth, "%s: %s was %s and is %s", self, request, before, state)
        for request in loads:
            told, state = request in reports.finished_recving, states[request]
            check((state in _OVER) == told, "%s: %s is %s, reported: %s", self, request, state, told)
        lent = self.lending.requests()
        for request in prompts:
            told, state = request in reports.finished_sending, states[request]
            side = self.lending if request in lent else self.prefill
            busy = state is State.FAILED and self.engine.reading(set(side.blocks(request)))
            check(not busy, "%s: %s has failed, and its blocks may be read", self, request)
            # A failure is known before the engine is done with the request.
            check(told or state is not State.DONE, "%s: %s is done, and not reported", self, request)
            check(state in _OVER or not told, "%s: %s is reported, and %s", self, request, state)
        self._states = states
        for request in sorted(reports.finished_sending):
            (self.lending if request in lent else self.prefill).sent(request, states.get(request))
        for request in sorted(reports.finished_recving):
            failed, stale = request in reports.failed_recving, request in reports.stale
            if request in self.prefill.loads():
                self.prefill.loaded(request, failed, stale)
                continue
            self.decode.received(request, failed, stale, states.get(request), reports.sampled.get(request))
        for transfer_id in sorted(ledger.take_prompts_due()):
            self.world.prompt_due(self, transfer_id)
        answers = ledger.take_prefix_answers()
        for plan in self.world.scenario.plans if answers else ():
            if prefix_id(plan) in answers:
                self.world.prefix_answered(plan, answers[prefix_id(plan)])

    # --- Its end

    def leave(self) -> None:
        """Stands in for Agent.close."""
        if self.leaving:
            return
        self.leaving = True
        self._leave_by = self.clock.now() + self.world.times.drain

        def begin(now: float) -> Sequence[Action]:
            self._leave_by = now + self.world.times.drain
            self.effects.peers.drain()
            return [*self.effects.decode.close(now), *self.effects.prefill.close(now)]

        self.submit(begin)

    def _may_leave(self, now: float) -> bool:
        if self._commands:
            return False
        effects = self.effects
        return now >= self._leave_by or not (len(effects.prefill) + len(effects.decode) + effects.fences)

    def _leave(self) -> None:
        now = self.clock.now()
        self.effects.run(now, self.effects.peers.goodbyes())
        self.effects.run(now, self.effects.peers.leave(now))
        self.world.books.note("%s has left", self)
        self.die()

    # --- SIGSTOP

    def resume(self) -> None:
        super().resume()
        self.prefill.resume()
