"""Background loops of the router, which run as long as the router."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

# An error that repeats with each turn is logged once a minute, not five times a second.
_REPORT_INTERVAL_S = 60.0


async def forever(what: str, turn: Callable[[], Awaitable[None]], rest: float) -> NoReturn:
    """Runs one turn after the other, until it is cancelled.

    If a turn raises, the error is logged, at most once a minute, and the next turn runs ``rest`` seconds
    later. A router that silently stopped receiving registrations would lose all its engines.
    """
    reported = -math.inf
    while True:
        try:
            await turn()
        except Exception:
            if time.monotonic() >= reported + _REPORT_INTERVAL_S:
                reported = time.monotonic()
                logger.exception("%s goes on after an error that was not expected", what)
            await asyncio.sleep(rest)
