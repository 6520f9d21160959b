"""What shall happen: engines, requests and faults, as plain data. A seed draws one; hypothesis draws and
shrinks them.

What a scenario leaves open (each delay, each coin) is decided by its ``seed``, from a stream of random
numbers per subject: taking one request out of a scenario does not change what befalls the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .shape import CUTS, Side

_LONG = 10.0  # a prompt that P begins so late may meet a deadline


@dataclass(frozen=True)
class Plan:
    """One request's life on both sides, as far as its client and the two schedulers decide it. Seconds."""

    name: str
    prefill: str
    decode: str
    prefill_at: float = 0.0
    decode_at: float = 0.0
    tokens: int = 48
    chunk: int = 32  # tokens that P computes in a step
    cached: int = 0  # D has these first tokens already, as far as they fill blocks
    window: int = 32  # of the sliding-window group D wants so many of the last tokens
    admitted_after: float = 0.0  # D queues the request for so long
    scheduled_after: float = 0.0  # and P, too
    prefill_abort: float | None = None  # after it came
    decode_abort: float | None = None
    preempted: tuple[float, ...] = ()
    named_late: bool = False  # P names a chunk's pages once they are computed, by no signal
    transfer: str = ""  # the transfer id, if it is not the name: two requests may claim one
    unknown_to_prefill: bool = False
    unknown_to_decode: bool = False
    needs_nothing: bool = False  # D finds all it needs in its own cache
    other_prompt: bool = False  # P and D got different prompts
    hashed: bool = True  # both sides have a hash of their prompt; else nobody can tell two apart
    truncated: bool = False  # P says that it has finished, and never names its last page

    @property
    def transfer_id(self) -> str:
        return self.transfer or self.name

    @property
    def computed_prompt(self) -> str:
        """What P computes, by name; what D wants has the transfer's."""
        return f"not {self.transfer_id}" if self.other_prompt else self.transfer_id

    @property
    def plain(self) -> bool:
        """Nothing about the request itself keeps it from being served."""
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
        """Its client leaves one engine or both, and nothing else keeps it from being served."""
        staying = replace(self, prefill_abort=None, decode_abort=None)
        return staying.plain and staying != self


@dataclass(frozen=True)
class Fault:
    """``kind`` is a key of faults.FAULTS, which says what ``who``, ``lasting`` and ``coin`` mean to it."""

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
    heads: int = 1  # of the model
    sides: tuple[Side, ...] = ()  # of the first engines; the others are plain
    chaos: bool = False  # the control network reorders and duplicates, which TCP does not
    jitter: float = 0.01  # seconds, typical for one message
    wire: float = 0.02  # seconds, typical for one write
    step: float = 0.02  # seconds, typical for one step of P
    lease: bool = False  # no lane can be revoked by the receiver alone: its fence waits for the writer's own
    skew: bool = False  # clocks run at rates that differ by up to 1 %
    plans: tuple[Plan, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def engines(self) -> tuple[str, ...]:
        return (*(f"p{i}" for i in range(self.prefills)), *(f"d{i}" for i in range(self.decodes)))

    def side(self, engine: str) -> Side:
        return dict(zip(self.engines, self.sides, strict=False)).get(engine, Side())

    def workers(self, engine: str) -> tuple[str, ...]:
        """The first has the engine's name."""
        return workers(engine, self.side(engine))

    def undisturbed(self, plan: Plan) -> bool:
        """Whether no fault concerns this request, and no other request: its end, good or bad, comes soon."""
        concerned = {*self.workers(plan.prefill), *self.workers(plan.decode)}
        claimed = sum(other.transfer_id == plan.transfer_id for other in self.plans)
        faultless = not any(concerned.issuperset(fault.who) for fault in self.faults)
        return faultless and claimed == 1 and plan.scheduled_after < _LONG

    def innocent(self, plan: Plan) -> bool:
        """Whether nothing that anybody does or suffers justifies a failure of this request."""
        return plan.plain and self.undisturbed(plan)


def workers(engine: str, side: Side) -> tuple[str, ...]:
    return (engine, *(f"{engine}/{number}" for number in range(1, side.workers)))


def engine_of(worker: str) -> tuple[str, int]:
    """And which of its workers it is."""
    engine, _, number = worker.partition("/")
    return engine, int(number or 0)


# Kinds of faults of one engine, and of the way between two.
LONELY = (
    *("crash", "vanish", "leave", "replace", "stop", "stall", "slow"),
    *("error", "stuck", "refuse", "no handshake", "no counters"),
)
MUTUAL = ("partition", "loss", "jam", "reset", "cut", "failover", "garbage")


def draw(seed: int) -> Scenario:
    """The scenario that a seed stands for."""
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
    # Faults and aborts come in some runs only: the others must end well for everybody.
    trouble = rng.random()
    plans = [_plan(rng, scenario, number, trouble > 0.2) for number in range(rng.randint(2, 8))]
    faults = (
        [_fault(rng, scenario, plans) for _ in range(rng.choice((1, 1, 2, 3, 6)))] if trouble > 0.4 else []
    )
    return replace(scenario, plans=tuple(plans), faults=tuple(faults))


def draw_side(rng: random.Random) -> Side:
    """Half of the engines have one worker."""
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
        # Serial, concurrent, or the other way round.
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
    # When something is going on: about one request and one of its two engines, most times.
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
