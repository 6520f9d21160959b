"""One stuck rank beside healthy ranks that are late: only the stuck rank is accused, and all others go on."""

from __future__ import annotations

import pytest

from .lateness import Lateness, Rules, places


@pytest.mark.parametrize(("ranks", "phases", "timeout"), [(2, 4, 3), (3, 4, 3), (4, 2, 2)])
def test_only_the_stuck_rank_is_accused_and_the_others_end(ranks: int, phases: int, timeout: int) -> None:
    for phase, reached in places(ranks, phases):
        found = Lateness(ranks, phases, timeout, phase, reached, Rules()).run()
        assert not found.violation, (phase, reached)
        assert found.states > 20


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (Rules(waiting_is_excused=False), "which is healthy"),
        (Rules(fence_is_a_wait=False), "which is healthy"),
        (Rules(by_flags=True), "which is healthy"),
        (Rules(seen_by_change=False), "waits for good"),
    ],
    ids=["waiting-counts", "fence-counts", "by-flags", "flag-that-stays"],
)
def test_a_planted_mistake_is_found(rules: Rules, expected: str) -> None:
    violations = (Lateness(3, 4, 3, *place, rules).run().violation for place in places(3, 4))
    assert expected in next(filter(None, violations), "")
