"""A worker without weights: the other end of the control connections of trainers and controllers."""

from __future__ import annotations

import queue

from kv_connector.control.sockets import Received
from kv_connector.protocol.actions import Address, Source
from kv_connector.weights.wire.loop import Loop
from kv_connector.weights.wire.messages import WeightMessage


class FakeWorker:
    """Listens at ``address``. Call close() once."""

    def __init__(self) -> None:
        self.got: queue.SimpleQueue[WeightMessage | None] = queue.SimpleQueue()
        """Messages that take() keeps for the test."""
        self.loop = Loop("worker", None)
        self.address = self.loop.sockets.bind(Address("127.0.0.1", 0))
        self.loop.start(self)

    def take(self, source: Source, message: WeightMessage | None) -> WeightMessage | None:
        """Takes a message. Returns the answer. None: no answer is sent."""
        raise NotImplementedError

    def received(self, now: float, received: Received[WeightMessage]) -> None:
        answer = self.take(received.source, received.message)
        if answer is not None:
            self.loop.sockets.send(received.source, answer)

    def readable(self, now: float) -> None:
        """Nothing is watched."""

    def tick(self, now: float) -> None:
        """Nothing is due."""

    def close(self) -> None:
        self.loop.stop()
