"""FirstBytes: how long clients waited for the first byte of an answer, over the last minutes."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

SLICE_SECONDS = 5
SLICES = 60

# Buckets grow by a twelfth of an octave, so a reported time is at most 3 % off. Up to two minutes a slice has
# 204 buckets, whatever the workload.
_PER_OCTAVE = 12
_SHORTEST = 1e-3
_BUCKETS = 17 * _PER_OCTAVE


@dataclass(frozen=True)
class Slice:
    """Answers and waiting times in one slice of SLICE_SECONDS. Times are in seconds; None if nothing was
    answered."""

    answers: int
    p50: float | None
    p99: float | None


class FirstBytes:
    """Counts waiting times in bounded memory. An answer costs a microsecond or two."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (number of the slice, slice), without slices that have no answers.
        self._over: deque[tuple[int, Slice]] = deque(maxlen=SLICES)
        self._number = 0
        self._current: Counter[int] = Counter()  # {bucket: answers}
        self._previous: Counter[int] = Counter()

    def observe(self, seconds: float) -> None:
        self._advance()
        bucket = int(math.log2(max(seconds, _SHORTEST) / _SHORTEST) * _PER_OCTAVE)
        self._current[min(bucket, _BUCKETS)] += 1

    def slices(self) -> list[Slice]:
        """Returns the last SLICES complete slices, the oldest first."""
        self._advance()
        known = dict(self._over)
        return [known.get(number, _NONE) for number in range(self._number - SLICES, self._number)]

    def latest(self) -> Slice:
        """Returns the last complete slice and the current slice together."""
        self._advance()
        return _slice(self._previous + self._current)

    def _advance(self) -> None:
        number = int(self._clock() / SLICE_SECONDS)
        if number == self._number:
            return
        if self._current:
            self._over.append((self._number, _slice(self._current)))
        self._previous = self._current if number == self._number + 1 else Counter()
        self._number, self._current = number, Counter()


_NONE = Slice(0, None, None)


def _slice(buckets: Counter[int]) -> Slice:
    return Slice(buckets.total(), _quantile(buckets, 0.5), _quantile(buckets, 0.99))


def _quantile(buckets: Counter[int], quantile: float) -> float | None:
    rank = math.ceil(buckets.total() * quantile)
    for bucket in sorted(buckets):
        rank -= buckets[bucket]
        if rank <= 0:
            return float(_SHORTEST * 2 ** ((bucket + 0.5) / _PER_OCTAVE))
    return None
