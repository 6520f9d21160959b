"""Reasons: why pages did not arrive, as decode engines report it. vLLM's error does not contain the
reason.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kv_connector.router.engines.endpoint import Endpoint

# An engine reports the reason before it fails the request, on another connection. On an idle machine both
# arrive within a millisecond.
PATIENCE_S = 0.25


class Reasons:
    """Reasons of KV loads that wait for their answer. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[Endpoint, asyncio.Future[str]]] = {}  # by transfer id

    @contextmanager
    def expected(self, transfer_id: str, decode: Endpoint) -> Iterator[asyncio.Future[str]]:
        """Yields the reason that a decode engine may report, for the length of a block that waits for a KV
        load."""
        reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._expected[transfer_id] = decode, reason
        try:
            yield reason
        finally:
            del self._expected[transfer_id]

    def awaited(self, transfer_id: str) -> Endpoint | None:
        """Returns the decode engine that may report why it did not receive this transfer; None: no engine
        may."""
        expected = self._expected.get(transfer_id)
        return None if expected is None else expected[0]

    def reported(self, transfer_id: str, reason: str) -> None:
        """Handles LOAD_FAILED. Ignores loads for which no request waits here, for example those of another
        router."""
        expected = self._expected.get(transfer_id)
        if expected is not None and not expected[1].done():
            expected[1].set_result(reason)
