"""RecentWork: the tokens that an engine was given lately, so that work spreads over engines that are idle."""

from math import exp2

# Seconds in which the tokens halve: about the time that a person takes between two turns.
HALF_LIFE_S = 60.0


class RecentWork:
    """The tokens that one engine was given lately. They halve every HALF_LIFE_S. Sans-IO: the time is an
    argument."""

    def __init__(self, tokens: float, now: float) -> None:
        self.given = tokens
        """Tokens that were left at the time ``at``."""
        self.at = now

    def tokens(self, now: float) -> float:
        """Returns the tokens that are left at this time, which is never earlier than that of another call."""
        return self.given * exp2((self.at - now) / HALF_LIFE_S)

    def add(self, tokens: float, at: float, now: float) -> None:
        """Adds tokens that were given at the time ``at``. Negative: they were not given after all."""
        more = tokens * exp2((at - now) / HALF_LIFE_S)
        self.given, self.at = max(0.0, self.tokens(now) + more), now
