"""Who may take blocks that an engine cannot take back while another one has to act.

Two kinds of requests hold such blocks: a load at D waits until P has computed its prompt, and an early prompt
at P, one that D has not asked for yet, waits until D has room for its load. If they may fill the pools, two
engines wait for each other: P's pool is full of prompts that D has no room for, and D's of loads whose
prompts P has no room for; or two engines that are P and D at once are full of each other's loads.

So each kind that a role has gets a share of the pool, and one more share is left for all other requests: a P
has halves, an engine that is P and D thirds. The loads of an engine that is D only may fill its pool, since
nobody waits for what it computes. Nobody waits for ever then, if each request fits into a share:

1. A prompt that D has room for waits for nobody else's engine. Neither do requests of the engine's own. What
   both other kinds hold leaves them a share, in which at least the oldest one runs to its end. So each comes
   to its end.
2. So each load ends: its prompt is one of those, as P is told that D has room once the load has blocks. So
   the loads' share empties again and again, and each load gets its blocks in its turn.
3. So each early prompt ends: its load comes to its turn, and then it is one of the first kind.

Each step builds on the ones before only: there is no circle. One share for both kinds would not do: prompts
that fill it at both engines wait for loads that fit at neither. A request that is larger than a share goes
when nobody of its kind holds anything; two such ones may still wait for each other until a deadline.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kv_connector.protocol.messages import Role


def gates(role: Role, blocks: int) -> tuple[AdmissionGate, AdmissionGate]:
    """Of early prompts, and of loads, in a pool of so many blocks."""
    if role is Role.BOTH:
        return AdmissionGate(blocks // 3), AdmissionGate(blocks // 3)
    return AdmissionGate(blocks // 2), AdmissionGate(None)


Place = tuple[float | str, ...]
"""A request's place in its engine's queue. The smaller place comes first. Of equal places, the request that
the gate held first comes first."""


def no_place(request: object) -> Place:
    """The place of any request whose engine serves whoever comes first."""
    return ()


class AdmissionGate:
    """One kind's share of the pool. An answer costs the same however many wait."""

    def __init__(self, blocks: int | None) -> None:
        """None: the kind may fill the pool."""
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
        """Whether the request must not take its blocks yet. It may be asked again and again.

        Nobody passes who waits first, or small ones might for ever: but those whose place is before its own.
        """
        if self._share is None:
            return False
        # Who has been in was preempted, which is told at the step's end only, and comes before all others.
        back = request_id in self._held
        held = self._total - self._held.get(request_id, 0)
        fits = held == 0 or held + blocks <= self._share
        if fits and (back or self._passes(request_id, place)):
            return False
        if request_id not in self._waiting:
            self._refusals += 1
            self._waiting[request_id] = place, self._refusals
            heapq.heappush(self._order, (place, self._refusals, request_id))
        return True

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
        """The request has its blocks."""
        self.leave(request_id)
        self._held[request_id] = blocks
        self._total += blocks

    def leave(self, request_id: str) -> None:
        """The request has no blocks any more, or does not wait for another engine."""
        self._total -= self._held.pop(request_id, 0)
        self._waiting.pop(request_id, None)
        # Those behind the first that leave without having entered stay in the heap.
        if len(self._order) > 2 * len(self._waiting) + 64:
            self._order = [(place, refusal, one) for one, (place, refusal) in self._waiting.items()]
            heapq.heapify(self._order)
        self.on_leave(request_id)
