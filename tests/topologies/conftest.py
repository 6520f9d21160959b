"""Every kind of model and topology: many minutes, with `make test-topologies`. Else a sample of them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deployment import Client
    from site_of_case import Models

# The engines, their clients and the oracle of rest are those of tests/vllm.
sys.path.append(str(Path(__file__).parent.parent / "vllm"))

# Heads and blocks that are cut anew, and recurrent states.
SAMPLE = ("test_tokens_are_one_engines[block-32-64-tp1-tp2]", "test_tokens_are_one_engines[granite-tp2-tp1]")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "KVC_TOPOLOGIES" in os.environ:
        return
    left_out = [
        item for item in items if item.path.parent == Path(__file__).parent and item.name not in SAMPLE
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from site_of_case import Models

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """What starts engines in a quarter of the time."""
    from nursery import nursery

    with nursery(tmp_path_factory.mktemp("nursery"), {"OMP_NUM_THREADS": "1"}) as command:
        yield command


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    from deployment import Client

    async with Client() as client:
        yield client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and directory:
        for log in sorted(directory.glob("*.log")):
            report.sections.append((f"end of {log}", "\n".join(log.read_text().splitlines()[-40:])))
    return report
