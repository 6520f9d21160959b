"""Two engines for all tests of this folder, started once, with other projects' routers in front of them.

`make test-fleet` runs these tests in .venv-fleet. No other environment collects them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fleet import Fleet

collect_ignore_glob = [] if "KVC_FLEET" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, interpreter: tuple[str, ...]) -> Iterator[Fleet]:
    from fleet import start

    with start(tmp_path_factory.mktemp("fleet"), interpreter) as started:
        yield started
