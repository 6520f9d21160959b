"""D's loads that wait for a notice of P, sans-IO: D is short of blocks, and P has not begun with the prompt.

A load holds no blocks meanwhile, and goes through these phases:

    phase    waits for                                       next
    LOOKING  P's directory, or a session with a worker of P  NOTED, over
    NOTED    DUE                                             over

It ends in one PromptDue, unless the engine withdraws it. The engine then reserves as soon as it has blocks.
Every failure ends it too, because the reservation that follows reports the failure. So does a P of an older
release, which knows no DEFER.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kv_connector.protocol.actions import Address, Dial, Log, PeerId, PromptDue, Send
from kv_connector.protocol.decode.borrowing import LocatedEngine
from kv_connector.protocol.decode.legs import DecodeAction
from kv_connector.protocol.plans.sources import Draw
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.messages import Defer, Due, id_problem


@dataclass
class _Deferred:
    transfer_id: str
    engine: Address
    worker: Address | None = None
    """The worker of P that gets DEFER. None: P is not located yet."""
    peer: PeerId | None = None
    """The session over which DEFER was sent. None: LOOKING."""


class Deferring:
    """All deferred loads of one worker. Every method returns the actions to execute, in order."""

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
        self._deferred: dict[str, _Deferred] = {}  # by transfer id
        self._announcing: set[PeerId] = set()
        """Sessions whose P knows DEFER."""
        self._timers: Timers[str] = Timers()

    def __len__(self) -> int:
        """Number of deferred loads."""
        return len(self._deferred)

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return self._timers.next()

    # --- The engine

    def defer(self, now: float, transfer_id: str, engine: Address) -> list[DecodeAction]:
        """The load gets no blocks until its prompt is about to be computed. PromptDue answers."""
        if transfer_id in self._deferred:
            return []
        deferred = _Deferred(transfer_id, engine)
        if id_problem(transfer_id) is not None:  # the reservation reports it
            return [PromptDue(transfer_id)]
        self._deferred[transfer_id] = deferred
        # After this time the engine reserves as without DEFER. So no fault of P can hold the request forever.
        self._timers.set(transfer_id, now + self._timeouts.transfer)
        located = self._engines.get(engine)
        if located is None:
            return self._find(engine)
        return [] if located.workers is None else self._send(deferred, located.workers)

    def withdraw(self, transfer_id: str) -> None:
        """The engine reserves or releases the transfer. P learns it from that."""
        if self._deferred.pop(transfer_id, None) is not None:
            self._timers.clear(transfer_id)

    def close(self) -> list[DecodeAction]:
        """Shuts down: no load waits any more."""
        return self._end(list(self._deferred.values()))

    # --- P

    def engine_found(self, engine: Address, workers: Mapping[Address, Draw]) -> list[DecodeAction]:
        """P at this address has these workers."""
        actions: list[DecodeAction] = []
        for deferred in self._looking():
            if deferred.engine == engine and deferred.worker is None:
                actions += self._send(deferred, workers)
        return actions

    def engine_not_found(self, engine: Address) -> list[DecodeAction]:
        """No engine answered at this address, it refused this engine, or its layout does not fit."""
        return self._end([one for one in self._looking() if one.engine == engine and one.worker is None])

    def peer_up(self, worker: Address, peer: PeerId, announces: bool) -> list[DecodeAction]:
        """A session with this worker is up. ``announces``: it knows DEFER."""
        if announces:
            self._announcing.add(peer)
        actions: list[DecodeAction] = []
        for deferred in self._looking():
            if deferred.worker == worker:
                actions += self._note(deferred, peer)
        return actions

    def dial_failed(self, worker: Address) -> list[DecodeAction]:
        """No session with this worker will be made."""
        return self._end([deferred for deferred in self._looking() if deferred.worker == worker])

    def peer_down(self, peer: PeerId) -> list[DecodeAction]:
        """The session is over."""
        self._announcing.discard(peer)
        return self._end([deferred for deferred in self._deferred.values() if deferred.peer == peer])

    def due(self, peer: PeerId, message: Due) -> list[DecodeAction]:
        """Handles DUE."""
        deferred = self._deferred.get(message.transfer_id)
        return [] if deferred is None or deferred.peer != peer else self._end([deferred])

    # --- Time

    def tick(self, now: float) -> list[DecodeAction]:
        """Acts on every deadline that has passed."""
        actions: list[DecodeAction] = []
        while (transfer_id := self._timers.pop_due(now)) is not None:
            deferred, limit = self._deferred[transfer_id], self._timeouts.transfer
            text = f"transfer {transfer_id}: {deferred.engine} did not begin with its prompt in {limit:g} s"
            actions += [Log(logging.INFO, text), *self._end([deferred])]
        return actions

    # --- Steps

    def _looking(self) -> list[_Deferred]:
        return [deferred for deferred in self._deferred.values() if deferred.peer is None]

    def _send(self, deferred: _Deferred, workers: Mapping[Address, Draw]) -> list[DecodeAction]:
        """Sends DEFER to one of the workers from which this one draws, now or once there is a session."""
        worker = next((address for address, draw in workers.items() if draw.plan is not None), None)
        if worker is None:
            return self._end([deferred])
        deferred.worker = worker
        peer = self._sessions.get(worker)
        if peer is not None:
            return self._note(deferred, peer)
        draw = workers[worker]
        return [Dial(deferred.engine, worker, draw.wants, draw.layout)]

    def _note(self, deferred: _Deferred, peer: PeerId) -> list[DecodeAction]:
        if peer not in self._announcing:
            return self._end([deferred])
        deferred.peer = peer
        return [Send(peer, Defer(deferred.transfer_id))]

    def _end(self, ended: list[_Deferred]) -> list[DecodeAction]:
        for deferred in ended:
            self.withdraw(deferred.transfer_id)
        return [PromptDue(deferred.transfer_id) for deferred in ended]
