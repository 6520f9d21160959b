"""Deadlines: how long each wait may last, and a queue of the next ones. In seconds of any clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timeouts:
    """How long each side waits for a message or an action before it acts itself, in seconds."""

    handshake: float = 1.0
    """The decode engine repeats an unanswered HELLO after this time, and doubles the time at each
    repetition."""
    connect: float = 5.0
    """The decode engine stops waiting for a prefill engine that never answers. The requests that wait for it
    fail."""
    heartbeat: float = 1.0
    """Interval between two PINGs of the decode engine. The prefill engine answers each PING with a PONG."""
    suspect: float = 3.0
    """Silence of a peer after which the log reports it as SUSPECT."""
    dead: float = 5.0
    """Silence of a peer after which it is DEAD: it is fenced, and its transfers fail."""
    hold: float = 20.0
    """The prefill engine frees a finished prompt that no decode engine has requested by then. Each PING of a
    decode engine lists the prompts that it waits for, which restarts their time."""
    orphan: float = 60.0
    """The prefill engine drops a decode engine's reservation if the request itself has not arrived by
    then."""
    transfer: float = 300.0
    """The decode engine gives up a transfer that is not complete by then."""
    cancel: float = 5.0
    """The decode engine waits this long for the prefill engine's report that a cancelled transfer has no
    pages in flight. After that time it fences the prefill engine."""
    drain: float = 5.0
    """The prefill engine waits this long for the writes of a cancelled or preempted request. After that time
    it fences the decode engine."""

    def longest(self) -> float:
        """The longest time for which a message about one transfer may matter."""
        return max(self.hold, self.orphan, self.transfer) + max(self.cancel, self.drain)


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
