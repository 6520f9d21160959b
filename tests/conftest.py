"""What all tests share."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, which everything here is written for."""
    return "asyncio"
