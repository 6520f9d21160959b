"""P's side of every transfer, sans-IO: which pages to push when, and how each transfer ends.

A transfer has two halves that arrive in any order: the request in P's engine (``expect`` ...
``request_finished``) and D's RESERVE. Pages flow while both are present. A granule is the tokens that lie in
one block on either side, in all layers of the group. If the blocks have the same size, it is a logical
block. Each granule is pushed exactly once, however the prompt was chunked, cached or preempted. The ledger
records the granules that are still to be pushed.

    request   RESERVE   phase
    -         yes       ACTIVE    an orphan: waits for the request (orphan timeout)
    yes       -         WAITING   pages are remembered; once finished, the hold timeout runs
    yes       yes       ACTIVE    pages are pushed as they are computed; finished and all pushed: sealed
                                  (if D wants their sums: sealed once all are pushed)
                        DRAINING  stopped early: waits for the report that nothing is in flight
                        CLOSED    nothing will move any more; P's engine still works on the request

If D has more workers than P, several of them send RESERVE to this worker for the transfer. Each has a share,
with its own RESERVE, ledger and end. RESERVE contains the number of shares. Until the first RESERVE arrives,
one share stands for all.

A request is reported as sent exactly once, after it finished and nothing reads its blocks. A transfer id is
used once: later messages about it are answered from its tombstone.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_connector.protocol.actions import (
    Fence,
    Log,
    Outcome,
    PeerId,
    Push,
    PushedGroup,
    Seal,
    Send,
    Share,
    SumPages,
    UnderWay,
)
from kv_connector.protocol.page_sums import source_pages, sums_messages
from kv_connector.protocol.pages.layout import KvLayout, layout_problem
from kv_connector.protocol.plans.plan import Groups, Plan, targets_problem, used_blocks, wants_problem
from kv_connector.protocol.plans.runs import Misfit, Places
from kv_connector.protocol.prefill.due_notices import DueNotices
from kv_connector.protocol.prefill.lending import Lendings, refusal
from kv_connector.protocol.prefill.share_ends import ShareEnds, outcome_of, report_end, report_moving
from kv_connector.protocol.prefill.shares import (
    PrefillAction,
    PromptShares,
    Reservation,
    SharePhase,
    ShareTransfer,
    prompt_problem,
    share_problem,
    under_way,
)
from kv_connector.protocol.prefill.tombstones import RecordedEnd, Tombstones
from kv_connector.protocol.requests import ComputedPages, PrefillRequest
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers, earliest
from kv_connector.protocol.wire.content_key import content_key_problem
from kv_connector.protocol.wire.messages import (
    Borrow,
    Cancel,
    CancelAck,
    Defer,
    Fail,
    FailCode,
    LendOutcome,
    Release,
    Reserve,
    Sampled,
    Wants,
    clip,
)
from kv_connector.protocol.wire.weight_version import shown, shown_apart

_CLOSING = "this engine is shutting down"


class WritesEnd(enum.Enum):
    """The final state of a share's writes, as the transfer engine reports it."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class _Decode:
    """A decode worker with a session."""

    layout: KvLayout
    plan: Plan
    prefixes: bool  # whether the session is one for prefixes


