"""Three engines in one request: the sample of the campaign that CI runs, and the bugs that it must find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .campaign import campaign, run
from .minimize import report
from .planted import PREFIX_BUGS, Bug, find
from .prefixes import draw
from .scenario import LENDING, LONELY, MUTUAL, Fault, Plan, Scenario
from .shape import Side

SEEDS = 600
PLAN = Plan("r0", "p0", "d0", tokens=96, lender="d1", prefix=64)
CALM = Scenario(1, decodes=2, plans=(PLAN,))


def test_a_prefix_is_borrowed_or_computed_and_nothing_leaks() -> None:
    tally = campaign(0, SEEDS, of="prefixes")
    if tally.violations:
        pytest.fail(f"{len(tally.violations)} of {SEEDS} fail. {report('prefixes', min(tally.violations))}")
    assert tally.seeds == SEEDS
    for what in (*LONELY, *MUTUAL, *LENDING, "prefix failed", "lent for nothing", "left alone"):
        assert tally.ended[what] > SEEDS / 20, f"{what}: {tally.ended}"
    for what in ("prefix received", "not lent", "received", "computed alone"):
        assert tally.ended[what] > SEEDS, f"{what}: {tally.ended}"
    assert tally.ended["prefix cancelled"]
    assert tally.ended["lent, and ended"]
    assert tally.ended["silent lender"]


def test_a_seed_decides_everything() -> None:
    for seed in range(10):
        first, second = (run(draw(seed), tracing=True)[0] for _ in range(2))
        assert first.books.trace == second.books.trace


@pytest.mark.parametrize("bug", PREFIX_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    find(bug, "prefixes", SEEDS, tmp_path)


@pytest.mark.parametrize("lender", ["d1", "d0", "p1"], ids=["decode", "the same decode", "prefill"])
def test_a_prompt_is_computed_from_the_end_of_its_prefix(lender: str) -> None:
    plan = replace(PLAN, lender=lender)
    world, violation = run(replace(CALM, prefills=2, plans=(plan,)), tracing=True)
    assert violation is None
    computed = [line for line in world.books.trace if " computes r0 " in line]
    assert computed[0].endswith("computes r0 [64, 96)")
    assert world.books.ended["received"] == world.books.ended["prefix received"] == 1


@pytest.mark.parametrize("lender", ["d1", "p0"])
def test_a_decode_engine_alone_borrows_beside_a_prompt_of_its_prefill_engine(lender: str) -> None:
    """Sessions for prefixes are apart from those for prompts, also with the engine of the other prompt."""
    alone = replace(PLAN, name="r1", lender=lender, alone=True)
    other = replace(PLAN, lender="", prefix=0)
    world, violation = run(replace(CALM, plans=(other, alone)), tracing=True)
    assert violation is None
    computed = [line for line in world.books.trace if " computes r1 " in line]
    assert computed[0].endswith("computes r1 [64, 96)")
    assert world.books.ended["received"] == world.books.ended["prefix received"] == 1
    assert world.books.ended["computed alone"] == 1


def test_only_the_tokens_that_both_prompts_have_are_lent() -> None:
    world, violation = run(replace(CALM, plans=(replace(PLAN, diverges=32, own=16),)), tracing=True)
    assert violation is None
    assert any("borrows prefix of r0, tokens [16, 32)" in line for line in world.books.trace)


def test_engines_of_unequal_shapes_share_a_prefix() -> None:
    shapes = Side(ranks=2), Side(block=32, tokens_first=True), Side(1, first_stage=2)
    for seed in range(6):
        for sides in (shapes, shapes[::-1], (shapes[1], shapes[0], shapes[2])):
            world, violation = run(replace(CALM, seed=seed, heads=2, sides=sides))
            assert violation is None
            workers = sides[0].workers
            assert world.books.ended["prefix received"] == workers


@pytest.mark.parametrize("alone", [False, True], ids=["for a decode engine", "alone"])
@pytest.mark.parametrize("kind", ["vanish", "crash", "stop", "leave", "replace"])
def test_a_lender_that_is_gone_costs_a_wait_and_no_request(kind: str, alone: bool) -> None:
    """The lender fails at each moment: before the question, before its answer, and while pages move."""
    for at in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        fault, plan = Fault(kind, at, ("d1",), lasting=3.0), replace(PLAN, alone=alone)
        world, violation = run(replace(CALM, wire=0.3, faults=(fault,), plans=(plan,)))
        assert violation is None
        assert world.books.ended["computed alone" if alone else "received"] == 1
