"""Engines that apply a version one after another, in the order in which the pusher names them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner
from weight_engines import WeightEngine, drawn

from kv_connector.cli.main import app
from kv_connector.weights.mapping.plan import PlanError
from kv_connector.weights.pusher import WeightPusher
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.update import PushError

PATIENCE_S = 60


@pytest.fixture
def two() -> Iterator[list[WeightEngine]]:
    engines = [WeightEngine(2), WeightEngine(1)]
    yield engines
    for engine in engines:
        engine.close()


def pusher(engines: list[WeightEngine]) -> WeightPusher:
    return WeightPusher(TensorSource(drawn(1)), [str(engine.address) for engine in engines], in_turn=True)


class Pauses:
    """The order in which two engines pause. The first one does so when it may go on."""

    def __init__(self, engines: list[WeightEngine], monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        first, second = (engine.model.pause for engine in engines)

        async def slowly() -> None:
            self.begun.set()
            await asyncio.to_thread(self.go_on.wait, PATIENCE_S)
            self.order.append("first")
            await first()

        async def pause() -> None:
            self.order.append("second")
            await second()

        monkeypatch.setattr(engines[0].model, "pause", slowly)
        monkeypatch.setattr(engines[1].model, "pause", pause)


def test_engine_applies_a_version_when_the_earlier_ones_have(
    two: list[WeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses(two, monkeypatch)
    with pusher(two) as trainer:
        trainer.connect()
        for version in ("v1", "v2"):
            pauses.begun.clear(), pauses.go_on.clear(), pauses.order.clear()
            update = trainer.push(version)
            update.wait("landed", PATIENCE_S)
            assert pauses.begun.wait(PATIENCE_S)
            # An Apply that was sent with the first engine's one arrives before this question.
            assert two[1].state().served != version
            pauses.go_on.set()
            update.wait("applied", PATIENCE_S)
            assert pauses.order == ["first", "second"]
    assert all(engine.model.serves(1) for engine in two)


def test_engine_after_one_that_keeps_its_version_keeps_its_own(two: list[WeightEngine]) -> None:
    first, second = two
    with pusher(two) as trainer:
        trainer.connect()
        first.model.no_pause = "the cache is in use"
        with pytest.raises(PushError, match="the cache is in use") as failed:
            trainer.push("v1").wait("applied", PATIENCE_S)
        assert f"{second.address}: not requested to apply it: {first.address}, which" in str(failed.value)
        assert not {"v1"} & {*first.served, *second.served}
        first.model.no_pause = ""
        trainer.push("v2").wait("applied", PATIENCE_S)
    assert first.served[-1] == second.served[-1] == "v2"


@pytest.mark.parametrize("lost", [0, 1], ids=["applying", "waiting"])
def test_lost_worker_does_not_change_the_order(
    two: list[WeightEngine], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """The engine that applies the version goes on, and the one that waits for its turn does not begin."""
    pauses = Pauses(two, monkeypatch)
    with pusher(two) as trainer:
        trainer.connect()
        update = trainer.push("v1")
        update.wait("landed", PATIENCE_S)
        assert pauses.begun.wait(PATIENCE_S)
        link = trainer._engines[lost].workers[0].link
        assert link is not None
        trainer._news.lost(link, "cut by the test")
        two[1].state()  # an Apply that was sent now arrives before this question
        pauses.go_on.set()
        with pytest.raises(PushError, match="cut by the test"):
            update.wait("applied", PATIENCE_S)
        update._done["applied"][str(two[1 - lost].address)].result(PATIENCE_S)
    assert pauses.order == (["first", "second"] if lost == 0 else ["first"])


def test_engine_that_is_gone_has_had_its_turn() -> None:
    gone, second = WeightEngine(1), WeightEngine(1)
    try:
        with pusher([gone, second]) as trainer:
            trainer.connect()
            gone.close()
            with pytest.raises(PushError, match=str(gone.address)) as failed:
                trainer.push("v1").wait("applied", PATIENCE_S)
            assert str(second.address) not in str(failed.value)
        assert second.served == ["v1"]
    finally:
        second.close()


def test_turns_need_engines_that_hold_a_version() -> None:
    engine = WeightEngine(1, streaming=True)
    try:
        with pusher([engine]) as trainer, pytest.raises(PlanError, match="in_turn needs engines in mode"):
            trainer.connect()
    finally:
        engine.close()


def test_turns_need_named_engines() -> None:
    for other in ({"router": "127.0.0.1:8500"}, {"engines": ["127.0.0.1:5800"], "apply": print}):
        with pytest.raises(ValueError, match=r"in_turn needs engines\. Leave it out with router or apply"):
            WeightPusher(TensorSource(drawn(1)), in_turn=True, **other)  # type: ignore[arg-type]


def test_command_takes_turns(two: list[WeightEngine], tmp_path: Path) -> None:
    save_file(dict(drawn(1)), tmp_path / "model.safetensors")
    first, second = two
    first.model.no_pause = "the cache is in use"
    engines = [word for engine in two for word in ("--engine", str(engine.address))]
    done = CliRunner().invoke(app, ["weights", "push", str(tmp_path), "--in-turn", *engines])
    assert done.exit_code == 1, done.output
    assert "which is before it, has not" in done.output
    assert second.served[-1:] != [tmp_path.name]
    done = CliRunner().invoke(
        app, ["weights", "push", str(tmp_path), "--in-turn", "--router", "127.0.0.1:8500"]
    )
    assert done.exit_code == 2, done.output
    assert "--in-turn needs --engine" in done.output
