"""Which requests may take blocks that an engine cannot take back until another engine acts.

Two kinds of requests hold such blocks. A load at D waits until P has computed its prompt. An early prompt
at P, which D has not requested yet, waits until D has room for its load. If the two kinds may fill the
pools, two engines can wait for each other. P's pool is then full of prompts that D has no room for, and D's
pool is full of loads whose prompts P has no room for. Or two engines that are P and D at once are full of
each other's loads.

So each kind that a role has gets a share of the pool, and one more share is left for all other requests.
A P has halves, and an engine that is P and D has thirds. The loads of an engine that is only D may fill its
pool, since no other engine waits for what it computes. If each request fits into a share, no request waits
forever:

1. A prompt that D has room for waits for no other engine. Neither does a request without a transfer. What
   both other kinds hold leaves them a share, in which at least the oldest one runs to its end. So each of
   them ends.
2. So each load ends: its prompt is one of those, because P receives RESERVE once the load has blocks. So
   the loads' share empties again and again, and each load gets its blocks in its turn.
3. So each early prompt ends: its load gets its turn, and the prompt then belongs to the first kind.

Each step builds only on the steps before it, so there is no circle. One share for both kinds would not be
enough: prompts that fill it at both engines wait for loads that fit at neither. A request larger than a
share enters when no request of its kind holds blocks. Two such requests may still wait for each other
until a deadline.

An engine that is only D is never part of such a circle, but its loads could hold all blocks while their
prompts queue at P. So the loads whose prompts wait take no more than half of the blocks that other requests
leave (DeferralGate). A load that this gate holds has no blocks. It passes once P reports that the prompt is
next in its queue. The points above hold with these loads:

- P reports the next prompts in its queue, whether or not its gate holds them. P waits for no answer. So the
  report depends only on the prompts before it, which end by point 1 or wait at P's gate.
- A load with the report needs no gate, only blocks. The loads before it end by point 2, or have no blocks.
- A load without a report passes once no such load has blocks and it fits. So even a lost report holds it no
  longer than the requests that run.

A prefix that one engine lends to another adds no kind, and no wait for blocks of another engine:

- A question holds no blocks.
- The lender holds blocks of its cache until their pages have arrived, for seconds at most. It needs no
  further block for that. If the blocks exceed its share, it refuses, and the borrower computes the prefix. A
  lender that waited for room instead could wait for a borrower that waits for it.
- The borrower's blocks wait for these pages alone. So the load of a prefix ends by itself, like a step that
  computes it, and point 1 holds for its prompt. That prompt belongs to a P, or to a D that computes it alone.
  An early prompt is inside its gate from the question on, although it has no blocks yet. The question ends
  after a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kv_connector.protocol.wire.messages import Role


def gates(role: Role, blocks: int, free: Callable[[], int]) -> tuple[AdmissionGate, AdmissionGate]:
    """The gates for early prompts and for loads, in a pool of this many blocks. ``free``: returns how many of
    them are free."""
    if role is Role.BOTH:
        return AdmissionGate(blocks // 3), AdmissionGate(blocks // 3)
    return AdmissionGate(blocks // 2), DeferralGate(free)


# Blocks that an engine holds for borrowers are missing in its cache for seconds. An 8B model on an H200 has
# room for 568,000 tokens (128 KiB each, 74 GB). A quarter of them is the longest prompt of agents, 142,000.
_LENT_SHARE = 4


def may_lend(held: int, blocks: int, total: int) -> bool:
    """Whether an engine that holds ``held`` blocks for borrowers may hold ``blocks`` more, in a pool of this
    many blocks."""
    return held + blocks <= total // _LENT_SHARE


Place = tuple[float | str, ...]
"""A request's place in its engine's queue. The smaller place comes first. Of equal places, the request that
the gate held first comes first."""


def no_place(request: object) -> Place:
    """The place of a request in an engine that serves requests in their order of arrival."""
    return ()


class AdmissionGate:
    """The gate to one kind's share of the pool. The cost of an answer does not depend on how many requests
    wait."""

    defers = False
    """Whether a request that the gate holds may pass once P reports that its prompt is next."""

    def __init__(self, blocks: int | None) -> None:
        """``blocks``: size of the share. None: the kind may fill the pool."""
        self._share = blocks
        self._held: dict[str, int] = {}
        self._total = 0
        self._waiting: dict[str, tuple[Place, int]] = {}
        """Requests that the gate holds, by request id: place, and number of the refusal."""
        self._order: list[tuple[Place, int, str]] = []
        """A heap of the held requests, and of some that have entered or left since."""
        self._refusals = 0
        self.on_leave: Callable[[str], None] = lambda request_id: None
        """Receives the id of each request that leaves, also of one that the gate does not know."""

    def must_wait(self, request_id: str, blocks: int, place: Place = ()) -> bool:
        """Whether the request must not take its blocks yet. The query may be repeated.

        No request passes the first waiting one, because small requests could otherwise pass it forever. The
        exception is a request whose place comes before that one's.
        """
        # A request that was inside before was preempted. Its leave() comes only at the step's end. It enters
        # before all others.
        back = request_id in self._held
        held = self._total - self._held.get(request_id, 0)
        if self._fits(held, blocks) and (back or self._passes(request_id, place)):
            return False
        if request_id not in self._waiting:
            self._refusals += 1
            self._waiting[request_id] = place, self._refusals
            heapq.heappush(self._order, (place, self._refusals, request_id))
        return True

    def _fits(self, held: int, blocks: int) -> bool:
        return self._share is None or held == 0 or held + blocks <= self._share

    def _passes(self, request_id: str, place: Place) -> bool:
        first = self.first()
        return first is None or first == request_id or place < self._waiting[first][0]

    def first(self) -> str | None:
        """The id of the held request that may enter next. None: the gate holds no request."""
        while self._order:
            place, refusal, request_id = self._order[0]
            if self._waiting.get(request_id) == (place, refusal):
                return request_id
            heapq.heappop(self._order)
        return None

    def enter(self, request_id: str, blocks: int) -> None:
        """The request has taken its blocks."""
        self.leave(request_id)
        self._held[request_id] = blocks
        self._total += blocks

    def leave(self, request_id: str) -> None:
        """The request has released its blocks, or no longer waits for another engine."""
        self._total -= self._held.pop(request_id, 0)
        self._waiting.pop(request_id, None)
        # Requests that leave without having entered stay in the heap unless they are its first.
        if len(self._order) > 2 * len(self._waiting) + 64:
            self._order = [(place, refusal, one) for one, (place, refusal) in self._waiting.items()]
            heapq.heapify(self._order)
        self.on_leave(request_id)


class DeferralGate(AdmissionGate):
    """The gate for loads whose prompts still wait at P, in an engine that is only D.

    Such a load takes blocks only if at least as many stay free as these loads then hold. So together they
    never hold more than half of the blocks that other requests leave. The only one of them may take all that
    are free, so that an engine without other loads gets the overlap of pages with the prefill. A load that
    does not fit is held too, because it would stop the requests behind it.
    """

    defers = True

    def __init__(self, free: Callable[[], int]) -> None:
        """``free``: returns the number of free blocks."""
        super().__init__(None)
        self._free = free

    def _fits(self, held: int, blocks: int) -> bool:
        free = self._free()
        return blocks <= free if held == 0 else held + blocks <= free - blocks
