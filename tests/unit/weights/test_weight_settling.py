"""The waits for a GPU, which computes later than it is called, and for engines that copy beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kv_connector.protocol.actions import Address
from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.memory import arena, buffer
from kv_connector.weights.memory.arena import Arena
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.trainer import writer
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

GEOMETRY = Geometry((Parameter("w", "float32", 4),), (Write(0, 0, (0,), (4,), 0, (1,)),), ())


def test_weights_that_are_still_being_computed_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function settle stands for a GPU whose last step is complete once it is waited for."""
    weights = torch.zeros(4)
    monkeypatch.setattr(writer, "settle", lambda device: weights.fill_(7.0))

    def record(tensors: Sequence[Tensor]) -> Geometry:
        return GEOMETRY

    worker = WeightReceiver(ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",)), record)
    try:
        address = str(worker.start())
        with WeightPusher(TensorSource([("w", weights)]), [address], apply=lambda _: None) as pusher:
            pusher.connect()
            pusher.push("1").wait("landed", 60)
        assert [found["w"].tolist() for found in worker.take(worker.state().landed)] == [[7.0] * 4]
    finally:
        worker.close()


def test_zeros_of_a_buffer_are_written_before_a_peer_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device meta has no memory. It stands for a GPU."""
    settled: list[torch.device] = []
    monkeypatch.setattr(buffer, "settle", settled.append)
    buffer.Buffer("bucket", 1024, torch.device("meta"))
    assert settled == [torch.device("meta")]


def test_arena_is_cleared_before_any_peer_can_write_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: seen.append("filled"))
    monkeypatch.setattr(arena, "settle", lambda device: seen.append(f"settled {device}"))
    padded = Geometry(GEOMETRY.parameters, (), (Constant(0, (4,), 0, (1,), 0.0),))
    Arena(padded, torch.device("cpu")).clear(0)
    assert seen == ["filled", "settled cpu"]
