"""How the shares of P's prompts end, and with the last share the prompt, sans-IO.

A share ends once: complete, without its pages, or before anything was known about it. If writes are in
flight, it drains first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    FinishedSending,
    Outcome,
    Reached,
    Send,
    Share,
    State,
)
from kv_connector.protocol.prefill.shares import (
    PrefillAction,
    PromptShares,
    SharePhase,
    ShareTransfer,
    verdict_on,
)
from kv_connector.protocol.prefill.tombstones import RecordedEnd, Tombstones
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.messages import CancelAck, Fail, FailCode, Role, clip

# Decode has received everything that it wanted of this worker, if anything.
_GOOD = (Outcome.COMPLETED, Outcome.RELEASED)


class ShareEnds:
    """Ends the shares of a prefill machine, and changes the machine's tables accordingly."""

    def __init__(
        self,
        prompts: dict[str, PromptShares],
        tombstones: Tombstones,
        timers: Timers[Share],
        timeouts: Timeouts,
    ) -> None:
        """``prompts``: by transfer id. The machine shares all of these objects."""
        self._prompts = prompts
        self._tombstones = tombstones
        self._timers = timers
        self._timeouts = timeouts

    def complete(self, now: float, transfer: ShareTransfer) -> list[PrefillAction]:
        """All pages that D wanted have arrived."""
        reservation = transfer.reservation
        assert reservation is not None
        text = "the transfer is complete"
        transfer.verdict = RecordedEnd(Outcome.COMPLETED, FailCode.DUPLICATE, text, (reservation.key,))
        return self._finish_reservation(now, transfer, ())

    def end(self, now: float, transfer: ShareTransfer, code: FailCode, text: str) -> list[PrefillAction]:
        """Ends the share without its pages, unless it has ended or is ending."""
        outcome = outcome_of(code)
        if transfer.phase is SharePhase.WAITING:
            return self.close(now, transfer, RecordedEnd(outcome, code, text, ()))
        if transfer.phase is SharePhase.ACTIVE:
            reservation = transfer.reservation
            assert reservation is not None
            return self.drain(now, transfer, RecordedEnd(outcome, code, text, (reservation.key,)))
        return []

    def end_all(self, now: float, prompt: PromptShares, code: FailCode, text: str) -> list[PrefillAction]:
        """Ends each share of the prompt as end() does."""
        return [action for transfer in prompt.shares for action in self.end(now, transfer, code, text)]

    def drain(self, now: float, transfer: ShareTransfer, verdict: RecordedEnd) -> list[PrefillAction]:
        """Stops the transfer's writes. Its end follows once nothing is in flight."""
        reservation = transfer.reservation
        assert reservation is not None
        transfer.verdict = verdict
        if not reservation.writing:
            return self.drained(now, transfer, quiesced=True)
        transfer.phase = SharePhase.DRAINING
        if reservation.peer_lost:  # the peer's fence ends the writes, and limits the wait
            return []
        self._timers.set(transfer.share, now + self._timeouts.drain)
        return [CancelWrites(transfer.share)]

    def drained(self, now: float, transfer: ShareTransfer, quiesced: bool) -> list[PrefillAction]:
        """Nothing of a stopped transfer is in flight any more. Reports that to D, unless the peer is gone."""
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = RecordedEnd(verdict.outcome, verdict.code, verdict.text, verdict.served, quiesced)
        if reservation.peer_lost:
            return self._finish_reservation(now, transfer, ())
        message = reservation.message
        if reservation.cancelled:
            answer: CancelAck | Fail = CancelAck(message.transfer_id, message.attempt, drained=quiesced)
        else:
            answer = Fail(message.transfer_id, message.attempt, verdict.code, clip(verdict.text), quiesced)
        return self._finish_reservation(now, transfer, (Send(reservation.peer, answer),))

    def close(self, now: float, transfer: ShareTransfer, verdict: RecordedEnd) -> list[PrefillAction]:
        """Ends a transfer without a reservation."""
        if transfer.prompt.mismatch and verdict.code is FailCode.PREFILL_ABORTED:
            # D computes the prompt itself, so its other workers must not take this for an abort.
            verdict = replace(verdict, code=FailCode.PROMPT_MISMATCH, text=transfer.prompt.mismatch)
        transfer.verdict = verdict
        transfer_id, number = transfer.share
        request_id = _request_id(transfer.prompt)
        ended = Ended(
            Role.PREFILL,
            transfer_id,
            None,
            verdict.outcome,
            verdict.text,
            share=number,
            request_id=request_id,
        )
        return [ended, *self._settle(now, transfer)]

    def conclude(self, now: float, prompt: PromptShares) -> list[PrefillAction]:
        """All shares are over. Reports the request if P's engine has finished it, or else when it does."""
        if prompt.request is not None and not prompt.finished:
            return []
        del self._prompts[prompt.transfer_id]
        verdict = verdict_on(prompt)
        self._tombstones.bury(now, prompt.transfer_id, verdict)
        if prompt.request is None:
            return []
        done = _report_status(prompt, State.DONE) if verdict.outcome in _GOOD else []
        return [*done, FinishedSending(prompt.request.request_id)]

    def forbid(self, now: float, transfer_id: str, verdict: RecordedEnd) -> list[PrefillAction]:
        """Ends a transfer before it begins, when nothing is known about it yet."""
        if self._tombstones.get(transfer_id) is not None:
            return []
        self._tombstones.bury(now, transfer_id, verdict)
        return [Ended(Role.PREFILL, transfer_id, None, verdict.outcome, verdict.text)]

    def _finish_reservation(
        self, now: float, transfer: ShareTransfer, messages: Sequence[Send]
    ) -> list[PrefillAction]:
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        seconds = now - reservation.since
        transfer_id, number = transfer.share
        ended = Ended(
            Role.PREFILL,
            transfer_id,
            reservation.peer,
            verdict.outcome,
            verdict.text,
            seconds,
            number,
            _request_id(transfer.prompt),
        )
        return [*messages, ended, *self._settle(now, transfer)]

    def _settle(self, now: float, transfer: ShareTransfer) -> list[PrefillAction]:
        """Nothing of this share moves any more."""
        transfer.phase, transfer.reservation = SharePhase.CLOSED, None
        self._timers.clear(transfer.share)
        transfer.forget_pages()
        prompt = transfer.prompt
        if not prompt.over:
            return []
        return [*report_end(prompt), *self.conclude(now, prompt)]


