"""All interleavings of dispatch and combine at three ranks, and the mistakes that they must show."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from .explore import Exploration, Found
from .planted import FULL, LATE, MISTAKES, SHIFTED, SPARSE, Mistake
from .program import Sizes

# A rank with two tokens moves the rows of the ranks behind it: other sources write them in the next round.
_MOVING: Sizes = ((1, 0, 2), (0, 2, 1), (1, 1, 0))


@cache
def _protocol(sizes: Sizes, **options: Any) -> Found:
    return Exploration(sizes, **options).run()


@pytest.mark.parametrize("sizes", [FULL, _MOVING, ((0, 0, 0), (2, 0, 0), (0, 0, 1)), ((1, 1, 1),) * 3])
def test_rows_are_of_their_round_in_every_interleaving(sizes: Sizes) -> None:
    found = Exploration(sizes).run()
    assert not found.violation, found.trace
    assert found.states > 1000
    assert list(found.ends) == [(len(sizes),) * 3]


def test_every_choice_of_idle_ranks_in_two_rounds_is_safe() -> None:
    for first, second in product(product((0, 1), repeat=3), repeat=2):
        found = Exploration((first, second)).run()
        assert not found.violation, (first, second, found.trace)
        assert list(found.ends) == [(2, 2, 2)]


@pytest.mark.parametrize("epoch", [(1 << 31) - 2, (1 << 31) - 1, (1 << 32) - 2, (1 << 32) - 1])
def test_epochs_pass_the_wrap(epoch: int) -> None:
    found = Exploration(_MOVING, epoch=epoch).run()
    assert not found.violation, found.trace
    assert list(found.ends) == [(3, 3, 3)]


@pytest.mark.parametrize("sizes", [FULL, SPARSE])
def test_reduced_exploration_reaches_the_same_ends_in_fewer_states(sizes: Sizes) -> None:
    whole, reduced = (Exploration(sizes, reduced=only).run() for only in (False, True))
    assert not reduced.violation
    assert reduced.ends == whole.ends
    assert reduced.states < whole.states


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_planted_mistake_is_found(mistake: Mistake) -> None:
    for reduced in (False, True):
        found = Exploration(mistake.sizes, mistake.rules, reduced=reduced, **mistake.options).run()
        assert mistake.found in found.violation, found.violation
        assert found.trace
    assert not _protocol(mistake.sizes, **mistake.options).violation


@pytest.mark.parametrize("victim", range(3))
def test_no_torn_round_is_delivered_when_a_rank_dies(victim: int) -> None:
    """Each read that takes effect is checked, and a rank that completed a round has made all its reads.

    No state is a deadlock: each survivor ends, with a fault or with all of its rounds.
    """
    found = Exploration(_MOVING, victim=victim).run()
    assert not found.violation, found.trace
    survivors = [rank for rank in range(3) if rank != victim]
    for rank in survivors:
        assert {ends[rank] for ends in found.ends} == {0, 1, 2, 3}
    # No survivor is more than one round ahead of another.
    one, other = survivors
    assert {ends[one] - ends[other] for ends in found.ends} == {-1, 0, 1}


@pytest.mark.parametrize("victim", range(3))
def test_survivors_complete_every_round_without_a_dead_rank(victim: int) -> None:
    """Each row that a survivor reads is of its round, whenever the victim dies and its stores land."""
    found = Exploration(SHIFTED, victim=victim, survive=True).run()
    assert not found.violation, found.trace
    for rank in range(3):
        if rank != victim:
            assert {ends[rank] for ends in found.ends} == {len(SHIFTED)}


def test_the_others_complete_every_round_without_a_late_rank_that_continues() -> None:
    """It completes all rounds if no rank has masked it, and ends otherwise."""
    found = _protocol(LATE, stuck=0, survive=True)
    assert not found.violation, found.trace
    assert {ends[1:] for ends in found.ends} == {(2, 2)}
    assert {ends[0] for ends in found.ends} == {0, 1, 2}


def test_no_torn_round_is_delivered_when_waits_run_out() -> None:
    found = Exploration(FULL, deadlines=True).run()
    assert not found.violation, found.trace
    assert {ends[0] for ends in found.ends} == {0, 1, 2}
    assert all(max(ends) - min(ends) <= 1 for ends in found.ends)


@pytest.mark.parametrize("stuck", range(3))
def test_no_torn_round_is_delivered_when_a_rank_is_given_up(stuck: int) -> None:
    """No state is a deadlock: the rank that was given up ends too, although none of its waits runs out."""
    found = Exploration(FULL, stuck=stuck).run()
    assert not found.violation, found.trace
    for rank in range(3):
        assert {ends[rank] for ends in found.ends} == {0, 1, 2}
    assert all(max(ends) - min(ends) <= 1 for ends in found.ends)
