"""The hostile peers at CI's size: each attack once. `make hostile` sends any number of frames."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.fuzz import hostile, wire
from tests.fuzz.hostile_same_host import SameHostAttacker
from tests.fuzz.peers import stage


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    return hostile.gpu_driver(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("lane", hostile.LANES)
def test_a_live_engine_takes_no_harm(lane: str, driver: str | None) -> None:
    with closing(hostile.campaign(lane, 0, "ci", driver)) as lines:
        assert "attacks" in next(lines)


def test_attacker_cannot_pass_for_a_domain_of_the_victims_process(driver: str | None) -> None:
    """The victim would take such a peer's memory for an address in its own process."""
    with stage("nvlink", driver) as (victim, honest):
        attacker = SameHostAttacker(wire.NVLINK, victim, honest.immediate(), "ci")
        assert attacker.pass_for_one_of_theirs() == [False]
        attacker.close()
