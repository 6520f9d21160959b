"""Reports of the agent to its engine adapter: ended requests, counters for metrics, and what is in flight.

The agent's thread writes them and any thread may read them. One lock protects everything, except the look-up
of a state.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_connector.protocol.actions import (
    Ended,
    Outcome,
    PrefixAnswered,
    PrefixDecided,
    PrefixRequested,
    PromptDue,
    Reached,
    State,
)
from kv_connector.protocol.prefill.lending import MAX_QUESTIONS
from kv_connector.protocol.session.sessions import PeerInfo
from kv_connector.protocol.wire.messages import LendOutcome, Role

# Kept for an adapter that does not take them: more than the transfers that end in one step of an engine.
_TIMINGS = 10_000


@dataclass
class Reports:
    """Request ids. Each is reported exactly once over the agent's life."""

    finished_sending: set[str] = field(default_factory=set)  # nothing reads their blocks any more
    finished_recving: set[str] = field(default_factory=set)  # nothing can land in their blocks any more
    failed_recving: set[str] = field(default_factory=set)  # those of finished_recving that failed
    stale: set[str] = field(default_factory=set)  # those of failed_recving that ended with Outcome.STALE
    # the token that P sampled, for requests of finished_recving
    sampled: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentStats:
    """Counters since the agent started. They only grow."""

    # Of transfers that this agent has sent and that are over.
    pages_pushed: int
    bytes_pushed: int
    layers_pushed: int
    # The part of them that had arrived when note_prefill_end() was called. A layer counts once all its pages
    # had arrived.
    pages_before_prefill_end: int
    bytes_before_prefill_end: int
    layers_before_prefill_end: int
    sent: dict[Outcome, int]  # transfers by outcome, as prefill engine
    received: dict[Outcome, int]  # transfers by outcome, as decode engine
    sent_seconds: float  # from RESERVE to the end, summed over completed transfers
    received_seconds: float
    received_pages: int
    checks: CheckStats
    malformed_messages: int
    links_lost: int  # links that broke while their peer had others
    links_restored: int
    peers: tuple[PeerInfo, ...]
    prefixes: PrefixStats


@dataclass(frozen=True)
class CheckStats:
    """Counters of verified pages since the agent started, as decode engine. They only grow."""

    pages: int  # compared with the prefill engine's
    corrupt: int  # of these pages, those that differ
    unverified: int  # transfers with pages that could not be compared


@dataclass(frozen=True)
class PrefixStats:
    """Counters of prefixes since the agent started. They only grow.

    A lender counts at the worker that has got the question, a borrower at its first worker.
    """

    borrow: dict[LendOutcome, int]  # this engine's answered requests
    lend: dict[LendOutcome, int]  # answered requests of other engines
    tokens_borrowed: int
    tokens_lent: int
    answer_seconds: float  # from a request to its answer, summed
    load_seconds: float  # from RESERVE to the last page, summed over prefixes that were borrowed


@dataclass(frozen=True)
class Timing:
    """The duration and size of one transfer that is over."""

    side: Role
    lane: str
    seconds: float  # from RESERVE to the end: all pages written, or all pages received
    # Of a sent transfer:
    first_push_seconds: float = 0.0  # from RESERVE until its first pages could be written
    nbytes: int = 0
    # Of either side, if the transfer completed:
    pages: int = 0