def report_moving(prompt: PromptShares, first_token: int = 0) -> list[PrefillAction]:
    """Reports with the first share that pages flow."""
    actions = [] if prompt.moving else _report_status(prompt, State.MOVING, first_token)
    prompt.moving = prompt.request is not None
    return actions


def report_end(prompt: PromptShares) -> list[PrefillAction]:
    """Reports a failure when nothing will move any more, unless decode has received everything that it
    wanted. Decode may want nothing, which can be known before the prompt is computed."""
    if verdict_on(prompt).outcome not in _GOOD:
        return _report_status(prompt, State.FAILED)
    return [] if prompt.finished else report_moving(prompt)


def _request_id(prompt: PromptShares) -> str:
    return "" if prompt.request is None else prompt.request.request_id


def _report_status(prompt: PromptShares, state: State, first_token: int = 0) -> list[PrefillAction]:
    """The report for the request, if there is one."""
    request = prompt.request
    if request is None:
        return []
    reason = verdict_on(prompt).text if state is State.FAILED else ""
    return [Reached(Role.PREFILL, prompt.transfer_id, request.request_id, state, reason, first_token)]


def outcome_of(code: FailCode) -> Outcome:
    """The outcome of a transfer that P ends with this code."""
    match code:
        case FailCode.STALE:
            return Outcome.STALE
        case FailCode.PREFILL_ABORTED:
            return Outcome.CANCELLED
    return Outcome.FAILED
