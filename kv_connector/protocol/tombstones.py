"""What a prefill worker remembers of transfers that are over, for messages that come late."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_connector.protocol.actions import Outcome, PeerId
from kv_connector.protocol.messages import FailCode

# 100 transfers a second for ten minutes, twice the default deadline of a transfer, in about 20 MB.
MAX_TOMBSTONES = 1 << 16


@dataclass(frozen=True)
class Verdict:
    """How a transfer ended: what a late message about it is told."""

    outcome: Outcome
    code: FailCode
    text: str
    served: tuple[tuple[PeerId, int], ...]  # the peers and attempts that know already
    quiesced: bool = True  # nothing of those attempts can land any more


class Tombstones:
    """Verdicts by transfer id, forgotten by age and, in need, by number."""

    def __init__(self, lifetime: float) -> None:
        """``lifetime``: seconds after which no message about a transfer can come any more."""
        self._lifetime = lifetime
        self._verdicts: OrderedDict[str, tuple[float, Verdict]] = OrderedDict()  # oldest first

    def bury(self, now: float, transfer_id: str, verdict: Verdict) -> None:
        """Remembers the verdict, instead of an earlier one."""
        self._verdicts.pop(transfer_id, None)
        self._verdicts[transfer_id] = (now, verdict)
        self.forget(now)

    def get(self, transfer_id: str) -> Verdict | None:
        """The verdict on a transfer, if it is remembered."""
        known = self._verdicts.get(transfer_id)
        return None if known is None else known[1]

    def forget(self, now: float) -> None:
        """Drops what is too old, and the oldest of what is too much."""
        while self._verdicts:
            transfer_id, (buried, _) = next(iter(self._verdicts.items()))
            if now - buried < self._lifetime and len(self._verdicts) <= MAX_TOMBSTONES:
                return
            del self._verdicts[transfer_id]
