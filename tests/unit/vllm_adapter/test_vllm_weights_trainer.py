"""The trainer as vLLM's trainer engine, with a client that is as strict as vLLM's worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from agent_setup import until
from weight_engines import WeightEngine, drawn

from kv_connector.protocol.timeouts import Timeouts
from kv_connector.vllm.weights.trainer import WriteImmTrainerEngine, WriteImmTrainerInitInfo
from kv_connector.weights.sources import TensorSource
from kv_connector.weights.update import PushError


class Client:
    def __init__(self, engine: WeightEngine) -> None:
        self._engine = engine
        self._updates = False
        self.finished: list[str | None] = []

    def start_weight_update(self) -> None:
        assert not self._updates, "a weight update is already active"
        self._updates = True

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self._updates
        self._engine.model._apply(0, info["version"])

    def finish_weight_update(self, version: str | None = None) -> None:
        assert self._updates
        self._updates = False
        self.finished.append(version)


@pytest.fixture
def engine() -> Iterator[WeightEngine]:
    engine = WeightEngine()
    yield engine
    engine.close()


def info(engine: WeightEngine) -> WriteImmTrainerInitInfo:
    return WriteImmTrainerInitInfo([str(engine.workers[0]._address)], rank=0, providers=("tcp",), timeout=60)


def test_init_info_passes_the_pusher_its_arguments(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "nics": ("mlx5_0",),
        "begin_timeout": 3.0,
        "timeouts": Timeouts(dead=7),
        "staging_bytes": 1 << 20,
    }
    seen: dict[str, object] = {}

    class Pusher:
        def __init__(self, *_: object, **named: object) -> None:
            seen.update(named)

        def connect(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr("kv_connector.vllm.weights.trainer.WeightPusher", Pusher)
    trainer = WriteImmTrainerEngine.trainer_init(
        replace(info(engine), **given), client=Client(engine), source=TensorSource(drawn(1))
    )
    trainer.shutdown()
    assert given.items() <= seen.items()


@pytest.mark.parametrize(
    ("engines", "timeout", "words"),
    [
        ("10.0.0.5:5801", 1.0, "engines is '10.0.0.5:5801'. Give a sequence of addresses"),
        ([], 1.0, "engines is"),
        (["10.0.0.5:5801"], 0.0, "timeout is 0.0. Give a positive number of seconds"),
    ],
)
def test_init_info_refuses_an_invalid_value(engines: object, timeout: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WriteImmTrainerInitInfo(engines, rank=0, timeout=timeout)  # type: ignore[arg-type]


def test_a_version_that_is_not_applied_is_not_in_the_way_of_the_next(engine: WeightEngine) -> None:
    client = Client(engine)
    trainer = WriteImmTrainerEngine.trainer_init(info(engine), client=client, source=TensorSource(drawn(1)))
    engine.model.broken, trainer._timeout = "no such tensor", 0.2
    with pytest.raises(PushError, match=r"not applied within 0\.2 s"):  # its log has the reason
        trainer.send_weights()
    engine.model.broken, trainer._timeout = "", 60.0
    trainer.send_weights()
    trainer.shutdown()
    assert client.finished == [None, "2"]
    assert engine.model.serves(1)


def test_one_that_does_not_connect_leaves_nothing_behind(
    engine: WeightEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    with monkeypatch.context() as patch:
        shut = WriteImmTrainerEngine.shutdown
        patch.setattr(WriteImmTrainerEngine, "shutdown", lambda self: closed.append(shut(self)))
        patch.setattr("kv_connector.weights.pusher.make_plan", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            WriteImmTrainerEngine.trainer_init(
                info(engine), client=Client(engine), source=TensorSource(drawn(1))
            )
    assert closed == [None]
    until(lambda: not engine.workers[0].state().senders)
