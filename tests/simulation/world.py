"""A cluster in virtual time: all engine processes of a scenario, the networks between them, and their
faults."""

from __future__ import annotations

import functools

from kv_connector.protocol.messages import Rank, Role
from kv_connector.protocol.timeouts import Timeouts

from . import faults
from .process import Process
from .scenario import Plan, Scenario, engine_of, workers
from .shape import Side, worker
from .surroundings import Surroundings

# The defaults of production, except those that would only make a run longer: the holds of a minute and the
# deadline of five.
TIMES = Timeouts(hold=12.0, orphan=12.0, transfer=25.0, cancel=3.0, drain=3.0)

# The longest fence in this fabric (fabric.SimEngine._fence), and a little more.
_FENCE_S = 5.0


class World(Surroundings):
    """One run of one scenario."""

    scenario: Scenario
    processes: dict[str, Process]

    def __init__(self, scenario: Scenario, tracing: bool = False) -> None:
        super().__init__(scenario, TIMES, tracing)
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

    def _run(self) -> None:
        for engine in self.scenario.engines:
            self.start_engine(engine)
        last = 0.0
        for plan in self.scenario.plans:
            if not plan.unknown_to_prefill:
                self.clock.at(plan.prefill_at, functools.partial(self._arrive, plan, plan.prefill))
            if not plan.unknown_to_decode:
                self.clock.at(plan.decode_at, functools.partial(self._arrive, plan, plan.decode))
            last = max(last, plan.prefill_at, plan.decode_at + plan.admitted_after)
        for fault in self.scenario.faults:
            self.clock.at(fault.at, functools.partial(faults.strike, self, fault))
            last = max(last, fault.at + fault.lasting + self.times.drain + 0.1)
        self.clock.at(last, lambda: None)
        self.until(last + 1.0, lambda: {"events": "to come"} if self.clock.now < last else {})
        self.until(last + self.decode_bound() + self.prefill_bound(), self._busy)
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

    def preemption_bound(self) -> float:
        """Returns the time within which P's engine continues its step."""
        return 1.02 * self.times.drain + 0.5 + self._pauses

    # --- Steps

    def _arrive(self, plan: Plan, engine: str) -> None:
        for name in self.workers(engine):
            process = self.processes.get(name)
            if process is not None:
                (process.decode if engine == plan.decode else process.prefill).arrive(plan)

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
