"""P's side of every transfer, sans-IO: which pages to push when, and how each transfer ends.

A transfer has two halves that arrive in any order: the request in P's engine (``expect`` ... ``finished``)
and D's RESERVE. Pages flow while both are there. Each page (a logical block of a KV group, all layers of
the group) is pushed exactly once, however the prompt was chunked, cached or preempted: the ledger knows
what has gone.

    request   RESERVE   phase
    -         yes       ACTIVE    an orphan: waits for the request (orphan timeout)
    yes       -         WAITING   pages are remembered; once finished, the hold timeout runs
    yes       yes       ACTIVE    pages are pushed as they are computed; finished and all pushed: sealed
                        DRAINING  stopped early: waits for the engine's word that nothing is in flight
                        CLOSED    nothing will move any more; P's engine still works on the request

A request is reported as sent exactly once, after it finished and nothing reads its blocks. A transfer id
lives once: what arrives for it later meets its tombstone.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_connector.protocol.actions import (
    CancelWrites,
    Ended,
    Fence,
    FinishedSending,
    Log,
    Outcome,
    PeerId,
    Push,
    PushedGroup,
    Reached,
    Seal,
    Send,
    State,
    UnderWay,
)
from kv_connector.protocol.layout import KvLayout, layout_problem
from kv_connector.protocol.messages import Cancel, CancelAck, Fail, FailCode, Reserve, Role, clip
from kv_connector.protocol.plan import layouts_problem, tables_problem, targets_problem, used_blocks
from kv_connector.protocol.requests import ComputedPages, PrefillRequest
from kv_connector.protocol.timers import Timeouts, Timers
from kv_connector.protocol.tombstones import Tombstones, Verdict

PrefillAction = Send | Fence | Ended | Reached | Log | Push | Seal | CancelWrites | FinishedSending


class WritesEnd(enum.Enum):
    """The engine's last word on a transfer's writes."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Phase(enum.Enum):
    WAITING = enum.auto()
    ACTIVE = enum.auto()
    DRAINING = enum.auto()
    CLOSED = enum.auto()


@dataclass
class _Reservation:
    """D's RESERVE while it is being served."""

    peer: PeerId
    message: Reserve
    since: float
    deadline: float
    targets: list[dict[int, int]]  # per group: logical block -> D's block
    pushed: list[set[int]]  # the ledger: logical blocks per group
    left: int  # pages wanted and not yet pushed
    writing: bool = False  # the engine has an open transfer
    peer_lost: bool = False

    @property
    def key(self) -> tuple[PeerId, int]:
        return self.peer, self.message.attempt


@dataclass
class _Transfer:
    transfer_id: str
    request: PrefillRequest | None = None
    finished: bool = False
    phase: _Phase = _Phase.WAITING
    claimed: PeerId | None = None  # who said last that it will come for it
    reservation: _Reservation | None = None
    verdict: Verdict | None = None  # in DRAINING what it will be, in CLOSED what it is
    # Computed and not pushed, per group: logical block -> (P's block, signal base).
    pages: list[dict[int, tuple[int, int | None]]] = field(default_factory=list)


