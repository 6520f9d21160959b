"""Decode engines short of blocks: the sample of the campaign that CI runs, and the bugs that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from .campaign import campaign, run
from .deferring import draw
from .minimize import report
from .planted import DEFER_BUGS, Bug, find
from .scenario import LONELY, MUTUAL, Fault, Plan, Scenario

SEEDS = 600
# P begins with the prompt after 6 s, and D has no blocks to spare until then.
PLAN = Plan("r0", "p0", "d0", scheduled_after=6.0, short_for=100.0)
CALM = Scenario(1, plans=(PLAN,))


def test_deferred_loads_get_their_blocks_and_nothing_leaks() -> None:
    tally = campaign(0, SEEDS, of="deferring")
    if tally.violations:
        pytest.fail(f"{len(tally.violations)} of {SEEDS} fail. {report('deferring', min(tally.violations))}")
    assert tally.seeds == SEEDS
    for what in (*LONELY, *MUTUAL, "aborted"):
        assert tally.ended[what] > SEEDS / 100, f"{what}: {tally.ended}"
    for what in ("received", "notice"):
        assert tally.ended[what] > SEEDS, f"{what}: {tally.ended}"
    assert tally.ended["notice, early"] > SEEDS / 10


def test_a_seed_decides_everything() -> None:
    for seed in range(10):
        first, second = (run(draw(seed), tracing=True)[0] for _ in range(2))
        assert first.books.trace == second.books.trace


@pytest.mark.parametrize("bug", DEFER_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    find(bug, "deferring", SEEDS, tmp_path)


def _reserved_at(scenario: Scenario) -> float:
    world, violation = run(scenario, tracing=True)
    assert violation is None
    assert world.books.ended["received"] == 1
    return next(float(line.split()[0]) for line in world.books.trace if "reserves r0" in line)


def test_decode_takes_no_block_before_the_prompt_begins() -> None:
    assert 5.9 < _reserved_at(CALM) < 6.5


def test_decode_with_an_older_prefill_engine_reserves_at_once() -> None:
    older = Scenario(1, plans=(PLAN,), older=frozenset({"p0"}))
    assert _reserved_at(older) < 1.0


def test_decode_reserves_when_it_has_room_again() -> None:
    plan = Plan("r0", "p0", "d0", scheduled_after=6.0, short_for=2.0)
    assert 2.0 <= _reserved_at(Scenario(1, plans=(plan,))) < 2.5


def test_a_lost_session_ends_the_wait_for_its_notices() -> None:
    scenario = Scenario(1, plans=(PLAN,), faults=(Fault("reset", 3.0, ("p0", "d0")),))
    assert 3.0 <= _reserved_at(scenario) < 9.0
