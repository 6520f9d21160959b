"""Scenarios in which decode engines are short of blocks: those of requests, with few blocks and DEFER."""

from __future__ import annotations

import random
from dataclasses import replace

from . import scenario as requests
from .scenario import Plan, Scenario
from .shape import ROWS

# Blocks of 16 tokens that the longest prompt takes in the two groups with blocks, with its row, twice.
_SPARE = 2 * (6 * ROWS + 1)


def draw(seed: int) -> Scenario:
    """Draws the scenario of a seed. Engines, requests and their faults are those of the same seed of
    requests."""
    scenario = requests.draw(seed)
    rng = random.Random(f"{seed} deferring")
    ids = [plan.transfer_id for plan in scenario.plans]
    # D's scheduler defers no second request of a transfer. It refuses that one, or it waits for the first.
    plans = tuple(_short(rng, plan) if ids.count(plan.transfer_id) == 1 else plan for plan in scenario.plans)
    older = frozenset(engine for engine in scenario.engines if rng.random() < 0.1)
    spare = rng.choice((None, _SPARE, 2 * _SPARE))
    return replace(scenario, plans=plans, older=older, spare=spare, noticing=rng.random() < 0.7)


def _short(rng: random.Random, plan: Plan) -> Plan:
    if rng.random() < 0.15:
        return plan
    # P's queue, and D's: the prompt begins before D has room, after it, or never.
    return replace(
        plan,
        short_for=rng.choice((0.1, rng.uniform(0, 3), 100.0, 100.0)),
        scheduled_after=plan.scheduled_after or rng.choice((0.0, 0.0, 0.3, rng.uniform(0, 9))),
        admitted_after=rng.choice((0.0, 0.0, plan.admitted_after)),
    )