class PrefillMachine:
    """All transfers of one prefill worker. Every method returns what to do, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._peers: dict[PeerId, KvLayout] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._tombstones = Tombstones(2 * timeouts.longest())
        self._timers: Timers[str] = Timers()
        self._closing = False

    def __len__(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def writing(self, transfer_id: str) -> bool:
        """Whether the transfer may have an open counterpart in the engine."""
        transfer = self._transfers.get(transfer_id)
        return transfer is not None and transfer.reservation is not None and transfer.reservation.writing

    def next_deadline(self) -> float | None:
        """When tick() is due, if nothing happens before."""
        return self._timers.next()

    def under_way(self) -> list[UnderWay]:
        """The transfers that are not over. Any thread may call it."""
        found = []
        for transfer in list(self._transfers.values()):  # in one step
            request, reservation = transfer.request, transfer.reservation
            found.append(
                UnderWay(
                    Role.PREFILL,
                    transfer.transfer_id,
                    "" if request is None else request.request_id,
                    None if reservation is None else reservation.peer,
                    "orphan" if request is None else transfer.phase.name.lower(),
                    None if reservation is None else reservation.since,
                )
            )
        return found

    # --- P's engine

    def expect(self, now: float, request: PrefillRequest) -> list[PrefillAction]:
        """The request has reached P's scheduler."""
        transfer = self._transfers.get(request.transfer_id)
        if transfer is None:
            transfer = self._new_transfer(request.transfer_id)
            tombstone = self._tombstones.get(request.transfer_id)
            if tombstone is not None:  # released, cancelled or expired before the request came
                transfer.phase, transfer.verdict = _Phase.CLOSED, tombstone
        elif transfer.request is not None:
            if transfer.request.request_id == request.request_id:
                return []
            text = (
                f"request {request.request_id} is ignored: transfer {request.transfer_id} "
                f"belongs to request {transfer.request.request_id}"
            )
            return [Log(logging.ERROR, text)]
        transfer.request = request
        if transfer.phase is _Phase.CLOSED:  # if it was completed, then for another request
            return _reached(transfer, State.FAILED)
        reservation = transfer.reservation
        if reservation is None or transfer.phase is not _Phase.ACTIVE:
            return []
        problem = _prompt_problem(request, reservation.message)
        if problem is not None:  # the right RESERVE may still come
            transfer.phase, transfer.reservation = _Phase.WAITING, None
            self._timers.clear(transfer.transfer_id)
            return [self._refuse(reservation.peer, reservation.message, FailCode.PROMPT_MISMATCH, problem)]
        self._timers.set(transfer.transfer_id, reservation.deadline)
        return _reached(transfer, State.MOVING)

    def computed(self, now: float, pages: ComputedPages) -> list[PrefillAction]:
        """These pages become valid in this step; the ones that D wants and lacks are pushed."""
        transfer = self._transfers.get(pages.transfer_id)
        if transfer is None or transfer.request is None:
            text = f"pages of transfer {pages.transfer_id} are ignored: no such request is expected"
            return [Log(logging.WARNING, text)]
        if len(pages.groups) != len(self._layout.groups):
            text = f"{len(pages.groups)} KV groups were computed, the layout has {len(self._layout.groups)}"
            return self._end(now, transfer, FailCode.WRITE_ERROR, text)
        if transfer.phase not in (_Phase.WAITING, _Phase.ACTIVE):
            return []
        for known, group, named in zip(transfer.pages, self._layout.groups, pages.groups, strict=True):
            for logical, block in used_blocks(group, named.first, named.blocks).items():
                earlier = known.get(logical)
                # The same block again is valid since the earlier step; another one replaces it.
                if earlier is None or earlier[0] != block:
                    known[logical] = (block, pages.signal_base)
        return self._push(transfer)

    def preempt(self, transfer_ids: Sequence[str]) -> tuple[str, ...]:
        """The requests lose their blocks: pages not yet pushed are forgotten until they are computed again.

        Returns the transfers whose writes still read those blocks: they must be quiesced before anybody
        else may write there, or ``quiesce_failed`` be called.
        """
        for transfer_id in transfer_ids:
            for known in self._pages(transfer_id):
                known.clear()
        return tuple(transfer_id for transfer_id in transfer_ids if self.writing(transfer_id))

    def forget_pages(self, now: float) -> list[PrefillAction]:
        """The memory loses its contents, and all sessions are over: what was computed has to be computed
        again, and a finished prompt has nothing left to give."""
        self.preempt(tuple(self._transfers))
        actions: list[PrefillAction] = []
        for transfer in list(self._transfers.values()):
            if transfer.finished and transfer.phase is _Phase.WAITING:
                actions += self._end(now, transfer, FailCode.PREFILL_ABORTED, "the prefill engine was asleep")
        return actions

    def quiesce_failed(self, now: float, transfer_id: str) -> list[PrefillAction]:
        """A preempted transfer did not drain in time: only a fence stops the reads."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.reservation is None or transfer.reservation.peer_lost:
            return []
        return [Fence(transfer.reservation.peer, f"writes of preempted transfer {transfer_id} did not drain")]

    def cache_cleared(self, now: float) -> list[PrefillAction]:
        """All prompts are computed anew, and differently: what D has of one would not fit the rest."""
        actions: list[PrefillAction] = []
        for transfer in list(self._transfers.values()):
            reservation = transfer.reservation
            if reservation is not None and reservation.left > 0 and any(reservation.pushed):
                text = "the prefill engine cleared its KV cache when a part of the prompt had gone"
                actions += self._end(now, transfer, FailCode.PREFILL_ABORTED, text)
        return actions

    def finished(self, now: float, transfer_id: str, ok: bool, reason: str) -> list[PrefillAction]:
        """The request left P's scheduler, with its prompt computed (ok) or not."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            # It was aborted before it was ever scheduled, and D's RESERVE is still to come.
            return [] if ok else self._forbid(now, transfer_id, _aborted(reason))
        if transfer.finished:
            return []
        transfer.finished = True
        if not ok:
            return self._end(now, transfer, FailCode.PREFILL_ABORTED, reason)
        if transfer.phase is _Phase.WAITING:
            self._hold(now, transfer)
            return []
        if transfer.phase is _Phase.ACTIVE:
            return self._seal(now, transfer)
        return self._settle(now, transfer) if transfer.phase is _Phase.CLOSED else []

    # --- D, through messages

    def admit(self, peer: PeerId, layout: KvLayout, regions: int) -> str | None:
        """A decode peer introduced itself: None, or the reason why its pages do not fit ours."""
        problem = (
            layout_problem(layout, regions)
            or tables_problem(self._layout, layout)
            or layouts_problem(self._layout, layout)
        )
        if problem is None:
            self._peers[peer] = layout
        return problem

    def reserve(self, now: float, peer: PeerId, message: Reserve) -> list[PrefillAction]:
        """RESERVE: D wants the prompt's pages."""
        layout = self._peers.get(peer)
        if layout is None:
            return []
        problem = targets_problem(layout, message.groups, message.prompt_tokens)
        if problem is not None:
            return [self._refuse(peer, message, FailCode.INCOMPATIBLE, problem)]
        transfer = self._transfers.get(message.transfer_id)
        verdict = self._tombstones.get(message.transfer_id) if transfer is None else transfer.verdict
        if verdict is not None:
            if verdict.served == (peer, message.attempt):
                return []
            return [self._refuse(peer, message, verdict.code, verdict.text)]
        if self._closing:  # behind the verdicts: a repeated RESERVE's writes may still be in flight
            return [self._refuse(peer, message, FailCode.DRAINING, "the prefill engine is shutting down")]
        if transfer is None:
            transfer = self._new_transfer(message.transfer_id)
        elif transfer.reservation is not None:
            if transfer.reservation.key == (peer, message.attempt):
                return []
            text = "the transfer is already going to another decode request"
            return [self._refuse(peer, message, FailCode.DUPLICATE, text)]
        elif transfer.request is not None:
            problem = _prompt_problem(transfer.request, message)
            if problem is not None:
                return [self._refuse(peer, message, FailCode.PROMPT_MISMATCH, problem)]
        targets = [
            used_blocks(group, target.first, target.blocks)
            for group, target in zip(layout.groups, message.groups, strict=True)
        ]
        deadline = now + message.deadline_ms / 1000
        transfer.reservation = _Reservation(
            peer=peer,
            message=message,
            since=now,
            deadline=deadline,
            targets=targets,
            pushed=[set() for _ in targets],
            left=sum(map(len, targets)),
        )
        transfer.phase = _Phase.ACTIVE
        if transfer.request is None:
            self._timers.set(transfer.transfer_id, min(deadline, now + self._timeouts.orphan))
            return []
        self._timers.set(transfer.transfer_id, deadline)
        actions = [*_reached(transfer, State.MOVING), *self._push(transfer)]
        if transfer.finished:
            actions += self._seal(now, transfer)
        return actions

    def cancel(self, now: float, peer: PeerId, message: Cancel) -> list[PrefillAction]:
        """CANCEL: D no longer wants the transfer. Always ends in a CANCEL_ACK or a FAIL for that attempt."""
        key = (peer, message.attempt)
        transfer = self._transfers.get(message.transfer_id)
        acknowledged = Send(peer, CancelAck(message.transfer_id, message.attempt, drained=True))
        cancelled = Verdict(Outcome.CANCELLED, FailCode.EXPIRED, "decode cancelled the transfer", key)
        if transfer is None:
            tombstone = self._tombstones.get(message.transfer_id)
            if tombstone is None:  # overtook its RESERVE, which must not start anything when it comes
                return [acknowledged, *self._forbid(now, message.transfer_id, cancelled)]
            return [_acknowledge(peer, message, tombstone)]
        if transfer.reservation is not None:
            if transfer.reservation.key != key:
                return [acknowledged]
            if transfer.phase is _Phase.DRAINING:
                return []  # the answer follows once it has drained
            return self._drain(now, transfer, cancelled)
        if transfer.verdict is not None:
            return [_acknowledge(peer, message, transfer.verdict)]
        return [acknowledged, *self._close(now, transfer, cancelled)]

    def release(self, now: float, peer: PeerId, transfer_id: str) -> list[PrefillAction]:
        """RELEASE: D needs nothing of this transfer. A RESERVE outranks it."""
        transfer = self._transfers.get(transfer_id)
        released = Verdict(Outcome.RELEASED, FailCode.EXPIRED, "decode released the transfer", None)
        if transfer is None:
            return self._forbid(now, transfer_id, released)
        return self._close(now, transfer, released) if transfer.phase is _Phase.WAITING else []

    def waiting(self, now: float, peer: PeerId, transfer_ids: Sequence[str]) -> list[PrefillAction]:
        """PING: these transfers still wait in D's queue, so their blocks are held on."""
        for transfer_id in transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.phase is _Phase.WAITING:
                transfer.claimed = peer
                if transfer.finished:
                    self._hold(now, transfer)
        return []

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[PrefillAction]:
        """The session is over, its fence is under way: ``fenced`` follows."""
        self._peers.pop(peer, None)
        actions: list[PrefillAction] = []
        for transfer in self._transfers.values():
            if transfer.claimed == peer and transfer.finished and transfer.phase is _Phase.WAITING:
                self._hold(now, transfer)
        for transfer in self._of_peer(peer):
            reservation = transfer.reservation
            assert reservation is not None
            reservation.peer_lost = True
            self._timers.clear(transfer.transfer_id)
            if transfer.phase is _Phase.ACTIVE:
                verdict = Verdict(Outcome.FAILED, FailCode.EXPIRED, reason, reservation.key)
                actions += self._drain(now, transfer, verdict)
        return actions

    def fenced(self, now: float, peer: PeerId) -> list[PrefillAction]:
        """No write to that peer is in flight any more."""
        actions: list[PrefillAction] = []
        for transfer in self._of_peer(peer):
            actions += self._drained(now, transfer, quiesced=False)  # at the peer, its own fence says so
        return actions

    # --- The transfer engine

    def writes_ended(
        self, now: float, transfer_id: str, end: WritesEnd, quiesced: bool, reason: str
    ) -> list[PrefillAction]:
        """The engine's last word on a transfer's writes: nothing of it is in flight on this side any more."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.reservation is None or not transfer.reservation.writing:
            return []
        if transfer.phase is _Phase.DRAINING:
            return self._drained(now, transfer, quiesced or end is WritesEnd.DONE)
        if end is WritesEnd.DONE:
            return self._complete(now, transfer)
        text, served = reason or "the writes ended early", transfer.reservation.key
        transfer.verdict = Verdict(Outcome.FAILED, FailCode.WRITE_ERROR, text, served)
        return self._drained(now, transfer, quiesced)

    def push_failed(self, now: float, transfer_id: str, reason: str) -> list[PrefillAction]:
        """The engine did not take a Push; its transfer, if it is open, has to be cancelled."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.phase is not _Phase.ACTIVE:
            return []
        return self._end(now, transfer, FailCode.WRITE_ERROR, reason)

    # --- Time and the end

    def tick(self, now: float) -> list[PrefillAction]:
        """Acts on every deadline that has come."""
        actions: list[PrefillAction] = []
        while (transfer_id := self._timers.pop_due(now)) is not None:
            transfer = self._transfers[transfer_id]
            reservation = transfer.reservation
            if reservation is None:
                text = "no decode engine asked for it in time"
                verdict = Verdict(Outcome.EXPIRED, FailCode.EXPIRED, text, None)
                actions += self._close(now, transfer, verdict)
            elif transfer.phase is _Phase.DRAINING:
                text = f"writes of transfer {transfer_id} did not drain within {self._timeouts.drain:g} s"
                actions.append(Fence(reservation.peer, text))
            elif transfer.request is None:
                text = "no request with this transfer id reached the prefill engine in time"
                actions += self._end(now, transfer, FailCode.UNKNOWN_TRANSFER, text)
            else:
                actions += self._end(now, transfer, FailCode.EXPIRED, "the reservation's deadline passed")
        self._tombstones.forget(now)
        return actions

    def close(self, now: float) -> list[PrefillAction]:
        """P shuts down: every reservation ends in FAIL(DRAINING). Requests are no longer reported."""
        self._closing = True
        actions: list[PrefillAction] = []
        for transfer in list(self._transfers.values()):
            transfer.finished, transfer.request = True, None
            actions += self._end(now, transfer, FailCode.DRAINING, "the prefill engine is shutting down")
        return actions

    # --- Steps

    def _new_transfer(self, transfer_id: str) -> _Transfer:
        transfer = _Transfer(transfer_id, pages=[{} for _ in self._layout.groups])
        self._transfers[transfer_id] = transfer
        return transfer

    def _pages(self, transfer_id: str) -> list[dict[int, tuple[int, int | None]]]:
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else transfer.pages

    def _hold(self, now: float, transfer: _Transfer) -> None:
        """From now on a finished prompt's blocks are kept for a while, until D comes for them."""
        hold = self._timeouts.hold
        if transfer.claimed is not None and transfer.claimed not in self._peers:
            # D had said that it would come. Either it dials again and says so, or it is dead.
            hold = min(hold, self._timeouts.dead + self._timeouts.connect)
        self._timers.set(transfer.transfer_id, now + hold)

    def _of_peer(self, peer: PeerId) -> list[_Transfer]:
        return [
            t for t in self._transfers.values() if t.reservation is not None and t.reservation.peer == peer
        ]

    def _refuse(self, peer: PeerId, message: Reserve, code: FailCode, text: str) -> Send:
        """FAIL for a RESERVE that never became a reservation: nothing of it was ever written."""
        return Send(peer, Fail(message.transfer_id, message.attempt, code, clip(text), quiesced=True))

    def _push(self, transfer: _Transfer) -> list[PrefillAction]:
        """Pushes what is computed, wanted and not yet pushed; one Push for each step that computed some."""
        reservation = transfer.reservation
        if reservation is None or transfer.request is None:
            return []
        steps: dict[int | None, list[PushedGroup]] = {}
        for group, (known, targets) in enumerate(zip(transfer.pages, reservation.targets, strict=True)):
            pushed = reservation.pushed[group]
            pairs: dict[int | None, list[tuple[int, int]]] = {}
            for logical, (block, signal_base) in known.items():
                target = targets.get(logical)
                if target is not None and logical not in pushed:
                    pushed.add(logical)
                    reservation.left -= 1
                    pairs.setdefault(signal_base, []).append((block, target))
            known.clear()  # the rest is not wanted, and never will be
            for signal_base, pages in pairs.items():
                source, target_blocks = zip(*pages, strict=True)
                steps.setdefault(signal_base, []).append(PushedGroup(group, source, target_blocks))
        if steps:
            reservation.writing = True
        immediate = reservation.message.immediate
        return [
            Push(reservation.peer, transfer.transfer_id, signal_base, immediate, tuple(groups))
            for signal_base, groups in sorted(steps.items(), key=_begin)
        ]

    def _seal(self, now: float, transfer: _Transfer) -> list[PrefillAction]:
        """P has computed all it will: the transfer ends when its writes have arrived."""
        reservation = transfer.reservation
        assert reservation is not None
        if reservation.left > 0:
            text = f"{reservation.left} of the pages that decode asked for were never computed"
            return self._end(now, transfer, FailCode.WRITE_ERROR, text)
        if reservation.writing:
            return [Seal(transfer.transfer_id)]
        return self._complete(now, transfer)  # D wanted no page at all

    def _complete(self, now: float, transfer: _Transfer) -> list[PrefillAction]:
        reservation = transfer.reservation
        assert reservation is not None
        text = "the transfer is complete"
        transfer.verdict = Verdict(Outcome.COMPLETED, FailCode.DUPLICATE, text, reservation.key)
        return self._finish_reservation(now, transfer, ())

    def _end(self, now: float, transfer: _Transfer, code: FailCode, text: str) -> list[PrefillAction]:
        """Ends the transfer with a failure, whatever its phase."""
        if transfer.phase is _Phase.WAITING:
            return self._close(now, transfer, Verdict(Outcome.FAILED, code, text, None))
        if transfer.phase is _Phase.ACTIVE:
            reservation = transfer.reservation
            assert reservation is not None
            return self._drain(now, transfer, Verdict(Outcome.FAILED, code, text, reservation.key))
        return self._settle(now, transfer) if transfer.phase is _Phase.CLOSED else []

    def _drain(self, now: float, transfer: _Transfer, verdict: Verdict) -> list[PrefillAction]:
        """Stops the transfer's writes; its end follows once nothing is in flight."""
        reservation = transfer.reservation
        assert reservation is not None
        transfer.verdict = verdict
        if not reservation.writing:
            return self._drained(now, transfer, quiesced=True)
        transfer.phase = _Phase.DRAINING
        if reservation.peer_lost:  # its fence ends the writes, and bounds the wait
            return []
        self._timers.set(transfer.transfer_id, now + self._timeouts.drain)
        return [CancelWrites(transfer.transfer_id)]

    def _drained(self, now: float, transfer: _Transfer, quiesced: bool) -> list[PrefillAction]:
        """Nothing of a stopped transfer is in flight any more: tell D, unless it is gone."""
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        transfer.verdict = Verdict(verdict.outcome, verdict.code, verdict.text, verdict.served, quiesced)
        if reservation.peer_lost:
            return self._finish_reservation(now, transfer, ())
        message = reservation.message
        if verdict.outcome is Outcome.CANCELLED:
            answer: CancelAck | Fail = CancelAck(message.transfer_id, message.attempt, drained=quiesced)
        else:
            answer = Fail(message.transfer_id, message.attempt, verdict.code, clip(verdict.text), quiesced)
        return self._finish_reservation(now, transfer, (Send(reservation.peer, answer),))

    def _finish_reservation(
        self, now: float, transfer: _Transfer, messages: Sequence[Send]
    ) -> list[PrefillAction]:
        reservation, verdict = transfer.reservation, transfer.verdict
        assert reservation is not None
        assert verdict is not None
        seconds = now - reservation.since
        ended = Ended(
            Role.PREFILL, transfer.transfer_id, reservation.peer, verdict.outcome, verdict.text, seconds
        )
        return [*messages, ended, *self._settle(now, transfer)]

    def _close(self, now: float, transfer: _Transfer, verdict: Verdict) -> list[PrefillAction]:
        """Ends a transfer that no RESERVE is being served for."""
        transfer.verdict = verdict
        ended = Ended(Role.PREFILL, transfer.transfer_id, None, verdict.outcome, verdict.text)
        return [ended, *self._settle(now, transfer)]

    def _settle(self, now: float, transfer: _Transfer) -> list[PrefillAction]:
        """Nothing moves any more: the request is reported if P's engine is done with it, else when it is."""
        assert transfer.verdict is not None
        over: list[PrefillAction] = []
        if transfer.phase is not _Phase.CLOSED:
            completed = transfer.verdict.outcome is Outcome.COMPLETED
            over = _reached(transfer, State.DONE if completed else State.FAILED)
        transfer.phase, transfer.reservation = _Phase.CLOSED, None
        self._timers.clear(transfer.transfer_id)
        for known in transfer.pages:
            known.clear()
        if transfer.request is not None and not transfer.finished:
            return over
        del self._transfers[transfer.transfer_id]
        self._tombstones.bury(now, transfer.transfer_id, transfer.verdict)
        return over if transfer.request is None else [*over, FinishedSending(transfer.request.request_id)]

    def _forbid(self, now: float, transfer_id: str, verdict: Verdict) -> list[PrefillAction]:
        """A transfer of which nothing is known yet ends before it begins."""
        if self._tombstones.get(transfer_id) is not None:
            return []
        self._tombstones.bury(now, transfer_id, verdict)
        return [Ended(Role.PREFILL, transfer_id, None, verdict.outcome, verdict.text)]


