"""SecondSource: the gain of two sources for a decode engine's pages, for conversation_simulation.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

SECOND_HEADS = (
    "of moved tokens, a third engine has, %",
    "pages after the first token, ms, mean / p99",
    "gain of a second source, ms, mean / p99",
)


@dataclass
class RequestTimes:
    """Times of one request, in seconds of the clock, and its tokens."""

    reserved: float = 0.0
    """Time at which the decode engine has blocks."""
    begins: float = 0.0
    """Time of the prefill engine's first step."""
    first: float = 0.0
    """Time of the first token."""
    missing: int = 0
    """Tokens that the decode engine lacked."""
    third: int = 0
    """The part of these that a third engine had."""
    lends: bool = False
    """Whether the prefill engine loads from this third engine."""


@dataclass
class SecondSource:
    """The gain of requests if decode engines got pages from a third engine too.

    As it is, the prefill engine sends all that the decode engine lacks, from its first step on. The third
    engine could send what it has from the reservation on, behind what it lends to the prefill engine. A
    request shares its NICs with no other request. So the gain is the most that is possible.
    """

    load_s: float
    """Seconds to move a token between two engines."""
    missing: int = 0
    """Tokens that decode engines lacked."""
    third: int = 0
    """The part of these that a third engine had."""
    waits: list[float] = field(default_factory=list)
    """Seconds from each first token until the decode engine has all pages."""
    gains: list[float] = field(default_factory=list)
    """Seconds by which a second source would shorten each wait."""

    def add(self, request: RequestTimes, loaded: int) -> None:
        """Notes a request. ``loaded``: tokens that the prefill engine loaded."""
        self.missing += request.missing
        self.third += request.third
        lent = loaded if request.lends else 0
        sends = max(request.begins, request.reserved)
        one = max(request.first, sends + request.missing * self.load_s)
        # The pages pass the third engine's NIC, the prefill engine's, and the decode engine's.
        two = max(
            request.first,
            request.reserved + (lent + request.third) * self.load_s,
            sends + (request.missing - request.third) * self.load_s,
            request.reserved + request.missing * self.load_s,
        )
        self.waits.append(one - request.first)
        self.gains.append(max(0.0, one - two) if request.third else 0.0)

    def columns(self) -> list[float]:
        """Returns the numbers of second_cells()."""
        found = [100 * self.third / self.missing]
        for seconds in (self.waits, self.gains):
            found += [statistics.fmean(seconds) * 1e3, statistics.quantiles(seconds, n=100)[-1] * 1e3]
        return found


def second_cells(columns: Sequence[float]) -> list[str]:
    """Returns the cells below SECOND_HEADS."""
    third, wait, wait_p99, gain, gain_p99 = columns
    return [f"{third:.1f}", f"{wait:.1f} / {wait_p99:.1f}", f"{gain:.1f} / {gain_p99:.1f}"]
