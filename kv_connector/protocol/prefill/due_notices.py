"""P's notices for decode engines that are short of blocks, sans-IO: from DEFER to DUE."""

from __future__ import annotations

from kv_connector.protocol.actions import PeerId, Send
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.timers import Timers
from kv_connector.protocol.wire.messages import Due


class DueNotices:
    """The transfers for which a D waits for DUE. Methods return the actions to execute, in order."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._waiting: dict[str, PeerId] = {}  # by transfer id
        self._timers: Timers[str] = Timers()
        """Deadlines of transfers whose request has not arrived."""

    def __len__(self) -> int:
        return len(self._waiting)

    def next_deadline(self) -> float | None:
        """The time at which tick() is due if nothing happens before."""
        return self._timers.next()

    def defer(self, now: float, peer: PeerId, transfer_id: str, *, arrived: bool) -> None:
        """Remembers that a D waits. ``arrived``: the request is known here, so its end cannot be missed."""
        self._waiting[transfer_id] = peer
        if not arrived:
            self._timers.set(transfer_id, now + self._timeouts.orphan)

    def arrived(self, transfer_id: str) -> None:
        """The request has reached P's scheduler."""
        self._timers.clear(transfer_id)

    def announce(self, transfer_id: str) -> list[Send]:
        """Sends DUE to the D that waits, if one does."""
        peer = self._waiting.get(transfer_id)
        self.drop(transfer_id)
        return [] if peer is None else [Send(peer, Due(transfer_id))]

    def drop(self, transfer_id: str) -> None:
        """D waits no more."""
        if self._waiting.pop(transfer_id, None) is not None:
            self._timers.clear(transfer_id)

    def peer_down(self, peer: PeerId) -> None:
        """Forgets all that this peer waits for."""
        for transfer_id in [one for one, waits in self._waiting.items() if waits == peer]:
            self.drop(transfer_id)

    def tick(self, now: float) -> list[Send]:
        """Sends DUE for requests that did not arrive in time. D's RESERVE then has its own time limit."""
        actions: list[Send] = []
        while (transfer_id := self._timers.pop_due(now)) is not None:
            actions += self.announce(transfer_id)
        return actions

    def close(self) -> list[Send]:
        """Sends DUE for all transfers. D learns from the answer to RESERVE that P shuts down."""
        return [action for transfer_id in list(self._waiting) for action in self.announce(transfer_id)]