def _prompt_problem(request: PrefillRequest, reserve: Reserve) -> str | None:
    if request.prompt_tokens != reserve.prompt_tokens:
        return (
            f"prompt length: prefill has {request.prompt_tokens} tokens, decode has {reserve.prompt_tokens}"
        )
    if request.prompt_hash is None:
        return None
    if reserve.prompt_hash is None:  # else an id alone, with whatever prompt, would get these pages
        return "decode sends no hash of the prompt, prefill has one: run the same release on both sides"
    if request.prompt_hash != reserve.prompt_hash:
        return "the prompts differ: several prompts or requests may share one transfer id"
    return None


def _reached(transfer: _Transfer, state: State) -> list[PrefillAction]:
    """For the request, if there is one."""
    request, verdict = transfer.request, transfer.verdict
    if request is None:
        return []
    reason = verdict.text if state is State.FAILED and verdict is not None else ""
    return [Reached(Role.PREFILL, transfer.transfer_id, request.request_id, state, reason)]


def _begin(step: tuple[int | None, object]) -> int:
    """Steps by their beginning; what is computed already comes first."""
    signal_base, _ = step
    return -1 if signal_base is None else signal_base


def _aborted(reason: str) -> Verdict:
    return Verdict(Outcome.FAILED, FailCode.PREFILL_ABORTED, reason, None)


def _acknowledge(peer: PeerId, message: Cancel, verdict: Verdict) -> Send:
    """CANCEL_ACK for a transfer that is over; only the served attempt may have left something in flight."""
    drained = verdict.quiesced or verdict.served != (peer, message.attempt)
    return Send(peer, CancelAck(message.transfer_id, message.attempt, drained))
