"""The plan of a run: engines, requests and faults, as plain data. A seed draws one; hypothesis draws and
shrinks them.

The ``seed`` decides each delay and each coin that a scenario leaves open, from a stream of random numbers per
subject. Removing one request from a scenario does not change what happens to the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .shape import CUTS, Side

_LONG = 10.0  # a prompt that P begins this late may reach a deadline


@dataclass(frozen=True)
class Plan:
    """The life of one request on both sides, as its client and the two schedulers decide it. Times in
    seconds."""

    name: str
    prefill: str
    decode: str
    prefill_at: float = 0.0
    decode_at: float = 0.0
    tokens: int = 48
    chunk: int = 32  # tokens that P computes in a step
    cached: int = 0  # first tokens in D's cache, as far as they fill blocks
    window: int = 32  # last tokens of the sliding-window group that D needs
    admitted_after: float = 0.0  # time in D's queue
    scheduled_after: float = 0.0  # time in P's queue
    prefill_abort: float | None = None  # time after its arrival
    decode_abort: float | None = None
    preempted: tuple[float, ...] = ()
    named_late: bool = False  # P names a chunk's pages after they are computed, without a signal
    transfer: str = ""  # the transfer id, if it is not the name: two requests may claim one
    unknown_to_prefill: bool = False
    unknown_to_decode: bool = False
    needs_nothing: bool = False  # D has all pages in its own cache
    other_prompt: bool = False  # P and D got different prompts
    hashed: bool = True  # both sides have a hash of their prompt; without it a difference is not detected
    truncated: bool = False  # P reports the prompt as finished, and never names its last page
    lender: str = ""  # the engine from which the prefix is borrowed
    alone: bool = False  # D computes the prompt itself, and P has no part in it
    prefix: int = 0  # tokens that the lender has
    diverges: int = 1 << 20  # number of them that are the prompt's
    own: int = 0  # first tokens in the borrower's cache, as far as they fill blocks
    evicted: float | None = None  # when the lender evicts them
    short_for: float | None = None  # D has no blocks to spare for so long, and waits for P's notice

    @property
    def transfer_id(self) -> str:
        return self.transfer or self.name

    @property
    def computed_prompt(self) -> str:
        """Name of the prompt that P computes. D expects the prompt of the transfer."""
        return f"not {self.transfer_id}" if self.other_prompt else self.transfer_id

    @property
    def computer(self) -> str:
        """The engine that computes the prompt, and may borrow its prefix."""
        return self.decode if self.alone else self.prefill

    @property
    def computing_at(self) -> float:
        """When the request arrives there."""
        return self.decode_at if self.alone else self.prefill_at

    @property
    def plain(self) -> bool:
        """Whether no property of the request itself prevents its success."""
        return (
            self.prefill_abort is None
            and self.decode_abort is None
            and not self.transfer
            and not self.unknown_to_prefill
            and not self.unknown_to_decode
            and not self.needs_nothing
            and not self.other_prompt
            and not self.truncated
        )

    @property
    def left(self) -> bool:
        """Whether its client leaves one engine or both, and no other property prevents its success."""
        staying = replace(self, prefill_abort=None, decode_abort=None)
        return staying.plain and staying != self


@dataclass(frozen=True)
class Fault:
    """A fault. ``kind`` is a key of faults.FAULTS, which defines the meaning of ``who``, ``lasting`` and
    ``coin``."""

    kind: str
    at: float
    who: tuple[str, ...]
    lasting: float = 1.0
    coin: int = 0


@dataclass(frozen=True)
class Scenario:
    seed: int
    prefills: int = 1
    decodes: int = 1
    both: bool = False  # every engine may take either role
    heads: int = 1  # heads of the model
    sides: tuple[Side, ...] = ()  # sides of the first engines; the others are plain
    chaos: bool = False  # the control network reorders and duplicates messages, which TCP does not
    jitter: float = 0.01  # seconds, typical for one message
    wire: float = 0.02  # seconds, typical for one write
    step: float = 0.02  # seconds, typical for one step of P
    older: frozenset[str] = frozenset()  # engines of a release that does not know DEFER
    spare: int | None = None  # blocks of each D's pool. None: more than its requests take
    noticing: bool = True  # P's scheduler sends notices ahead. False: only with the first pages
    lease: bool = False  # no receiver can revoke a lane alone: its fence waits for the writer's fence
    verify: bool = False  # D checks its pages against sums of P
    skew: bool = False  # clocks run at rates that differ by up to 1 %
    plans: tuple[Plan, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return (*(f"p{i}" for i in range(self.prefills)), *(f"d{i}" for i in range(self.decodes)))

    def side(self, engine: str) -> Side:
        return dict(zip(self.engines, self.sides, strict=False)).get(engine, Side())

    def workers(self, engine: str) -> tuple[str, ...]:
        """Returns the workers of an engine. The first has the engine's name."""
        return workers(engine, self.side(engine))

    def undisturbed(self, plan: Plan) -> bool:
        """Returns whether no fault and no other request concerns this request: its end, good or bad, comes
        soon."""
        concerned = {*self.workers(plan.computer), *self.workers(plan.decode)}
        claimed = sum(other.transfer_id == plan.transfer_id for other in self.plans)
        faultless = not any(concerned.issuperset(fault.who) for fault in self.faults)
        return faultless and claimed == 1 and plan.scheduled_after < _LONG

    def innocent(self, plan: Plan) -> bool:
        """Returns whether neither a fault nor an abort justifies a failure of this request.

        A fault of the lender does not. But where no receiver can revoke a lane alone, P's fence, and so the
        request, may have to wait for the lender.
        """
        waits = self.lease and bool(plan.lender) and bool(self.faults)
        return plan.plain and self.undisturbed(plan) and not waits

    def lends(self, plan: Plan) -> bool:
        """Returns whether the prefix of this request must be borrowed if it was cached."""
        calm = not self.faults and not self.chaos and self.jitter <= 0.01
        alone = self.undisturbed(plan) and plan.plain  # no other request has its content
        return calm and alone and bool(plan.lender) and plan.evicted is None

    def answers_soon(self, plan: Plan) -> bool:
        """Returns whether the lender of this request has an answer at once, good or bad."""
        undisturbed = all(fault.kind in LENDING for fault in self.faults)
        return undisturbed and not self.chaos and self.jitter <= 0.01 and plan.plain and bool(plan.lender)


