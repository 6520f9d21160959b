"""Reasons: why pages did not come, in a decode engine's own words: vLLM's error for it has none."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

# An engine tells it before it fails the request, on another connection: a millisecond on an idle machine.
PATIENCE_S = 0.25


class Reasons:
    """Of the loads that wait for their answer. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[str]] = {}  # by transfer

    @contextmanager
    def expected(self, transfer_id: str) -> Iterator[asyncio.Future[str]]:
        """For the length of a block that waits for a load: the reason that a decode engine may report."""
        reason = self._expected[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            yield reason
        finally:
            del self._expected[transfer_id]

    def reported(self, transfer_id: str, reason: str) -> None:
        """LOAD_FAILED. Of loads that are not waited for, another router's for one, it says nothing here."""
        expected = self._expected.get(transfer_id)
        if expected is not None and not expected.done():
            expected.set_result(reason)