class PrefillMachine:
    """All transfers of one prefill worker. Every method returns the actions to execute, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._peers: dict[PeerId, _Decode] = {}
        self._prompts: dict[str, PromptShares] = {}  # by transfer id
        self._tombstones = Tombstones(2 * timeouts.longest())
        self._timers: Timers[Share] = Timers()
        self._ends = ShareEnds(self._prompts, self._tombstones, self._timers, timeouts)
        self._lendings = Lendings()
        self._lends_not = ""  # why borrowers are refused; empty: they are not
        self._due_notices = DueNotices(timeouts)
        self._closing = False
        self._weights = ""

    def __len__(self) -> int:
        """Number of transfers that are not over."""
        return len(self._prompts)

    @property
    def remembered(self) -> int:
        """Number of transfers that are over, whose end is remembered for late messages."""
        return len(self._tombstones)

    def writing(self, share: Share) -> bool:
        """Whether the share may have an open native transfer."""
        transfer = self._transfer(share)
        return transfer is not None and transfer.reservation is not None and transfer.reservation.writing

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return earliest(
            (self._timers.next(), self._lendings.next_deadline(), self._due_notices.next_deadline())
        )

    def under_way(self) -> list[UnderWay]:
        """The shares that are not over, and prompts that P's engine still works on. Any thread may call
        it."""
        return under_way(list(self._prompts.values()))  # copied in one step, because other threads change it

    # --- P's engine

    def expect(self, now: float, request: PrefillRequest) -> list[PrefillAction]:
        """The request has reached P's scheduler."""
        prompt = self._prompts.get(request.transfer_id)
        if prompt is None:
            prompt = self._new_prompt(request.transfer_id)
            tombstone = self._tombstones.get(request.transfer_id)
            if tombstone is not None:  # released, cancelled or expired before the request arrived
                if tombstone.outcome is Outcome.COMPLETED:  # the transfer id served another request
                    tombstone = replace(tombstone, outcome=Outcome.FAILED)
                prompt.shares[0].phase, prompt.shares[0].verdict = SharePhase.CLOSED, tombstone
        elif prompt.request is not None:
            if prompt.request.request_id == request.request_id:
                return []
            text = (
                f"request {request.request_id} is ignored: transfer {request.transfer_id} "
                f"belongs to request {prompt.request.request_id}"
            )
            return [Log(logging.ERROR, text)]
        prompt.request = request
        if prompt.over:
            return [*self._due_notices.announce(request.transfer_id), *report_end(prompt)]
        self._due_notices.arrived(request.transfer_id)
        actions: list[PrefillAction] = []
        for transfer in prompt.shares:
            reservation = transfer.reservation
            if reservation is None or transfer.phase is not SharePhase.ACTIVE:
                self._timers.clear(transfer.share)  # the orphan timeout ends
                continue
            problem = prompt_problem(request, reservation.message)
            if problem is None:
                self._timers.set(transfer.share, reservation.deadline)
                actions += report_moving(prompt, reservation.message.first_token)
                continue
            # The right RESERVE may still arrive.
            transfer.phase, transfer.reservation = SharePhase.WAITING, None
            self._timers.clear(transfer.share)
            code = FailCode.PROMPT_MISMATCH
            actions.append(self._refuse(reservation.peer, reservation.message, code, problem))
        return actions

    def due(self, now: float, transfer_id: str) -> list[PrefillAction]:
        """The engine is about to compute this prompt. The first pages_computed() reports it, too."""
        prompt = self._prompts.get(transfer_id)
        if prompt is None or prompt.request is None:
            return []
        prompt.due = True
        return [*self._due_notices.announce(transfer_id)]

    def pages_computed(self, now: float, pages: ComputedPages) -> list[PrefillAction]:
        """These pages become valid in this step. The pages that D wants and lacks are pushed."""
        prompt = self._prompts.get(pages.transfer_id)
        if prompt is None or prompt.request is None:
            text = f"pages of transfer {pages.transfer_id} are ignored: no such request is expected"
            return [Log(logging.WARNING, text)]
        if len(pages.groups) != len(self._layout.groups):
            text = f"{len(pages.groups)} KV groups were computed, the layout has {len(self._layout.groups)}"
            return self._ends.end_all(now, prompt, FailCode.WRITE_ERROR, text)
        used = [
            used_blocks(group, named.first, named.blocks)
            for group, named in zip(self._layout.groups, pages.groups, strict=True)
        ]
        actions = self.due(now, pages.transfer_id)
        for transfer in prompt.shares:
            if transfer.phase not in (SharePhase.WAITING, SharePhase.ACTIVE):
                continue
            for known, blocks in zip(transfer.pages, used, strict=True):
                for logical, block in blocks.items():
                    earlier = known.get(logical)
                    # The same block again is valid since the earlier step. Another block replaces it.
                    if earlier is None or earlier[0] != block:
                        known[logical] = (block, pages.signal_base)
            actions += self._push(transfer)
        return actions

    def preempt(self, transfer_ids: Sequence[str]) -> tuple[Share, ...]:
        """The requests lose their blocks: pages not yet pushed are forgotten until they are computed again.

        Returns the shares whose writes still read those blocks. These writes must be quiesced before the
        blocks are written again. If that fails, call ``quiesce_failed``.
        """
        prompts = [self._prompts[transfer_id] for transfer_id in transfer_ids if transfer_id in self._prompts]
        transfers = [transfer for prompt in prompts for transfer in prompt.shares]
        for transfer in transfers:
            transfer.forget_pages()
            if transfer.reservation is not None and transfer.reservation.pushed:
                transfer.reservation.unsummed = "its prompt was preempted at the prefill engine"
        return tuple(transfer.share for transfer in transfers if self.writing(transfer.share))

    def forget_pages(self, now: float) -> list[PrefillAction]:
        """The memory loses its contents, and all sessions are over. Pages must be computed again, and a
        finished prompt has nothing left to send."""
        self.preempt(tuple(self._prompts))
        actions: list[PrefillAction] = []
        for transfer in self._all():
            if transfer.prompt.finished and transfer.phase is SharePhase.WAITING:
                actions += self._ends.end(now, transfer, FailCode.EXPIRED, "the prefill engine was asleep")
        return actions

    def quiesce_failed(self, now: float, share: Share) -> list[PrefillAction]:
        """A preempted share did not drain in time. Only a fence stops its reads."""
        transfer = self._transfer(share)
        if transfer is None or transfer.reservation is None or transfer.reservation.peer_lost:
            return []
        return [Fence(transfer.reservation.peer, f"writes of preempted transfer {share} did not drain")]

    def cache_cleared(self, now: float) -> list[PrefillAction]:
        """All prompts are recomputed with a different result, so the pages that D has of a prompt would not
        fit the rest."""
        actions: list[PrefillAction] = []
        for transfer in self._all():
            reservation = transfer.reservation
            if reservation is not None and reservation.left > 0 and reservation.writing:
                text = "the prefill engine cleared its KV cache after a part of the prompt was sent"
                actions += self._go_stale(now, transfer, text)
        return actions

    def set_weights(self, now: float, version: str) -> list[PrefillAction]:
        """P computes with this version from now on, and unfinished prompts from their beginning. Their pages
        are stale for a D that has reserved them with another version."""
        self._weights = version
        actions: list[PrefillAction] = []
        for prompt in list(self._prompts.values()):
            if prompt.finished:
                continue
            prompt.weights = version
            for transfer in prompt.shares:
                transfer.forget_pages(f"weights: prefill engine got {_named(shown(version))} meanwhile")
                reservation = transfer.reservation
                if reservation is None:
                    continue
                if reservation.message.weights != version:
                    text = _other_weights(version, reservation.message)
                    actions += self._go_stale(now, transfer, text)
                elif not reservation.writing:  # D had this version first
                    reservation.stale = ""
        return actions

    def request_finished(
        self,
        now: float,
        transfer_id: str,
        ok: bool,
        reason: str,
        sampled: int | None = None,
        aborted: bool = False,
    ) -> list[PrefillAction]:
        """The request left P's scheduler, with its prompt computed (``ok``) or not. A computed request may be
        given up later by a second call (not ``ok``).

        ``sampled``: the token behind the prompt. ``aborted``: the request is not ``ok`` because its client
        left, so the transfer has not failed.
        """
        due: list[PrefillAction] = [*self._due_notices.announce(transfer_id)]
        return due + self._finish(now, transfer_id, ok, reason, sampled, aborted)

    def _finish(
        self, now: float, transfer_id: str, ok: bool, reason: str, sampled: int | None, aborted: bool
    ) -> list[PrefillAction]:
        code = FailCode.PREFILL_ABORTED if aborted else FailCode.WRITE_ERROR
        prompt = self._prompts.get(transfer_id)
        if prompt is None:
            # The request ended before it was ever scheduled, and D's RESERVE is still to arrive.
            return (
                []
                if ok
                else self._ends.forbid(now, transfer_id, RecordedEnd(outcome_of(code), code, reason, ()))
            )
        if prompt.finished and ok:
            return []
        prompt.finished, prompt.sampled = True, sampled
        if prompt.over:
            return self._ends.conclude(now, prompt)
        if not ok:
            return self._ends.end_all(now, prompt, code, reason)
        actions: list[PrefillAction] = []
        for transfer in prompt.shares:
            if transfer.phase is SharePhase.WAITING:
                self._hold(now, transfer)
            elif transfer.phase is SharePhase.ACTIVE:
                reservation = transfer.reservation
                assert reservation is not None
                actions += _say_sampled(reservation.peer, reservation.message, prompt)
                actions += self._seal(now, transfer)
        return actions

    def lend(
        self,
        now: float,
        transfer_id: str,
        tokens: int,
        outcome: LendOutcome = LendOutcome.LENT,
        reason: str = "",
    ) -> list[PrefillAction]:
        """Answers a borrower: the engine holds the pages of the first ``tokens`` tokens, or 0.

        Before it, a good answer needs the lending itself: expect() with a request that is ``lent``,
        pages_computed() and request_finished(). The engine's other workers ignore the answer.
        """
        prompt = self._prompts.get(transfer_id)
        if tokens and (prompt is None or prompt.over):  # end_lendings() came in between
            tokens, outcome, reason = 0, LendOutcome.NOT_CACHED, "the prefix is no longer lent"
        return [*self._lendings.answer(transfer_id, tokens, outcome, reason)]

    def refuse_lending(self, now: float, reason: str) -> list[PrefillAction]:
        """Refuses all borrowers from now on, for this reason, without a step of the engine. "": lends
        again."""
        self._lends_not = reason
        return [*self._lendings.refuse_all(LendOutcome.PAUSED, reason)] if reason else []

    def end_lendings(self, now: float, reason: str) -> list[PrefillAction]:
        """Ends each lent prefix, and lets its borrower compute it.

        Writes in flight are drained first, so that none of them reads a block that has been given back.
        """
        lent = [prompt for prompt in self._prompts.values() if prompt.lent]
        actions: list[PrefillAction] = []
        for prompt in lent:
            actions += self._ends.end_all(now, prompt, FailCode.STALE, reason)
        return actions

    # --- D, through messages

    def admit(
        self, peer: PeerId, layout: KvLayout, wants: Wants, regions: int, *, prefixes: bool = False
    ) -> Plan | str:
        """A decode peer introduced itself. Returns the plan for writing to it, or the reason why its pages do
        not fit. ``prefixes``: it borrows prefixes over this session."""
        problem = layout_problem(layout, regions) or wants_problem(self._layout, layout, wants)
        if problem is not None:
            return problem
        try:
            plan = Plan(self._layout, layout, wants)
        except Misfit as misfit:
            return str(misfit)
        self._peers[peer] = _Decode(layout, plan, prefixes)
        return plan

    def borrow(self, now: float, peer: PeerId, message: Borrow) -> list[PrefillAction]:
        """Handles BORROW: the scheduler looks the prefix up, and lend() answers."""
        decode, transfer_id = self._peers.get(peer), message.transfer_id
        if decode is None or not decode.prefixes:
            return []
        if transfer_id in self._prompts or self._tombstones.get(transfer_id) is not None:
            return []  # it is a repetition, or RELEASE has overtaken it
        outcome, problem = self._lending_problem(message)
        if problem:
            return [*refusal(peer, message, outcome, problem)]
        return [*self._lendings.borrow(now, peer, message)]

    def _lending_problem(self, message: Borrow) -> tuple[LendOutcome, str]:
        """The reason why the scheduler is not asked, or ""."""
        if self._closing:
            return LendOutcome.CLOSING, _CLOSING
        if self._lends_not:
            return LendOutcome.PAUSED, self._lends_not
        if message.weights != self._weights:
            names = shown_apart(self._weights, message.weights)
            text = f"weights: lending engine has {names[0]}, borrowing engine has {names[1]}"
            return LendOutcome.WEIGHTS, text
        return LendOutcome.FAILED, content_key_problem(message.content) or ""

    def reserve(self, now: float, peer: PeerId, message: Reserve) -> list[PrefillAction]:
        """Handles RESERVE: D wants the prompt's pages."""
        self._due_notices.drop(message.transfer_id)
        decode = self._peers.get(peer)
        if decode is None:
            return []
        prompt = self._prompts.get(message.transfer_id)
        problem = targets_problem(decode.layout, message.groups, message.prompt_tokens) or share_problem(
            prompt, message
        )
        if problem is not None:
            return [self._refuse(peer, message, FailCode.INCOMPATIBLE, problem)]
        known = None if prompt is None else self._share_of(prompt, message.share)
        verdict = self._tombstones.get(message.transfer_id) if known is None else known.verdict
        if verdict is not None:
            if (peer, message.attempt) in verdict.served:
                return []
            return [self._refuse(peer, message, verdict.code, verdict.text)]
        if self._closing:  # after the verdicts: writes for a repeated RESERVE may still be in flight
            return [self._refuse(peer, message, FailCode.DRAINING, "the prefill engine is shutting down")]
        if known is not None and known.reservation is not None:
            if known.reservation.key == (peer, message.attempt):
                return []
            text = "the transfer already serves another decode request"
            return [self._refuse(peer, message, FailCode.DUPLICATE, text)]
        ours = self._weights if prompt is None else prompt.weights
        stale = "" if ours == message.weights else _other_weights(ours, message)
        if stale and not (message.wants_sampled and (prompt is None or not prompt.finished)):
            return self._refuse_stale(now, peer, message, stale)
        request = None if prompt is None else prompt.request
        if prompt is not None and request is not None:
            problem = prompt_problem(request, message)
            if problem is not None:
                prompt.mismatch = problem
                return [self._refuse(peer, message, FailCode.PROMPT_MISMATCH, problem)]
        prompt = prompt or self._new_prompt(message.transfer_id)
        if not prompt.shares_known:
            self._split(prompt, message.shares)
        transfer = prompt.shares[message.share]
        wanted = decode.plan.wanted(message.groups, message.prompt_tokens)
        deadline = now + message.deadline_ms / 1000
        transfer.reservation = Reservation(
            peer=peer,
            message=message,
            since=now,
            deadline=deadline,
            wanted=wanted,
            left=sum(map(len, wanted.values())),
            stale=stale,
        )
        transfer.phase = SharePhase.ACTIVE
        if request is None:
            # A lender expects a lending before it answers, at most a step later in its other workers. If it
            # does not, its process has been replaced.
            limit = self._timeouts.lend if decode.prefixes else self._timeouts.orphan
            until = min(deadline, now + limit)
            self._timers.set(transfer.share, until)
            for other in prompt.shares:  # shares without a RESERVE wait as long
                if other.phase is SharePhase.WAITING and self._timers.deadline(other.share) is None:
                    self._timers.set(other.share, until)
            return []
        self._timers.set(transfer.share, deadline)
        actions = [*report_moving(prompt, message.first_token), *self._push(transfer)]
        if prompt.finished:
            actions += [*_say_sampled(peer, message, prompt), *self._seal(now, transfer)]
        return actions

    def cancel(self, now: float, peer: PeerId, message: Cancel) -> list[PrefillAction]:
        """Handles CANCEL: D no longer wants the share. It always ends in a CANCEL_ACK or a FAIL for that
        attempt."""
        key = (peer, message.attempt)
        prompt = self._prompts.get(message.transfer_id)
        acknowledged = Send(peer, CancelAck(message.transfer_id, message.attempt, drained=True))
        text = "the decode engine cancelled the transfer"
        cancelled = RecordedEnd(Outcome.CANCELLED, FailCode.PREFILL_ABORTED, text, (key,))
        if prompt is None:
            tombstone = self._tombstones.get(message.transfer_id)
            if tombstone is None:  # CANCEL overtook its RESERVE, which must not start the transfer
                return [acknowledged, *self._ends.forbid(now, message.transfer_id, cancelled)]
            return [_acknowledge(peer, message, tombstone)]
        transfer = self._share_of(prompt, message.share)
        if transfer is None:
            return [acknowledged]
        if transfer.reservation is not None:
            if transfer.reservation.key != key:
                return [acknowledged]
            if transfer.phase is SharePhase.DRAINING:
                return []  # the answer follows once it has drained
            transfer.reservation.cancelled = True
            return self._ends.drain(now, transfer, cancelled)
        if transfer.verdict is not None:
            return [_acknowledge(peer, message, transfer.verdict)]
        return [acknowledged, *self._ends.close(now, transfer, cancelled)]

    def release(self, now: float, peer: PeerId, message: Release) -> list[PrefillAction]:
        """Handles RELEASE: D needs no pages of this transfer. A RESERVE outranks it."""
        prompt = self._prompts.get(message.transfer_id)
        # A later RESERVE belongs to a request whose client has left, because a router has disowned the
        # transfer.
        text = "a decode engine released the transfer"
        released = RecordedEnd(Outcome.RELEASED, FailCode.PREFILL_ABORTED, text, ())
        self._lendings.drop(message.transfer_id)
        if prompt is None:
            return self._ends.forbid(now, message.transfer_id, released)
        transfer = self._share_of(prompt, message.share)
        if transfer is None or transfer.phase is not SharePhase.WAITING:
            return []
        return self._ends.close(now, transfer, released)

    def defer(self, now: float, peer: PeerId, message: Defer) -> list[PrefillAction]:
        """Handles DEFER: D takes blocks for this transfer once the prompt is about to be computed."""
        transfer_id = message.transfer_id
        prompt = self._prompts.get(transfer_id)
        request = None if prompt is None else prompt.request
        known = prompt is not None and (prompt.due or prompt.finished or prompt.over)
        over = prompt is None and self._tombstones.get(transfer_id) is not None
        self._due_notices.defer(now, peer, transfer_id, arrived=request is not None)
        waits_for_nothing = self._closing or known or over
        return [*self._due_notices.announce(transfer_id)] if waits_for_nothing else []

    def waiting(self, now: float, peer: PeerId, transfer_ids: Sequence[str]) -> list[PrefillAction]:
        """Handles the list of a PING: these transfers still wait in D's queue, so their blocks are held
        longer. A prefix is not held for a queue."""
        for transfer_id in transfer_ids:
            prompt = self._prompts.get(transfer_id)
            for transfer in () if prompt is None or prompt.lent else prompt.shares:
                if transfer.phase is SharePhase.WAITING:
                    transfer.claimed = peer
                    if transfer.prompt.finished:
                        self._hold(now, transfer)
        return []

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[PrefillAction]:
        """The session is over and being fenced. ``fenced`` follows."""
        self._peers.pop(peer, None)
        self._lendings.peer_down(peer)
        self._due_notices.peer_down(peer)
        actions: list[PrefillAction] = []
        for transfer in self._all():
            if transfer.claimed == peer and transfer.prompt.finished and transfer.phase is SharePhase.WAITING:
                self._hold(now, transfer)
        for transfer in self._of_peer(peer):
            reservation = transfer.reservation
            assert reservation is not None
            reservation.peer_lost = True
            self._timers.clear(transfer.share)
            if transfer.phase is SharePhase.ACTIVE:
                verdict = RecordedEnd(Outcome.FAILED, FailCode.EXPIRED, reason, (reservation.key,))
                actions += self._ends.drain(now, transfer, verdict)
        return actions

    def fenced(self, now: float, peer: PeerId) -> list[PrefillAction]:
        """No write to that peer is in flight any more."""
        actions: list[PrefillAction] = []
        for transfer in self._of_peer(peer):
            # the peer's own fence decides whether writes can land there
            actions += self._ends.drained(now, transfer, quiesced=False)
        return actions

    # --- The transfer engine

    def writes_ended(
        self, now: float, share: Share, end: WritesEnd, quiesced: bool, reason: str
    ) -> list[PrefillAction]:
        """The transfer engine reports the end of a share's writes. None of them is in flight on this side any
        more."""
        transfer = self._transfer(share)
        if transfer is None or transfer.reservation is None or not transfer.reservation.writing:
            return []
        if transfer.phase is SharePhase.DRAINING:
            return self._ends.drained(now, transfer, quiesced or end is WritesEnd.DONE)
        if end is WritesEnd.DONE:
            return self._sum(now, transfer)
        text, served = reason or "the writes ended early", (transfer.reservation.key,)
        transfer.verdict = RecordedEnd(Outcome.FAILED, FailCode.WRITE_ERROR, text, served)
        return self._ends.drained(now, transfer, quiesced)

    def pages_summed(self, now: float, share: Share, sums: bytes, problem: str) -> list[PrefillAction]:
        """These are the sums of the share's pages, in the order of SumPages, or the reason why there are
        none."""
        transfer = self._transfer(share)
        reservation = None if transfer is None else transfer.reservation
        if transfer is None or reservation is None:
            return []
        reservation.summed = True
        if reservation.unsummed:  # the blocks may have had another content by then
            sums, problem = b"", reservation.unsummed
        said = _say_sums(reservation, sums, problem)
        # The share does not end before its prompt: D may wait for the token, too.
        return [*said, *(self._seal(now, transfer) if transfer.prompt.finished else ())]

    def wants_sums(self, share: Share) -> bool:
        """Whether the share whose pages are to be summed has not ended. Any thread may call it."""
        transfer = self._transfer(share)
        return transfer is not None and transfer.reservation is not None

    def push_failed(self, now: float, share: Share, reason: str) -> list[PrefillAction]:
        """The transfer engine did not accept a Push. If the native transfer is open, it must be cancelled."""
        transfer = self._transfer(share)
        if transfer is None or transfer.phase is not SharePhase.ACTIVE:
            return []
        return self._ends.end(now, transfer, FailCode.WRITE_ERROR, reason)

    # --- Time and the end

    def tick(self, now: float) -> list[PrefillAction]:
        """Acts on every deadline that has passed."""
        actions: list[PrefillAction] = []
        while (share := self._timers.pop_due(now)) is not None:
            transfer = self._transfer(share)
            assert transfer is not None
            reservation = transfer.reservation
            if reservation is None:
                text = "no decode engine requested it in time"
                verdict = RecordedEnd(Outcome.EXPIRED, FailCode.EXPIRED, text, ())
                actions += self._ends.close(now, transfer, verdict)
            elif transfer.phase is SharePhase.DRAINING:
                text = f"writes of transfer {share} did not drain within {self._timeouts.drain:g} s"
                actions.append(Fence(reservation.peer, text))
            elif transfer.prompt.request is None:
                text = "no request with this transfer id reached the prefill engine in time"
                actions += self._ends.end(now, transfer, FailCode.UNKNOWN_TRANSFER, text)
            else:
                actions += self._ends.end(
                    now, transfer, FailCode.EXPIRED, "the reservation's deadline passed"
                )
        actions += self._due_notices.tick(now)
        self._lendings.tick(now)
        self._tombstones.forget(now)
        return actions

    def close(self, now: float) -> list[PrefillAction]:
        """P shuts down: every reservation ends in FAIL(DRAINING). Requests are no longer reported."""
        self._closing = True
        actions: list[PrefillAction] = [*self._lendings.refuse_all(LendOutcome.CLOSING, _CLOSING)]
        actions += self._due_notices.close()
        for prompt in list(self._prompts.values()):
            prompt.finished, prompt.request = True, None
            text = "the prefill engine is shutting down"
            actions += (
                self._ends.conclude(now, prompt)
                if prompt.over
                else self._ends.end_all(now, prompt, FailCode.DRAINING, text)
            )
        return actions

    # --- Steps

    def _new_prompt(self, transfer_id: str) -> PromptShares:
        prompt = PromptShares(transfer_id, self._weights)
        prompt.shares.append(
            ShareTransfer(Share(transfer_id), prompt, pages=[{} for _ in self._layout.groups])
        )
        self._prompts[transfer_id] = prompt
        return prompt

    def _split(self, prompt: PromptShares, shares: int) -> None:
        """Replaces the one share without a RESERVE by as many shares as D has reported."""
        prompt.shares_known = True
        (first,) = prompt.shares
        held_until = self._timers.deadline(first.share)
        for number in range(1, shares):
            share, pages = Share(prompt.transfer_id, number), [dict(known) for known in first.pages]
            prompt.shares.append(ShareTransfer(share, prompt, claimed=first.claimed, pages=pages))
            if held_until is not None:
                self._timers.set(share, held_until)

    def _share_of(self, prompt: PromptShares, number: int) -> ShareTransfer | None:
        """The share of that number, or None if there are fewer shares. Until the first RESERVE, one share
        stands for all."""
        if not prompt.shares_known:
            return prompt.shares[0]
        return prompt.shares[number] if number < len(prompt.shares) else None

    def _transfer(self, share: Share) -> ShareTransfer | None:
        prompt = self._prompts.get(share.transfer_id)
        return None if prompt is None else prompt.shares[share.number]

    def _all(self) -> list[ShareTransfer]:
        return [transfer for prompt in self._prompts.values() for transfer in prompt.shares]

    def _hold(self, now: float, transfer: ShareTransfer) -> None:
        """Keeps a finished prompt's blocks for the hold time, until D requests them."""
        hold = self._timeouts.lend if transfer.prompt.lent else self._timeouts.hold
        if transfer.claimed is not None and transfer.claimed not in self._peers:
            # D had claimed the prompt. It either reconnects and claims it again, or it is dead.
            hold = min(hold, self._timeouts.dead + self._timeouts.connect)
        self._timers.set(transfer.share, now + hold)

    def _of_peer(self, peer: PeerId) -> list[ShareTransfer]:
        return [t for t in self._all() if t.reservation is not None and t.reservation.peer == peer]

    def _refuse(self, peer: PeerId, message: Reserve, code: FailCode, text: str) -> Send:
        """FAIL for a RESERVE that never became a reservation. Nothing was written for it."""
        return Send(peer, Fail(message.transfer_id, message.attempt, code, clip(text), quiesced=True))

    def _refuse_stale(self, now: float, peer: PeerId, message: Reserve, text: str) -> list[PrefillAction]:
        """No other D will request the pages. D computes the prompt itself."""
        refused = self._refuse(peer, message, FailCode.STALE, text)
        verdict = RecordedEnd(Outcome.STALE, FailCode.STALE, text, ())
        prompt = self._prompts.get(message.transfer_id)
        if prompt is None:
            return [refused, *self._ends.forbid(now, message.transfer_id, verdict)]
        transfer = self._share_of(prompt, message.share)
        assert transfer is not None  # ensured by share_problem()
        said = _say_sampled(peer, message, prompt) if prompt.finished else []
        return [*said, refused, *self._ends.close(now, transfer, verdict)]

    def _go_stale(self, now: float, transfer: ShareTransfer, text: str) -> list[PrefillAction]:
        """The reserved pages are stale for D. If D waits for a token, which a client may have by then, D gets
        FAIL only after the token."""
        reservation = transfer.reservation
        waits = reservation is not None and reservation.message.wants_sampled
        if (
            reservation is None
            or not waits
            or transfer.phase is not SharePhase.ACTIVE
            or transfer.prompt.finished
        ):
            return self._ends.end(now, transfer, FailCode.STALE, text)
        reservation.stale = text
        transfer.forget_pages(text)
        return []

    def _push(self, transfer: ShareTransfer) -> list[PrefillAction]:
        """Pushes pages that are computed, wanted and not yet pushed. Makes one Push for each step that
        computed some."""
        reservation = transfer.reservation
        if reservation is None or transfer.prompt.request is None:
            return []
        if reservation.stale:
            transfer.forget_pages(reservation.stale)
            return []
        plan = self._peers[reservation.peer].plan
        steps: dict[int | None, dict[tuple[Groups, Places], list[tuple[int, int]]]] = {}
        for groups, pair in plan.pairs.items():
            wanted = reservation.wanted[groups]
            before = len(wanted)
            for (signal_base, places), blocks in pair.take(transfer.pages[pair.source], wanted).items():
                steps.setdefault(signal_base, {})[groups, places] = blocks
                if reservation.message.wants_sums:
                    reservation.pushed.setdefault((groups, places), []).extend(blocks)
            reservation.left -= before - len(wanted)
        transfer.forget_pages()  # the other pages are not wanted, and never will be
        if steps:
            reservation.writing = True
        message = reservation.message
        actions: list[PrefillAction] = [
            Push(
                reservation.peer,
                transfer.share,
                signal_base,
                message.immediate,
                tuple(
                    PushedGroup(groups, places, *map(tuple, zip(*blocks, strict=True)))
                    for (groups, places), blocks in batches.items()
                ),
                message.wants_sampled,
            )
            for signal_base, batches in sorted(steps.items(), key=_begin)
        ]
        if message.wants_sums and steps and reservation.left == 0:
            # D waits for the sums, so the writes do not wait for the report that the request has finished.
            reservation.to_sum = source_pages(plan, reservation.pushed)
            actions.append(Seal(transfer.share))
        return actions

    def _seal(self, now: float, transfer: ShareTransfer) -> list[PrefillAction]:
        """P has computed everything. The transfer ends when its writes have arrived, and D has their sums if
        it wants them."""
        reservation = transfer.reservation
        assert reservation is not None
        if reservation.stale:
            return self._ends.end(now, transfer, FailCode.STALE, reservation.stale)
        if reservation.left > 0 and transfer.stale:
            # P did not compute them again: all were computed already, or the pause kept P's cache.
            text = f"{reservation.left} pages were not computed again: {transfer.stale}"
            return self._ends.end(now, transfer, FailCode.STALE, text)
        if reservation.left > 0:
            text = f"{reservation.left} of the pages that the decode engine requested were never computed"
            return self._ends.end(now, transfer, FailCode.WRITE_ERROR, text)
        if reservation.to_sum is not None and not reservation.summed:
            return []  # its writes are sealed
        if reservation.writing:
            return [Seal(transfer.share)]
        return self._ends.complete(now, transfer)  # D wanted no page, or has the sums

    def _sum(self, now: float, transfer: ShareTransfer) -> list[PrefillAction]:
        """All pages have arrived. Their blocks are held until they are summed, if D wants that."""
        reservation = transfer.reservation
        assert reservation is not None
        if reservation.to_sum is None:
            return self._ends.complete(now, transfer)
        # Nothing is in flight, so an end of the share drops the sums, and does not wait for the summer.
        reservation.writing = False
        return [SumPages(transfer.share, reservation.to_sum)]


