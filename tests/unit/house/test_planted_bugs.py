"""The bugs that the simulator must find: the code that each of them replaces still exists.

The simulator's own tests find that too, but run for minutes.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.simulation import planted
from tests.simulation.planted import Bug
from tests.simulation.weights import planted as planted_in_weights

PACKAGE = Path(__file__).parents[3] / "kv_connector"


def bugs(module: ModuleType) -> list[Bug]:
    lists = [value for value in vars(module).values() if isinstance(value, tuple)]
    return [bug for found in lists for bug in found if isinstance(bug, Bug)]


@pytest.mark.parametrize("bug", [*bugs(planted), *bugs(planted_in_weights)], ids=lambda bug: bug.name)
def test_code_of_a_planted_bug_exists_once(bug: Bug) -> None:
    assert (PACKAGE / bug.file).read_text().count(bug.good) == 1, f"adapt the planted bug {bug.name!r}"
