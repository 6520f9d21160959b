"""D's side of every transfer, sans-IO: from blocks waiting to be filled to exactly one report.

The pages come from one worker of a prefill engine or from several, each of which has some of the layers, or
some heads of them. Who they are follows from the engine's directory (sources.py), once it is known. With each
of them a transfer has a leg. The phases of transfers and legs, with their tables, are in legs.py.

One counter tells when all pages have come. A request that goes on with the token that P samples waits for
that, too, and does without it where it is not to be had any more. Where one leg fails, or the request is
aborted, all are stopped.
Blocks and the counter are handed back only when nothing can land in them any more: all pages have come, or
every peer said that nothing is in flight, or is fenced. A failed transfer is reported as failed, an aborted
one is not. Where P's request was aborted first, the report waits a moment for the abort of D's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Ended,
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
    UnderWay,
)
from kv_connector.protocol.layout import KvLayout, layout_problem
from kv_connector.protocol.legs import Leg, LegPhase, Phase, Reception
from kv_connector.protocol.messages import (
    MAX_REGIONS,
    Cancel,
    CancelAck,
    Fail,
    FailCode,
    Rank,
    Release,
    Reserve,
    Role,
    Sampled,
    id_problem,
)
from kv_connector.protocol.plan import targets_problem, used_blocks
from kv_connector.protocol.prompt_hash import PROMPT_HASH_BYTES
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.protocol.runs import Misfit
from kv_connector.protocol.sources import Draw, draws, scattered
from kv_connector.protocol.timers import Timeouts, Timers

DecodeAction = (
    Send | Fence | Ended | Reached | Log | FindEngine | Dial | OpenCounter | CloseCounter | FinishedReceiving
)

# Seconds that a load waits for the abort of its own request once P's was aborted. A client leaves both: their
# API servers notice it within milliseconds, and D's workers with D's next step, of 10 to 500 ms. A failure
# that is reported before may be answered, and logged by vLLM as an internal error.
ABORT_LAG_S = 1.0


@dataclass
class _Engine:
    """A prefill engine that was found, or is being looked for."""

    workers: dict[Address, Draw] | None = None  # of which we want something, or whom we tell that nobody does
    releases: list[str] = field(default_factory=list)  # transfers, to be released once it is found


class DecodeMachine:
    """All transfers of one decode worker. Every method returns what to do, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._rank = 0
        self._ranks: Sequence[Rank] = (Rank("localhost", 1, 0, layout),)  # of this engine
        self._transfers: dict[str, Reception] = {}  # by request id
        self._attempts: dict[int, str] = {}  # attempt -> request id
        self._engines: dict[Address, _Engine] = {}
        self._sessions: dict[Address, PeerId] = {}
        self._releases: dict[Address, list[Release]] = {}  # to be sent once the session is there
        self._timers: Timers[str] = Timers()
        self._next_attempt = 1
        self._weights = ""

    def __len__(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._transfers

    def next_deadline(self) -> float | None:
        """When tick() is due, if nothing happens before."""
        return self._timers.next()

    def under_way(self) -> list[UnderWay]:
        """The transfers that are not over. Any thread may call it."""
        found = []
        for transfer in list(self._transfers.values()):  # in one step
            peer, phase = transfer.shown
            request, since = transfer.request, transfer.deadline - self._timeouts.transfer
            ids = request.transfer_id, request.request_id
            found.append(UnderWay(Role.DECODE, *ids, peer, phase.name.lower(), since))
        return found

    # --- D's engine

    def set_weights(self, version: str) -> None:
        """D serves this version from now on, and asks for pages of it. What it has asked for before is its
        framework's to cancel."""
        self._weights = version

    def set_ranks(self, rank: int, ranks: Sequence[Rank]) -> None:
        """All workers of this engine, of which this is number ``rank``. Without it, it is the only one."""
        self._rank, self._ranks = rank, tuple(ranks)

    def reserve(self, now: float, request: DecodeRequest) -> list[DecodeAction]:
        """The request has its blocks and wants its pages."""
        if request.request_id in self._transfers:
            return [Log(logging.ERROR, f"request {request.request_id} is already being received")]
        transfer = Reception(request, self._next_attempt, now + self._timeouts.transfer)
        # 32 bits on the wire; an attempt that old was fenced long before.
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
        """The request was aborted: its blocks come back as soon as nothing can land in them."""
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
        # In LANDED, P may still compute the prompt whose token alone was wanted: it stops, too.
        actions = self._stop(now, transfer)
        if transfer.since is None:  # no source was asked
            actions += self.release(now, transfer.request.transfer_id, transfer.request.engine)
        return actions

    def release(self, now: float, transfer_id: str, address: Address) -> list[DecodeAction]:
        """D needs nothing of this transfer of the engine at ``address``: P may free its blocks. Best effort,
        P's hold time ends it too."""
        problem = id_problem(transfer_id)
        if problem is not None:
            return [Log(logging.WARNING, f"cannot release a transfer at {address}: {problem}")]
        engine = self._engines.get(address)
        if engine is not None and engine.workers is not None:
            return self._release(transfer_id, address, engine.workers)
        actions = self._find(address) if engine is None else []
        self._engines[address].releases.append(transfer_id)
        return actions

    # --- The engine and its workers

    def engine_found(self, now: float, address: Address, ranks: Sequence[Rank]) -> list[DecodeAction]:
        """These are the workers of the engine at this address; the first of them is who answered there."""
        engine = self._engines.setdefault(address, _Engine())  # requests that queue look for it, too
        if engine.workers is not None:
            return []
        where = [address, *(Address(rank.host, rank.port) for rank in ranks[1:])]
        try:
            if len(set(where)) < len(where):
                raise Misfit("two of its workers listen at one address")
            for number, rank in enumerate(ranks):
                if (problem := layout_problem(rank.layout, MAX_REGIONS)) is not None:
                    raise Misfit(f"rank {number}: {problem}")
            found = draws(self._ranks, self._rank, ranks)
        except Misfit as misfit:
            return self.engine_not_found(
                now, address, f"the prefill engine at {address} does not fit: {misfit}"
            )
        engine.workers = {where[number]: draw for number, draw in found.items()}
        actions: list[DecodeAction] = [
            Dial(address, worker, draw.wants, draw.layout) for worker, draw in engine.workers.items()
        ]
        actions += self._missing(address, ranks)
        actions += self._strided(address, engine.workers.values())
        for transfer_id in engine.releases:
            actions += self._release(transfer_id, address, engine.workers)
        engine.releases.clear()
        for transfer in self._unstaged(address):
            actions += self._stage(now, transfer, engine.workers)
        return actions

    def engine_not_found(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """Nobody answered there, or we are refused, or could not use what it has."""
        self._engines.pop(address, None)
        actions: list[DecodeAction] = []
        for transfer in self._unstaged(address):
            actions += self._give_up(now, transfer, reason)
        return actions

    def peer_up(self, now: float, address: Address, peer: PeerId) -> list[DecodeAction]:
        """There is a session with the worker at this address."""
        self._sessions[address] = peer
        actions: list[DecodeAction] = [Send(peer, message) for message in self._releases.pop(address, ())]
        for transfer, leg in self._awaiting(address):
            leg.peer = peer
            actions += self._open(transfer)
        return actions

    def dial_failed(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """There will be no session: refused, or nobody answered."""
        self._releases.pop(address, None)
        self._forget(address)
        actions: list[DecodeAction] = []
        for transfer, _ in self._awaiting(address):
            actions += self._give_up(now, transfer, reason)
        return actions

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[DecodeAction]:
        """The session is over, its fence is under way: ``fenced`` follows."""
        for address in [address for address, known in self._sessions.items() if known == peer]:
            del self._sessions[address]
            self._forget(address)
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            leg = transfer.leg(peer)
            if leg is None or leg.phase in (LegPhase.FENCING, LegPhase.STOPPED):
                continue
            if transfer.phase is Phase.LANDED:
                actions += self._will_not_say(now, transfer, leg)
                continue
            if leg.phase is not LegPhase.STAGED:  # else it was not asked for anything
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
        """The counter exists, so pages may come."""
        transfer = self._transfers.get(request_id)
        if transfer is None:  # a source was lost in the meantime
            return [CloseCounter(request_id)]
        transfer.enter(Phase.RESERVED)
        transfer.since = now
        request = transfer.request
        reserve = Reserve(
            transfer_id=request.transfer_id,
            attempt=transfer.attempt,
            prompt_tokens=request.prompt_tokens,
            first_token=request.first_token,
            prompt_hash=request.prompt_hash,
            groups=request.groups,
            immediate=immediate,
            deadline_ms=max(0, round((transfer.deadline - now) * 1000)),
            wants_sampled=request.wants_sampled,
            weights=self._weights,
        )
        actions: list[DecodeAction] = [_reached(request, State.MOVING)]
        for leg in transfer.legs:
            assert leg.peer is not None
            leg.enter(LegPhase.RESERVED)
            own = msgspec.structs.replace(reserve, share=leg.draw.share, shares=leg.draw.shares)
            actions.append(Send(leg.peer, own))
        return actions

    def counter_failed(self, now: float, request_id: str, reason: str) -> list[DecodeAction]:
        """No counter: nothing was sent, so nothing can land."""
        transfer = self._transfers.get(request_id)
        return [] if transfer is None else self._give_up(now, transfer, reason)

    def counter_reached(self, now: float, request_id: str) -> list[DecodeAction]:
        """Every page has landed exactly once, whatever else is under way: nothing more can land."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return []
        if transfer.phase is Phase.RESERVED and transfer.request.wants_sampled and transfer.said is None:
            transfer.enter(Phase.LANDED)
            return []
        return self._end(now, transfer, Outcome.COMPLETED, "")

    # --- Messages of P

    def sampled(self, now: float, peer: PeerId, message: Sampled) -> list[DecodeAction]:
        """SAMPLED: each source says it, and the first counts."""
        found = self._attempt(peer, message)
        if found is None or found[0].said is not None:
            return []
        transfer = found[0]
        transfer.said = message
        return self._end(now, transfer, Outcome.COMPLETED, "") if transfer.phase is Phase.LANDED else []

    def fail(self, now: float, peer: PeerId, message: Fail) -> list[DecodeAction]:
        """FAIL: P will not complete the transfer."""
        found = self._attempt(peer, message)
        if found is None:
            return []
        transfer, leg = found
        if leg.phase not in (LegPhase.RESERVED, LegPhase.CANCELLING):
            return []
        if transfer.phase is Phase.LANDED:
            return self._will_not_say(now, transfer, leg)
        reason = f"{message.code.value}: {message.message}"
        # Of two prompts D's is the true one: its client gets the answer.
        other_prompt = message.code is FailCode.PROMPT_MISMATCH
        if other_prompt or message.code is FailCode.STALE:
            transfer.outcome = Outcome.STALE
        elif message.code is FailCode.PREFILL_ABORTED and not transfer.failure:
            transfer.outcome = Outcome.CANCELLED  # its client left P first
        if not message.quiesced:
            # What comes of the fence must not give another reason.
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
        """CANCEL_ACK: P has stopped."""
        found = self._attempt(peer, message)
        if found is None or found[1].phase is not LegPhase.CANCELLING:
            return []
        transfer, leg = found
        if message.drained:
            return self._stopped(now, transfer, leg)
        return [Fence(peer, f"cancelled transfer {message.transfer_id} may still have writes in flight")]

    # --- Time and the end

    def tick(self, now: float) -> list[DecodeAction]:
        """Acts on every deadline that has come."""
        actions: list[DecodeAction] = []
        while (request_id := self._timers.pop_due(now)) is not None:
            transfer = self._transfers[request_id]
            if transfer.phase is Phase.LINGERING:
                actions += self._end_stopped(now, transfer)
                continue
            if not transfer.stopping:
                actions += self._give_up(now, transfer, f"not complete within {self._timeouts.transfer:g} s")
                continue
            transfer_id = transfer.request.transfer_id
            text = f"no CANCEL_ACK for transfer {transfer_id} within {self._timeouts.cancel:g} s"
            for leg in transfer.legs:
                if leg.phase is LegPhase.CANCELLING:
                    assert leg.peer is not None
                    actions.append(Fence(leg.peer, text))
        return actions

    def close(self, now: float) -> list[DecodeAction]:
        """D shuts down: every transfer is cancelled, and fails, since its pages have not all come."""
        actions: list[DecodeAction] = []
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
        """Not the token alone that P sampled."""
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
        """The transfers that wait for the engine at this address to be found."""
        looking = [one for one in self._transfers.values() if one.phase is Phase.LOOKING]
        return [transfer for transfer in looking if transfer.request.engine == address]

    def _missing(self, address: Address, ranks: Sequence[Rank]) -> list[DecodeAction]:
        has = {layer.name for rank in ranks for layer in rank.layout.layers}
        missing = [layer.name for layer in self._layout.layers if layer.name not in has]
        if not missing:
            return []
        text = (
            f"the prefill engine at {address} lacks {len(missing)} layers of a drafter, such as "
            f"{missing[0]}. Fewer drafts are right without them: start it with the same speculative decoding"
        )
        return [Log(logging.WARNING, text)]

    def _strided(self, address: Address, workers: Iterable[Draw]) -> list[DecodeAction]:
        found = scattered(workers)
        if found is None:
            return []
        writes, nbytes = found
        text = (
            f"prefill engine at {address}: pages arrive in up to {writes} writes per layer and block, of "
            f"{nbytes} bytes or more. For fewer writes use equal block sizes and a layout with heads first"
        )
        return [Log(logging.WARNING, text)]

    def _find(self, address: Address) -> list[DecodeAction]:
        self._engines[address] = _Engine()
        return [FindEngine(address)]

    def _forget(self, worker: Address) -> None:
        """A worker is not to be had: its engine may be another when it is."""
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

    def _attempt(self, peer: PeerId, message: Sampled | Fail | CancelAck) -> tuple[Reception, Leg] | None:
        """The part of a transfer that a message of ``peer`` is about, if it is under way with that peer."""
        transfer = self._transfers.get(self._attempts.get(message.attempt, ""))
        if transfer is None or transfer.request.transfer_id != message.transfer_id:
            return None
        leg = transfer.leg(peer)
        return None if leg is None else (transfer, leg)

    def _stage(self, now: float, transfer: Reception, workers: Mapping[Address, Draw]) -> list[DecodeAction]:
        """It is known of whom the transfer wants what."""
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
        """Once there is a session with each source."""
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
        """Not all pages will come, through that peer's fault if there is one. The first reason counts.

        Where all are here, it goes on without knowing what P sampled.
        """
        if transfer.phase is Phase.LANDED:
            return self._end(now, transfer, Outcome.COMPLETED, "")
        transfer.failure, transfer.failed = transfer.failure or reason, transfer.failed or peer
        if not transfer.stopping:
            transfer.enter(Phase.FAILING)
        actions = self._stop(now, transfer)
        # No source was asked, and one that gets RELEASE need not wait to be. It refuses D's other workers as
        # it does where a client left: they end as cancelled, after ABORT_LAG_S, and this worker reports the
        # cause. To save that second, P would have to tell this RELEASE from an abort's, which is the same.
        if transfer.since is None:
            for leg in transfer.legs:
                if (known := self._sessions.get(leg.address)) is not None:
                    actions.append(Send(known, Release(transfer.request.transfer_id, leg.draw.share)))
        return actions

    def _will_not_say(self, now: float, transfer: Reception, leg: Leg) -> list[DecodeAction]:
        """All pages are here, and of this source nothing will be heard of what was sampled."""
        leg.enter(LegPhase.STOPPED)
        if any(other.phase is LegPhase.RESERVED for other in transfer.legs):
            return []
        return self._end(now, transfer, Outcome.COMPLETED, "")

    def _stop(self, now: float, transfer: Reception) -> list[DecodeAction]:
        """Has every source stop that has not, and ends the transfer once all have."""
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
        elif LegPhase.CANCELLING not in phases:  # a fence has its own bound
            self._timers.clear(transfer.request.request_id)
        return actions

    def _stopped(self, now: float, transfer: Reception, leg: Leg) -> list[DecodeAction]:
        """Nothing of this source can land any more, and not everything has."""
        leg.enter(LegPhase.STOPPED)
        return self._stop(now, transfer)

    def _end_stopped(self, now: float, transfer: Reception) -> list[DecodeAction]:
        outcome = Outcome.CANCELLED if transfer.phase is Phase.ABORTED else transfer.outcome
        return self._end(now, transfer, outcome, transfer.failure)

    def _end(self, now: float, transfer: Reception, outcome: Outcome, reason: str) -> list[DecodeAction]:
        """The one place in which a transfer is forgotten and reported."""
        request, aborted = transfer.request, transfer.phase is Phase.ABORTED
        transfer.enter(Phase.OVER)
        del self._transfers[request.request_id]
        del self._attempts[transfer.attempt]
        self._timers.clear(request.request_id)
        seconds = 0.0 if transfer.since is None else now - transfer.since
        peer = transfer.failed if transfer.failed is not None or not transfer.legs else transfer.legs[0].peer
        ended = Ended(
            Role.DECODE, request.transfer_id, peer, outcome, reason, seconds, request_id=request.request_id
        )
        state = State.DONE if outcome is Outcome.COMPLETED else State.FAILED
        failed = not aborted and outcome is not Outcome.COMPLETED
        stale = outcome is Outcome.STALE
        token = None if transfer.said is None else transfer.said.token
        report = FinishedReceiving(request.request_id, failed, token, stale)
        last: list[DecodeAction] = [ended, _reached(request, state, reason), report]
        return last if transfer.since is None else [CloseCounter(request.request_id), *last]


def _reached(request: DecodeRequest, state: State, reason: str = "") -> Reached:
    return Reached(Role.DECODE, request.transfer_id, request.request_id, state, reason)
