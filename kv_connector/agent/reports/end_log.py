"""The log line of a transfer that ended without its pages."""

from __future__ import annotations

import logging

from kv_connector.agent.reports.links import PeerName
from kv_connector.protocol.actions import Ended, Outcome, Share
from kv_connector.protocol.wire.messages import Role

logger = logging.getLogger("kv_connector")

# Many of these occur where clients leave or a fleet is updated, and nothing is wrong with the transfers.
_USUAL = (Outcome.STALE, Outcome.CANCELLED)


def log_end(ended: Ended, peer: PeerName | None) -> None:
    """Logs the end. ``peer``: None if no peer was involved, or its session is forgotten."""
    where = "that no decode engine requested" if ended.side is Role.PREFILL else "without a session"
    if peer is not None:
        where = f"{'to' if ended.side is Role.PREFILL else 'from'} {peer.name} over {peer.lane}"
    logger.log(
        logging.INFO if ended.outcome in _USUAL else logging.WARNING,
        "transfer %s%s %s: %s: %s",
        Share(ended.transfer_id, ended.share),
        f" of request {ended.request_id}" if ended.request_id else "",
        where,
        ended.outcome.value,
        ended.reason or "the decode engine aborted its request",
    )
