"""Limits: how many requests and body bytes may be in flight in this process."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from kv_connector.router.failure import overloaded

# vLLM's own target. Some libraries walk over all descriptors below the limit.
_DESCRIPTORS = 65_535
# For sockets that belong to no request: listening, registrations, health checks, log, name resolution.
_SPARE_DESCRIPTORS = 128
# A request holds its client's connection, one to the prefill engine and one to the decode engine. The fourth
# is for an idle connection of a client.
_DESCRIPTORS_OF_REQUEST = 4


def raise_descriptor_limit() -> int:
    """Raises this process's soft limit on descriptors, up to its hard limit or 65,535, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def requests_for(descriptors: int) -> int:
    """Returns the most requests in flight for so many descriptors, with as many idle clients."""
    return max(1, (descriptors - _SPARE_DESCRIPTORS) // _DESCRIPTORS_OF_REQUEST)


# A body with more bytes than this is long. Long bodies can fill their part of the budget to the last byte,
# and a prompt of 2 KB would be refused with them. So a sixteenth of the budget is for short bodies. By
# default that is 8 MiB, enough for 128 of the longest of them.
_SHORT = 64 << 10
_FOR_SHORT = 16


class Limits:
    """Counts requests in flight and the bytes of their bodies. Used from the event loop's thread only."""

    def __init__(self, requests: int, nbytes: int) -> None:
        self._most_requests = requests
        self._most_bytes = nbytes
        self._tasks: set[asyncio.Task[object]] = set()
        self._bytes = 0

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Counts the current task as a request in flight, for the length of a block. Failure 503 if there are
        too many."""
        if len(self._tasks) >= self._most_requests:
            raise overloaded(
                f"the router has {len(self._tasks)} requests in flight, the most that its limit on open "
                f"files allows. Retry later, or raise the router's hard limit (it uses {_DESCRIPTORS} files "
                "at most)"
            )
        task = asyncio.current_task()
        assert task is not None
        place = Place(self)
        self._tasks.add(task)
        try:
            yield place
        finally:
            self._tasks.discard(task)
            self._bytes -= place.nbytes

    async def wait_empty(self, seconds: float) -> None:
        """Waits until no request is in flight, for the given number of seconds at most."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def take(self, nbytes: int, *, had: int, expected: int) -> None:
        """Counts ``nbytes`` more bytes of a body. Failure 503 if all bodies together have too many.

        ``had``: bytes of this body that are counted already. ``expected``: bytes of the whole body, if known.
        """
        most = self._most_bytes
        alone = self._bytes == had
        if max(had + nbytes, expected) > _SHORT and not alone:
            most -= most // _FOR_SHORT
        if nbytes > 0 and self._bytes + nbytes > most:
            raise overloaded(
                f"the bodies of all requests in flight would exceed {most} bytes (--body-budget). Retry later"
            )
        self._bytes += nbytes


class Place:
    """One request's part of the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.nbytes = 0
        """Bytes of the request's body that are counted."""

    def take(self, nbytes: int, *, expected: int = 0) -> None:
        """Counts bytes of the body that have arrived. ``expected``: bytes of the whole body. Failure 503 if
        all bodies together have too many bytes."""
        self._limits.take(nbytes, had=self.nbytes, expected=expected)
        self.nbytes += nbytes

    def answered(self) -> None:
        """Notes that the answer has begun: from now on the body counts half. It may stay for minutes, and new
        requests need room. Bodies of 60 MiB cost 1.5 times their size (2026-11-28), so three times what they
        count."""
        left = self.nbytes // 2
        self._limits.take(left - self.nbytes, had=self.nbytes, expected=0)
        self.nbytes = left
