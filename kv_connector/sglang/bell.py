"""Bell: lets a scheduler without work wait for events.

SGLang's schedulers take their next turn at once, even if the last one found nothing. A scheduler that only
waits for pages uses a whole core for that. If cores are few, it takes that core from the other engine's
prefill. On every machine it takes time from its own agent, with which it shares an interpreter.
"""

from __future__ import annotations

import os
import time
from typing import Any

import zmq

# An event that does not ring (an answer of the bootstrap server, a deadline) is seen no later than this.
_PATIENCE_MS = 1
# Time without waits after an event, in seconds. A request begins with several events in a row: P learns of
# D's request after 6 ms on two idle cores (docs/performance.md). A prompt takes longer to compute.
_AWAKE_S = 0.01


class Bell:
    """A bell for the lifetime of its process."""

    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._rung, zmq.POLLIN)
        self._heard = 0.0

    def ring(self) -> None:
        """Ends the current wait, or the next one. Any thread may call it."""
        os.eventfd_write(self._rung, 1)

    def wait(self, requests: Any) -> None:
        """BLOCKS until the bell rings or a request arrives, for a millisecond at most. Does not block shortly
        after an event, because another one will follow.

        ``requests``: SGLang's socket for requests. Another object, such as SGLang's server in Rust, is not
        watched. Used by one thread.
        """
        if isinstance(requests, zmq.Socket) and requests not in self._poller:
            self._poller.register(requests, zmq.POLLIN)
        awake = time.monotonic() - self._heard < _AWAKE_S
        if heard := dict(self._poller.poll(0 if awake else _PATIENCE_MS)):
            self._heard = time.monotonic()
        if self._rung in heard:
            os.eventfd_read(self._rung)
