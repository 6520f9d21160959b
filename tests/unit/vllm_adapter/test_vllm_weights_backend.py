"""The backend for weights: an update that fails before it has written leaves the worker as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig

from kv_connector.vllm.internals import reload
from kv_connector.vllm.weights.backend import UpdateInfo, WriteImmWeightTransferEngine
from kv_connector.vllm.weights.loaded_model import LoadedModel

Contents = dict[str, torch.Tensor]


class Receiver:
    """A stand-in for a receiver in which rounds have landed."""

    def __init__(self, *rounds: Contents) -> None:
        self.rounds = rounds
        self.finished: list[tuple[str, bool]] = []

    def take(self, version: str) -> Iterator[Contents]:
        yield from self.rounds

    def finish(self, problem: str, *, torn: bool) -> None:
        self.finished.append((problem, torn))


def model() -> torch.nn.Sequential:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    reload.layerwise.record_metadata_for_reloading(made)
    for parameter in made.parameters():
        torch.nn.init.ones_(parameter)
    return made


def update(loaded: LoadedModel, *rounds: Contents) -> tuple[str, bool]:
    """Applies a version. Returns the problem, and whether the worker is torn."""
    engine: Any = object.__new__(WriteImmWeightTransferEngine)
    engine._name, engine._model, engine._receiver = "weights/0", loaded, Receiver(*rounds)
    engine.receive_weights(UpdateInfo("v1"))
    (found,) = engine._receiver.finished
    assert isinstance(found, tuple)
    return found


TWOS = {"0.weight": torch.full((4,), 2.0), "1.weight": torch.full((4,), 3.0)}


@pytest.mark.parametrize(
    "broken",
    [(reload.layerwise, "initialize_layerwise_reload"), (reload.meta, "materialize_layer")],
    ids=["begin", "room"],
)
def test_update_that_fails_before_it_writes_leaves_the_worker_whole(broken: tuple[Any, str]) -> None:
    served = model()
    loaded = LoadedModel(served, VllmConfig(), torch.device("cpu"))
    with mock.patch.object(*broken, side_effect=MemoryError("no room")):
        assert update(loaded, TWOS) == ("MemoryError: no room", False)
    assert all(bool((parameter == 1).all()) for parameter in served.parameters())
    assert update(loaded, TWOS) == ("", False)
    assert [float(parameter[0, 0]) for parameter in served.parameters()] == [2.0, 3.0]


def test_update_that_fails_behind_its_first_round_leaves_the_worker_torn() -> None:
    served = model()
    loaded = LoadedModel(served, VllmConfig(), torch.device("cpu"))
    first = {"0.weight": TWOS["0.weight"]}
    real = reload.meta.materialize_layer

    def materialize(module: torch.nn.Module, info: Any) -> None:
        if module is served[1]:
            raise MemoryError("no room")
        real(module, info)

    with mock.patch.object(reload.meta, "materialize_layer", materialize):
        assert update(loaded, first, {"1.weight": TWOS["1.weight"]}) == ("MemoryError: no room", True)
    assert [float(parameter[0, 0]) for parameter in served.parameters()] == [2.0, 1.0]
