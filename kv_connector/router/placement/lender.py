"""Lenders: engines from which the engine that computes a prompt can load its beginning, in place of computing
it.

A proposal is a hint. The borrower decides by cost whether it asks the lender, and the lender answers by
content. If the lender lacks the prefix, the request has lost one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.pool import Member

# Engines keep whole blocks. A block of 32 tokens is the largest that is usual for attention on GPUs and the
# smallest on CPUs. A lead of less than a block may be no block at all.
_BLOCK = 32


@dataclass(frozen=True)
class Prefix:
    """The proposal that an engine loads the beginning of a prompt from another engine."""

    lender: Endpoint
    tokens: int
    """Tokens of the prompt that the lender is expected to have."""


class Lenders:
    """The engines that can lend a prefix of one prompt."""

    def __init__(
        self, matches: Sequence[tuple[int, int]], lending: Callable[[int], Iterable[Member]]
    ) -> None:
        """``matches``: (mask of engines, tokens that each of them has), the most tokens first. ``lending``:
        returns the engines of a mask that lend prefixes and take requests for the prompt's model. Only these
        are proposed."""
        self._matches = matches
        self._find = lending
        self._able: list[list[Member]] = []
        """For each match, the engines that lend, the least busy first. Filled as far as was needed."""

    def propose(self, borrower: Member, own: int) -> Prefix | None:
        """Returns the best lender for this engine, which has ``own`` tokens of the prompt.

        It is the engine with the most tokens, and of equals the one with the fewest requests. None: no
        engine has enough more to pay for the question.
        """
        if not borrower.borrows:
            return None
        for number, (_, tokens) in enumerate(self._matches):
            if tokens - own < _BLOCK:
                break
            for one in self._lending(number):
                if one.endpoint == borrower.endpoint:
                    continue
                if one.prefixes != borrower.prefixes or not one.weights.fits(borrower.weights):
                    continue
                held = one.workload.hit(tokens)
                if held - own >= least_lead(borrower, one):
                    return Prefix(one.endpoint, held)
        return None

    def able(self) -> bool:
        """Returns whether any engine may lend a prefix."""
        return any(map(self._lending, range(len(self._matches))))

    def _lending(self, number: int) -> list[Member]:
        while len(self._able) <= number:
            mask, _ = self._matches[len(self._able)]
            self._able.append(sorted(self._find(mask), key=_requests))
        return self._able[number]


def lending(engines: Iterable[Member], mask: int) -> list[Member]:
    """Returns the engines of this mask that lend prefixes."""
    return [one for one in engines if one.prefixes and one.workload.cache.bit & mask]


def least_lead(borrower: Member, lender: Member) -> int:
    """Returns the tokens that a lender must have beyond those of the borrower.

    A busy lender answers at the end of its step, in half a step on average. The borrower computes that many
    tokens meanwhile.
    """
    cost, load = borrower.workload.cost, lender.workload.load
    if not lender.outstanding or cost is None or load is None or not cost.token:
        return _BLOCK
    return max(_BLOCK, round((load.decode_ns or 0) * 1e-9 / 2 / cost.token))


def _requests(engine: Member) -> int:
    return engine.outstanding
