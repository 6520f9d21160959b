"""Backlog: the prompts that an engine still has to compute for this router, and the time for that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Work:
    """A prompt in an engine's queue. Two prompts with equal numbers are different works."""

    tokens: int
    """Tokens of the prompt that the engine has not cached."""
    seconds: float
    """Forecast time to compute these tokens, in seconds."""
    cached: int = 0
    """Tokens of the prompt that the engine has cached."""
    reported: bool = True
    """Whether the end of the prompt's computation will be reported here. Else it is assumed to end as
    forecast."""


class Backlog:
    """The prompts of one engine, which takes them in the order in which they come.

    A prompt that takes longer than forecast delays the prompts behind it by their forecast at most. Prompts
    that an engine computes in one step end at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: dict[Work, None] = {}  # in the order of arrival
        self._uncached = 0  # tokens of the queue, without cached ones
        self._began = 0.0  # when the oldest prompt was begun, or the prompt before it ended
        self._beside: dict[Work, float] = {}
        """Works that are over by their own forecast, although no end is reported, with the time until which
        they count. That is the forecast end of the prompts that were in the queue with them: a decode engine
        computes all of these side by side."""

    def add(self, work: Work) -> None:
        self._prune()
        if not self._queue:
            self._began = self._clock()
        self._queue[work] = None
        self._uncached += work.tokens

    def remove(self, work: Work) -> None:
        """Removes a prompt that is computed or no longer wanted. A second call does nothing."""
        self._prune()
        self._beside.pop(work, None)
        if work not in self._queue:
            return
        if next(iter(self._queue)) is work:
            self._began = self._clock()
        del self._queue[work]
        self._uncached -= work.tokens

    @property
    def uncached(self) -> int:
        """Tokens that are still to be computed. A prompt counts in full until it is computed."""
        self._prune()
        return self._uncached

    @property
    def ends_by_itself(self) -> bool:
        """Whether the oldest prompt ends as forecast, because its end will not be reported."""
        return bool(self._queue) and not next(iter(self._queue)).reported

    @property
    def tokens(self) -> int:
        """Tokens of whole prompts, as an engine counts them that has not checked its prefix cache yet."""
        self._prune()
        return sum(work.tokens + work.cached for work in self._queue)

    def left(self) -> float:
        """Returns the seconds until all prompts are computed."""
        self._prune()
        if not self._queue:
            return 0.0
        oldest = next(iter(self._queue))
        done = min(self._clock() - self._began, oldest.seconds)
        return sum(work.seconds for work in self._queue) - done

    def in_a_step(self, chunk: int) -> int:
        """Returns the tokens of all prompts in a step that takes at most ``chunk`` tokens of each."""
        self._prune()
        now = self._clock()
        self._beside = {work: until for work, until in self._beside.items() if now < until}
        return sum(min(work.tokens, chunk) for work in (*self._beside, *self._queue))

    def _prune(self) -> None:
        """Removes works that are over by now, although no end is reported."""
        if not self._queue:
            return
        now = self._clock()
        while self._queue:
            oldest = next(iter(self._queue))
            if oldest.reported or now < self._began + oldest.seconds:
                return
            self._began += oldest.seconds
            del self._queue[oldest]
            self._uncached -= oldest.tokens
            self._beside[oldest] = self._began + sum(work.seconds for work in self._queue)