def workers(engine: str, side: Side) -> tuple[str, ...]:
    return (engine, *(f"{engine}/{number}" for number in range(1, side.workers)))


def engine_of(worker: str) -> tuple[str, int]:
    """Returns the engine of a worker, and the worker's number."""
    engine, _, number = worker.partition("/")
    return engine, int(number or 0)


# Kinds of faults of one engine, and of the connection of two.
LONELY = (
    *("crash", "vanish", "leave", "replace", "stop", "stall", "slow"),
    *("error", "stuck", "refuse", "no handshake", "no counters"),
)
MUTUAL = ("partition", "loss", "jam", "reset", "cut", "failover", "garbage")


# Acts of a lender that end its lendings. A lender may always do so.
LENDING = ("pause", "empty")


def draw(seed: int) -> Scenario:
    """Draws the scenario of a seed."""
    rng = random.Random(seed)
    scenario = Scenario(
        seed=seed,
        prefills=rng.choice((1, 1, 1, 2, 2, 3)),
        decodes=rng.choice((1, 1, 1, 2, 2, 3)),
        both=rng.random() < 0.1,
        chaos=rng.random() < 0.3,
        jitter=rng.choice((0.0005, 0.01, 0.01, 0.1)),
        wire=rng.choice((0.001, 0.02, 0.1, 0.3)),
        step=rng.choice((0.01, 0.1, 0.3)),
        lease=rng.random() < 0.25,
        skew=rng.random() < 0.3,
    )
    sides = tuple(draw_side(rng) for _ in scenario.engines)
    scenario = replace(scenario, heads=rng.choice((1, 2, 2)), sides=sides)
    # Faults and aborts occur in some runs only. In the others every request must succeed.
    trouble = rng.random()
    plans = [_plan(rng, scenario, number, trouble > 0.2) for number in range(rng.randint(2, 8))]
    faults = (
        [_fault(rng, scenario, plans) for _ in range(rng.choice((1, 1, 2, 3, 6)))] if trouble > 0.4 else []
    )
    # Drawn from another stream, so that the seeds of planted bugs stay the same.
    verify = random.Random(f"{seed} verify").random() < 0.5
    return replace(scenario, plans=tuple(plans), faults=tuple(faults), verify=verify)


