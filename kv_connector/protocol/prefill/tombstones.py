"""The ends of transfers that a prefill worker remembers, for late messages."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_connector.protocol.actions import Outcome, PeerId
from kv_connector.protocol.wire.messages import FailCode

# 100 transfers a second for ten minutes, twice the default deadline of a transfer, in about 20 MB.
MAX_TOMBSTONES = 1 << 16


@dataclass(frozen=True)
class RecordedEnd:
    """The end of a transfer, with which a late message about it is answered."""

    outcome: Outcome
    code: FailCode
    text: str
    served: tuple[tuple[PeerId, int], ...]  # the peers and attempts that have received it already
    quiesced: bool = True  # whether nothing of those attempts can land any more


class Tombstones:
    """Verdicts by transfer id. They are forgotten by age, and by number if there are too many."""

    def __init__(self, lifetime: float) -> None:
        """``lifetime``: time after which no message about a transfer can arrive any more, in seconds."""
        self._lifetime = lifetime
        self._verdicts: OrderedDict[str, tuple[float, RecordedEnd]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        """Number of remembered verdicts."""
        return len(self._verdicts)

    def bury(self, now: float, transfer_id: str, verdict: RecordedEnd) -> None:
        """Remembers the verdict, and replaces an earlier one."""
        self._verdicts.pop(transfer_id, None)
        self._verdicts[transfer_id] = (now, verdict)
        self.forget(now)

    def get(self, transfer_id: str) -> RecordedEnd | None:
        """The verdict on a transfer, or None."""
        known = self._verdicts.get(transfer_id)
        return None if known is None else known[1]

    def forget(self, now: float) -> None:
        """Drops verdicts that are too old, and the oldest ones if there are too many."""
        while self._verdicts:
            transfer_id, (buried, _) = next(iter(self._verdicts.items()))
            if now - buried < self._lifetime and len(self._verdicts) <= MAX_TOMBSTONES:
                return
            del self._verdicts[transfer_id]
