"""The copy of a model whose loaders are recorded: it shares no data with the model, and none of its loaders
write to the model."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kv_connector.weights.mapping.geometry import Constant, Geometry, Parameter, Tensor, Write
from kv_connector.weights.mapping.recorder import RecordError, record
from kv_connector.weights.mapping.shadow import ABSENT, Tensors, loadable, loaded_names, shadows_of


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        self.register_parameter("bias", None)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("angles", torch.zeros(2), persistent=False)
        self.loads = 0

    def load(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        self.loads += 1
        parameter.data.copy_(tensor)


class Model(torch.nn.Module):
    """Two layers that share a weight, and attributes that refer to layers and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.second.weight = self.first.weight
        self.norm = torch.nn.Parameter(torch.ones(3))
        self.layers = [self.first, self.second]
        self.by_name = {"first": self.first, "size": 4}
        self.sizes = {"size": 4}
        self.cached = dict(self.named_parameters())
        self.last = self.second

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameter = self.cached[name]
            getattr(parameter, "weight_loader", torch.Tensor.copy_)(parameter, tensor)


def tensors(module: torch.nn.Module) -> tuple[Tensors, Tensors]:
    return (
        {name: one for name, one in module._parameters.items() if one is not None},
        {name: one for name, one in module._buffers.items() if one is not None},
    )


def without_data(tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    made = torch.nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
    vars(made).update(vars(tensor))
    return made


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def shadow(model: Model) -> Model:
    shadow = shadows_of(model, tensors, without_data)[model]
    assert isinstance(shadow, Model)
    return shadow


def test_shadow_has_the_models_names_without_data(model: Model, shadow: Model) -> None:
    assert [*loadable(shadow)] == [*loadable(model)] == ["norm", "first.weight", "first.seen", "second.seen"]
    assert all(one.is_meta for one in loadable(shadow).values())
    assert shadow.first.bias is None
    assert shadow.first.weight is shadow.second.weight


def test_shadow_refers_to_its_own_modules_and_parameters(model: Model, shadow: Model) -> None:
    assert shadow.layers == [shadow.first, shadow.second]
    assert shadow.by_name == {"first": shadow.first, "size": 4}
    assert shadow.last is shadow.second
    assert shadow.sizes is model.sizes
    assert shadow.cached["norm"] is shadow.norm


def test_recorded_loaders_leave_the_model_alone(model: Model, shadow: Model) -> None:
    given = [Tensor("first.weight", "float32", (4,)), Tensor("norm", "float32", (3,))]
    geometry = record(shadow.load_weights, loadable(shadow), given)
    assert loaded_names(geometry, lambda name: loadable(shadow)[name].numel()) == {"first.weight", "norm"}
    assert (shadow.first.loads, model.first.loads) == (1, 0)
    assert torch.equal(model.first.weight, torch.ones(4))


def test_parameter_that_is_loaded_in_part_is_refused() -> None:
    geometry = Geometry(
        (Parameter("norm", "float32", 8),),
        (Write(0, 0, (0,), (3,), 0, (1,)),),
        (Constant(0, (2,), 3, (1,), 0.0),),
    )
    assert loaded_names(geometry, lambda _: 5) == {"norm"}
    with pytest.raises(RecordError, match=f"{ABSENT}: 3 of 8 elements of norm"):
        loaded_names(geometry, lambda _: 8)
