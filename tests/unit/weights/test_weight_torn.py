"""An engine whose workers have different versions stays paused until they have the same one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from agent_setup import until
from weight_engines import WeightEngine, drawn

from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.update import PushError
from kv_connector.weights.wire.messages import Begin, Ping

PATIENCE_S = 30


@pytest.fixture
def engine() -> Iterator[WeightEngine]:
    # No test here is about silence: a process that gets no time for seconds must not lose a version.
    engine = WeightEngine(2, timeouts=Timeouts(dead=PATIENCE_S, heartbeat=0.5))
    try:
        push(engine, "v0", 0)
        yield engine
    finally:
        engine.close()


def push(engine: WeightEngine, version: str, seed: int) -> None:
    with WeightPusher(TensorSource(drawn(seed)), [str(engine.address)]) as pusher:
        pusher.connect()
        pusher.push(version).wait("applied", PATIENCE_S)


def tear(engine: WeightEngine) -> None:
    """Gives worker 0 the version v1, and worker 1 half of it."""
    engine.model.broken, engine.model.broken_worker = "no room", 1
    with pytest.raises(PushError, match="no room"):
        push(engine, "v1", 1)
    engine.model.broken, engine.model.broken_worker = "", None
    assert engine.model.paused
    assert engine.served == ["v1", "v0"]


def test_a_torn_engine_stays_paused_when_the_next_pause_fails(engine: WeightEngine) -> None:
    """If it resumed, it would answer with the weights of two versions."""
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


def test_an_engine_that_is_whole_goes_on_when_its_pause_fails(engine: WeightEngine) -> None:
    engine.model.no_pause = "the cache could not be reset"
    with pytest.raises(PushError, match="could not be reset"):
        push(engine, "v1", 1)
    assert engine.model.serves(0)
    assert not engine.state().torn


def test_an_engine_that_cannot_report_its_version_stays_paused(engine: WeightEngine) -> None:
    """If it resumed, it would send KV of the new weights under the old version's name."""
    engine.model.no_label = "a worker does not answer"
    with pytest.raises(PushError, match=r"all workers have version v1.*a worker does not answer"):
        push(engine, "v1", 1)
    assert engine.model.paused
    assert engine.state().torn
    engine.model.no_label = ""
    push(engine, "v2", 2)
    assert engine.model.serves(2)
    assert engine.model.labels == ["v0", "v2"]


def test_a_version_is_held_for_an_engine_whose_pause_takes_long(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that does not wait begins the next version meanwhile, and dies.

    Its version takes longer than a silent controller holds a version. The engine goes on with a whole
    version.
    """
    pausing, go_on = threading.Event(), threading.Event()
    begun = [threading.Event() for _ in engine.workers]
    pings: list[list[bytes]] = [[] for _ in engine.workers]
    pause = engine.model.pause

    async def slowly() -> None:
        pausing.set()
        await asyncio.to_thread(go_on.wait, PATIENCE_S)
        await pause()

    monkeypatch.setattr(engine.model, "pause", slowly)
    for number, worker in enumerate(engine.workers):
        receive = worker._landing.receive

        def heard(now, source, message, number=number, receive=receive):  # type: ignore[no-untyped-def]
            actions = receive(now, source, message)
            if isinstance(message, Begin) and message.version.startswith("v2"):
                begun[number].set()
            if isinstance(message, Ping) and not message.sender:
                pings[number].append(source)
            return actions

        monkeypatch.setattr(worker._landing, "receive", heard)
    with WeightPusher(TensorSource(drawn(1)), [str(engine.address)]) as pusher:
        pusher.connect()
        first = pusher.push("v1")
        assert pausing.wait(PATIENCE_S)
        ends = threading.Thread(target=pusher.push, args=["v2"])
        ends.start()
        assert all(one.wait(PATIENCE_S) for one in begun)
        assert [worker._landing.state().landed for worker in engine.workers] == [first.identity] * 2
        pusher.cancel("the trainer dies")
        ends.join(PATIENCE_S)
        assert not ends.is_alive()
        go_on.set()
        until(lambda: engine.state().served == first.identity and not engine.model.paused)
    assert engine.model.serves(1)
    assert all(pings), "it is held by who is there"


def test_a_torn_engine_reports_what_ends_its_pause(engine: WeightEngine) -> None:
    """The trainer is gone, so that no other message reports it."""
    engine.model.broken, engine.model.broken_worker = "no room", 1
    with pytest.raises(PushError, match="stays paused until a whole version is pushed or seeded to it"):
        push(engine, "v1", 1)
    assert "no room" in engine.state().problem


def test_an_engine_whose_update_fails_altogether_reports_why(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(version: str) -> None:
        raise RuntimeError(f"no worker answers for {version}")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "update", fails)
        with pytest.raises(PushError, match="stays paused until"):
            push(engine, "v1", 1)
    assert engine.state().torn
    assert "no worker answers" in engine.state().problem
    push(engine, "v2", 2)
    assert engine.model.serves(2)
