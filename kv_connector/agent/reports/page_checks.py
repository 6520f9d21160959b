"""Verified pages: who sums them, and what is counted and logged about the comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kv_connector.agent.interfaces import Summer
from kv_connector.agent.reports.ledger import Ledger
from kv_connector.agent.reports.links import PeerName
from kv_connector.protocol.actions import PagesChecked, PeerId, Share, SumPages
from kv_connector.protocol.decode.decode_machine import DecodeMachine
from kv_connector.protocol.decode.legs import DecodeAction
from kv_connector.protocol.prefill.prefill_machine import PrefillMachine
from kv_connector.protocol.prefill.shares import PrefillAction

logger = logging.getLogger("kv_connector")

# Reasons that are logged once. An engine's name is new at each start, so their number is limited.
_REMEMBERED = 1024

Summed = Sequence[PrefillAction | DecodeAction]
Command = Callable[[float], Summed]


class PageChecks:
    """Passes pages to the summer and sums to the machines, and reports the checks of this worker."""

    def __init__(
        self, name: str, summer: Summer, prefill: PrefillMachine, decode: DecodeMachine, ledger: Ledger
    ) -> None:
        """``name``: this worker's, for the log."""
        self._name = name
        self._summer = summer
        self._prefill = prefill
        self._decode = decode
        self._ledger = ledger
        self._warned: set[tuple[str, str]] = set()
        self.submit: Callable[[Command], None] = lambda command: None
        """Hands the agent's thread a command. Any thread may call it."""

    def act(self, action: SumPages | PagesChecked, name_of: Callable[[PeerId | None], PeerName]) -> None:
        """Has pages summed, or reports their check. The sums come as a command."""
        match action:
            case SumPages(owner, pages):
                self._summer.sum(
                    pages,
                    lambda sums, problem: self.submit(lambda now: self.summed(now, owner, sums, problem)),
                    lambda: self._wants_sums(owner),
                )
            case PagesChecked():
                self._report(action, name_of)

    def summed(self, now: float, owner: Share | int, sums: bytes, problem: str) -> Summed:
        """Passes the sums, or the reason why there are none, to the machine that wants them."""
        if isinstance(owner, Share):
            return self._prefill.pages_summed(now, owner, sums, problem)
        return self._decode.pages_summed(now, owner, sums, problem)

    def _wants_sums(self, owner: Share | int) -> bool:
        if isinstance(owner, Share):
            return self._prefill.wants_sums(owner)
        return self._decode.wants_sums(owner)

    def _report(self, checked: PagesChecked, name_of: Callable[[PeerId | None], PeerName]) -> None:
        self._ledger.checked(checked.pages, checked.corrupt, bool(checked.unverified))
        if checked.first is not None:
            logger.error(
                "CORRUPT PAGE: transfer %s of request %s from %s over %s to %s: %s",
                checked.transfer_id,
                checked.request_id,
                *name_of(checked.first.peer),
                self._name,
                checked.problem,
            )
        for session, reason in checked.unverified:
            peer = name_of(session)
            if (peer.name, reason) in self._warned:
                continue
            if len(self._warned) >= _REMEMBERED:
                self._warned.clear()
            self._warned.add((peer.name, reason))
            logger.warning("NOT VERIFIED: pages from %s over %s: %s", *peer, reason)
