"""Scenarios in which engines borrow prefixes: those of requests, with a lender for most of them. D computes
some of the requests itself."""

from __future__ import annotations

import random
from dataclasses import replace

from . import scenario as requests
from .scenario import LENDING, LONELY, MUTUAL, Fault, Plan, Scenario


def draw(seed: int) -> Scenario:
    """Draws the scenario of a seed. Engines, requests and their faults are those of the same seed of
    requests."""
    scenario = requests.draw(seed)
    rng = random.Random(f"{seed} prefixes")
    ids = [plan.transfer_id for plan in scenario.plans]
    plans = tuple(_with_lender(rng, scenario, plan) for plan in scenario.plans)
    # Drawn from another stream, so that the seeds of planted bugs stay the same.
    alone = random.Random(f"{seed} alone")
    plans = tuple(
        _alone(plan) if alone.random() < 0.2 and plan.lender and ids.count(plan.transfer_id) == 1 else plan
        for plan in plans
    )
    lent = [plan for plan in plans if plan.lender]
    faults = list(scenario.faults)
    if lent and rng.random() < 0.5:
        faults += [_fault(rng, scenario, rng.choice(lent)) for _ in range(rng.choice((1, 1, 2)))]
    if lent and rng.random() < 0.3:
        faults += [_act(rng, rng.choice(lent)) for _ in range(rng.choice((1, 1, 2)))]
    return replace(scenario, plans=plans, faults=tuple(faults))


def _with_lender(rng: random.Random, scenario: Scenario, plan: Plan) -> Plan:
    if rng.random() < 0.15:
        return plan
    # Some prompts come after an earlier one has waited for a lender that does not answer.
    late = rng.choice((0.0, 0.0, 0.0, rng.uniform(4.0, 9.0)))
    plan = replace(plan, prefill_at=plan.prefill_at + late, decode_at=plan.decode_at + late)
    return replace(
        plan,
        lender=rng.choice([engine for engine in scenario.engines if engine != plan.prefill]),
        prefix=16 * rng.randint(1, 7),
        own=rng.choice((0, 0, 0, rng.randrange(plan.tokens))),
        diverges=rng.choice((1 << 20, 1 << 20, 1 << 20, 16 * rng.randint(0, 5))),
        evicted=rng.choice(
            (None, None, plan.prefill_at + rng.choice((0.01, 0.1, 1.0)) * rng.expovariate(1.0))
        ),
    )


def _alone(plan: Plan) -> Plan:
    """Lets D compute a request itself. Its P lends what D would have lent to P."""
    lender = plan.prefill if plan.lender == plan.decode else plan.lender
    return replace(plan, alone=True, lender=lender, unknown_to_decode=False, unknown_to_prefill=False)


def _act(rng: random.Random, plan: Plan) -> Fault:
    """Draws an act of the lender that ends its lendings, while it lends."""
    at = max(0.0, plan.computing_at + rng.choice((-1.0, 1.0, 1.0, 1.0)) * rng.expovariate(6.0))
    return Fault(rng.choice(LENDING), at, (plan.lender,), rng.choice((0.1, 1.0, 5.0)))


def _fault(rng: random.Random, scenario: Scenario, plan: Plan) -> Fault:
    """Draws a fault of the lender, or of its connection with the borrower, while it lends."""
    at = max(0.0, plan.computing_at + rng.choice((-1.0, 1.0, 1.0)) * rng.expovariate(3.0))
    coin = rng.randrange(1 << 16)
    lasting = rng.choice((0.05, 0.5, 2.0, 4.0)) * rng.uniform(0.5, 1.5)
    lenders, borrowers = scenario.workers(plan.lender), scenario.workers(plan.computer)
    lender, borrower = lenders[coin % len(lenders)], borrowers[coin // 2 % len(borrowers)]
    if rng.random() < 0.6:
        return Fault(rng.choice(LONELY), at, (lender,), lasting, coin)
    return Fault(rng.choice(MUTUAL), at, (lender, borrower), lasting, coin)
