"""A slow engine misses a version, and delays neither the trainer nor other engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner
from weight_engines import PATIENT, WeightEngine, WriterGate, drawn

from kv_connector.cli.main import app
from kv_connector.protocol.timeouts import Timeouts
from kv_connector.weights.pusher import WeightPusher, _Awaited
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.trainer.joining import TargetWorker, workers_of
from kv_connector.weights.trainer.version_news import WorkerNews
from kv_connector.weights.update import PushError

PATIENCE_S = 60
NEVER_S = 10 * PATIENCE_S


class SlowPause:
    """Delays an engine's pause until ``go_on``, as a prefill engine waits until its prompts are fetched."""

    def __init__(self, engine: WeightEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pausing, self.go_on = threading.Event(), threading.Event()
        pause = engine.model.pause

        async def slowly() -> None:
            self.pausing.set()
            await asyncio.to_thread(self.go_on.wait, NEVER_S)
            await pause()

        monkeypatch.setattr(engine.model, "pause", slowly)


@pytest.mark.parametrize("streaming", [False, True])
def test_push_leaves_an_engine_out_that_does_not_begin(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = engines = [WeightEngine(2, streaming=streaming) for _ in range(2)]
    pause = SlowPause(slow, monkeypatch)
    addresses = [str(engine.address) for engine in engines]
    try:
        with WeightPusher(
            TensorSource(drawn(1)),
            addresses,
            timeouts=replace(PATIENT, orphan=NEVER_S),
            begin_timeout=NEVER_S,
        ) as pusher:
            pusher.connect()
            wait_for = pusher._wait_for
            of_slow: Sequence[TargetWorker] = []

            def wait_while_quick_is_awaited(awaited: Mapping[TargetWorker, _Awaited]) -> list[WorkerNews]:
                if set(awaited) <= set(of_slow):
                    assert pause.pausing.wait(PATIENCE_S)
                    awaited = {worker: replace(one, due=0.0) for worker, one in awaited.items()}
                return wait_for(awaited)

            monkeypatch.setattr(pusher, "_wait_for", wait_while_quick_is_awaited)
            for version in ("v1", "v2", "v3"):
                if version != "v1" or streaming:
                    of_slow = pusher._engines[1].workers
                update = pusher.push(version)
                update._done["applied"][addresses[0]].result(PATIENCE_S)
                assert quick.served == [version, version]
                if version == "v1" and not streaming:
                    assert pause.pausing.wait(PATIENCE_S)
                    continue  # it has landed at both engines, and waits for the slow one's pause
                with pytest.raises(PushError, match=rf"not begun within {NEVER_S} s") as failed:
                    update.wait("applied", PATIENCE_S)
                assert addresses[0] not in str(failed.value)
            pause.go_on.set()
            of_slow = []
            pusher.push("v4").wait("applied", PATIENCE_S)
            assert quick.model.serves(1)
            assert slow.model.serves(1)
            assert slow.served == ["v4", "v4"]
    finally:
        pause.go_on.set()
        for engine in engines:
            engine.close()


def test_push_does_not_wait_for_the_rest_of_an_engine_that_lost_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker has discarded the version in favour of another sender's.

    The other one waits for it to be applied.
    """
    engine = WeightEngine(2, streaming=True)
    pause = SlowPause(engine, monkeypatch)
    threads = ThreadPoolExecutor(1)
    try:
        with WeightPusher(TensorSource(drawn(1)), [str(engine.address)], begin_timeout=NEVER_S) as pusher:
            pusher.connect()
            push = threads.submit(pusher.push, "v1")
            assert pause.pausing.wait(PATIENCE_S)
            lost, other = workers_of(pusher._engines)
            pusher._end(lost, "it has begun another version")
            with pytest.raises(PushError, match="it has begun another version"):
                push.result(PATIENCE_S).wait("applied", PATIENCE_S)
            assert other.link is not None
            assert other.link.over
            pause.go_on.set()
            pusher.push("v2").wait("applied", PATIENCE_S)
    finally:
        pause.go_on.set()
        threads.shutdown()
        engine.close()


def test_push_waits_for_an_engine_as_long_as_it_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of which one rank writes a checkpoint needs longer than KV may be reserved."""
    engine = WeightEngine(2)
    pause = SlowPause(engine, monkeypatch)
    orphan = 0.05
    try:
        with WeightPusher(
            TensorSource(drawn(1)),
            [str(engine.address)],
            timeouts=Timeouts(orphan=orphan),
            begin_timeout=NEVER_S,
        ) as pusher:
            pusher.connect()
            pusher.push("v1")
            wait_for = pusher._wait_for

            def late(awaited):  # type: ignore[no-untyped-def]
                threading.Timer(4 * orphan, pause.go_on.set).start()
                return wait_for(awaited)

            monkeypatch.setattr(pusher, "_wait_for", late)
            pusher.push("v2").wait("applied", PATIENCE_S)
        assert engine.served == ["v2", "v2"]
    finally:
        pause.go_on.set()
        engine.close()


@pytest.mark.parametrize("command", ["push", "bench"])
def test_timeout_bounds_writes_too(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens when the command gives up, or never."""
    gate, engine = WriterGate(), WeightEngine(2)
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    monkeypatch.setattr("kv_connector.weights.pusher.WeightPusher", gate.pusher)
    monkeypatch.setattr("kv_connector.cli.weights.threading.Timer", gate.timer)
    try:
        asked = ["weights", command, str(tmp_path), "--engine", str(engine.address), "--timeout", "60"]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 1, done.output
        assert "not done within 60 s (--timeout)" in done.output
        assert gate.begun.is_set()
        assert engine.served == ["", ""]
    finally:
        gate.go.set()
        engine.close()


def test_timeout_bounds_connecting_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that takes a long time to record the checkpoint."""
    go_on = threading.Event()
    engine = WeightEngine(1, load=lambda *given: go_on.wait(NEVER_S))  # type: ignore[arg-type, return-value]
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    try:
        asked = ["weights", "push", str(tmp_path), "--engine", str(engine.address), "--timeout", "1"]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 2, done.output
        assert "not done within 1 s (--timeout)" in done.output
    finally:
        go_on.set()
        engine.close()
