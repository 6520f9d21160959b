"""Incidents: what went wrong lately, for the status page. The log has each; here equal ones are counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

# Kinds of incidents that are kept: an engine has a handful, so this is a bad day of a dozen engines.
_KEPT = 64
# What happens again after so long is another incident.
_SAME_SECONDS = 600.0


@dataclass(frozen=True)
class Incident:
    at: float
    """The clock's time when it happened last."""
    engine: str
    """As strangers may call it, "decode 2"; "" where it is no single engine's."""
    what: str
    """What happened, in words of ours that name nobody."""
    detail: str
    """The engine's or the library's own words, for operators: addresses and ids may be in them."""
    times: int


class Incidents:
    """Used from the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], Incident] = {}  # by engine and what; the latest is the last

    def note(self, engine: str, what: str, detail: str) -> None:
        now = self._clock()
        before = self._kept.pop((engine, what), None)
        if before is not None and now - before.at < _SAME_SECONDS:
            self._kept[engine, what] = replace(before, at=now, detail=detail, times=before.times + 1)
            return
        self._kept[engine, what] = Incident(now, engine, what, detail, 1)
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]

    def latest(self) -> list[Incident]:
        """The latest first."""
        return list(reversed(self._kept.values()))
