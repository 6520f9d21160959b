"""Logs the transfers that take long, each of them once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kv_connector.agent.reports.links import PeerName
from kv_connector.protocol.actions import PeerId, Share, UnderWay
from kv_connector.protocol.wire.messages import Role

logger = logging.getLogger("kv_connector")

# A transfer that is not over after this time gets a line in the log. That is far longer than the pages of a
# prefill of 100,000 tokens take on a working lane, and shorter than any deadline.
SLOW_S = 10.0


class SlowTransfers:
    """The transfers that were logged and are not over. Used by the agent's thread alone."""

    def __init__(
        self, name_of: Callable[[PeerId | None], PeerName], progress: Callable[[UnderWay], str]
    ) -> None:
        """``progress``: a text that says how much of a transfer has arrived."""
        self._name_of = name_of
        self._progress = progress
        self._reported: set[Share] = set()

    def report(self, now: float, under_way: Iterable[UnderWay]) -> None:
        """Logs one line for each of these transfers that takes long: its peer, lane and phase."""
        slow = {
            Share(one.transfer_id, one.share): one
            for one in under_way
            if one.since is not None and now - one.since >= SLOW_S
        }
        for share in slow.keys() - self._reported:
            one = slow[share]
            assert one.since is not None
            peer = self._name_of(one.peer)
            logger.warning(
                "SLOW: transfer %s%s %s %s, lane %s: %s for %.0f s, %s",
                share,
                f" of request {one.request_id}" if one.request_id else "",
                "to" if one.side is Role.PREFILL else "from",
                peer.name,
                peer.lane,
                one.phase,
                now - one.since,
                self._progress(one),
            )
        self._reported = set(slow)