def draw_side(rng: random.Random) -> Side:
    """Draws the shape of an engine. Half of the engines have one worker."""
    ranks, first_stage = rng.choice(((1, 0), (1, 0), (1, 0), (2, 0), (1, rng.choice(CUTS)), (2, CUTS[0])))
    return Side(ranks, first_stage, rng.choice((16, 16, 32)), rng.random() < 0.5)


def _plan(rng: random.Random, scenario: Scenario, number: int, trouble: bool) -> Plan:
    if scenario.both:
        prefill, decode = rng.sample(scenario.engines, 2)
    else:
        prefill, decode = f"p{rng.randrange(scenario.prefills)}", f"d{rng.randrange(scenario.decodes)}"
    fate = rng.random() if trouble else 1.0
    tokens = rng.randint(1, 6) * 16 - rng.choice((0, 0, rng.randrange(16)))
    came = rng.uniform(0, 2)

    admitted_after = rng.choice((0.0, 0.0, rng.expovariate(1.0), rng.uniform(0, 20)))

    def sometimes(low: float, high: float, after: float = 0.0) -> float | None:
        return after + rng.choice((0.01, 0.1, 1.0)) * rng.expovariate(1.0) if low < fate < high else None

    return Plan(
        name=f"r{number}",
        prefill=prefill,
        decode=decode,
        # Prefill first, both at once, or decode first.
        prefill_at=came + rng.choice((0.0, rng.uniform(0, 2))),
        decode_at=came + rng.choice((0.0, rng.uniform(0, 2))),
        tokens=tokens,
        chunk=rng.choice((16 * rng.randint(1, 6), rng.randint(12, 96))),
        cached=rng.randrange(tokens) if rng.random() < 0.3 else 0,
        window=rng.randint(1, 48),
        admitted_after=admitted_after,
        scheduled_after=rng.choice((0.0,) * 20 + (1.0, 40.0)) if trouble else 0.0,
        prefill_abort=sometimes(0.0, 0.12),
        decode_abort=sometimes(0.1, 0.3, rng.choice((0.0, admitted_after))),
        named_late=rng.random() < 0.3,
        preempted=tuple(rng.uniform(0, 1.5) for _ in range(rng.choice((0, 0, 1, 2, 4)))),
        transfer="r0" if 0.3 < fate < 0.33 and number else "",
        unknown_to_prefill=0.33 < fate < 0.36,
        unknown_to_decode=0.36 < fate < 0.39,
        needs_nothing=0.39 < fate < 0.42,
        other_prompt=0.42 < fate < 0.45,
        hashed=(scenario.seed + number) % 2 == 0 or 0.42 < fate < 0.45,
        truncated=0.45 < fate < 0.48,
    )


def _fault(rng: random.Random, scenario: Scenario, plans: list[Plan]) -> Fault:
    # Most faults hit one request and one of its two engines while the request runs.
    plan = rng.choice(plans)
    begun = max(plan.prefill_at, plan.decode_at + plan.admitted_after)
    at = rng.choice((rng.uniform(0, 4), begun + rng.expovariate(3.0), max(0.0, begun - rng.expovariate(3.0))))
    coin = rng.randrange(1 << 16)
    lasting = rng.choice((0.05, 0.5, 2.0, 4.0, 8.0)) * rng.uniform(0.5, 1.5)
    sources, targets = scenario.workers(plan.prefill), scenario.workers(plan.decode)
    source, target = sources[coin % len(sources)], targets[coin // 2 % len(targets)]
    if rng.random() < 0.6:
        who = rng.choice((source, target, rng.choice(scenario.engines)))
        return Fault(rng.choice(LONELY), at, (who,), lasting, coin)
    if rng.random() < 0.7:
        return Fault(rng.choice(MUTUAL), at, (source, target), lasting, coin)
    if scenario.both:
        return Fault(rng.choice(MUTUAL), at, tuple(rng.sample(scenario.engines, 2)), lasting, coin)
    pair = (f"p{rng.randrange(scenario.prefills)}", f"d{rng.randrange(scenario.decodes)}")
    return Fault(rng.choice(MUTUAL), at, pair, lasting, coin)
