"""Fixtures of the browser's tests: the browser, and the fake engines of the router's unit tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chromium import Chromium, chromium, find_chromium


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no chromium on this machine: make test-browser installs Debian's")
    async with chromium(executable, tmp_path) as running:
        yield running
