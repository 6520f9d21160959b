"""The invariants, checked while the world runs. The first violation ends the run.

- A page is read from a block that holds it, and lands where it is awaited, never in a block that was freed.
- A block is freed only when no operation in flight could read it or land in it.
- No counter ever exceeds its target.
- A request that was received holds exactly its own pages.
- A request is reported once, after it finished, and within its bound.
- The state of a request never goes back. It is DONE with the report of a success, and FAILED once no page of
  the request is in flight.
- A request that no fault concerns is served, or refused for a good reason, and soon.
- A request that its client leaves, and that no fault concerns, counts as failed on neither side.
- At rest no component holds anything.
- No machine raises, and no action has an unforeseen failure.
"""

from __future__ import annotations

import logging
from collections import Counter

from .clock import Clock


class Violation(AssertionError):
    """The machines broke an invariant."""


class Books:
    def __init__(self, clock: Clock, tracing: bool) -> None:
        self.tracing = tracing
        self.trace: list[str] = []
        self.violation: str | None = None
        self.ended: Counter[str] = Counter()  # times that the campaign reached each end and each fault
        self._clock = clock

    def note(self, text: str, *args: object) -> None:
        if self.tracing:
            self.trace.append(f"{self._clock.now:9.4f} {text % args if args else text}")

    def check(self, condition: object, text: str, *args: object) -> None:
        if not condition:
            self.fail(text % args if args else text)

    def fail(self, text: str) -> None:
        """Ends the run: at once if the caller lets the exception pass, else after this event."""
        if self.violation is None:
            self.violation = text
            self.note("VIOLATION: %s", text)
        raise Violation(text)

    def look(self) -> None:
        """Raises the violation again after each event, because a caller may have swallowed fail()'s
        exception."""
        if self.violation is not None:
            raise Violation(self.violation)


class Tap(logging.Handler):
    """Writes log lines of the code under test to the trace. An exception that the code caught is a
    violation."""

    def __init__(self, books: Books) -> None:
        super().__init__(logging.DEBUG if books.tracing else logging.ERROR)
        self._books = books
        # Name of the process that has its turn. The process sets it.
        self.speaker = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        books = self._books
        books.note("%s: %s", self.speaker, text)
        unforeseen = record.name == "kv_connector" and record.levelno >= logging.ERROR and " failed" in text
        if books.violation is None and (record.exc_info or unforeseen) and "NAK" not in text:
            error = record.exc_info[1] if record.exc_info else None
            books.violation = f"{self.speaker} logged: {text}" + (f" ({error!r})" if error else "")
            books.note("VIOLATION: %s", books.violation)
