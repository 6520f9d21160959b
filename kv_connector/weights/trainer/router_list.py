"""RouterList: a router's list of the engines that take weights."""

from __future__ import annotations

import itertools
import logging
import time

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import Controllers, ControllersAre, MembershipSockets
from kv_connector.protocol.actions import Address, Source
from kv_connector.weights.wire.links import LinkError

logger = logging.getLogger("kv_connector")

# A router that has started answers after 3 s.
_ANSWER_S = 5.0
# Interval of queries. The first may be sent before the connection stands.
_REPEAT_S = 0.5
_SOON_S = 0.05


class NoEngines(LinkError):
    """The router knows no engine that takes weights."""


class RouterList:
    """The list of one router. One thread calls it."""

    def __init__(self, router: Address, key: ClusterKey | None) -> None:
        self._router = router
        self._sockets = MembershipSockets(key)
        self._link: Source | None = None
        self._numbers = itertools.count(1)

    def ask(self) -> list[Address]:
        """Returns the controllers of the engines that take weights. Blocks, for a few seconds at most.

        Raises NoEngines if the router has none of them, and LinkError if it does not answer.
        """
        if self._link is None:
            self._link = self._sockets.dial(self._router, patient=False)
        deadline = time.monotonic() + _ANSWER_S
        found: list[Address] = []
        question = Controllers(next(self._numbers))
        while True:
            answer = self._answer(self._link, question, deadline)
            if answer is None:
                # The next query uses a new connection: after a handshake with another key, ZMQ gives up the
                # old one.
                self._sockets.hang_up(self._link)
                self._link = None
                raise LinkError(
                    f"no router answers at {self._router} within {_ANSWER_S:g} s. Check that it is the "
                    "router's --registration address, and that both have the same cluster key"
                )
            found += [Address(one.host, one.port) for one in answer.controllers]
            if not answer.more:
                if not found:
                    raise NoEngines(self._why_none(answer.others))
                return found
            question = Controllers(next(self._numbers), answer.controllers[-1])

    def close(self) -> None:
        self._sockets.close()

    def _answer(self, link: Source, question: Controllers, deadline: float) -> ControllersAre | None:
        while (now := time.monotonic()) < deadline:
            sent = self._sockets.send(link, question)
            until = min(now + (_REPEAT_S if sent else _SOON_S), deadline)
            while (left := until - time.monotonic()) > 0:
                self._sockets.wait(left)
                for received in self._sockets.receive():
                    answer = received.message
                    # Each number is used once: a late answer to an earlier query is not an answer to this.
                    if isinstance(answer, ControllersAre) and answer.number == question.number:
                        return answer
        return None

    def _why_none(self, others: int) -> str:
        what = f"none of the engines of {others} API servers" if others else "no engine"
        return (
            f"{what} at the router {self._router} takes weights. Start engines with "
            "--weight-transfer-config and with the KV connector, whose setting `routers` names this router"
        )
