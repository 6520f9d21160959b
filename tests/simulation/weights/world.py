"""Engines that receive weights, the trainers that push them, and their faults, in virtual time."""

from __future__ import annotations

import functools
import random

from kv_connector.protocol.timeouts import Timeouts

from .. import faults
from ..surroundings import Surroundings
from .arena import Tag
from .controller import Controller
from .scenario import Scenario, Trainer
from .trainer import Job, Rank
from .worker import Worker

# The defaults of production, except the minute in which other trainers may send BEGIN.
TIMES = Timeouts(orphan=8.0)

# The longest fence in this fabric (fabric.SimEngine._fence), and a little more.
_FENCE_S = 5.0
# A connect and twelve pushes. Some attempts wait in vain, for three workers in turn that do not answer.
_LONGEST_S = 800.0
# A whole push without faults: a few of the slowest messages, writes, and an update.
_PUSH_S = 20.0


class World(Surroundings):
    """One run of one scenario."""

    scenario: Scenario

    def __init__(self, scenario: Scenario, tracing: bool = False) -> None:
        super().__init__(scenario, TIMES, tracing)
        self.versions: dict[str, Tag] = {}  # pushed weights, by version name
        self._jobs: list[Job] = []
        self.quiet = False
        self._ambushes = list(scenario.ambushes)
        self._pauses = sum(fault.lasting for fault in scenario.faults + scenario.ambushes)

    def _run(self) -> None:
        for name in self.scenario.controllers:
            self.start(name)
        for trainer in self.scenario.trainers:
            self._start_job(trainer, trainer.at)
        last = max((trainer.at for trainer in self.scenario.trainers), default=0.0)
        for fault in self.scenario.faults:
            self.clock.at(fault.at, functools.partial(faults.strike, self, fault))
            last = max(last, fault.at + fault.lasting + self.times.drain + 0.1)
        self._pass(last)
        # An ambush that was not triggered by now is dropped.
        self.until(self.clock.now + _LONGEST_S + self._pauses, self._at_work)
        self._ambushes = []
        self._pass(max((fault.lasting for fault in self.scenario.ambushes), default=0.0) + self.times.drain)
        self.quiet = True  # dead processes are not restarted any more
        for process in self.processes.values():
            if process.engine is not None:
                process.engine.heal()
        self.until(self.clock.now + _LONGEST_S + self._pauses, self._at_work)
        self._pass(3 * self.times.dead + _FENCE_S)
        self._all_is_well()

    def _all_is_well(self) -> None:
        """Checks that every live process is in a state from which the next push succeeds."""
        jobs = [job for job in self._jobs if job.lives and job.ranks[0].name in self.processes]
        heir = next((job for job in jobs if job.connected), None)
        for job in jobs:
            if job is not heir:
                self._end(job, "close")
        self._pass(2 * self.times.dead + _FENCE_S)
        if heir is not None:
            self._last_push(heir)
        engines = [name for name in self.scenario.controllers if name in self.processes]
        plan = Trainer("last", ranks=1 + self.seed % 3, pushes=0)
        job = Job(self, plan, 1, engines, self.clock.now)
        self._admit(job)
        self.until(self.clock.now + _PUSH_S, self._at_work)
        self._last_push(job)
        self.until(self.clock.now + 3 * self.times.dead + _FENCE_S, self._left)

    def _last_push(self, job: Job) -> None:
        self._end(job, "push")
        for rank in job.ranks:
            failed = job.problems.get(rank.rank, {"it": "has not come through"})
            bad = {name: why for name, why in failed.items() if name in self.processes or name == "it"}
            self.books.check(not bad, "all is quiet, and %s cannot push: %s", rank, bad)
        for name in job.engines:
            controller = self.processes.get(name)
            if controller is not None:
                self.books.check(not controller.paused, "%s stays paused", controller)
        self.books.ended["last pushes"] += 1

    def _end(self, job: Job, how: str) -> None:
        job.last = how
        job.wake()
        names = job.plan.names
        limit = self.clock.now + _PUSH_S
        self.until(limit, lambda: {n: "has not ended" for n in names if n in self.processes})

    def _pass(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.clock.at(end, lambda: None)
        self.until(end + 1.0, lambda: {"time": "to pass"} if self.clock.now < end else {})

    # --- For the models

    def start(self, name: str) -> None:
        """Starts an engine, by the name of its controller or a worker. A rank is started with all others of
        its job."""
        name = name.partition("/")[0]
        if name in self.processes or name not in self.scenario.controllers:
            return
        controller = Controller(self, name, self.next_life(name))
        self.processes[name] = controller
        self.processes |= {worker.name: worker for worker in controller.workers}
        self.books.note("%s starts", controller)

    def ambush(self, moment: str, seconds: float) -> None:
        """Triggers a fault that waits for this kind of moment, within the next ``seconds``."""
        waiting = (
            fault
            for fault in self._ambushes
            if fault.at <= self.clock.now and ("landing", "applying")[fault.coin // 64 % 2] == moment
        )
        if (fault := next(waiting, None)) is not None:
            self._ambushes.remove(fault)
            self.clock.after(fault.coin % 61 / 61 * seconds, lambda: faults.strike(self, fault))

    def served(self, rank: Rank, engine: str, version: str) -> None:
        """Checks the engine, after a rank received that the engine serves the version."""
        controller = self.processes.get(engine)
        if controller is None:
            return  # the engine served it and has ended
        models = {tag for worker in controller.workers for tag in worker.model}
        goes_on = not controller.paused or controller.taking != version
        right = self.versions[version] in models and (rank.rank > 0 or goes_on)
        mine = {model for model in models if model is not None and model[0] == rank.tag[0]}
        # Another trainer's version may have followed, or the engine was replaced.
        self.books.check(right or not mine, "%s takes %s for served by %s: %s", rank, version, engine, models)
        self.books.ended["told"] += 1

    def rank_ended(self, rank: Rank) -> None:
        """Ends the other ranks of its job. Usually all start again."""
        job = rank.job
        if job.last or job.ending:
            return
        job.ending = True
        rng = random.Random(f"{self.seed} {job} ends")
        for other in job.ranks:
            self.clock.after(
                rng.uniform(0, job.plan.restart), other.die if rng.random() < 0.5 else other.leave
            )
        if not job.plan.gone and not self.quiet:
            at = self.clock.now + job.plan.restart * (1 + rng.random())
            self.clock.at(at, lambda: self.quiet or self._start_job(job.plan, at))

    # --- Steps

    def _start_job(self, plan: Trainer, at: float) -> None:
        self._admit(Job(self, plan, self.next_life(plan.name), self.scenario.controllers, at))

    def _admit(self, job: Job) -> None:
        self._jobs.append(job)
        self.processes |= {rank.name: rank for rank in job.ranks}
        self.books.note("%s starts", job)

    def _at_work(self) -> dict[str, object]:
        return {
            rank.name: "is at work"
            for job in self._jobs
            for rank in job.ranks
            if not rank.dead and rank.rank not in job.waiting
        }

    def _left(self) -> dict[str, object]:
        workers = [process for process in self.processes.values() if isinstance(process, Worker)]
        return {worker.name: left for worker in workers if (left := worker.left())}
