"""Ranks that write nothing and workers that load nothing delay no other rank or worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from weight_engines import WeightEngine, drawn, expected

from kv_connector.protocol.actions import Address
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.mapping.geometry import Geometry, Parameter, Write
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import Held, TensorSource
from kv_connector.weights.update import PushError
from kv_connector.weights.worker.receiver import ReceiverConfig, WeightReceiver

GEOMETRY = Geometry((Parameter("w", "float32", 4),), (Write(0, 0, (0,), (4,), 0, (1,)),), ())
PATIENCE_S = 30


class Ranks:
    """Two ranks, as threads."""

    def __init__(self) -> None:
        self.said: list[object] = [None, None]
        self.barrier = threading.Barrier(2)


class Rank(TensorSource):
    """A rank of the trainer. The first rank has all tensors."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        super().__init__([("w", torch.ones(4))])
        self.rank, self._ranks = rank, ranks

    def held(self) -> Sequence[Held]:
        return [] if self.rank else super().held()

    def exchange(self, value: object) -> list[object]:
        self._ranks.said[self.rank] = value
        self._ranks.barrier.wait(PATIENCE_S)
        said = list(self._ranks.said)
        self._ranks.barrier.wait(PATIENCE_S)
        return said


def test_a_rank_that_writes_nothing_is_not_held_up() -> None:
    worker = WeightReceiver(ReceiverConfig("worker", Address("127.0.0.1", 0), ("tcp",)), lambda _: GEOMETRY)
    engine, ranks = str(worker.start()), Ranks()

    def push(rank: int) -> None:
        with WeightPusher(Rank(rank, ranks), [engine], apply=lambda _: None) as pusher:
            pusher.connect()
            update = pusher.push("1")
            update.wait("landed", PATIENCE_S)
            if rank:
                update.wait("applied", 0)

    try:
        with ThreadPoolExecutor(2) as pool:
            for pushed in [pool.submit(push, rank) for rank in range(2)]:
                pushed.result()
    finally:
        worker.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_worker_that_loads_nothing_takes_the_version_with_the_others(streaming: bool) -> None:
    """If only some layers are pushed, pipeline stages are such workers. No rank waits for ``orphan``."""
    engine = WeightEngine(2, streaming=streaming, idle=[0])
    try:
        long = Timeouts(orphan=10 * PATIENCE_S)
        engines, lost = [str(engine.address)], ["up", "down"]  # the idle worker has their other half
        with WeightPusher(TensorSource(drawn(1)), engines, timeouts=long, partial=lost) as pusher:
            pusher.connect()
            for version in ("v1", "v2"):
                pusher.push(version).wait("applied", PATIENCE_S)
                assert engine.served == [version, version]
        assert engine.model.weights[0] == {}
        assert torch.equal(engine.model.weights[1]["up"], expected(1, 2)[1]["up"])
    finally:
        engine.close()


def test_connect_refuses_an_engine_that_would_load_nothing() -> None:
    engine = WeightEngine(2, idle=[0, 1])
    try:
        with (
            WeightPusher(TensorSource(drawn(1)), [str(engine.address)]) as pusher,
            pytest.raises(PushError, match=f"{engine.address} would load none of the 3 tensors"),
        ):
            pusher.connect()
    finally:
        engine.close()
