"""Collects every kind of model and topology in `make test-topologies`, which takes many minutes; otherwise a
sample."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from site_of_case import Models

# This sample covers heads that are divided differently, and recurrent states.
SAMPLE = ("test_tokens_are_one_engines[granite-tp2-tp1]",)


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
