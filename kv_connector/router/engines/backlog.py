"""Backlog: the prompts that an engine has still to compute for this router, and how long that will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Work:
    """A prompt in an engine's queue. Of two alike each is its own."""

    tokens: int
    """That the engine has not cached."""
    seconds: float
    """That it takes to compute them, by a forecast."""
    cached: int = 0
    """The other tokens of the prompt."""
    reported: bool = True
    """Its end will be known here; else it is taken to end as forecast."""


class Backlog:
    """One engine's, which takes prompts in the order in which they come.

    One that takes longer than forecast delays those behind it by what is forecast for them, no more; what an
    engine computes in one step is known to be over at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: dict[Work, None] = {}  # in order
        self._began = 0.0  # when the oldest was begun, or the one before it ended
        self._beside: dict[Work, float] = {}
        """Over by their own forecasts, though nobody says so, and by when those are that were in the queue
        with them: a decode engine computes all of these side by side."""

    def add(self, work: Work) -> None:
        self._prune()
        if not self._queue:
            self._began = self._clock()
        self._queue[work] = None

    def remove(self, work: Work) -> None:
        """It is computed, or nobody wants it any more. The second call does nothing."""
        self._prune()
        self._beside.pop(work, None)
        if work not in self._queue:
            return
        if next(iter(self._queue)) is work:
            self._began = self._clock()
        del self._queue[work]

    @property
    def tokens(self) -> int:
        """Of whole prompts, as an engine counts that has not looked into its prefix cache yet."""
        self._prune()
        return sum(work.tokens + work.cached for work in self._queue)

    def left(self) -> float:
        """Seconds until all of it is computed."""
        self._prune()
        if not self._queue:
            return 0.0
        oldest = next(iter(self._queue))
        done = min(self._clock() - self._began, oldest.seconds)
        return sum(work.seconds for work in self._queue) - done

    def in_a_step(self, chunk: int) -> int:
        """Tokens of all prompts together in a step that takes at most so many of each."""
        self._prune()
        now = self._clock()
        self._beside = {work: until for work, until in self._beside.items() if now < until}
        return sum(min(work.tokens, chunk) for work in (*self._beside, *self._queue))

    def _prune(self) -> None:
        """Takes out what is over by now though nobody says so."""
        now = self._clock()
        while self._queue:
            oldest = next(iter(self._queue))
            if oldest.reported or now < self._began + oldest.seconds:
                return
            self._began += oldest.seconds
            del self._queue[oldest]
            self._beside[oldest] = self._began + sum(work.seconds for work in self._queue)
