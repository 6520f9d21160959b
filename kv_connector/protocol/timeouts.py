"""How long each wait of the protocol may last."""

from __future__ import annotations

from dataclasses import dataclass


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
    check: float = 30.0
    """The decode engine waits this long for the sums of pages that have all arrived (`verify_pages`). One
    thread sums 50 GB of CPU memory in that time (1.7 GB/s, AMD EPYC, busy, 2026-11-30). An engine that sleeps
    or ends waits as long for sums that have begun."""
    cancel: float = 5.0
    """The decode engine waits this long for the prefill engine's report that a cancelled transfer has no
    pages in flight. After that time it fences the prefill engine."""
    drain: float = 5.0
    """The prefill engine waits this long for the writes of a cancelled or preempted request. After that time
    it fences the decode engine."""
    ask: float = 1.0
    """An engine that requests a prefix waits this long for the answer. After that time it computes the
    prompt, which takes 1.1 s for 32,000 tokens of an 8B model (H200, 2026-11)."""
    remember: float = 30.0
    """The borrowing engine relies this long on its measurements of a lending engine. So at most one prompt in
    30 s waits ``ask`` for an engine that does not answer."""
    lend: float = 3.0
    """The lending engine frees the pages of a prefix that the borrowing engine has not requested by then."""
    borrow: float = 30.0
    """The borrowing engine gives up a prefix that is not complete by then, and computes the prompt."""

    def longest(self) -> float:
        """The longest time for which a message about one transfer may matter."""
        return max(self.hold, self.orphan, self.transfer) + max(self.cancel, self.drain)
