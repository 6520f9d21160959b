"""A queue of deadlines, in seconds of any clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


def earliest(deadlines: Iterable[float | None]) -> float | None:
    """The earliest of these deadlines, or None. None among them is no deadline."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


class Timers(Generic[Key]):
    """One deadline per key. Equal times fire in the order in which they were set: a run can be repeated."""

    def __init__(self) -> None:
        self._deadline: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._sequence = 0

    def set(self, key: Key, when: float) -> None:
        """Sets or moves the key's deadline."""
        self._sequence += 1
        self._deadline[key] = (when, self._sequence)
        heapq.heappush(self._heap, (when, self._sequence, key))
        # Moved and cleared deadlines stay in the heap: rebuild it before they outnumber the live ones.
        if len(self._heap) > 2 * len(self._deadline) + 64:
            self._heap = [(when, sequence, key) for key, (when, sequence) in self._deadline.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Key) -> None:
        """Removes the key's deadline, if it has one."""
        self._deadline.pop(key, None)

    def deadline(self, key: Key) -> float | None:
        """The key's deadline, if it has one."""
        known = self._deadline.get(key)
        return None if known is None else known[0]

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Key | None:
        """Takes the earliest key whose deadline has come, or None."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._deadline[key]
        return key

    def __len__(self) -> int:
        return len(self._deadline)

    def __contains__(self, key: Key) -> bool:
        return key in self._deadline

    def _drop_stale(self) -> None:
        while self._heap and self._deadline.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
