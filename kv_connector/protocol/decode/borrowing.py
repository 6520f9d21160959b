"""The borrower's questions for prefixes, sans-IO: whether another engine has the leading tokens of a prompt.

A question goes through these phases:

    phase    waits for                                            next
    LOOKING  the lender's directory, or a session with a worker   ASKED, over
    ASKED    LENT                                                 over

A lender that leaves a question without an answer is not asked again for some time, unless its process is
replaced. Neither is an engine that cannot lend to this one. A question ends in one PrefixAnswered, unless it
is withdrawn. A lender may hold pages for a question that ends without its answer. Such a question ends in a
RELEASE, unless the session is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kv_connector.protocol.actions import Address, Dial, Log, PeerId, PrefixAnswered, Send
from kv_connector.protocol.decode.legs import DecodeAction
from kv_connector.protocol.plans.sources import Draw
from kv_connector.protocol.requests import PrefixRequest
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.content_key import content_key_problem
from kv_connector.protocol.wire.messages import Borrow, LendOutcome, Lent, Release, id_problem


class LocatedEngine(Protocol):
    """An engine that is known, or is being located."""

    @property
    def workers(self) -> Mapping[Address, Draw] | None: ...


# Lenders that are located at once. A wrong address costs a control connection for ``connect`` seconds, 5 by
# default. A fleet of more engines gets the others' answers a moment later.
MAX_LOCATED = 16

# Lenders that left a question without an answer, or cannot lend. Their addresses come from outside, so their
# number is limited.
_REMEMBERED = 1024


@dataclass(frozen=True)
class _Silence:
    """A lender left a question without an answer, or cannot lend to this engine."""

    until: float
    incarnation: str  # of the process that got the question; empty: no process was reached


@dataclass
class _Question:
    request: PrefixRequest
    asked_at: float
    deadline: float
    worker: Address | None = None
    """The lender's worker that gets BORROW. None: the lender is not located yet."""
    peer: PeerId | None = None
    """The session over which BORROW was sent. None: LOOKING."""


