"""integration/benchmarks/scaling_simulation.py: autoscalers that read the router's forecasts."""

from __future__ import annotations

import itertools

import pytest
from scaling_simulation import STABLE_S, SYNC_S, TARGET, Autoscaler, simulate

from kv_connector.router.engines.members import Side


def sizes(scaler: Autoscaler, demand: float, begin: float, seconds: float, current: int) -> list[int]:
    found = []
    for number in range(int(seconds / SYNC_S)):
        current = scaler.wanted(begin + number * SYNC_S, demand, current)
        found.append(current)
    return found


def test_autoscaler_adds_engines_at_once_and_removes_them_one_by_one() -> None:
    scaler = Autoscaler(most=16)
    assert sizes(scaler, 3.4, 0, 600, 1) == [5] * 40
    fewer = sizes(scaler, 1.0, 600, 900, 5)
    steady = int(STABLE_S / SYNC_S)
    assert fewer[:steady] == [5] * steady, "for five minutes the larger number counts"
    assert sorted(set(fewer), reverse=True) == [5, 4, 3, 2]
    assert fewer[-1] == 2
    assert all(before - after <= 1 for before, after in itertools.pairwise(fewer))


def test_autoscaler_ignores_demand_within_its_tolerance() -> None:
    scaler = Autoscaler(most=16)
    assert sizes(scaler, 4 * TARGET * 1.09, 0, 600, 4)[-1] == 4
    assert sizes(scaler, 4 * TARGET * 1.11, 600, 15, 4)[-1] == 5
    assert sizes(scaler, 100.0, 700, 15, 5)[-1] == 16


def test_simulation_measures_the_demand_of_both_sides() -> None:
    """Prompts of 0.45 s in each second, by their cost, and one engine for them."""
    minutes = simulate([0.5], 4, seed=1, most=4)
    assert sum(minute.arrivals for minute in minutes) == 120
    assert sum(len(minute.waits) for minute in minutes) == 120
    last = minutes[-1]
    assert last.demand[Side.PREFILL] == pytest.approx(0.45, abs=0.2)
    assert 0 < last.demand[Side.DECODE] < 1
    assert last.size[Side.PREFILL] == 1
