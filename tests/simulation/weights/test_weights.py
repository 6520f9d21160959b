"""The sample of the campaign that CI runs, and the bugs that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..campaign import campaign, run
from ..minimize import report
from ..planted import Bug, find
from ..scenario import Fault
from .planted import BUGS
from .scenario import ANYBODY, MUTUAL, WORKER, Scenario, Trainer, draw
from .world import World

SEEDS = 200


def test_no_version_is_torn_and_the_next_push_succeeds() -> None:
    tally = campaign(0, SEEDS, of="weights")
    if tally.violations:
        pytest.fail(f"{len(tally.violations)} of {SEEDS} fail. {report('weights', min(tally.violations))}")
    assert tally.seeds == SEEDS
    for what in (*ANYBODY, *WORKER, *MUTUAL, "given up", "torn", "seeded", "lent"):
        assert tally.ended[what] > SEEDS / 50, f"{what}: {tally.ended}"
    assert tally.ended["applied"] > 5 * SEEDS
    assert tally.ended["last pushes"] > SEEDS


def test_a_seed_decides_everything() -> None:
    for seed in range(20):
        first, second = (run(draw(seed), tracing=True)[0] for _ in range(2))
        assert first.books.trace == second.books.trace


def test_ranks_that_write_nothing_somewhere_are_simulated() -> None:
    """The last of four ranks writes to no worker. Its wait ends all the same."""
    world = World(Scenario(1, engines=2, workers=2, trainers=(Trainer("t0", ranks=4),)))
    world.run()
    assert world.books.ended["applied"] == 2 * (
        2 + 1 + 1
    )  # engines; pushes, the last one, and the next trainer's


def test_a_link_that_was_replaced_costs_the_new_one_nothing() -> None:
    """The link breaks while the push looks for another engine, which is dead. The worker is then joined
    again."""
    faults = Fault("vanish", 1.0, ("e0",), lasting=60.0), Fault("cut", 8.0, ("t0/0", "e1/0"))
    trainer = Trainer("t0", ranks=1, pushes=1)
    world = World(Scenario(1, engines=2, trainers=(trainer,), faults=faults), tracing=True)
    world.run()
    assert any("e1.1 says Applied(version='t0.1 step 1 try 1'" in line for line in world.books.trace)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    find(bug, "weights", SEEDS, tmp_path)
