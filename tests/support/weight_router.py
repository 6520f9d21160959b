"""A router that lists engines which take weights, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Self

from kv_connector.control.cluster_key import ClusterKey
from kv_connector.control.membership import (
    PAGE,
    ControllerAddress,
    Controllers,
    ControllersAre,
    MembershipSockets,
)
from kv_connector.lab.free_ports import free_ports
from kv_connector.protocol.actions import Address


class WeightRouter:
    """The router. ``listed``: the controllers that it lists. ``others``: servers of engines without one."""

    def __init__(self, listed: Iterable[Address] = (), *, key: ClusterKey | None = None) -> None:
        self.listed, self.others = list(listed), 0
        self.address = Address("127.0.0.1", free_ports(1)[0])
        self._sockets = MembershipSockets(key)
        self._sockets.bind(self.address)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ending.is_set():
            self._sockets.wait(0.02)
            for received in self._sockets.receive():
                question = received.message
                assert isinstance(question, Controllers)
                left = sorted(
                    one
                    for one in (ControllerAddress(listed.host, listed.port) for listed in self.listed)
                    if question.after is None or one > question.after
                )
                answer = ControllersAre(question.number, tuple(left[:PAGE]), len(left) > PAGE, self.others)
                self._sockets.send(received.source, answer)
        self._sockets.close()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