@dataclass(frozen=True)
class LiveState:
    """The transfers and resources that are in use. If none is, the agent is ``idle``. Its sessions live
    on."""

    prefill_requests: int
    decode_requests: int
    engine_transfers: int
    counter_sets: int
    fences: int  # sessions that are over and not fenced yet
    commands: int  # handed to the agent, not executed yet
    acting: bool  # the agent's thread is acting on events: a request's end may not be reported yet
    peers: int
    links_out: int  # links to connected peers that are lost and not restored
    remembered: int  # transfers that are over, whose end is remembered for late messages

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing is held."""
        return not any(
            (
                self.prefill_requests,
                self.decode_requests,
                self.engine_transfers,
                self.counter_sets,
                self.fences,
                self.commands,
                self.acting,
            )
        )


class Ledger:
    """The reports and counters that the agent's thread writes and the adapter reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # a report, or a reservation
        self._reports = Reports()
        self._reserved: set[str] = set()
        # An engine that takes no step leaves the questions of borrowers here. Older ones have no answer in
        # time.
        self._prefix_requests: deque[PrefixRequested] = deque(maxlen=MAX_QUESTIONS)
        self._prefix_answers: dict[str, int] = {}
        self._prefix_loads: dict[str, float] = {}
        self._prompts_due: set[str] = set()
        self.on_prefix_request: Callable[[], None] = lambda: None
        # The state of each request, until its end was taken. Changed under the lock, looked up without it.
        self._reached: dict[str, Reached] = {}
        self._disowned: set[str] = set()  # requests in flight whose end the adapter no longer wants
        self._ended: dict[Role, Counter[Outcome]] = {Role.PREFILL: Counter(), Role.DECODE: Counter()}
        self._seconds = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        self._pushed = [0, 0, 0]  # pages, bytes, layers
        self._before_end = [0, 0, 0]
        self._received_pages = 0
        self._checks = [0, 0, 0]  # pages, corrupt pages, transfers that were not verified
        self._borrow: Counter[LendOutcome] = Counter()
        self._lend: Counter[LendOutcome] = Counter()
        self._tokens_borrowed = self._tokens_lent = 0
        self._answer_seconds = self._load_seconds = 0.0
        self._timings: deque[Timing] = deque(maxlen=_TIMINGS)

    def news(self, news: PrefixRequested | PrefixAnswered | PrefixDecided | PromptDue) -> None:
        """Keeps news for the engine's scheduler, and counts answers about prefixes."""
        with self._lock:
            match news:
                case PrefixRequested():
                    self._prefix_requests.append(news)
                case PrefixAnswered():
                    self._prefix_answers[news.transfer_id] = news.tokens
                    self._borrow[news.outcome] += 1
                    self._answer_seconds += news.seconds
                case PromptDue(transfer_id):
                    self._prompts_due.add(transfer_id)
                case PrefixDecided():
                    self._lend[news.outcome] += 1
                    self._tokens_lent += news.tokens
                    return
            self._news.notify_all()
        if isinstance(news, PrefixRequested):
            self.on_prefix_request()

    def prefix_loaded(self, ended: Ended) -> None:
        """Counts a borrowed prefix that has arrived."""
        with self._lock:
            self._tokens_borrowed += ended.prefix_tokens
            self._load_seconds += ended.seconds
            self._prefix_loads[ended.transfer_id] = ended.seconds

    def take_prefix_loads(self) -> dict[str, float]:
        with self._lock:
            loads, self._prefix_loads = self._prefix_loads, {}
            return loads

    def take_prompts_due(self) -> set[str]:
        with self._lock:
            due, self._prompts_due = self._prompts_due, set()
            return due

    def take_prefix_requests(self) -> list[PrefixRequested]:
        with self._lock:
            requests = list(self._prefix_requests)
            self._prefix_requests.clear()
            return requests

    def take_prefix_answers(self) -> dict[str, int]:
        with self._lock:
            answers, self._prefix_answers = self._prefix_answers, {}
            return answers

    def sent(self, request_id: str) -> None:
        with self._lock:
            if self._drop_disowned(request_id):
                return
            self._reports.finished_sending.add(request_id)
            self._news.notify_all()

    @property
    def states(self) -> int:
        """Number of requests whose state is kept."""
        return len(self._reached)

    def reached(self, reached: Reached) -> None:
        with self._lock:
            self._reached[reached.request_id] = reached
            if reached.side is Role.PREFILL and reached.state is State.MOVING:
                self._reserved.add(reached.transfer_id)
                self._news.notify_all()

    def state(self, request_id: str) -> State | None:
        reached = self._reached.get(request_id)
        return None if reached is None else reached.state

    def failure(self, request_id: str) -> str:
        reached = self._reached.get(request_id)
        return "" if reached is None else reached.reason

    def first_token(self, request_id: str) -> int:
        reached = self._reached.get(request_id)
        return 0 if reached is None else reached.first_token

    def forget(self, request_id: str) -> None:
        """Forgets a request now, or when its report is due."""
        with self._lock:
            reached = self._reached.get(request_id)
            if reached is None:
                return
            if reached.state is State.MOVING:
                self._disowned.add(request_id)
                return
            del self._reached[request_id]
            self._reserved.discard(reached.transfer_id)
            reports = self._reports
            for ids in (
                reports.finished_sending,
                reports.finished_recving,
                reports.failed_recving,
                reports.stale,
            ):
                ids.discard(request_id)
            reports.sampled.pop(request_id, None)

    def load_ended(
        self, request_id: str, failed: bool, sampled: int | None = None, *, stale: bool = False
    ) -> None:
        with self._lock:
            if self._drop_disowned(request_id):
                return
            self._reports.finished_recving.add(request_id)
            if failed:
                self._reports.failed_recving.add(request_id)
            if stale:
                self._reports.stale.add(request_id)
            if sampled is not None:
                self._reports.sampled[request_id] = sampled
            self._news.notify_all()

    def _drop_disowned(self, request_id: str) -> bool:
        if request_id not in self._disowned:
            return False
        self._disowned.discard(request_id)
        reached = self._reached.pop(request_id, None)
        if reached is not None:
            self._reserved.discard(reached.transfer_id)
        return True

    def ended(self, ended: Ended) -> None:
        with self._lock:
            self._ended[ended.side][ended.outcome] += 1
            if ended.outcome is Outcome.COMPLETED:
                self._seconds[ended.side] += ended.seconds

    def pushed(self, pages: int, nbytes: int, layers: int, before_end: tuple[int, int, int]) -> None:
        """Counts the writes of a transfer that is over. ``before_end``: the pages, bytes and layers that
        arrived before the prefill's end."""
        with self._lock:
            for totals, counts in ((self._pushed, (pages, nbytes, layers)), (self._before_end, before_end)):
                for index, count in enumerate(counts):
                    totals[index] += count

    def received_pages(self, pages: int) -> None:
        with self._lock:
            self._received_pages += pages

    def checked(self, pages: int, corrupt: int, unverified: bool) -> None:
        """Counts the check of a transfer's pages."""
        with self._lock:
            for index, count in enumerate((pages, corrupt, int(unverified))):
                self._checks[index] += count

    def timed(self, timing: Timing) -> None:
        with self._lock:
            self._timings.append(timing)

    def take_timings(self) -> list[Timing]:
        with self._lock:
            timings = list(self._timings)
            self._timings.clear()
            return timings

    def take_reserved(self) -> set[str]:
        with self._lock:
            reserved, self._reserved = self._reserved, set()
            return reserved

    def await_news(self, timeout: float) -> None:
        """Blocks until there is something to take, at most ``timeout`` seconds."""
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._reserved
                    or self._reports.finished_sending
                    or self._reports.finished_recving
                    or self._prefix_requests
                    or self._prefix_answers
                    or self._prompts_due
                ),
                timeout,
            )

    def take_reports(self) -> Reports:
        with self._lock:
            reports, self._reports = self._reports, Reports()
            for request_id in reports.finished_sending | reports.finished_recving:
                self._reached.pop(request_id, None)
            return reports

    def stats(
        self, peers: tuple[PeerInfo, ...], malformed: int, links_lost: int, links_restored: int
    ) -> AgentStats:
        with self._lock:
            return AgentStats(
                pages_pushed=self._pushed[0],
                bytes_pushed=self._pushed[1],
                layers_pushed=self._pushed[2],
                pages_before_prefill_end=self._before_end[0],
                bytes_before_prefill_end=self._before_end[1],
                layers_before_prefill_end=self._before_end[2],
                sent=dict(self._ended[Role.PREFILL]),
                received=dict(self._ended[Role.DECODE]),
                sent_seconds=self._seconds[Role.PREFILL],
                received_seconds=self._seconds[Role.DECODE],
                received_pages=self._received_pages,
                checks=CheckStats(*self._checks),
                malformed_messages=malformed,
                links_lost=links_lost,
                links_restored=links_restored,
                peers=peers,
                prefixes=PrefixStats(
                    borrow=dict(self._borrow),
                    lend=dict(self._lend),
                    tokens_borrowed=self._tokens_borrowed,
                    tokens_lent=self._tokens_lent,
                    answer_seconds=self._answer_seconds,
                    load_seconds=self._load_seconds,
                ),
            )