def _say_sampled(peer: PeerId, message: Reserve, prompt: PromptShares) -> list[PrefillAction]:
    """SAMPLED, if D has requested it."""
    if not message.wants_sampled:
        return []
    return [Send(peer, Sampled(message.transfer_id, message.attempt, prompt.sampled))]


def _say_sums(reservation: Reservation, sums: bytes, problem: str) -> list[PrefillAction]:
    return [Send(reservation.peer, one) for one in sums_messages(reservation.message, sums, clip(problem))]


def _begin(step: tuple[int | None, object]) -> int:
    """Sorts steps by their beginning. Pages that are computed already come first."""
    signal_base, _ = step
    return -1 if signal_base is None else signal_base


def _named(version: str) -> str:
    return version or "what it was started with"


def _other_weights(ours: str, message: Reserve) -> str:
    names = shown_apart(ours, message.weights)
    prefill, decode = map(_named, names)
    return f"weights: prefill engine has {prefill}, decode engine has {decode}"


def _acknowledge(peer: PeerId, message: Cancel, verdict: RecordedEnd) -> Send:
    """CANCEL_ACK for a transfer that is over. Only a served attempt may have left writes in flight."""
    drained = verdict.quiesced or (peer, message.attempt) not in verdict.served
    return Send(peer, CancelAck(message.transfer_id, message.attempt, drained))
