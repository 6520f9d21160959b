"""BorrowCosts: whether it pays to load a prefix from another engine, by this engine's own measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_connector.protocol.actions import Address

# Questions and loads that are kept for each lender. The median of eight ignores a few slow steps.
_SAMPLES = 8


@dataclass
class _Lender:
    questions: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    """Seconds from a question until the scheduler had its answer."""
    overheads: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    """Seconds of a load in the scheduler beyond those in which its pages arrived."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    """Tokens a second of a load, from its reservation to its last page."""
    late: bool = False
    """Whether a load took longer than computing its tokens, or ended without its pages as late."""
    prefetch_late_at: float = -math.inf
    """Time of the last late prefetch. Other loads are measured on, so it expires by itself."""
    measured_at: float = 0.0


class BorrowCosts:
    """The cost of a load against that of computing the same tokens.

    A cost that is not known counts as nothing. So the first prefix of a lender is loaded and measured,
    however short it is.
    """

    def __init__(self, compute_seconds: Callable[[int, int], float | None], remember_s: float) -> None:
        """``compute_seconds``: of the tokens behind the first ones, by the numbers of both. None: unknown.

        ``remember_s``: how long a measurement counts, in seconds. Otherwise a lender that was slow once would
        never be measured again.
        """
        self.compute_seconds = compute_seconds
        self._remember_s = remember_s
        self._lenders: dict[Address, _Lender] = {}
        self.clock: Callable[[], float] = time.monotonic

    def answered(self, lender: Address, seconds: float) -> None:
        """Notes a question that was answered, with a prefix or with a refusal."""
        self._of(lender).questions.append(seconds)

    def loaded(self, lender: Address, tokens: int, seconds: float, wire_s: float) -> None:
        """Notes a load. ``seconds``: in the scheduler. ``wire_s``: from its reservation to its last page."""
        measured = self._of(lender)
        measured.overheads.append(max(seconds - wire_s, 0.0))
        if wire_s > 0:
            measured.rates.append(tokens / wire_s)

    def late(self, lender: Address, *, prefetch: bool) -> None:
        """Notes a load that was given up because of its duration. How long it would have taken is unknown.

        A late prefetch keeps off only prefetches. No client waits for a prefetch, and it may have been one of
        several that shared the wire.
        """
        measured = self._of(lender)
        measured.late = measured.late or not prefetch
        if prefetch:
            measured.prefetch_late_at = self.clock()

    def pays(self, lender: Address, first: int, end: int, ahead: int, *, asked: bool = False) -> bool:
        """Returns whether the tokens [``first``, ``end``) are here sooner if they are loaded.

        ``ahead``: tokens that are being loaded, and share the wire. ``asked``: the question is answered.
        """
        if self.was_late(lender):
            return False
        measured = self._measured(lender)
        computed = self.compute_seconds(first, end - first)
        if computed is None:
            return True
        loaded = 0.0 if measured is None else _load_seconds(measured, end - first + ahead, asked=asked)
        return loaded < computed

    def was_late(self, lender: Address) -> bool:
        """Returns whether a load from this lender, no prefetch, was given up lately because of its
        duration."""
        measured = self._measured(lender)
        return measured is not None and measured.late

    def was_late_for_prefetch(self, lender: Address) -> bool:
        """Does the same as was_late(), for loads and prefetches."""
        measured = self._measured(lender)
        if measured is None:
            return False
        return measured.late or self.clock() - measured.prefetch_late_at < self._remember_s

    def _measured(self, lender: Address) -> _Lender | None:
        measured = self._lenders.get(lender)
        if measured is None or self.clock() - measured.measured_at >= self._remember_s:
            return None
        return measured

    def _of(self, lender: Address) -> _Lender:
        now = self.clock()
        stale = [one for one, known in self._lenders.items() if now - known.measured_at >= self._remember_s]
        for one in stale:
            del self._lenders[one]
        measured = self._lenders.setdefault(lender, _Lender())
        measured.measured_at = now
        return measured


def _load_seconds(measured: _Lender, tokens: int, *, asked: bool) -> float:
    fixed = _median(measured.overheads) + (0.0 if asked else _median(measured.questions))
    # A short load consists mostly of round trips, so the highest rate comes closest to that of the wire.
    return fixed + (tokens / max(measured.rates) if measured.rates else 0.0)


def _median(samples: deque[float]) -> float:
    return statistics.median(samples) if samples else 0.0
