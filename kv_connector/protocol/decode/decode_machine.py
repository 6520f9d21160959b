"""D's side of every transfer, sans-IO: from blocks waiting to be filled to exactly one report.

The pages come from one worker of a prefill engine or from several, each of which has some of the layers, or
some heads of them. The engine's directory determines the workers (sources.py). With each of them a transfer
has a leg. The phases of transfers and legs, with their tables, are in legs.py.

One counter reports when all pages have arrived. A request that continues with the token that P samples also
waits for the token. If the token cannot come any more, the request continues without it. If one leg fails, or
the request is aborted, all legs are stopped.

Blocks and the counter are handed back only when nothing can land in them any more. Either all pages have
arrived, or every peer has reported that nothing is in flight, or is fenced. A failed transfer is reported as
failed, an aborted one is not. If P's request was aborted first, the report waits a moment for the abort of
D's request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Fence,
    FindEngine,
    FinishedReceiving,
    Log,
    OpenCounter,
    Outcome,
    PeerId,
    Reached,
    Send,
    State,
    SumPages,
    UnderWay,
)
from kv_connector.protocol.decode.borrowing import Borrowing
from kv_connector.protocol.decode.deferring import Deferring
from kv_connector.protocol.decode.legs import DecodeAction, Leg, LegPhase, Phase, Reception
from kv_connector.protocol.pages.layout import KvLayout, layout_problem
from kv_connector.protocol.plans.plan import targets_problem, used_blocks
from kv_connector.protocol.plans.runs import Misfit
from kv_connector.protocol.plans.sources import Draw, draws, warnings
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers, earliest
from kv_connector.protocol.wire.messages import (
    MAX_REGIONS,
    Cancel,
    CancelAck,
    Fail,
    FailCode,
    Rank,
    Release,
    Role,
    Sampled,
    Sums,
    id_problem,
)
from kv_connector.protocol.wire.prompt_hash import PROMPT_HASH_BYTES

# Seconds that a load waits for the abort of D's request after P's request was aborted. A client leaves both
# engines. Their API servers notice it within milliseconds. D's workers notice it with D's next step, of 10 to
# 500 ms. A failure reported earlier may be answered by vLLM, and logged as an internal error.
ABORT_LAG_S = 1.0


@dataclass
class _Engine:
    """A prefill engine that is known, or is being located."""

    # those that send pages here, and idle ones that this worker has to notify
    workers: dict[Address, Draw] | None = None
    # ids of transfers to be released once the engine is found
    releases: list[str] = field(default_factory=list)


class DecodeMachine:
    """All transfers of one decode worker. Every method returns the actions to execute, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts, *, verify: bool = False) -> None:
        """``verify``: whether pages are checked against sums of P."""
        self._layout = layout
        self._verify = verify
        self._summing: set[PeerId] = set()  # sessions with workers of P that can sum their pages
        self._timeouts = timeouts
        self.rank = 0
        self._ranks: Sequence[Rank] = (Rank("localhost", 1, 0, layout),)  # the workers of this engine
        self._transfers: dict[str, Reception] = {}  # by request id
        self._attempts: dict[int, str] = {}  # attempt -> request id
        self._engines: dict[Address, _Engine] = {}
        self._sessions: dict[Address, PeerId] = {}
        self._releases: dict[Address, list[Release]] = {}  # sent once the session is up
        self._timers: Timers[str] = Timers()
        self._next_attempt = 1
        self._weights = ""
        self.borrowing = Borrowing(timeouts, self._engines, self._sessions, self._find)
        """The questions that precede transfers of prefixes."""
        self.deferring = Deferring(timeouts, self._engines, self._sessions, self._find)
        """The loads that wait without blocks until P is about to compute their prompts."""

    def __len__(self) -> int:
        """Number of transfers that are not over."""
        return len(self._transfers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._transfers

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return earliest((self._timers.next(), self.borrowing.next_deadline(), self.deferring.next_deadline()))

    def under_way(self) -> list[UnderWay]:
        """The transfers that are not over. Any thread may call it."""
        transfers = list(self._transfers.values())  # copied in one step, because other threads change it
        return [transfer.under_way(self._timeouts) for transfer in transfers]

    # --- D's engine

    def set_weights(self, version: str) -> None:
        """D serves this version from now on, and requests pages of it. The framework must cancel earlier
        requests."""
        self._weights = self.borrowing.weights = version

    def set_ranks(self, rank: int, ranks: Sequence[Rank]) -> None:
        """Sets all workers of this engine. This worker has number ``rank``. Without a call it is the only
        worker."""
        self.rank, self._ranks = rank, tuple(ranks)

    def reserve(self, now: float, request: DecodeRequest) -> list[DecodeAction]:
        """The request has its blocks and wants its pages."""
        if request.request_id in self._transfers:
            return [Log(logging.ERROR, f"request {request.request_id} is already being received")]
        self.deferring.withdraw(request.transfer_id)
        transfer = Reception(request, self._next_attempt, now + request.limit(self._timeouts))
        # The number has 32 bits on the wire. By the time it repeats, the old attempt was fenced long ago.
        self._next_attempt = self._next_attempt % 0xFFFFFFFF + 1
        self._transfers[request.request_id] = transfer
        self._attempts[transfer.attempt] = request.request_id
        problem = id_problem(request.transfer_id) or self._problem(request)
        if problem is not None:
            return self._end(now, transfer, Outcome.FAILED, problem)
        self._timers.set(request.request_id, transfer.deadline)
        engine = self._engines.get(request.engine)
        if engine is None:
            return self._find(request.engine)
        return [] if engine.workers is None else self._stage(now, transfer, engine.workers)

    def cancel(self, now: float, request_id: str) -> list[DecodeAction]:
        """The request was aborted. Its blocks are handed back once nothing can land in them."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.phase is Phase.ABORTED:
            return []
        before = transfer.phase
        transfer.enter(Phase.ABORTED)
        if before is Phase.LINGERING:
            return self._end_stopped(now, transfer)
        if before is Phase.FAILING:
            return []
        if before is Phase.LANDED and self._wants_pages(transfer.request):
            return self._end(now, transfer, Outcome.CANCELLED, "")
        # In LANDED, P may still be computing a prompt of which only the token is wanted. It stops as well.
        actions = self._stop(now, transfer)
        if transfer.since is None:  # no source got a RESERVE
            actions += self.release(now, transfer.request.transfer_id, transfer.request.engine)
        return actions

    def release(self, now: float, transfer_id: str, address: Address) -> list[DecodeAction]:
        """D needs nothing of this transfer from the engine at ``address``, so P may free its blocks. Best
        effort: P's hold time ends it too."""
        self.deferring.withdraw(transfer_id)
        if (problem := id_problem(transfer_id)) is not None:
            return [Log(logging.WARNING, f"cannot release a transfer at {address}: {problem}")]
        engine = self._engines.get(address)
        if engine is not None and engine.workers is not None:
            return self._release(transfer_id, address, engine.workers)
        actions = self._find(address) if engine is None else []
        self._engines[address].releases.append(transfer_id)
        return actions

    # --- The engine and its workers

    def engine_found(self, now: float, address: Address, ranks: Sequence[Rank]) -> list[DecodeAction]:
        """Takes the workers of the engine at this address. The first of them is the one that answered
        there."""
        engine = self._engines.setdefault(address, _Engine())  # queued requests look for it as well
        if engine.workers is not None:
            return []
        where = [address, *(Address(rank.host, rank.port, address.prefixes) for rank in ranks[1:])]
        try:
            if len(set(where)) < len(where):
                raise Misfit("two of its workers listen at one address")
            for number, rank in enumerate(ranks):
                if (problem := layout_problem(rank.layout, MAX_REGIONS)) is not None:
                    raise Misfit(f"rank {number}: {problem}")
            found = draws(self._ranks, self.rank, ranks)
        except Misfit as misfit:
            return self.engine_not_found(
                now, address, f"the prefill engine at {address} does not fit: {misfit}"
            )
        engine.workers = {where[number]: draw for number, draw in found.items()}
        actions: list[DecodeAction] = [
            Dial(address, worker, draw.wants, draw.layout) for worker, draw in engine.workers.items()
        ]
        for text in warnings(self._layout, ranks, found.values()):
            actions.append(Log(logging.WARNING, f"prefill engine at {address}: {text}"))
        for transfer_id in engine.releases:
            actions += self._release(transfer_id, address, engine.workers)
        engine.releases.clear()
        actions += self.borrowing.engine_found(now, address, engine.workers)
        actions += self.deferring.engine_found(address, engine.workers)
        for transfer in self._unstaged(address):
            actions += self._stage(now, transfer, engine.workers)
        return actions

    def engine_not_found(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """No engine answered at this address, it refused this engine, or its layout does not fit."""
        self._engines.pop(address, None)
        actions = self.borrowing.engine_not_found(now, address) + self.deferring.engine_not_found(address)
        for transfer in self._unstaged(address):
            actions += self._give_up(now, transfer, reason)
        return actions

    def peer_up(
        self, now: float, address: Address, peer: PeerId, incarnation: str = "", knows_defer: bool = False
    ) -> list[DecodeAction]:
        """A session with the worker at this address is up. The others: as in SessionUp."""
        self._sessions[address] = peer
        if knows_defer or address.prefixes:  # both are newer than PROTOCOL_VERSION
            self._summing.add(peer)
        actions: list[DecodeAction] = [Send(peer, message) for message in self._releases.pop(address, ())]
        actions += self.borrowing.peer_up(now, address, peer, incarnation)
        actions += self.deferring.peer_up(address, peer, knows_defer)
        for transfer, leg in self._awaiting(address):
            leg.peer = peer
            actions += self._open(transfer)
        return actions

    def dial_failed(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """No session will be made: the worker refused or did not answer."""
        self._releases.pop(address, None)
        self._forget(address)
        actions = self.borrowing.dial_failed(now, address) + self.deferring.dial_failed(address)
        for transfer, _ in self._awaiting(address):
            actions += self._give_up(now, transfer, reason)
        return actions

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[DecodeAction]:
        """The session is over and being fenced. ``fenced`` follows."""
        self._summing.discard(peer)
        for address in [address for address, known in self._sessions.items() if known == peer]:
            del self._sessions[address]
            self._forget(address)
        actions = self.borrowing.peer_down(now, peer) + self.deferring.peer_down(peer)
        for transfer in list(self._transfers.values()):
            leg = transfer.leg(peer)
            if leg is None or leg.phase in (LegPhase.FENCING, LegPhase.STOPPED):
                continue
            if transfer.phase is Phase.LANDED:
                actions += self._will_not_say(now, transfer, leg)
                continue
            if transfer.verifies_without(peer):
                leg.enter(LegPhase.STOPPED)
                continue
            if leg.phase is not LegPhase.STAGED:  # a staged source got no RESERVE
                leg.enter(LegPhase.FENCING)
            actions += self._give_up(now, transfer, reason, peer)
        return actions

    def fenced(self, now: float, peer: PeerId) -> list[DecodeAction]:
        """No write of that peer can land any more."""
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            leg = transfer.leg(peer)
            if leg is not None and leg.phase is LegPhase.FENCING:
                actions += self._stopped(now, transfer, leg)
        return actions

    # --- The counter

    def counter_opened(self, now: float, request_id: str, immediate: int) -> list[DecodeAction]:
        """The counter exists, so pages may arrive."""
        transfer = self._transfers.get(request_id)
        if transfer is None:  # a source was lost in the meantime
            return [CloseCounter(request_id)]
        summing = self._summing if self._verify else None
        return [
            _report_status(transfer.request, State.MOVING),
            *transfer.reserve(now, immediate, self._weights, summing),
        ]

    def counter_failed(self, now: float, request_id: str, reason: str) -> list[DecodeAction]:
        """No counter could be opened. Nothing was sent, so nothing can land."""
        transfer = self._transfers.get(request_id)
        return [] if transfer is None else self._give_up(now, transfer, reason)

    def counter_reached(self, now: float, request_id: str) -> list[DecodeAction]:
        """Every page has landed exactly once. Whatever else is in flight, nothing more can land."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return []
        if transfer.check is None:
            return self._landed(now, transfer)
        if transfer.stopping:  # its pages were not checked
            return self._end_stopped(now, transfer)
        transfer.enter(Phase.CHECKING)
        self._timers.set(request_id, min(transfer.deadline, now + self._timeouts.check))
        return [SumPages(transfer.attempt, transfer.check.pages)]

    def pages_summed(self, now: float, attempt: int, sums: bytes, problem: str) -> list[DecodeAction]:
        """These are the sums of the attempt's pages as in SumPages, or the reason why there are none."""
        transfer = self._transfers.get(self._attempts.get(attempt, ""))
        if transfer is None or transfer.check is None:
            return []
        transfer.check.summed(sums, problem)
        return self._compare(now, transfer)

    def wants_sums(self, attempt: int) -> bool:
        """Whether the attempt's pages are still being checked. Any thread may call it."""
        transfer = self._transfers.get(self._attempts.get(attempt, ""))
        return transfer is not None and transfer.phase is Phase.CHECKING

    # --- Messages of P

    def sums(self, now: float, peer: PeerId, message: Sums) -> list[DecodeAction]:
        """Handles SUMS, of which the last one may arrive before or after D's own sums."""
        found = self._attempt(peer, message)
        if found is None or found[0].check is None or found[0].phase not in (Phase.RESERVED, Phase.CHECKING):
            return []
        problem = found[0].check.receive(peer, message)
        return self._give_up(now, found[0], problem, peer) if problem else self._compare(now, found[0])

    def sampled(self, now: float, peer: PeerId, message: Sampled) -> list[DecodeAction]:
        """Handles SAMPLED. Each source sends it, and the first one counts."""
        found = self._attempt(peer, message)
        if found is None or found[0].said is not None:
            return []
        transfer = found[0]
        transfer.said = message
        return self._end(now, transfer, Outcome.COMPLETED, "") if transfer.phase is Phase.LANDED else []

    def fail(self, now: float, peer: PeerId, message: Fail) -> list[DecodeAction]:
        """Handles FAIL: P will not complete the transfer."""
        found = self._attempt(peer, message)
        if found is None:
            return []
        transfer, leg = found
        if leg.phase not in (LegPhase.RESERVED, LegPhase.CANCELLING):
            return []
        if transfer.phase is Phase.LANDED:
            return self._will_not_say(now, transfer, leg)
        reason = f"{message.code.value}: {message.message}"
        # If the prompts differ, D's prompt is the right one, because the client gets D's answer.
        other_prompt, prefix = message.code is FailCode.PROMPT_MISMATCH, transfer.request.engine.prefixes
        if other_prompt or message.code is FailCode.STALE:
            transfer.outcome = Outcome.STALE
        elif message.code is FailCode.PREFILL_ABORTED and not (transfer.failure or prefix):
            transfer.outcome = Outcome.CANCELLED  # the client left P first
        if not message.quiesced:
            # The fence that follows must not replace the reason.
            transfer.failure, transfer.failed = transfer.failure or reason, transfer.failed or peer
            return [Fence(peer, f"transfer {message.transfer_id} failed with writes in flight: {reason}")]
        leg.enter(LegPhase.STOPPED)
        actions = self._give_up(now, transfer, reason, peer)
        if not other_prompt:
            return actions
        text = f"transfer {message.transfer_id}: the decode engine computes its prompt itself: {reason}"
        release = Send(peer, Release(message.transfer_id, leg.draw.share))
        return [Log(logging.WARNING, text), release, *actions]

    def cancel_ack(self, now: float, peer: PeerId, message: CancelAck) -> list[DecodeAction]:
        """Handles CANCEL_ACK: P has stopped."""
        found = self._attempt(peer, message)
        if found is None or found[1].phase is not LegPhase.CANCELLING:
            return []
        transfer, leg = found
        if message.drained:
            return self._stopped(now, transfer, leg)
        return [Fence(peer, f"cancelled transfer {message.transfer_id} may still have writes in flight")]

    # --- Time and the end

    def tick(self, now: float) -> list[DecodeAction]:
        """Acts on every deadline that has passed."""
        actions = self.borrowing.tick(now) + self.deferring.tick(now)
        while (request_id := self._timers.pop_due(now)) is not None:
            transfer = self._transfers[request_id]
            if transfer.phase is Phase.LINGERING:
                actions += self._end_stopped(now, transfer)
                continue
            if not transfer.stopping:
                actions += self._give_up(now, transfer, *transfer.overdue(self._timeouts))
                continue
            transfer_id = transfer.request.transfer_id
            text = f"no CANCEL_ACK for transfer {transfer_id} within {self._timeouts.cancel:g} s"
            for leg in transfer.legs:
                if leg.phase is LegPhase.CANCELLING:
                    assert leg.peer is not None
                    actions.append(Fence(leg.peer, text))
        return actions

    def close(self, now: float) -> list[DecodeAction]:
        """Shuts down: every transfer is cancelled, and fails, because pages are missing."""
        actions = self.borrowing.close(now) + self.deferring.close()
        for transfer in list(self._transfers.values()):
            if transfer.phase is Phase.LINGERING:
                actions += self._end_stopped(now, transfer)
            elif not transfer.stopping:
                actions += self._give_up(now, transfer, "the decode engine is shutting down")
        return actions

    # --- Steps

    def _problem(self, request: DecodeRequest) -> str | None:
        length = PROMPT_HASH_BYTES if request.prompt_hash is None else len(request.prompt_hash)
        if length != PROMPT_HASH_BYTES:
            return f"the prompt hash has {length} bytes instead of {PROMPT_HASH_BYTES}"
        return targets_problem(self._layout, request.groups, request.prompt_tokens)

    def _wants_pages(self, request: DecodeRequest) -> bool:
        """Whether the request wants pages, and not only the token that P sampled."""
        targets = zip(self._layout.groups, request.groups, strict=True)
        return any(used_blocks(group, target.first, target.blocks) for group, target in targets)

    def _awaiting(self, address: Address) -> list[tuple[Reception, Leg]]:
        """The transfers that wait for a session with this address."""
        return [
            (transfer, leg)
            for transfer in self._transfers.values()
            for leg in transfer.legs
            if leg.address == address and leg.peer is None
        ]

    def _unstaged(self, address: Address) -> list[Reception]:
        """The transfers that wait until the engine at this address is found."""
        looking = [one for one in self._transfers.values() if one.phase is Phase.LOOKING]
        return [transfer for transfer in looking if transfer.request.engine == address]

    def _find(self, address: Address) -> list[DecodeAction]:
        self._engines[address] = _Engine()
        return [FindEngine(address)]

    def _forget(self, worker: Address) -> None:
        """Forgets the engines of a worker that cannot be reached. Another engine may be there later."""
        for address, engine in list(self._engines.items()):
            if engine.workers is not None and worker in engine.workers:
                del self._engines[address]

    def _release(
        self, transfer_id: str, address: Address, workers: Mapping[Address, Draw]
    ) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        for worker, draw in workers.items():
            message = Release(transfer_id, draw.share)
            peer = self._sessions.get(worker)
            if peer is None:
                self._releases.setdefault(worker, []).append(message)
                actions.append(Dial(address, worker, draw.wants, draw.layout))
            else:
                actions.append(Send(peer, message))
        return actions

    def _compare(self, now: float, transfer: Reception) -> list[DecodeAction]:
        """Compares the sums of both sides once all are there."""
        check = transfer.check
        if transfer.phase is not Phase.CHECKING or check is None or not check.complete:
            return []
        checked = check.result()
        if checked.first is None:
            return [checked, *self._landed(now, transfer)]
        return [checked, *self._give_up(now, transfer, checked.problem, checked.first.peer)]

    def _landed(self, now: float, transfer: Reception) -> list[DecodeAction]:
        """Ends a transfer that has its pages, unless its request waits for a token that may still come."""
        waits = transfer.request.wants_sampled and transfer.said is None
        if waits and any(leg.phase is LegPhase.RESERVED for leg in transfer.legs) and not transfer.stopping:
            transfer.enter(Phase.LANDED)
            self._timers.set(transfer.request.request_id, transfer.deadline)
            return []
        return self._end(now, transfer, Outcome.COMPLETED, "")

    def _attempt(
        self, peer: PeerId, message: Sampled | Sums | Fail | CancelAck
    ) -> tuple[Reception, Leg] | None:
        """The transfer and leg that a message of ``peer`` belongs to, if the leg exists."""
        transfer = self._transfers.get(self._attempts.get(message.attempt, ""))
        if transfer is None or transfer.request.transfer_id != message.transfer_id:
            return None
        leg = transfer.leg(peer)
        return None if leg is None else (transfer, leg)

    def _stage(self, now: float, transfer: Reception, workers: Mapping[Address, Draw]) -> list[DecodeAction]:
        """Creates the legs of a transfer, now that its sources are known."""
        request = transfer.request
        transfer.enter(Phase.STAGED)
        transfer.legs = tuple(
            Leg(address, draw, self._sessions.get(address))
            for address, draw in workers.items()
            if draw.plan is not None
        )
        idle = {address: draw for address, draw in workers.items() if draw.plan is None}
        return [*self._release(request.transfer_id, request.engine, idle), *self._open(transfer)]

    def _open(self, transfer: Reception) -> list[DecodeAction]:
        """Opens the counter once there is a session with each source."""
        request, writes, peers = transfer.request, 0, []
        for leg in transfer.legs:
            if leg.peer is None:
                return []
            assert leg.draw.plan is not None
            peers.append(leg.peer)
            writes += sum(leg.draw.plan.counts(request.groups, request.prompt_tokens).values())
        return [OpenCounter(tuple(peers), request.request_id, writes)]

    def _give_up(
        self, now: float, transfer: Reception, reason: str, peer: PeerId | None = None
    ) -> list[DecodeAction]:
        """Stops a transfer of which not all pages will arrive, because of ``peer`` if one caused it. The
        first reason counts.

        If all pages have arrived, the request continues without the sampled token.
        """
        if transfer.phase is Phase.LANDED:
            return self._end(now, transfer, Outcome.COMPLETED, "")
        transfer.failure, transfer.failed = transfer.failure or reason, transfer.failed or peer
        if not transfer.stopping:
            transfer.enter(Phase.FAILING)
        actions = self._stop(now, transfer)
        # No source got a RESERVE, and a source that gets RELEASE need not wait for one. That source refuses
        # D's other workers with the code of an abort. They end as cancelled, after ABORT_LAG_S, and this
        # worker reports the cause. To save that second, P would have to distinguish this RELEASE from that of
        # an abort, which is the same message.
        if transfer.since is None:
            for leg in transfer.legs:
                if (known := self._sessions.get(leg.address)) is not None:
                    actions.append(Send(known, Release(transfer.request.transfer_id, leg.draw.share)))
        return actions

    def _will_not_say(self, now: float, transfer: Reception, leg: Leg) -> list[DecodeAction]:
        """All pages have arrived, and this source will not send SAMPLED."""
        leg.enter(LegPhase.STOPPED)
        if any(other.phase is LegPhase.RESERVED for other in transfer.legs):
            return []
        return self._end(now, transfer, Outcome.COMPLETED, "")

    def _stop(self, now: float, transfer: Reception) -> list[DecodeAction]:
        """Stops every running source, and ends the transfer once all have stopped."""
        actions: list[DecodeAction] = []
        for leg in transfer.legs:
            if leg.phase is LegPhase.STAGED:
                leg.enter(LegPhase.STOPPED)
            elif leg.phase is LegPhase.RESERVED:
                assert leg.peer is not None
                leg.enter(LegPhase.CANCELLING)
                cancel = Cancel(transfer.request.transfer_id, transfer.attempt, leg.draw.share)
                actions.append(Send(leg.peer, cancel))
        if transfer.stopped:
            if transfer.phase is Phase.ABORTED or transfer.outcome is not Outcome.CANCELLED:
                return self._end_stopped(now, transfer)
            transfer.enter(Phase.LINGERING)
            self._timers.set(transfer.request.request_id, now + ABORT_LAG_S)
            return []
        phases = {leg.phase for leg in transfer.legs}
        if actions:
            self._timers.set(transfer.request.request_id, now + self._timeouts.cancel)
        elif LegPhase.CANCELLING not in phases:  # a fence has its own time limit
            self._timers.clear(transfer.request.request_id)
        return actions

    def _stopped(self, now: float, transfer: Reception, leg: Leg) -> list[DecodeAction]:
        """Nothing of this source can land any more, and pages are missing."""
        leg.enter(LegPhase.STOPPED)
        return self._stop(now, transfer)

    def _end_stopped(self, now: float, transfer: Reception) -> list[DecodeAction]:
        outcome = Outcome.CANCELLED if transfer.phase is Phase.ABORTED else transfer.outcome
        return self._end(now, transfer, outcome, transfer.failure)

    def _end(self, now: float, transfer: Reception, outcome: Outcome, reason: str) -> list[DecodeAction]:
        """Forgets and reports a transfer. No other method does."""
        request, aborted = transfer.request, transfer.phase is Phase.ABORTED
        transfer.enter(Phase.OVER)
        del self._transfers[request.request_id]
        del self._attempts[transfer.attempt]
        self._timers.clear(request.request_id)
        state = State.DONE if outcome is Outcome.COMPLETED else State.FAILED
        failed = not aborted and outcome is not Outcome.COMPLETED
        stale = outcome is Outcome.STALE or (failed and request.engine.prefixes)
        token = None if transfer.said is None else transfer.said.token
        report = FinishedReceiving(request.request_id, failed, token, stale)
        ended = transfer.ended(now, outcome, reason)
        last: list[DecodeAction] = [ended, _report_status(request, state, reason), report]
        return last if transfer.since is None else [CloseCounter(request.request_id), *last]


def _report_status(request: DecodeRequest, state: State, reason: str = "") -> Reached:
    return Reached(Role.DECODE, request.transfer_id, request.request_id, state, reason)