class Borrowing:
    """All questions of one worker. Every method returns the actions to execute, in order."""

    def __init__(
        self,
        timeouts: Timeouts,
        engines: Mapping[Address, LocatedEngine],
        sessions: Mapping[Address, PeerId],
        find: Callable[[Address], list[DecodeAction]],
    ) -> None:
        """``engines``, ``sessions``: the decode machine's tables. ``find``: begins to locate an engine."""
        self._timeouts = timeouts
        self._engines = engines
        self._sessions = sessions
        self._find = find
        self._questions: dict[str, _Question] = {}  # by transfer id
        self._silences: dict[Address, _Silence] = {}  # by lender
        self._incarnations: dict[PeerId, str] = {}  # of lenders' processes, by session
        self._timers: Timers[str] = Timers()
        self.weights = ""
        """The version of the weights that this engine serves."""

    def __len__(self) -> int:
        """Number of questions without an answer."""
        return len(self._questions)

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return self._timers.next()

    # --- The engine

    def ask(self, now: float, request: PrefixRequest) -> list[DecodeAction]:
        """Requests a prefix."""
        transfer_id = request.transfer_id
        if transfer_id in self._questions:
            return [Log(logging.ERROR, f"prefix {transfer_id} is already being requested")]
        problem = id_problem(transfer_id) or content_key_problem(request.content)
        if problem is not None:
            text = f"prefix {transfer_id} is not requested: {problem}"
            return [Log(logging.WARNING, text), PrefixAnswered(transfer_id, 0, LendOutcome.FAILED, 0.0)]
        engine = self._engines.get(request.lender)
        silence = self._silences.get(request.lender)
        silent = silence is not None and now < silence.until
        if silent or (engine is None and self._locating() >= MAX_LOCATED):
            return [PrefixAnswered(transfer_id, 0, LendOutcome.SKIPPED, 0.0)]
        question = _Question(request, now, now + self._timeouts.ask)
        self._questions[transfer_id] = question
        self._timers.set(transfer_id, question.deadline)
        if engine is None:
            return self._find(request.lender)
        return [] if engine.workers is None else self._send(now, question, engine.workers)

    def withdraw(self, now: float, transfer_id: str) -> list[DecodeAction]:
        """The engine needs the answer no more. There will be none."""
        question = self._questions.get(transfer_id)
        return [] if question is None else self._end(question)

    def close(self, now: float) -> list[DecodeAction]:
        """Shuts down: nothing is lent to this engine any more."""
        return self._give_up(now, list(self._questions.values()), LendOutcome.CLOSING)

    # --- The lender

    def engine_found(
        self, now: float, lender: Address, workers: Mapping[Address, Draw]
    ) -> list[DecodeAction]:
        """The lender at this address has these workers."""
        actions: list[DecodeAction] = []
        for question in self._looking():
            if question.request.lender == lender and question.worker is None:
                actions += self._send(now, question, workers)
        return actions

    def engine_not_found(self, now: float, lender: Address) -> list[DecodeAction]:
        """No engine answered at this address, it lends nothing, or its layout does not fit."""
        lost = [q for q in self._looking() if q.request.lender == lender and q.worker is None]
        for question in lost[:1]:
            self._remember(now, question)
        return self._give_up(now, lost, LendOutcome.UNREACHABLE)

    def peer_up(self, now: float, worker: Address, peer: PeerId, incarnation: str) -> list[DecodeAction]:
        """A session with this worker is up."""
        lender = replace(worker, prefixes=True)
        silence = self._silences.get(lender)
        if silence is not None and silence.incarnation != incarnation:
            del self._silences[lender]
        if worker.prefixes:
            self._incarnations[peer] = incarnation
        waiting = [question for question in self._looking() if question.worker == worker]
        return [self._borrow(now, question, peer) for question in waiting]

    def dial_failed(self, now: float, worker: Address) -> list[DecodeAction]:
        """No session with this worker will be made."""
        lost = [question for question in self._looking() if question.worker == worker]
        return self._give_up(now, lost, LendOutcome.UNREACHABLE)

    def peer_down(self, now: float, peer: PeerId) -> list[DecodeAction]:
        """The session is over. The lender frees what it holds for these questions by itself."""
        lost = [question for question in self._questions.values() if question.peer == peer]
        self._incarnations.pop(peer, None)
        return [self._answer(now, question, LendOutcome.UNREACHABLE) for question in lost]

    def lent(self, now: float, peer: PeerId, message: Lent) -> list[DecodeAction]:
        """Handles LENT."""
        question = self._questions.get(message.transfer_id)
        if question is None or question.peer != peer:
            return []  # a question that has ended has sent RELEASE
        request, tokens = question.request, message.tokens
        self._silences.pop(request.lender, None)
        if tokens == 0:
            if message.outcome is LendOutcome.UNLIKE:
                self._remember(now, question)
            text = f"prefix {request.transfer_id} is not lent by {request.lender}: {message.reason}"
            outcome = LendOutcome.FAILED if message.outcome is LendOutcome.LENT else message.outcome
            return [Log(logging.DEBUG, text), self._answer(now, question, outcome)]
        content = request.content
        fits = tokens % content.tokens == 0 == tokens % request.multiple
        if not (request.first_token < tokens <= content.covered and fits):
            text = f"prefix {request.transfer_id}: {request.lender} lends {tokens} tokens, which do not fit"
            return [Log(logging.WARNING, text), *self._give_up(now, [question], LendOutcome.FAILED)]
        return [self._answer(now, question, LendOutcome.LENT, tokens)]

    # --- Time

    def tick(self, now: float) -> list[DecodeAction]:
        """Acts on every deadline that has passed."""
        actions: list[DecodeAction] = []
        while (transfer_id := self._timers.pop_due(now)) is not None:
            question = self._questions[transfer_id]
            self._remember(now, question)
            actions += self._give_up(now, [question], LendOutcome.SILENT)
        return actions

    # --- Steps

    def _looking(self) -> list[_Question]:
        return [question for question in self._questions.values() if question.peer is None]

    def _send(self, now: float, question: _Question, workers: Mapping[Address, Draw]) -> list[DecodeAction]:
        """Sends BORROW to one of the workers from which this one draws, now or once there is a session."""
        worker = next((address for address, draw in workers.items() if draw.plan is not None), None)
        if worker is None:
            return self._give_up(now, [question], LendOutcome.UNREACHABLE)
        question.worker = worker
        peer = self._sessions.get(worker)
        if peer is not None:
            return [self._borrow(now, question, peer)]
        draw = workers[worker]
        return [Dial(question.request.lender, worker, draw.wants, draw.layout)]

    def _borrow(self, now: float, question: _Question, peer: PeerId) -> Send:
        question.peer = peer
        request = question.request
        left = max(0, round((question.deadline - now) * 1000))
        return Send(
            peer,
            Borrow(
                request.transfer_id,
                request.content,
                request.first_token,
                request.multiple,
                left,
                self.weights,
            ),
        )

    def _locating(self) -> int:
        """Number of lenders that are being located."""
        return sum(engine.workers is None and one.prefixes for one, engine in self._engines.items())

    def _remember(self, now: float, question: _Question) -> None:
        """Remembers that a lender does not answer, or cannot lend. The next prompt must not wait for it."""
        lender, incarnation = question.request.lender, ""
        if question.peer is not None:
            incarnation = self._incarnations.get(question.peer, "")
        self._silences.pop(lender, None)
        if len(self._silences) >= _REMEMBERED:
            del self._silences[next(iter(self._silences))]
        self._silences[lender] = _Silence(now + self._timeouts.remember, incarnation)

    def _give_up(
        self, now: float, questions: Iterable[_Question], outcome: LendOutcome
    ) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        for question in questions:
            actions += [*self._end(question), self._answered(now, question, outcome)]
        return actions

    def _answer(
        self, now: float, question: _Question, outcome: LendOutcome, tokens: int = 0
    ) -> PrefixAnswered:
        """Ends a question with its answer, or without a session."""
        self._forget(question)
        return self._answered(now, question, outcome, tokens)

    def _answered(
        self, now: float, question: _Question, outcome: LendOutcome, tokens: int = 0
    ) -> PrefixAnswered:
        return PrefixAnswered(question.request.transfer_id, tokens, outcome, now - question.asked_at)

    def _end(self, question: _Question) -> list[DecodeAction]:
        """Ends a question without its answer."""
        self._forget(question)
        if question.peer is None:
            return []
        return [Send(question.peer, Release(question.request.transfer_id))]

    def _forget(self, question: _Question) -> None:
        transfer_id = question.request.transfer_id
        del self._questions[transfer_id]
        self._timers.clear(transfer_id)
