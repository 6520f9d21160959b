"""The sessions of a release that knows only PROTOCOL_VERSION."""

from __future__ import annotations

from kv_connector.protocol.actions import Reply, Source
from kv_connector.protocol.session.peers import PeerTable
from kv_connector.protocol.session.sessions import PeersAction
from kv_connector.protocol.wire.messages import (
    AnyMessage,
    Defer,
    Hello,
    HelloNak,
    Locate,
    NakReason,
    Reserve,
    knows_defer,
)

from .books import Violation


class OlderPeers(PeerTable):
    """It refuses newer sessions, and cannot decode DEFER."""

    def receive(self, now: float, source: Source, message: AnyMessage) -> list[PeersAction]:
        if isinstance(message, Defer):
            raise Violation("an older engine got DEFER")
        if isinstance(message, Reserve) and message.wants_sums:
            raise Violation("an older engine got a RESERVE that it cannot decode")
        if isinstance(message, Hello) and knows_defer(message):
            raise Violation("an older engine got a newer HELLO, after it had refused a newer LOCATE")
        if isinstance(message, Locate) and knows_defer(message):
            return [Reply(source, HelloNak(NakReason.INCOMPATIBLE, "protocol: engines differ"))]
        return super().receive(now, source, message)
