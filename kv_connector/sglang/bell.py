"""Bell: what a scheduler waits for that has nothing to compute.

SGLang's schedulers take their next turn at once, whatever the last one found. One that only waits for pages
takes a whole core for it: from the other server's prefill where cores are few, and anywhere from its own
agent, with which it shares an interpreter.
"""

from __future__ import annotations

import os
import time
from typing import Any

import zmq

# What is not announced (an answer of the bootstrap server, a deadline) is seen no later than this.
_PATIENCE_MS = 1
# A request's way begins with several such steps: until P knows that D has asked for it pass 6 ms on two idle
# cores (docs/performance.md). A prompt takes longer to compute.
_AWAKE_S = 0.01


class Bell:
    """For as long as its process lives."""

    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._rung, zmq.POLLIN)
        self._heard = 0.0

    def ring(self) -> None:
        """Ends the wait, or the next one. Any thread."""
        os.eventfd_write(self._rung, 1)

    def wait(self, requests: Any) -> None:
        """BLOCKS until it is rung or a request has come, for a millisecond at most; not where something was
        heard a moment ago, which will have a sequel. ``requests``: SGLang's socket for them; of anything
        else, such as its server in Rust, nothing is heard here. One thread."""
        if isinstance(requests, zmq.Socket) and requests not in self._poller:
            self._poller.register(requests, zmq.POLLIN)
        awake = time.monotonic() - self._heard < _AWAKE_S
        if heard := dict(self._poller.poll(0 if awake else _PATIENCE_MS)):
            self._heard = time.monotonic()
        if self._rung in heard:
            os.eventfd_read(self._rung)
