"""Reasons: why pages did not arrive, as decode engines report it. vLLM's error does not contain the
reason.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

# An engine reports the reason before it fails the request, on another connection. On an idle machine both
# arrive within a millisecond.
PATIENCE_S = 0.25


class Reasons:
    """Reasons of KV loads that wait for their answer. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[str]] = {}  # by transfer id

    @contextmanager
    def expected(self, transfer_id: str) -> Iterator[asyncio.Future[str]]:
        """Yields the reason that a decode engine may report, for the length of a block that waits for a KV
        load."""
        reason = self._expected[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            yield reason
        finally:
            del self._expected[transfer_id]

    def reported(self, transfer_id: str, reason: str) -> None:
        """Handles LOAD_FAILED. Ignores loads for which no request waits here, for example those of another
        router."""
        expected = self._expected.get(transfer_id)
        if expected is not None and not expected.done():
            expected.set_result(reason)
