"""Counts and logs the links to peers that break and return while the peer has other links.

The transfer engine writes no log. A peer with fewer links is slower, and nothing else shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from kv_connector.agent.interfaces import LinkPort
from kv_connector.engine import LostLink

logger = logging.getLogger("kv_connector")

# Peers with a line of their own in one look. A dead NIC costs every peer a link at once, and the remaining
# peers share one more line.
_LINES = 8


class PeerName(NamedTuple):
    """The name and the lane of a peer of the transfer engine."""

    name: str
    lane: str


class LinkWatch:
    """Compares the transfer engine's links with those of the last look. One thread calls look(), and any
    thread reads the counts."""

    def __init__(self, engine: LinkPort) -> None:
        self._engine = engine
        self._seen: dict[tuple[int, int], LostLink] = {}  # by peer and link
        self.lost = 0
        """Links lost while their peer had others, since the start."""
        self.restored = 0
        """Lost links that are up again, since the start."""
        self.out = 0
        """Links to connected peers that are lost and not restored."""

    def look(self, names: Mapping[int, PeerName]) -> None:
        """Logs at most one line for each peer whose links have changed. ``names``: the sessions' peers, by
        their id in the transfer engine. Blocks for one turn of the transfer thread, if a link was ever lost.
        Raises TransferError if the transfer engine is closed."""
        stats = self._engine.stats()
        self.lost, self.restored = stats.links_lost, stats.links_restored
        if not self.lost:
            return
        links = sorted(self._engine.lost_links())
        lines = []
        for peer, group in groupby(links, key=lambda link: link.peer):
            line = self._change(names.get(peer, PeerName(f"number {peer}", "-")), list(group))
            if line is not None:
                lines.append(line)
        for level, text in lines[:_LINES]:
            logger.log(level, "%s", text)
        if more := lines[_LINES:]:
            level = max(level for level, _ in more)
            logger.log(level, "LINK LOST or RESTORED: links of %d more peers changed as well", len(more))
        self._seen = {(link.peer, link.link): link for link in links}
        self.out = sum(not link.up for link in links)

    def _change(self, peer: PeerName, links: Sequence[LostLink]) -> tuple[int, str] | None:
        """The log level and text for the changes of one peer. None: no change."""
        lost = [link for link in links if link.times_lost > self._times_lost(link)]
        returned = [link for link in links if link.up and self._was_out(link)]
        out = sum(not link.up for link in links)
        where = f"peer {peer.name}, lane {peer.lane}"
        if lost:
            reasons = "; ".join(f"{link.domain}: {link.reason}" for link in lost)
            now = f"{out} of {links[0].links} links are out" if out else "all links are up again"
            return logging.WARNING, f"LINK LOST: {where}: {now}: {reasons}"
        if returned:
            devices = ", ".join(link.domain for link in returned)
            now = f"{out} of {links[0].links} links are still out" if out else f"all {links[0].links} are up"
            return logging.INFO, f"LINK RESTORED: {where}: {devices}: {now}"
        return None

    def _times_lost(self, link: LostLink) -> int:
        seen = self._seen.get((link.peer, link.link))
        return 0 if seen is None else seen.times_lost

    def _was_out(self, link: LostLink) -> bool:
        seen = self._seen.get((link.peer, link.link))
        return seen is not None and not seen.up
