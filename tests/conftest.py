"""Fixtures that all tests share. Tests with engines also get their starters, and logs on a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import pytest

try:
    from hypothesis import settings
except ImportError:  # some environments run tests without properties
    settings = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from deployment import Client


# No test has a limit of time for an example: a busy machine would make it fail.
if settings is not None:
    settings.register_profile("busy", deadline=None)
    settings.load_profile("busy")


def pytest_report_header() -> list[str]:
    return needs.header()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if needs.left_out(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    for marker in needs.markers_of(item.path):
        item.add_marker(marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked by itself, in a file that has others, too."""
    for marker, package in needs.MARKERS.items():
        if item.get_closest_marker(marker) and needs.missing(package):
            pytest.skip(needs.reason(package))


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, which everything here is written for."""
    return "asyncio"


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Yields a command that starts engines in a quarter of the usual time."""
    from nursery import nursery

    with nursery(tmp_path_factory.mktemp("nursery"), {"OMP_NUM_THREADS": "1"}) as command:
        yield command


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    from deployment import Client

    async with Client() as client:
        yield client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        arguments = getattr(item, "funcargs", {})
        if deployment := arguments.get("deployment"):
            logs = [deployment.prefill.log, deployment.decode.log]
        else:
            directory = arguments.get("tmp_path")
            logs = sorted(directory.glob("*.log")) if directory else []
        for log in logs:
            report.sections.append((f"end of {log}", "\n".join(log.read_text().splitlines()[-40:])))
    return report
