"""Limits: how many requests and body bytes may be in flight in this process."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kv_connector.router.failure import overloaded, too_many

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

    def __init__(self, requests: int, nbytes: int, requests_per_key: int | None = None) -> None:
        """``requests_per_key``: most requests in flight with one API key; None: no such limit."""
        self._most_requests = requests
        self._most_bytes = nbytes
        self._most_per_key = requests_per_key
        self._tasks: set[asyncio.Task[object]] = set()
        self._of_keys: Counter[str] = Counter()
        self._bytes = 0

    def change(self, requests: int, nbytes: int, requests_per_key: int | None) -> None:
        """Sets other limits. Requests in flight continue, also if they are too many."""
        self._most_requests = requests
        self._most_bytes = nbytes
        self._most_per_key = requests_per_key

    @contextmanager
    def enter(self, key: str | None = None) -> Iterator[LimitsPlace]:
        """Counts the current task as a request in flight, for the length of a block.

        ``key``: name of the client's API key. Failure 429 if too many requests have this key, 503 if all
        requests are too many.
        """
        if key is not None and self._most_per_key is not None and self._of_keys[key] >= self._most_per_key:
            raise too_many(
                f"{self._most_per_key} requests of this API key are in flight, the most that it may have "
                "(--requests-per-key). Retry later"
            )
        if len(self._tasks) >= self._most_requests:
            raise overloaded(
                f"the router has {len(self._tasks)} requests in flight, its maximum. Retry later, or raise "
                f"--max-requests or the router's hard limit on open files (it uses {_DESCRIPTORS} at most)"
            )
        task = asyncio.current_task()
        assert task is not None
        place = LimitsPlace(self)
        self._tasks.add(task)
        if key is not None:
            self._of_keys[key] += 1
        try:
            yield place
        finally:
            self._tasks.discard(task)
            if key is not None:
                self._of_keys[key] -= 1
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


class LimitsPlace:
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
