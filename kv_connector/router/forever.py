"""What the router does beside its requests, for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

# An error that comes again with each turn is a line a minute, not five a second.
_REPORT_INTERVAL_S = 60.0


async def forever(what: str, turn: Callable[[], Awaitable[None]], rest: float) -> NoReturn:
    """One turn after the other, until it is cancelled. One that raises is logged, once a minute, and the next
    comes ``rest`` seconds later: a router that no longer hears of its engines, and does not say so, would
    lose them all."""
    reported = -math.inf
    while True:
        try:
            await turn()
        except Exception:
            if time.monotonic() >= reported + _REPORT_INTERVAL_S:
                reported = time.monotonic()
                logger.exception("%s goes on after an error that was not expected", what)
            await asyncio.sleep(rest)
