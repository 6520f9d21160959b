"""What the router does beside its requests, for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

logger = logging.getLogger(__name__)


async def forever(what: str, turn: Callable[[], Awaitable[None]], rest: float) -> NoReturn:
    """One turn after the other, until it is cancelled. One that raises is logged, and the next comes ``rest``
    seconds later: a router that no longer hears of its engines, and does not say so, would lose them all."""
    while True:
        try:
            await turn()
        except Exception:
            logger.exception("%s: goes on after an error that was not expected", what)
            await asyncio.sleep(rest)
