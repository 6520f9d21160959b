"""Breaker: takes an engine out of use while its requests fail. Sans-IO: the time is an argument."""

from collections import deque

# Failures in a row that open the breaker. A client's request that breaks engines fails at three of them at
# most (dispatch.ATTEMPTS), once at each. Of 200 requests, an engine that fails at once gets three before
# that.
FAILURES = 3
# Failures mixed with successes also open the breaker: over half of the requests of this time, of at least
# _LEAST.
WINDOW_S = 10.0
_LEAST = 10
# Number of outcomes that are kept. An engine has some hundred requests a second at most.
_KEPT = 4096
# Seconds from the opening to the first trial, and at most between two trials. Each trial doubles the pause.
_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 30.0


class Breaker:
    """The breaker of one engine. Failures open it, a success closes it.

    While the breaker is open, the engine may get one request after each pause: the trial.
    """

    def __init__(self) -> None:
        # (time, requests that it counts, failures that it counts)
        self._recent: deque[tuple[float, int, int]] = deque()
        self.close()

    def close(self) -> None:
        """Forgets all failures."""
        self.open = False
        """Whether the breaker is open: the engine gets requests only if no other engine does."""
        self.trial = False
        """Whether the engine may get the trial."""
        self._in_a_row = 0
        self._requests = self._failures = 0
        self._recent.clear()
        self._pause = _PAUSE_S
        self._next_trial: float | None = None  # None: a trial is due, or was taken since the last tick

    def succeeded(self, now: float) -> None:
        """Counts a request whose answer has begun."""
        if self.open:
            self.close()
        self._in_a_row = 0
        self._count(now, 1, 0)

    def failed(self, now: float, *, begun: bool = False, unsure: bool = False) -> None:
        """Counts a request that failed.

        ``begun``: its answer had begun, and counted as a success. ``unsure``: another engine may be to blame.
        A good engine may share some requests in a row with a bad engine, but not half of all requests.
        """
        self._in_a_row += not unsure
        self._count(now, 0 if begun else 1, 1)
        often = self._requests >= _LEAST and 2 * self._failures > self._requests
        if not self.open and (often or self._in_a_row >= FAILURES):
            self.open = True
            self._next_trial = now + self._pause

    def taken(self) -> None:
        """Notes that the engine gets a request."""
        if self.trial:
            self.trial = False
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def tick(self, now: float) -> None:
        """Allows the trial when it is due. To be called several times a second."""
        if not self.open or self.trial:
            return
        if self._next_trial is None:
            self._next_trial = now + self._pause
        elif now >= self._next_trial:
            self.trial, self._next_trial = True, None

    def _count(self, now: float, requests: int, failures: int) -> None:
        self._recent.append((now, requests, failures))
        self._requests += requests
        self._failures += failures
        while len(self._recent) > _KEPT or now - self._recent[0][0] > WINDOW_S:
            _, requests, failures = self._recent.popleft()
            self._requests -= requests
            self._failures -= failures
