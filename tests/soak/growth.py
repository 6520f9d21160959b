"""Growth: whether a series of samples grows with the requests, or stays flat.

Samples of one process are not independent: memory moves in steps, and a burst of requests lasts for several
samples. The fit is therefore over medians of consecutive parts of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MILLION = 1e6

# Parts of a series whose medians are fitted. In a run of half an hour a part lasts two minutes, longer than a
# request.
PARTS = 10
# Fewest samples of a part, so that its median ignores a burst.
_SAMPLES_OF_A_PART = 3
FEWEST_SAMPLES = PARTS * _SAMPLES_OF_A_PART
# A flat series exceeds this multiple of its standard error in about one of 1,500 cases (Student's t with
# PARTS - 2 degrees of freedom). A run has about 60 series.
_ERRORS = 4.8
# A series that grows has grown in the last half of the run too, by at least this share of its mean pace. A
# single step, such as a larger heap, has not.
_LATELY = 0.5


@dataclass(frozen=True)
class Trend:
    """The fit of one series over the requests of the run."""

    begins: float
    """Value of the fit at the first sample."""
    grown: float
    """Growth of the fit from the first to the last sample."""
    per_million: float
    """Growth for a million requests."""
    error: float
    """Standard error of ``per_million``."""
    grows: bool
    """Whether the growth is beyond noise and beyond the resolution of the series."""

    @property
    def most(self) -> float:
        """The largest growth for a million requests that the samples allow: two standard errors above."""
        return self.per_million + 2 * self.error


def trend(requests: Sequence[float], values: Sequence[float], resolution: float) -> Trend | None:
    """Fits ``values`` over the number of requests at each sample. None: there are too few samples.

    ``resolution``: growth over the whole series that does not count, in the unit of the values.
    """
    if len(values) < FEWEST_SAMPLES or requests[-1] <= requests[0]:
        return None
    parts = np.array_split(np.arange(len(values)), PARTS)
    x = np.array([np.mean(np.take(requests, part)) for part in parts])
    y = np.array([np.median(np.take(values, part)) for part in parts])
    off = x - x.mean()
    spread = float(off @ off)
    slope = float(off @ y) / spread
    residuals = y - y.mean() - slope * off
    error = float(np.sqrt(residuals @ residuals / (PARTS - 2) / spread))
    grown = slope * (requests[-1] - requests[0])
    quarters = [float(np.median(quarter)) for quarter in np.array_split(np.asarray(values), 4)]
    lately = quarters[3] - quarters[2]
    return Trend(
        begins=float(y.mean() + slope * (requests[0] - x.mean())),
        grown=grown,
        per_million=slope * MILLION,
        error=error * MILLION,
        grows=grown > resolution and slope > _ERRORS * error and lately >= _LATELY * grown / 4,
    )


def longest_life(lives: Sequence[int]) -> slice:
    """Returns the longest run of equal process ids: samples of one process."""
    start, best = 0, slice(0, 0)
    for _, life in itertools.groupby(lives):
        end = start + len(list(life))
        if end - start > best.stop - best.start:
            best = slice(start, end)
        start = end
    return best
