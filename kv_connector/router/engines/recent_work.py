"""RecentWork: the tokens that an engine was given lately, so that work spreads over engines that are idle."""

from math import exp2

# Seconds in which the tokens halve: about the time that a person takes between two turns.
_HALF_LIFE_S = 60.0


class RecentWork:
    """The tokens that one engine was given lately. They halve every _HALF_LIFE_S. Sans-IO: the time is an
    argument."""

    def __init__(self, tokens: float, now: float) -> None:
        self._tokens = tokens
        self._at = now

    def tokens(self, now: float) -> float:
        """Returns the tokens that are left at this time, which is never earlier than that of another call."""
        return self._tokens * exp2((self._at - now) / _HALF_LIFE_S)

    def add(self, tokens: float, at: float, now: float) -> None:
        """Adds tokens that were given at the time ``at``. Negative: they were not given after all."""
        more = tokens * exp2((at - now) / _HALF_LIFE_S)
        self._tokens, self._at = max(0.0, self.tokens(now) + more), now
