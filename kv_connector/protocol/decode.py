"""D's side of every transfer, sans-IO: from blocks waiting to be filled to exactly one report.

    STAGED      the request waits for a session with its prefill peer
    RESERVED    RESERVE is sent: pages may land from now on
    CANCELLING  CANCEL is sent: waits for CANCEL_ACK (or for the last page, whichever comes first)
    FENCING     the peer is being fenced: waits until none of its writes can land

Blocks and the counter are handed back only when nothing can land in them any more: all pages have come, or P
said that nothing is in flight, or the peer is fenced. A failed transfer is reported as failed, an aborted
one is not.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

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
from kv_connector.protocol.plan import expected_pages, targets_problem
from kv_connector.protocol.prompt_hash import PROMPT_HASH_BYTES
from kv_connector.protocol.requests import DecodeRequest
from kv_connector.protocol.timers import Timeouts, Timers

DecodeAction = Send | Fence | Ended | Reached | Log | Dial | OpenCounter | CloseCounter | FinishedReceiving


class _Phase(enum.Enum):
    STAGED = enum.auto()
    RESERVED = enum.auto()
    CANCELLING = enum.auto()
    FENCING = enum.auto()


@dataclass
class _Transfer:
    request: DecodeRequest
    attempt: int
    deadline: float
    phase: _Phase = _Phase.STAGED
    peer: PeerId | None = None
    counting: bool = False  # its counter is allocated
    since: float = 0.0  # when RESERVE was sent
    aborted: bool = False
    failure: str = ""  # why the transfer is being stopped, unless it was aborted


class DecodeMachine:
    """All transfers of one decode worker. Every method returns what to do, in order."""

    def __init__(self, layout: KvLayout, timeouts: Timeouts) -> None:
        self._layout = layout
        self._timeouts = timeouts
        self._transfers: dict[str, _Transfer] = {}  # by request id
        self._attempts: dict[int, str] = {}  # attempt -> request id
        self._sessions: dict[Address, PeerId] = {}
        self._releases: dict[Address, list[str]] = {}  # transfer ids to release once the session is there
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
                transfer.peer,
                transfer.phase.name.lower(),
                transfer.deadline - self._timeouts.transfer,
            )
            for transfer in list(self._transfers.values())  # in one step
        ]

    # --- D's engine

    def reserve(self, now: float, request: DecodeRequest) -> list[DecodeAction]:
        """The request has its blocks and wants its pages."""
        if request.request_id in self._transfers:
            return [Log(logging.ERROR, f"request {request.request_id} is already being received")]
        transfer = _Transfer(request, self._next_attempt, now + self._timeouts.transfer)
        # 32 bits on the wire; an attempt that old was fenced long before.
        self._next_attempt = self._next_attempt % 0xFFFFFFFF + 1
        self._transfers[request.request_id] = transfer
        self._attempts[transfer.attempt] = request.request_id
        problem = id_problem(request.transfer_id) or self._problem(request)
        if problem is not None:
            return self._end(now, transfer, Outcome.FAILED, problem)
        self._timers.set(request.request_id, transfer.deadline)
        peer = self._sessions.get(request.peer)
        if peer is None:
            return [Dial(request.peer)]
        return self._open(transfer, peer)

    def cancel(self, now: float, request_id: str) -> list[DecodeAction]:
        """The request was aborted: its blocks come back as soon as nothing can land in them."""
        transfer = self._transfers.get(request_id)
        if transfer is None or transfer.aborted:
            return []
        transfer.aborted = True
        request = transfer.request
        if transfer.phase is _Phase.STAGED:
            ended = self._end(now, transfer, Outcome.CANCELLED, "")
            return [*ended, *self.release(now, request.transfer_id, request.peer)]
        if transfer.phase is _Phase.RESERVED:
            return self._cancel(now, transfer)
        return []

    def release(self, now: float, transfer_id: str, address: Address) -> list[DecodeAction]:
        """D needs nothing of this transfer: P may free its blocks. Best effort, P's hold time ends it too."""
        problem = id_problem(transfer_id)
        if problem is not None:
            return [Log(logging.WARNING, f"nothing to release at {address}: {problem}")]
        peer = self._sessions.get(address)
        if peer is not None:
            return [Send(peer, Release(transfer_id))]
        self._releases.setdefault(address, []).append(transfer_id)
        return [Dial(address)]

    # --- The session

    def peer_up(self, now: float, address: Address, peer: PeerId) -> list[DecodeAction]:
        """There is a session with this address now."""
        self._sessions[address] = peer
        actions: list[DecodeAction] = [
            Send(peer, Release(transfer_id)) for transfer_id in self._releases.pop(address, ())
        ]
        for transfer in self._staged(address):
            actions += self._open(transfer, peer)
        return actions

    def dial_failed(self, now: float, address: Address, reason: str) -> list[DecodeAction]:
        """There will be no session: refused, or nobody answered."""
        self._releases.pop(address, None)
        actions: list[DecodeAction] = []
        for transfer in self._staged(address):
            actions += self._end(now, transfer, Outcome.FAILED, reason)
        return actions

    def peer_down(self, now: float, peer: PeerId, reason: str) -> list[DecodeAction]:
        """The session is over, its fence is under way: ``fenced`` follows."""
        self._sessions = {address: known for address, known in self._sessions.items() if known != peer}
        for transfer in self._transfers.values():
            if transfer.peer == peer and transfer.phase is not _Phase.FENCING:
                transfer.phase = _Phase.FENCING
                transfer.failure = transfer.failure or reason
                self._timers.clear(transfer.request.request_id)
        return []

    def fenced(self, now: float, peer: PeerId) -> list[DecodeAction]:
        """No write of that peer can land any more."""
        actions: list[DecodeAction] = []
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            actions += self._stopped(now, transfer)
        return actions

    # --- The counter

    def counter_opened(self, now: float, request_id: str, immediate: int) -> list[DecodeAction]:
        """The counter exists, so pages may come."""
        transfer = self._transfers[request_id]
        transfer.counting = True
        transfer.phase = _Phase.RESERVED
        transfer.since = now
        request = transfer.request
        assert transfer.peer is not None
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
        return [_reached(request, State.MOVING), Send(transfer.peer, reserve)]

    def counter_failed(self, now: float, request_id: str, reason: str) -> list[DecodeAction]:
        """No counter: nothing was sent, so nothing can land."""
        return self._end(now, self._transfers[request_id], Outcome.FAILED, reason)

    def counter_reached(self, now: float, request_id: str) -> list[DecodeAction]:
        """Every page has landed exactly once, whatever else is under way: nothing more can land."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return []
        return self._end(now, transfer, Outcome.COMPLETED, "")

    # --- Messages of P

    def fail(self, now: float, peer: PeerId, message: Fail) -> list[DecodeAction]:
        """FAIL: P will not complete the transfer."""
        transfer = self._attempt(peer, message)
        if transfer is None or transfer.phase is _Phase.FENCING:
            return []
        reason = f"{message.code.value}: {message.message}"
        transfer.failure = transfer.failure or reason
        if message.quiesced:
            return self._stopped(now, transfer)
        return [Fence(peer, f"transfer {message.transfer_id} failed with writes in flight: {reason}")]

    def cancel_ack(self, now: float, peer: PeerId, message: CancelAck) -> list[DecodeAction]:
        """CANCEL_ACK: P has stopped."""
        transfer = self._attempt(peer, message)
        if transfer is None or transfer.phase is not _Phase.CANCELLING:
            return []
        if message.drained:
            return self._stopped(now, transfer)
        return [Fence(peer, f"cancelled transfer {message.transfer_id} may still have writes in flight")]

    # --- Time and the end

    def tick(self, now: float) -> list[DecodeAction]:
        """Acts on every deadline that has come."""
        actions: list[DecodeAction] = []
        while (request_id := self._timers.pop_due(now)) is not None:
            transfer = self._transfers[request_id]
            transfer_id = transfer.request.transfer_id
            if transfer.phase is _Phase.CANCELLING:
                assert transfer.peer is not None
                text = f"no CANCEL_ACK for transfer {transfer_id} within {self._timeouts.cancel:g} s"
                actions.append(Fence(transfer.peer, text))
                continue
            actions += self._give_up(now, transfer, f"not complete within {self._timeouts.transfer:g} s")
        return actions

    def close(self, now: float) -> list[DecodeAction]:
        """D shuts down: every transfer is cancelled, and fails, since its pages have not all come."""
        actions: list[DecodeAction] = []
        for transfer in list(self._transfers.values()):
            actions += self._give_up(now, transfer, "the decode engine is shutting down")
        return actions

    # --- Steps

    def _problem(self, request: DecodeRequest) -> str | None:
        length = PROMPT_HASH_BYTES if request.prompt_hash is None else len(request.prompt_hash)
        if length != PROMPT_HASH_BYTES:
            return f"a prompt hash has {PROMPT_HASH_BYTES} bytes, this one {length}"
        return targets_problem(self._layout, request.groups, request.prompt_tokens)

    def _staged(self, address: Address) -> list[_Transfer]:
        return [t for t in self._transfers.values() if t.phase is _Phase.STAGED and t.request.peer == address]

    def _attempt(self, peer: PeerId, message: Fail | CancelAck) -> _Transfer | None:
        """The transfer that a message of ``peer`` is about, if it is under way with that peer."""
        transfer = self._transfers.get(self._attempts.get(message.attempt, ""))
        if transfer is None or transfer.peer != peer or transfer.request.transfer_id != message.transfer_id:
            return None
        return transfer

    def _open(self, transfer: _Transfer, peer: PeerId) -> list[DecodeAction]:
        transfer.peer = peer
        pages = expected_pages(self._layout, transfer.request.groups)
        return [OpenCounter(peer, transfer.request.request_id, pages)]

    def _give_up(self, now: float, transfer: _Transfer, reason: str) -> list[DecodeAction]:
        """Stops a transfer that nobody aborted; one that is being stopped already goes on as it does."""
        if transfer.phase is _Phase.STAGED:
            return self._end(now, transfer, Outcome.FAILED, reason)
        if transfer.phase is not _Phase.RESERVED:
            return []
        transfer.failure = reason
        return self._cancel(now, transfer)

    def _cancel(self, now: float, transfer: _Transfer) -> list[DecodeAction]:
        assert transfer.peer is not None
        transfer.phase = _Phase.CANCELLING
        self._timers.set(transfer.request.request_id, now + self._timeouts.cancel)
        return [Send(transfer.peer, Cancel(transfer.request.transfer_id, transfer.attempt))]

    def _stopped(self, now: float, transfer: _Transfer) -> list[DecodeAction]:
        """Nothing can land any more, and not everything has."""
        outcome = Outcome.CANCELLED if transfer.aborted else Outcome.FAILED
        return self._end(now, transfer, outcome, transfer.failure)

    def _end(self, now: float, transfer: _Transfer, outcome: Outcome, reason: str) -> list[DecodeAction]:
        """The one place in which a transfer is forgotten and reported."""
        request = transfer.request
        del self._transfers[request.request_id]
        del self._attempts[transfer.attempt]
        self._timers.clear(request.request_id)
        seconds = now - transfer.since if transfer.counting else 0.0
        ended = Ended(Role.DECODE, request.transfer_id, transfer.peer, outcome, reason, seconds)
        state = State.DONE if outcome is Outcome.COMPLETED else State.FAILED
        report = FinishedReceiving(request.request_id, failed=outcome is Outcome.FAILED)
        last: list[DecodeAction] = [ended, _reached(request, state, reason), report]
        return [CloseCounter(request.request_id), *last] if transfer.counting else last


def _reached(request: DecodeRequest, state: State, reason: str = "") -> Reached:
    return Reached(Role.DECODE, request.transfer_id, request.request_id, state, reason)
