"""The plan of a run: engines, trainers and faults, as plain data. A seed draws one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ..scenario import Fault
from .arena import ROUNDS

# A trainer's begin_timeout. An engine may have two earlier versions to apply, with the longest pause (3 s),
# update (5 s) and writes for each. Production's minute would make runs with faults too long.
BEGIN_S = 20.0
PATIENCE_S = 30.0  # longer than any update takes


@dataclass(frozen=True)
class Trainer:
    """A trainer whose ranks push again and again, in step with each other. Times in seconds."""

    name: str
    at: float = 0.0
    ranks: int = 2
    pushes: int = 2
    training: float = 0.2  # typical time between two pushes
    patience: float = PATIENCE_S  # time after which an update counts as failed
    again: float = 1.0  # pause after a failed update
    restart: float = 3.0  # typical time of its launcher
    gives_up: tuple[int, int] | None = None  # this rank closes during this push of its first life
    gone: bool = False  # it is not restarted after a rank has died
    seeds: bool = False  # an engine that seeds the others beside a trainer, and leaves afterwards

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{rank}" for rank in range(self.ranks))


@dataclass(frozen=True)
class Scenario:
    seed: int
    engines: int = 1
    workers: int = 1  # workers of each engine
    chaos: bool = False  # the control network reorders and duplicates messages, which TCP does not
    jitter: float = 0.01  # seconds, typical for one message
    wire: float = 0.02  # seconds, typical for one write
    pausing: float = 0.0  # seconds, at most, until an engine is paused
    apply: float = 0.2  # seconds, at most, of a worker's update
    streaming: bool = False  # engines have memory for only two rounds of a version
    lease: bool = False  # no receiver can revoke a lane alone: its fence waits for the writer's fence
    skew: bool = False  # clocks run at rates that differ by up to 1 %
    lends: bool = False  # engines sometimes lend what they serve to others outside this world
    trainers: tuple[Trainer, ...] = ()
    faults: tuple[Fault, ...] = ()
    ambushes: tuple[Fault, ...] = ()  # from ``at`` on they wait until a version lands or is applied

    @property
    def rounds(self) -> int:
        return ROUNDS if self.streaming else 1

    @property
    def controllers(self) -> tuple[str, ...]:
        return tuple(f"e{number}" for number in range(self.engines))

    @property
    def untroubled(self) -> bool:
        """Whether nothing that a process does or suffers justifies a failure of a trainer."""
        patient = not any(one.gives_up or one.patience < PATIENCE_S for one in self.trainers)
        alone = sum(not one.seeds for one in self.trainers) <= 1
        return patient and alone and not self.faults + self.ambushes

    def workers_of(self, controller: str) -> tuple[str, ...]:
        return tuple(f"{controller}/{number}" for number in range(self.workers))


# Kinds of faults of one process, of a process that writes or is written to, and of the connection of two.
ANYBODY = ("crash", "vanish", "leave", "stop", "stall", "slow")
WORKER = ("error", "stuck", "no handshake", "no counters", "not applied", "not recorded")
MUTUAL = ("partition", "loss", "jam", "reset", "cut", "failover")


def draw(seed: int) -> Scenario:
    """Draws the scenario of a seed."""
    rng = random.Random(f"weights {seed}")
    scenario = Scenario(
        seed=seed,
        engines=rng.choice((1, 1, 1, 2)),
        workers=rng.choice((1, 2, 2)),
        jitter=rng.choice((0.0005, 0.01, 0.01, 0.1)),
        wire=rng.choice((0.001, 0.1, 0.3, 1.0)),
        apply=rng.choice((0.02, 0.2, 5.0)),
        streaming=rng.random() < 0.5,
        lease=rng.random() < 0.25,
        skew=rng.random() < 0.3,
    )
    trouble = rng.random() > 0.2
    trainers = tuple(
        _trainer(rng, number, trouble) for number in range(rng.choice((1, 1, 1, 2)) if trouble else 1)
    )
    seeding = random.Random(f"seeds {seed}")
    seeder = Trainer(
        "s0",
        at=seeding.uniform(0, 6),
        ranks=seeding.choice((1, 2, 3)),
        pushes=1,
        training=0.0,
        gone=True,
        seeds=True,
    )
    seeders = (seeder,) if seeding.random() < 0.4 else ()
    scenario = replace(scenario, trainers=trainers + seeders, lends=seeding.random() < 0.4)
    scenario = replace(scenario, pausing=random.Random(f"pauses {seed}").choice((0.0, 0.0, 0.1, 3.0)))
    faults, ambushes = (
        tuple(_fault(rng, scenario) for _ in range(rng.choice(counts) if trouble else 0))
        for counts in ((0, 1, 1, 2, 5), (0, 1, 2, 5))
    )
    return replace(scenario, faults=faults, ambushes=ambushes)


def _trainer(rng: random.Random, number: int, trouble: bool) -> Trainer:
    ranks, pushes = rng.choice((1, 2, 2, 3, 4)), rng.choice((2, 4, 12))
    gives_up = rng.randrange(ranks), rng.randrange(pushes)
    return Trainer(
        name=f"t{number}",
        at=number * rng.uniform(0, 4),
        ranks=ranks,
        pushes=pushes,
        training=rng.choice((0.0, 0.2, 0.2, 2.0)),
        patience=rng.choice((1.0, PATIENCE_S, PATIENCE_S)),
        again=rng.choice((0.0, 0.0, 1.0)),
        restart=rng.choice((0.05, 3.0)),
        gives_up=gives_up if trouble and rng.random() < 0.2 else None,
        gone=rng.random() < 0.25,
    )


def _fault(rng: random.Random, scenario: Scenario) -> Fault:
    at, coin = rng.choice((rng.uniform(0, 2), rng.uniform(0, 4), rng.uniform(0, 12))), rng.randrange(1 << 16)
    lasting = rng.choice((0.05, 0.5, 2.0, 4.0, 8.0)) * rng.uniform(0.5, 1.5)
    rank = rng.choice(rng.choice(scenario.trainers).names)
    controller = rng.choice(scenario.controllers)
    worker = rng.choice(scenario.workers_of(controller))
    if rng.random() < 0.6:
        if rng.random() < 0.5:
            return Fault(
                rng.choice(ANYBODY), at, (rng.choice((rank, rank, worker, controller)),), lasting, coin
            )
        kind = rng.choice(WORKER)
        writes = kind in ("error", "stuck", "no handshake") and rng.random() < 0.7
        return Fault(kind, at, (rank if writes else worker,), lasting, coin)
    kind = rng.choice(MUTUAL)
    control = kind in ("partition", "loss", "jam", "reset") and rng.random() < 0.2
    return Fault(kind, at, (rank, controller if control else worker), lasting, coin)
