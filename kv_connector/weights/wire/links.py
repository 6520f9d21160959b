"""Links: a trainer's control connections. They carry queries and answers, carry news, and find lost peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.sockets import Received
from kv_connector.protocol.actions import Address, Source
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.protocol.wire.messages import clip
from kv_connector.protocol.wire.weight_version import shown
from kv_connector.weights.wire.loop import Loop
from kv_connector.weights.wire.messages import (
    Applied,
    Begun,
    Dropped,
    Leave,
    NotApplied,
    Ping,
    Pong,
    Ready,
    Refused,
    WeightMessage,
)

logger = logging.getLogger("kv_connector")

News = Ready | Begun | Applied | NotApplied | Dropped
"""Messages that arrive without a query."""


class LinkError(RuntimeError):
    """A worker or a controller refused a request, or does not answer.

    The message has its address and the reason.
    """


class RefusedError(LinkError):
    """It refused a request."""


@dataclass(eq=False)
class Link:
    """One connection that this side dialled. ``over``: the reason why it has ended."""

    address: Address
    source: Source
    last_seen: float
    asked: Future[WeightMessage] | None = None
    over: str = ""
    next_ping: float = 0.0
    sends: bool = False


@dataclass
class Links:
    """The control connections of a trainer. Any thread may call any method.

    ``heard`` and ``lost`` are called on the loop's thread.
    """

    key: ClusterKey | None
    timeouts: Timeouts
    heard: Callable[[Link, News], None]
    lost: Callable[[Link, str], None]
    clock: Callable[[], float] = time.monotonic  # the clock of received() and tick()
    _links: dict[Source, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = Loop("kvc-weights", self.key)
        self.loop.start(self)

    def dial(self, address: Address) -> Link:
        def dial() -> Link:
            source = self.loop.sockets.dial(address)
            link = self._links[source] = Link(address, source, self.clock())
            return link

        return self.loop.call(dial).result()

    def ask(self, link: Link, message: WeightMessage) -> Future[WeightMessage]:
        """Sends a query, one at a time.

        The future has the answer, or LinkError after a refusal or the link's end.
        """
        answer: Future[WeightMessage] = Future()

        def ask() -> None:
            if link.over:
                answer.set_exception(LinkError(f"{link.address}: {link.over}"))
                return
            assert link.asked is None, "it has not answered the last question"
            link.asked = answer
            self.loop.sockets.send(link.source, message)

        self.loop.call(ask).result()
        return answer

    def wait(self, answer: Future[WeightMessage], link: Link, timeout: float) -> WeightMessage:
        """Blocks until the answer is here. Ends a link that does not answer in time."""
        try:
            return answer.result(timeout)
        except TimeoutError:
            silent = f"no answer within {timeout:g} s: check that it runs, and has the same cluster key"
            self.end(link, silent)
            raise LinkError(f"{link.address}: {silent}") from None

    def tell(self, link: Link, message: WeightMessage) -> None:
        self.loop.call(lambda: self.loop.sockets.send(link.source, message))

    def end(self, link: Link, reason: str) -> None:
        """Ends the link and sends the reason to the peer. After close() all links have ended already."""
        with suppress(CancelledError):
            self.loop.call(lambda: self._end(link, reason)).result()

    def end_all(self, reason: str) -> None:
        def end_all() -> None:
            for link in list(self._links.values()):
                self._end(link, reason)

        with suppress(CancelledError):
            self.loop.call(end_all).result()

    def close(self) -> None:
        self.end_all("it closed the connection")
        self.loop.stop()

    # --- Called by the loop

    def received(self, now: float, received: Received[WeightMessage]) -> None:
        link = self._links.get(received.source)
        if link is None:
            return
        link.last_seen = now
        message = received.message
        match message:
            case None:
                self._lost(link, "it sent a malformed message")
            case Pong():
                pass
            case Leave():
                self._lost(link, message.reason or "it has left")
            case Dropped():
                self.heard(link, message)
                self._lost(link, f"version {shown(message.version)} was discarded: {message.reason}")
            case Ready() | Begun() | Applied() | NotApplied():
                self.heard(link, message)
            case Refused() if link.asked is None:
                self._lost(link, message.reason)
            case _ if link.asked is None:
                logger.debug("%s: unexpected answer %s", link.address, message)
            case Refused():
                answer, link.asked = link.asked, None
                answer.set_exception(RefusedError(f"{link.address}: {message.reason}"))
            case _:
                answer, link.asked = link.asked, None
                answer.set_result(message)

    def readable(self, now: float) -> None:
        del now

    def tick(self, now: float) -> float | None:
        for link in list(self._links.values()):
            if now - link.last_seen >= self.timeouts.dead and link.next_ping:
                self._lost(link, f"it was silent for {self.timeouts.dead:g} s")
            elif now >= link.next_ping > 0:
                link.next_ping = now + self.timeouts.heartbeat
                self.loop.sockets.send(link.source, Ping(link.sends))
        pings = [link.next_ping - now for link in self._links.values() if link.next_ping]
        return min(pings, default=None)

    def watch(self, link: Link, *, sends: bool = False) -> None:
        """Pings the link from now on.

        The link is lost if the peer is silent, or does not know this side as a sender.
        """

        def watch() -> None:
            link.last_seen = link.next_ping = self.clock()
            link.sends = sends

        self.loop.call(watch)

    def _lost(self, link: Link, reason: str) -> None:
        if not link.over:
            self._over(link, reason)
            self.lost(link, reason)

    def _end(self, link: Link, reason: str) -> None:
        if not link.over:
            self.loop.sockets.send(link.source, Leave(clip(reason)))
            self._over(link, reason)

    def _over(self, link: Link, reason: str) -> None:
        link.over = reason
        del self._links[link.source]
        self.loop.sockets.hang_up(link.source)
        if link.asked is not None:
            link.asked.set_exception(LinkError(f"{link.address}: {reason}"))
            link.asked = None


@contextmanager
def questions(key: ClusterKey | None, timeouts: Timeouts | None = None) -> Iterator[Links]:
    """Yields links for queries only: news and lost links are ignored."""
    links = Links(key, timeouts or Timeouts(), heard=lambda *_: None, lost=lambda *_: None)
    try:
        yield links
    finally:
        links.close()
