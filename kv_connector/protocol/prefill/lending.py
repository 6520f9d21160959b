"""The lender's open questions for prefixes, sans-IO: from BORROW to the answer of its engine's scheduler.

All that follows a good answer is a transfer of the prefill machine. Its request is the lending itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_connector.protocol.actions import PeerId, PrefixDecided, PrefixRequested, Send
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.messages import Borrow, LendOutcome, Lent, clip

# Questions that a worker keeps. Each has a content key of up to 2 MiB until the scheduler takes it, and a
# question ends after a second.
MAX_QUESTIONS = 64


@dataclass(frozen=True)
class _Asked:
    peer: PeerId
    first_token: int


class Lendings:
    """The questions of borrowers that have no answer yet. Methods return the actions to execute, in order."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}  # by transfer id
        self._timers: Timers[str] = Timers()

    def __len__(self) -> int:
        return len(self._asked)

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return self._timers.next()

    def borrow(
        self, now: float, peer: PeerId, message: Borrow
    ) -> list[Send | PrefixRequested | PrefixDecided]:
        """Passes a question to the scheduler, unless there are too many."""
        if message.transfer_id in self._asked:
            return []
        if len(self._asked) >= MAX_QUESTIONS:
            text = f"{MAX_QUESTIONS} other prefixes are requested"
            return [*refusal(peer, message, LendOutcome.BUSY, text)]
        self._asked[message.transfer_id] = _Asked(peer, message.first_token)
        self._timers.set(message.transfer_id, now + message.deadline_ms / 1000)
        return [PrefixRequested(message.transfer_id, message.content, message.first_token, message.multiple)]

    def answer(
        self, transfer_id: str, tokens: int, outcome: LendOutcome, reason: str
    ) -> list[Send | PrefixDecided]:
        """Sends the scheduler's answer, if this worker has the question."""
        question = self._asked.get(transfer_id)
        self.drop(transfer_id)
        if question is None:
            return []
        return _answer(question.peer, transfer_id, tokens, outcome, reason, question.first_token)

    def drop(self, transfer_id: str) -> None:
        """Forgets a question. Its borrower expects no answer."""
        self._asked.pop(transfer_id, None)
        self._timers.clear(transfer_id)

    def peer_down(self, peer: PeerId) -> None:
        """Forgets the questions of this peer."""
        for transfer_id in [one for one, question in self._asked.items() if question.peer == peer]:
            self.drop(transfer_id)

    def tick(self, now: float) -> None:
        """Forgets the questions whose borrowers wait no longer."""
        while (transfer_id := self._timers.pop_due(now)) is not None:
            self._asked.pop(transfer_id, None)

    def refuse_all(self, outcome: LendOutcome, reason: str) -> list[Send | PrefixDecided]:
        """Refuses all questions. The scheduler's answers to them are ignored."""
        return [action for one in list(self._asked) for action in self.answer(one, 0, outcome, reason)]


def refusal(peer: PeerId, message: Borrow, outcome: LendOutcome, reason: str) -> list[Send | PrefixDecided]:
    """LENT for a question that the scheduler does not get."""
    return _answer(peer, message.transfer_id, 0, outcome, reason)


def _answer(
    peer: PeerId, transfer_id: str, tokens: int, outcome: LendOutcome, reason: str, first_token: int = 0
) -> list[Send | PrefixDecided]:
    lent = Send(peer, Lent(transfer_id, tokens, clip(reason), outcome))
    return [lent, PrefixDecided(outcome, max(tokens - first_token, 0))]
