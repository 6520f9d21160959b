"""A cluster in virtual time: all engine processes of a scenario, the networks between them, and their
faults."""

from __future__ import annotations

import functools
from dataclasses import replace

from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import Rank, Role

from . import faults
from .lending import LendingSide
from .process import Process
from .scenario import Plan, Scenario, engine_of, workers
from .shape import Side, worker
from .surroundings import Surroundings

# The defaults of production, except those that would only make a run longer: the holds of a minute and the
# deadline of five.
TIMES = Timeouts(hold=12.0, orphan=12.0, transfer=25.0, cancel=3.0, drain=3.0)
# A prefix that is not lent, or not loaded, delays the prompt by up to 20 s: question, load, cancel and fence.
# The question may take a handshake of slow messages.
PREFIX_TIMES = replace(TIMES, transfer=45.0, ask=4.0, remember=8.0, lend=4.0, borrow=8.0)

# The longest fence in this fabric (fabric.SimEngine._fence), and a little more.
_FENCE_S = 5.0


class World(Surroundings):
    """One run of one scenario."""

    scenario: Scenario
    processes: dict[str, Process]

    def __init__(self, scenario: Scenario, tracing: bool = False) -> None:
        self._defers = any(plan.short_for is not None for plan in scenario.plans)
        self._begun: dict[str, float] = {}
        self._borrows = any(plan.lender for plan in scenario.plans)
        super().__init__(scenario, PREFIX_TIMES if self._borrows else TIMES, tracing)
        self.sides = {engine: scenario.side(engine) for engine in scenario.engines}
        # Within this time a request without obstacles is served: a fault of a third party must not cost it
        # more. It covers a handshake and a RESERVE of the slowest messages, and writes, a few of which may
        # wait for each other. In chaos each of the six messages may be 0.5 s late, and two attempts to
        # connect fail.
        late = 3.4 if scenario.chaos else 1.5
        self.prompt_s = late + 20 * scenario.jitter + 10 * scenario.wire
        self._words: dict[str, float] = {}
        self._computed: dict[str, list[float]] = {}
        self._pauses = sum(fault.lasting for fault in scenario.faults)
        self._filled: set[str] = set()  # requests whose prefix was cached

    def _run(self) -> None:
        for engine in self.scenario.engines:
            self.start_engine(engine)
        last = 0.0
        for plan in self.scenario.plans:
            if plan.lender:
                last = max(last, self._cache(plan))
            if not (plan.unknown_to_prefill or plan.alone):
                self.clock.at(plan.prefill_at, functools.partial(self._arrive, plan, plan.prefill))
            if not plan.unknown_to_decode:
                self.clock.at(plan.decode_at, functools.partial(self._arrive, plan, plan.decode))
            last = max(last, plan.prefill_at, plan.decode_at + plan.admitted_after + (plan.short_for or 0.0))
        for fault in self.scenario.faults:
            self.clock.at(fault.at, functools.partial(faults.strike, self, fault))
            last = max(last, fault.at + fault.lasting + self.times.drain + 0.1)
        self.clock.at(last, self._evict_all)
        self.until(last + 1.0, lambda: {"events": "to come"} if self.clock.now < last else {})
        delay = self.load_bound() + self.ask_bound() if self._borrows else 0.0
        delay += self.notice_bound() if self._defers else 0.0
        self.until(last + delay + self.decode_bound() + self.prefill_bound(), self._busy)
        self.until(self.clock.now + 3 * self.times.dead + self._pauses + _FENCE_S, self._leftovers)
        for process in list(self.processes.values()):
            process.leave()
        self.until(
            self.clock.now + self.times.drain + 1.0, lambda: dict.fromkeys(self.processes, "has not left")
        )

    # --- For the models

    def start(self, name: str) -> None:
        """Starts a new process at the address, unless one lives there or its engine has no such worker."""
        engine, number = engine_of(name)
        if name in self.processes or name not in self.workers(engine):
            return
        role = Role.BOTH if self.scenario.both else Role.DECODE if name[0] == "d" else Role.PREFILL
        held = worker(self.sides[engine], self.scenario.heads, number)
        self.processes[name] = Process(self, name, role, held, self.next_life(name))
        self.books.note("%s starts", self.processes[name])

    def start_engine(self, engine: str) -> None:
        for name in self.workers(engine):
            self.start(name)

    def replace(self, engine: str, side: Side, silently: bool) -> None:
        """Ends the engine. Processes that start there from now on have another shape."""
        for name in self.workers(engine):
            if name in self.processes:
                self.processes[name].die(silently)
        self.sides[engine] = side

    def workers(self, engine: str) -> tuple[str, ...]:
        return workers(engine, self.sides[engine])

    def ranks(self, engine: str) -> list[Rank]:
        """Returns the workers of an engine, as its directory lists them."""
        ranks = []
        for number, name in enumerate(self.workers(engine)):
            held, address = worker(self.sides[engine], self.scenario.heads, number), self.address(name)
            ranks.append(Rank(address.host, address.port, held.stage, held.layout))
        return ranks

    def say(self, plan: Plan) -> None:
        """Records that D acted on a request. P's bounds are counted from here."""
        self._words[plan.name] = self.clock.now

    def last_word(self, plan: Plan) -> float:
        return self._words.get(plan.name, 0.0)

    def computed(self, plan: Plan) -> None:
        """Records that one of P's workers has computed the prompt."""
        self._computed.setdefault(plan.name, []).append(self.clock.now)

    def computed_at(self, plan: Plan, failed: bool) -> float | None:
        """Returns when all of P's workers have computed the prompt. A truncated prompt may fail with the
        first that finishes."""
        times = self._computed.get(plan.name, [])
        if failed and plan.truncated:
            return max(times, default=None)
        return max(times) if len(times) >= len(self.workers(plan.prefill)) else None

    def decode_bound(self) -> float:
        """Returns the time within which a reserved request is reported, whatever happens."""
        times = self.times
        return 1.02 * (times.transfer + times.cancel + times.drain + 2 * times.dead) + _FENCE_S + self._pauses

    def prefill_bound(self) -> float:
        """Returns the time within which a finished prompt is reported, counted from D's last action on it."""
        times = self.times
        return 1.02 * (times.hold + times.transfer + times.drain + times.dead) + _FENCE_S + self._pauses

    def ask_bound(self) -> float:
        """Returns the time within which a borrower has an answer, good or bad. Its turns may be slow."""
        return 1.02 * self.times.ask + 3.0 + self._pauses

    def begins(self, plan: Plan) -> None:
        """Records that a worker of P begins with a prompt, or ends it."""
        self._begun.setdefault(plan.name, self.clock.now)

    def begun_at(self, plan: Plan) -> float | None:
        """Returns when the first worker of P began with the prompt."""
        return self._begun.get(plan.name)

    def notice_bound(self) -> float:
        """Returns the time within which a deferred load waits for nothing any more, whatever happens."""
        return 1.02 * self.times.transfer + 3.0 + self._pauses

    def prompt_due(self, first: Process, transfer_id: str) -> None:
        """The scheduler of D has the notice, which its first worker got, and acts for all workers."""
        for name in self.workers(first.place[0]):
            process = self.processes.get(name)
            if process is not None:
                process.decode.due(transfer_id)

    def load_bound(self) -> float:
        """Returns the time within which a borrowed prefix has arrived or has not."""
        times = self.times
        return 1.02 * (times.borrow + times.cancel + times.drain + 2 * times.dead) + _FENCE_S + self._pauses

    def lending_bound(self) -> float:
        """Returns the time within which a lender may use its blocks again."""
        times = self.times
        return 1.02 * (times.lend + times.borrow + times.drain + times.dead) + _FENCE_S + self._pauses

    def lendings(self, engine: str) -> list[LendingSide]:
        """Returns the lending sides of the engine's living workers."""
        found = (self.processes.get(name) for name in self.workers(engine))
        return [process.lending for process in found if process is not None]

    def lend(self, asked: Process, request: PrefixRequested) -> None:
        """The scheduler of the lender decides. One of its workers got the question."""
        engine, _ = asked.place
        if asked.lending.paused:
            return  # its scheduler takes no step, so its workers answer
        found, tokens = asked.lending.look_up(request.content)
        multiple = max(request.multiple, asked.worker.block)
        tokens = tokens // multiple * multiple
        workers = [self.processes.get(name) for name in self.workers(engine)]
        ready = [one for one in workers if one is not None and not one.leaving and one.lending.has(found)]
        if tokens <= request.first_token or len(ready) < len(workers):
            asked.lending.refuse(request.transfer_id)
            return
        self.books.note("%s lends %d tokens as %s", engine, tokens, request.transfer_id)
        prompt_hash = request.content.prompt_hash(tokens)
        for process in ready:
            process.lending.hold(request.transfer_id, found)
            carry_out = functools.partial(process.lending.lend, request.transfer_id, tokens, prompt_hash)
            process.lending.later(carry_out)

    def prefix_answered(self, plan: Plan, tokens: int) -> None:
        """The scheduler of the borrower has the answer, and passes it to its workers."""
        for name in self.workers(plan.computer):
            process = self.processes.get(name)
            if process is not None:
                process.prefill.answered(plan, tokens)

    def cached_tokens(self, plan: Plan) -> int:
        """Returns the tokens that the borrower can have of the lender, if nothing is evicted."""
        lender, borrower = self.sides[plan.lender], self.sides[plan.computer]
        multiple = max(lender.block, borrower.block)
        has = plan.prefix // lender.block * lender.block if plan.name in self._filled else 0
        return min(has, plan.diverges, plan.tokens - 1) // multiple * multiple

    def preemption_bound(self) -> float:
        """Returns the time within which P's engine continues its step."""
        return 1.02 * self.times.drain + 0.5 + self._pauses

    # --- Steps

    def _cache(self, plan: Plan) -> float:
        """Puts the prefix of a request into its lender's cache. Returns when the last part of its life
        begins."""
        workers = [self.processes[name] for name in self.workers(plan.lender)]
        filled = [process.lending.fill(plan) for process in workers]
        if all(filled):
            self._filled.add(plan.name)
        if plan.evicted is None:
            return plan.computing_at + self.times.ask
        for process in workers:
            self.clock.at(plan.evicted, functools.partial(process.lending.evict, plan.name))
        return plan.evicted

    def _evict_all(self) -> None:
        for process in self.processes.values():
            process.lending.evict_all()

    def _arrive(self, plan: Plan, engine: str) -> None:
        for name in self.workers(engine):
            process = self.processes.get(name)
            if process is not None:
                (process.prefill if engine == plan.computer else process.decode).arrive(plan)

    def _busy(self) -> dict[str, object]:
        return {name: busy for name, process in self.processes.items() if (busy := process.busy())}

    def _leftovers(self) -> dict[str, object]:
        found: dict[str, object] = {
            name: left for name, process in self.processes.items() if (left := process.leftovers())
        }
        return found | {
            name: gone for name, process in self.processes.items() if (gone := self._widowed(process))
        }

    def _widowed(self, process: Process) -> list[str]:
        """Returns the sessions of a process that their other end does not know."""
        gone = []
        for session in process.effects.peers._sessions.peers.values():
            if session.address is None:
                assert session.engine is not None, "that of a caller is known"
                engine, number = session.engine
                name = f"{engine}/{number}" if number else engine
            else:
                name = self.name_at(session.address)
            other = self.processes.get(name)
            if other is None or not other.has_session_with(process):
                gone.append(f"session with {name}")
        return gone
