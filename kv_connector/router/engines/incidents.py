"""Incidents: recent failures, for the status page. The log has each of them; here equal ones are counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

# Kinds of incidents that are kept. An engine has a handful of kinds, so this is a bad day of a dozen engines.
_KEPT = 64
# After so many seconds, an equal incident is a new entry.
_SAME_SECONDS = 600.0


@dataclass(frozen=True)
class Incident:
    at: float
    """Time of the latest occurrence, by the clock of Incidents."""
    engine: str
    """Label for strangers, such as "decode 2"; "" if the incident belongs to no single engine."""
    what: str
    """Description of the event in the router's words, without addresses or names."""
    detail: str
    """Message of the engine or the library, for operators. It may contain addresses and ids."""
    times: int


class Incidents:
    """The recent incidents. Used from the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, str], Incident] = {}  # by engine and what, the latest last

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
        """Returns the incidents, the latest first."""
        return list(reversed(self._kept.values()))
