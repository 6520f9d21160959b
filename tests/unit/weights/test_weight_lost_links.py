"""Links between a trainer and a worker that break while others carry the weights: both sides log them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from agent_setup import until
from weight_engines import WeightEngine, drawn

from kv_connector.engine import LostLink
from kv_connector.engine.transfer_engine import TransferEngine
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource

PATIENCE_S = 60


def lose(engine: TransferEngine, peer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the transfer engine report a lost link to this peer, which has another link."""
    stats = replace(engine.stats(), links_lost=1)
    monkeypatch.setattr(engine, "stats", lambda: stats)
    lost = LostLink(peer, 1, 2, "mlx5_1", 1, False, "the cable is out")
    monkeypatch.setattr(engine, "lost_links", lambda: [lost])


def test_both_sides_log_a_lost_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kv_connector")
    monkeypatch.setattr("kv_connector.weights.worker.receiver._LOOK_S", 0.0)
    engine = WeightEngine(1)
    try:
        with WeightPusher(TensorSource(drawn(1)), [str(engine.address)], providers=("tcp",)) as pusher:
            pusher.connect()
            pusher.push("v1").wait("applied", PATIENCE_S)
            assert "LINK LOST" not in caplog.text
            (worker,) = pusher._engines[0].workers
            lose(pusher._engine, worker.peer, monkeypatch)
            ((sender, _),) = engine.workers[0]._peers.items()
            lose(engine.workers[0]._engine, sender, monkeypatch)
            pusher.push("v2").wait("applied", PATIENCE_S)
            for peer in (str(worker.address), "trainer/0"):
                line = f"LINK LOST: peer {peer}, lane tcp: 1 of 2 links are out: mlx5_1: the cable is out"
                until(lambda line=line: line in caplog.text)  # type: ignore[misc]
        assert engine.model.serves(1)
        until(lambda: not engine.workers[0]._peers)
    finally:
        engine.close()
