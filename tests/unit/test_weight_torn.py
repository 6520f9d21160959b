"""An engine whose workers have not all one version stays paused, whatever happens, until they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weight_engines import Engine, drawn

from kv_connector.weights.pusher import PushError, WeightPusher
from kv_connector.weights.sources import TensorSource

PATIENCE_S = 30


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(2)
    try:
        push(engine, "v0", 0)
        yield engine
    finally:
        engine.close()


def push(engine: Engine, version: str, seed: int) -> None:
    with WeightPusher(TensorSource(drawn(seed)), [str(engine.address)]) as pusher:
        pusher.connect()
        pusher.push(version).wait("applied", PATIENCE_S)


def tear(engine: Engine) -> None:
    """Worker 0 has v1, worker 1 a half of it."""
    engine.model.broken, engine.model.broken_worker = "no room", 1
    with pytest.raises(PushError, match="no room"):
        push(engine, "v1", 1)
    engine.model.broken, engine.model.broken_worker = "", None
    assert engine.model.paused
    assert engine.served == ["v1", "v0"]


def test_a_torn_engine_stays_paused_when_the_next_pause_fails(engine: Engine) -> None:
    """A resumed one would answer with the weights of two versions."""
    tear(engine)
    engine.model.no_pause = "the cache could not be reset"
    with pytest.raises(PushError, match="could not be reset"):
        push(engine, "v2", 2)
    assert engine.model.paused
    assert engine.state().torn
    engine.model.no_pause = ""
    push(engine, "v3", 3)
    assert engine.model.serves(3)
    assert not engine.state().torn


def test_an_engine_that_is_whole_goes_on_when_its_pause_fails(engine: Engine) -> None:
    engine.model.no_pause = "the cache could not be reset"
    with pytest.raises(PushError, match="could not be reset"):
        push(engine, "v1", 1)
    assert engine.model.serves(0)
    assert not engine.state().torn


def test_an_engine_that_cannot_report_its_version_stays_paused(engine: Engine) -> None:
    """It would send KV of the new weights under the old version's name."""
    engine.model.no_label = "a worker does not answer"
    with pytest.raises(PushError, match=r"all workers have version v1.*a worker does not answer"):
        push(engine, "v1", 1)
    assert engine.model.paused
    assert engine.state().torn
    engine.model.no_label = ""
    push(engine, "v2", 2)
    assert engine.model.serves(2)
    assert engine.model.labels == ["v0", "v2"]
