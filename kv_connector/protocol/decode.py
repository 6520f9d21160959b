"""D's side of every transfer, sans-IO: from blocks waiting to be filled to exactly one report.

The pages come from one prefill peer or from several, each of which has some of the layers. With each of them
a transfer has a leg:

    STAGED      the request waits for sessions with all its sources
    RESERVED    RESERVE is sent: pages may land from now on
    CANCELLING  CANCEL is sent: waits for CANCEL_ACK (or for the last page, whichever comes first)
    FENCING     the peer is being fenced: waits until none of its writes can land
    STOPPED     nothing of this peer can land any more, and not everything has

One counter tells when all pages have come. Where one leg fails, or the request is aborted, all are stopped.
Blocks and the counter are handed back only when nothing can land in them any more: all pages have come, or
every peer said that nothing is in flight, or is fenced. A failed transfer is reported as failed, an aborted
one is not.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

import msgspec

from kv_connector.protocol.actions import (
    Address,
    CloseCounter,
    Dial,
    Ended,
    Fence,
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
from kv_connector.protocol.layout import KvLayout
from kv_connector.protocol.messages import Cancel, CancelAck, Fail, Release, Reserve, Role, id_problem
from kv_connector.protocol.plan import expected_pages, sources_problem, targets_problem
from kv_connector.protocol.prompt_hash import PROMPT_HASH_BYTES
from kv_connector.protocol.requests import DecodeRequest, Source
from kv_connector.protocol.timers import Timeouts, Timers

DecodeAction = Send | Fence | Ended | Reached | Log | Dial | OpenCounter | CloseCounter | FinishedReceiving


class _Phase(enum.Enum):
    STAGED = enum.auto()
    RESERVED = enum.auto()
    CANCELLING = enum.auto()
    FENCING = enum.auto()
    STOPPED = enum.auto()


@dataclass
class _Leg:
    """One source's part of a transfer."""

    source: Source
    peer: PeerId | None = None  # STAGED: there is no session yet
    phase: _Phase = _Phase.STAGED


@dataclass
class _Transfer:
    request: DecodeRequest
    attempt: int
    deadline: float
    legs: tuple[_Leg, ...]
    counting: bool = False  # its counter is allocated
    since: float = 0.0  # when RESERVE was sent
    stopping: bool = False  # not every page will come
    aborted: bool = False
    failure: str = ""  # why it is being stopped, unless it was aborted
    failed: PeerId | None = None  # the source that is to blame for it

    def leg(self, peer: PeerId) -> _Leg | None:
        return next((leg for leg in self.legs if leg.peer == peer), None)

    @property
    def first(self) -> _Leg:
        """The one to tell of, of several: what is still under way."""
        return next((leg for leg in self.legs if leg.phase is not _Phase.STOPPED), self.legs[0])


