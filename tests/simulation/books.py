"""The invariants, as books that are kept while the world runs; the first wrong entry ends the run.

- a page is read from a block that holds it, and lands where it is awaited, never in a block that came back;
- a block comes back only when nothing that is under way could read it or land in it;
- no counter ever exceeds its target; a request that was received holds exactly its own pages;
- a request is reported once, after it finished, and within its bound;
- its state never goes back, is DONE with the report of a success, and FAILED once nothing of it moves;
- whoever no fault concerns is served, or refused for a good reason, and soon;
- a request that its client leaves, and that no fault concerns, counts as failed on neither side;
- at rest nothing is left anywhere;
- no machine raises, and no action has an unforeseen failure.
"""

from __future__ import annotations

import logging
from collections import Counter

from .clock import Clock


class Violation(AssertionError):
    """The machines did what they must never do."""


class Books:
    def __init__(self, clock: Clock, tracing: bool) -> None:
        self.tracing = tracing
        self.trace: list[str] = []
        self.violation: str | None = None
        self.ended: Counter[str] = Counter()  # how often the campaign came through each end and each fault
        self._clock = clock

    def note(self, text: str, *args: object) -> None:
        if self.tracing:
            self.trace.append(f"{self._clock.now:9.4f} {text % args if args else text}")

    def check(self, condition: object, text: str, *args: object) -> None:
        if not condition:
            self.fail(text % args if args else text)

    def fail(self, text: str) -> None:
        """Ends the run: at once where the caller lets it, else after this event."""
        if self.violation is None:
            self.violation = text
            self.note("VIOLATION: %s", text)
        raise Violation(text)

    def look(self) -> None:
        """After every event: somebody on the way may have swallowed what fail() raised."""
        if self.violation is not None:
            raise Violation(self.violation)


class Tap(logging.Handler):
    """What the code under test logs: into the trace; and an exception that it caught is a violation."""

    def __init__(self, books: Books) -> None:
        super().__init__(logging.DEBUG if books.tracing else logging.ERROR)
        self._books = books
        # Whose turn it is: set by the process that runs.
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
