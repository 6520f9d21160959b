"""Aliases: engines that the router's options list under another URL than they register."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from urllib.parse import urlsplit

from kv_connector.router.engines.members import Members

logger = logging.getLogger(__name__)

_PORTS = {"http": 80, "https": 443}
_THIS_HOST = "this host"

Listener = tuple[str, int]
"""Address and port of an API server. The address of any interface of this host is _THIS_HOST."""


class Aliases:
    """Warns once of each pair of URLs. Used from the event loop's thread only.

    Such an engine counts as two engines: its requests are counted at two places, and what it reports at one.
    The router does not merge the two, because a listed name may be that of a load balancer.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._known: dict[str, frozenset[Listener]] = {}
        """Addresses of URLs. A URL whose name has no address is resolved again at each look."""
        self._reported: set[tuple[str, str]] = set()

    async def look(self) -> None:
        """Compares the URLs of engines that are listed and do not register with those that register."""
        engines = list(self._members.engines(time.monotonic()))
        registered = {one.endpoint.url for one in engines if one.silence is not None}
        listed = {one.endpoint.url for one in engines} - registered
        if not listed or not registered:
            return
        urls = listed | registered
        self._known = {url: known for url, known in self._known.items() if url in urls}
        for url in urls - self._known.keys():
            if found := await _listeners(url):
                self._known[url] = found
        at = {one: url for url in registered for one in self._known.get(url, ())}
        pairs = {(url, at[one]) for url in listed for one in self._known.get(url, ()) if one in at}
        for url, other in sorted(pairs - self._reported):
            # A name may have another address by now.
            now = {one: await _listeners(one) for one in (url, other)}
            self._known.update(now)
            if not now[url] & now[other]:
                pairs.remove((url, other))
                continue
            words = "an engine is listed as %s and registers as %s, so it counts as two: list %s instead"
            logger.warning(words, url, other, other)
        self._reported = pairs


async def _listeners(url: str) -> frozenset[Listener]:
    """Returns the addresses to which the router connects for this URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    try:
        port = parts.port or _PORTS[parts.scheme]
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no such port, or no such name
        return frozenset()
    hosts = {(family, str(address[0])) for family, _, _, _, address in found}
    return frozenset((_THIS_HOST if _is_here(*one) else one[1], port) for one in hosts)


def _is_here(family: int, host: str) -> bool:
    """Returns whether the address belongs to an interface of this host."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