class DecodeMachine:
    """All transfers of one decode worker. Every method returns what to do, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._transfers: dict[str, _Transfer] = {}  # by request id
        self._attempts: dict[int, str] = {}  # attempt -> request id
        self._sessions: dict[Address, PeerId] = {}
        self._layers: dict[PeerId, tuple[int, ...]] = {}  # that each peer has
        self._releases: dict[Address, list[Release]] = {}  # to be sent once the session is there
        self._timers: Timers[str] = Timers()
        self._next_attempt = 1

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
        return [
            UnderWay(
                Role.DECODE,
                transfer.request.transfer_id,
                transfer.request.request_id,
                transfer.first.peer,
                transfer.first.phase.name.lower(),
                transfer.deadline - self._timeouts.transfer,
            )
            for transfer in list(self._transfers.values())  # in one step
        ]

    # --- D's engine

    def reserve(self, now: float, request: DecodeRequest) -> list[DecodeAction]:
        """The request has its blocks and wants its pages."""
        if request.request_id in self._transfers:
            return [Log(logging.ERROR, f"request {request.request_id} is already being received")]
        legs = tuple(_Leg(source, self._sessions.get(source.address)) for source in request.sources)
        transfer = _Transfer(request, self._next_attempt, now + self._timeouts.transfer, legs)
        # 32 bits on the wire; an attempt that old was fenced long before.
        self._next_attempt = self._next_attempt % 0xFFFFFFFF + 1
        self._transfers[request.request_id] = transfer
        self._attempts[transfer.attempt] = request.request_id
        problem = id_problem(request.transfer_id) or self._problem(request)
        if problem is not None:
            return self._end(now, transfer, Outcome.FAILED, problem)
        self._timers.set(request.request_id, transfer.deadline)
        dials: list[DecodeAction] = [Dial(leg.source.address) for leg in legs if leg.peer is None]
        return dials or self._open(now, transfer)

    def cancel(self, now: float, request_id: str) -> list[DecodeAction]:
        """The request was aborted: its blocks come back as soon as nothing can land in them."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.aborted:
            return []
        transfer.aborted = True
        if transfer.stopping:
            return []
        actions = self._stop(now, transfer)
        if not transfer.counting:  # no source was asked
            for leg in transfer.legs:
                actions += self.release(now, transfer.request.transfer_id, leg.source)
        return actions

    def release(self, now: float, transfer_id: str, source: Source) -> list[DecodeAction]:
        """D needs nothing of this transfer: P may free its blocks. Best effort, P's hold time ends it too."""
        problem = id_problem(transfer_id)
        if problem is not None:
            return [Log(logging.WARNING, f"nothing to release at {source.address}: {problem}")]
        message = Release(transfer_id, source.share)
        peer = self._sessions.get(source.address)
        if peer is not None:
            return [Send(peer, message)]
        self._releases.setdefault(source.address, []).append(message)
        return [Dial(source.address)]

    # --- The session

    def admit(self, peer: PeerId, layers: tuple[int, ...]) -> str | None:
        """A prefill peer says which layers of ours it has: None, or the reason why that cannot be."""
        if len(set(layers)) < len(layers) or not all(layer < len(self._layout.layers) for layer in layers):
            return f"it claims layers {layers} of {len(self._layout.layers)}"
        self._layers[peer] = layers
        return None

    def peer_up(self, now: float, address: Address, peer: PeerId) -> list[DecodeAction]:
        """There is a session with this address, and ``peer`` was admitted."""
        self._sessions[address] = peer
        actions: list[DecodeAction] = [Send(peer, message) for message in self._releases.pop(address, ())]
        for transfer, leg in self._awaiting(address):
            leg.peer = peer
            if all(other.peer is not None for other in transfer.legs):
                actions += self._open(now, transfer)
        return actions

    def dial_failed(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """There will be no session: refused, or nobody answered."""
        self._releases.pop(address, None)
        actions: list[DecodeAction] = []
        for transfer, _ in self._awaiting(address):
            actions += self._give_up(now, transfer, reason)
        return actions

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[DecodeAction]:
        """The session is over, its fence is under way: ``fenced`` follows."""
        self._sessions = {address: known for address, known in self._sessions.items() if known != peer}
        self._layers.pop(peer, None)
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            leg = transfer.leg(peer)
            if leg is None or leg.phase is _Phase.STOPPED:
                continue
            if leg.phase is not _Phase.STAGED:  # else it was not asked for anything
                leg.phase = _Phase.FENCING
            actions += self._give_up(now, transfer, reason, peer)
        return actions

    def fenced(self, now: float, peer: PeerId) -> list[DecodeAction]:
        """No write of that peer can land any more."""
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            leg = transfer.leg(peer)
            if leg is not None and leg.phase is _Phase.FENCING:
                actions += self._stopped(now, transfer, leg)
        return actions

    # --- The counter

    def counter_opened(self, now: float, request_id: str, immediate: int) -> list[DecodeAction]:
        """The counter exists, so pages may come."""
        transfer = self._transfers.get(request_id)
        if transfer is None:  # a source was lost in the meantime
            return [CloseCounter(request_id)]
        transfer.counting = True
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
        )
        actions: list[DecodeAction] = [_reached(request, State.MOVING)]
        for leg in transfer.legs:
            assert leg.peer is not None
            leg.phase = _Phase.RESERVED
            own = msgspec.structs.replace(reserve, share=leg.source.share, shares=leg.source.shares)
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
        return self._end(now, transfer, Outcome.COMPLETED, "")

    # --- Messages of P

    def fail(self, now: float, peer: PeerId, message: Fail) -> list[DecodeAction]:
        """FAIL: P will not complete the transfer."""
        found = self._attempt(peer, message)
        if found is None:
            return []
        transfer, leg = found
        if leg.phase not in (_Phase.RESERVED, _Phase.CANCELLING):
            return []
        reason = f"{message.code.value}: {message.message}"
        if not message.quiesced:
            # What comes of the fence must not give another reason.
            transfer.failure, transfer.failed = transfer.failure or reason, transfer.failed or peer
            return [Fence(peer, f"transfer {message.transfer_id} failed with writes in flight: {reason}")]
        leg.phase = _Phase.STOPPED
        return self._give_up(now, transfer, reason, peer)

    def cancel_ack(self, now: float, peer: PeerId, message: CancelAck) -> list[DecodeAction]:
        """CANCEL_ACK: P has stopped."""
        found = self._attempt(peer, message)
        if found is None or found[1].phase is not _Phase.CANCELLING:
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
            if not transfer.stopping:
                actions += self._give_up(now, transfer, f"not complete within {self._timeouts.transfer:g} s")
                continue
            transfer_id = transfer.request.transfer_id
            text = f"no CANCEL_ACK for transfer {transfer_id} within {self._timeouts.cancel:g} s"
            for leg in transfer.legs:
                if leg.phase is _Phase.CANCELLING:
                    assert leg.peer is not None
                    actions.append(Fence(leg.peer, text))
        return actions

    def close(self, now: float) -> list[DecodeAction]:
        """D shuts down: every transfer is cancelled, and fails, since its pages have not all come."""
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            if not transfer.stopping:
                actions += self._give_up(now, transfer, "the decode engine is shutting down")
        return actions

    # --- Steps

    def _problem(self, request: DecodeRequest) -> str | None:
        addresses = [source.address for source in request.sources]
        if not addresses or len(set(addresses)) < len(addresses):
            return f"pages come from one or more different prefill engines, not from {addresses}"
        length = PROMPT_HASH_BYTES if request.prompt_hash is None else len(request.prompt_hash)
        if length != PROMPT_HASH_BYTES:
            return f"a prompt hash has {PROMPT_HASH_BYTES} bytes, this one {length}"
        return targets_problem(self._layout, request.groups, request.prompt_tokens)

    def _awaiting(self, address: Address) -> list[tuple[_Transfer, _Leg]]:
        """The transfers that wait for a session with this address."""
        return [
            (transfer, leg)
            for transfer in self._transfers.values()
            for leg in transfer.legs
            if leg.source.address == address and leg.peer is None
        ]

    def _attempt(self, peer: PeerId, message: Fail | CancelAck) -> tuple[_Transfer, _Leg] | None:
        """The part of a transfer that a message of ``peer`` is about, if it is under way with that peer."""
        transfer = self._transfers.get(self._attempts.get(message.attempt, ""))
        if transfer is None or transfer.request.transfer_id != message.transfer_id:
            return None
        leg = transfer.leg(peer)
        return None if leg is None else (transfer, leg)

    def _open(self, now: float, transfer: _Transfer) -> list[DecodeAction]:
        """There is a session with each source."""
        request = transfer.request
        peers = tuple(leg.peer for leg in transfer.legs if leg.peer is not None)
        problem = sources_problem(self._layout, [self._layers[peer] for peer in peers])
        if problem is not None:
            return self._give_up(now, transfer, problem)
        return [OpenCounter(peers, request.request_id, expected_pages(self._layout, request.groups))]

    def _give_up(
        self, now: float, transfer: _Transfer, reason: str, peer: PeerId | None = None
    ) -> list[DecodeAction]:
        """Not all pages will come, through that peer's fault if there is one. The first reason counts."""
        transfer.failure, transfer.failed = transfer.failure or reason, transfer.failed or peer
        actions = self._stop(now, transfer)
        if not transfer.counting:  # no source was asked, and those that hear it need not wait to be
            for leg in transfer.legs:
                if leg.source.address in self._sessions:
                    actions += self.release(now, transfer.request.transfer_id, leg.source)
        return actions

    def _stop(self, now: float, transfer: _Transfer) -> list[DecodeAction]:
        """Has every source stop that has not, and ends the transfer once all have."""
        transfer.stopping = True
        actions: list[DecodeAction] = []
        for leg in transfer.legs:
            if leg.phase is _Phase.STAGED:
                leg.phase = _Phase.STOPPED
            elif leg.phase is _Phase.RESERVED:
                assert leg.peer is not None
                leg.phase = _Phase.CANCELLING
                cancel = Cancel(transfer.request.transfer_id, transfer.attempt, leg.source.share)
                actions.append(Send(leg.peer, cancel))
        phases = {leg.phase for leg in transfer.legs}
        if phases == {_Phase.STOPPED}:
            outcome = Outcome.CANCELLED if transfer.aborted else Outcome.FAILED
            return self._end(now, transfer, outcome, transfer.failure)
        if actions:
            self._timers.set(transfer.request.request_id, now + self._timeouts.cancel)
        elif _Phase.CANCELLING not in phases:  # a fence has its own bound
            self._timers.clear(transfer.request.request_id)
        return actions

    def _stopped(self, now: float, transfer: _Transfer, leg: _Leg) -> list[DecodeAction]:
        """Nothing of this source can land any more, and not everything has."""
        leg.phase = _Phase.STOPPED
        return self._stop(now, transfer)

    def _end(self, now: float, transfer: _Transfer, outcome: Outcome, reason: str) -> list[DecodeAction]:
        """The one place in which a transfer is forgotten and reported."""
        request = transfer.request
        del self._transfers[request.request_id]
        del self._attempts[transfer.attempt]
        self._timers.clear(request.request_id)
        seconds = now - transfer.since if transfer.counting else 0.0
        peer = transfer.failed if transfer.failed is not None or not transfer.legs else transfer.legs[0].peer
        ended = Ended(Role.DECODE, request.transfer_id, peer, outcome, reason, seconds)
        state = State.DONE if outcome is Outcome.COMPLETED else State.FAILED
        report = FinishedReceiving(request.request_id, failed=outcome is Outcome.FAILED)
        last: list[DecodeAction] = [ended, _reached(request, state, reason), report]
        return [CloseCounter(request.request_id), *last] if transfer.counting else last


def _reached(request: DecodeRequest, state: State, reason: str = "") -> Reached:
    return Reached(Role.DECODE, request.transfer_id, request.request_id, state, reason)
