"""Virtual time: ordered events, and clocks of machines that do not agree."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass


class Clock:
    """The true time, in seconds. Events of one instant happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._planned = 0

    def at(self, when: float, event: Callable[[], object]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (when if when > self.now else self.now, self._planned, event))

    def after(self, delay: float, event: Callable[[], object]) -> None:
        self.at(self.now + delay, event)

    def step(self) -> bool:
        """Runs the next event. Returns False if none is left."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(frozen=True)
class SkewedClock:
    """A machine's monotonic clock. It starts at a separate zero and runs a little fast or slow."""

    clock: Clock
    zero: float
    rate: float

    def now(self) -> float:
        return self.zero + self.clock.now * self.rate

    def true_time(self, local: float) -> float:
        """Returns the true time at which this clock shows ``local``, plus a microsecond: rounding must not
        make it early."""
        return (local - self.zero) / self.rate + 1e-6
