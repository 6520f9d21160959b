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


def test_engine_applies_a_version_when_the_earlier_ones_have(
    two: list[WeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    order: list[str] = []
    go_on = threading.Event()
    pause, label = first.model.pause, second.model.label

    async def slowly() -> None:
        await asyncio.to_thread(go_on.wait, PATIENCE_S)
        order.append("first")
        await pause()

    async def labelled(version: str) -> None:
        order.append("second")
        await label(version)

    monkeypatch.setattr(first.model, "pause", slowly)
    monkeypatch.setattr(second.model, "label", labelled)
    with pusher(two) as trainer:
        trainer.connect()
        for version in ("v1", "v2"):
            go_on.clear(), order.clear()
            update = trainer.push(version)
            update.wait("landed", PATIENCE_S)
            assert not second.state().landing, "it applies nothing yet"
            go_on.set()
            update.wait("applied", PATIENCE_S)
            assert order == ["first", "second"]
    assert all(engine.model.serves(1) for engine in two)


def test_engine_that_fails_has_had_its_turn(two: list[WeightEngine]) -> None:
    first, second = two
    first.model.no_pause = "the cache is in use"
    with pusher(two) as trainer:
        trainer.connect()
        with pytest.raises(PushError, match="the cache is in use") as failed:
            trainer.push("v1").wait("applied", PATIENCE_S)
        assert str(second.address) not in str(failed.value)
    assert second.served == ["v1"]


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
    assert second.served == [tmp_path.name]
    done = CliRunner().invoke(
        app, ["weights", "push", str(tmp_path), "--in-turn", "--router", "127.0.0.1:8500"]
    )
    assert done.exit_code == 2, done.output
    assert "--in-turn needs --engine" in done.output
