"""Shadow: a copy of a model's modules without data. Its loaders are recorded in place of the model's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from kv_connector.weights.mapping.geometry import Geometry
from kv_connector.weights.mapping.recorder import RecordError

ABSENT = "not in the checkpoint"

Tensors = Mapping[str, torch.Tensor]
"""Tensors of a module, by the module's names of them."""


def shadows_of(
    model: torch.nn.Module,
    before_loading: Callable[[torch.nn.Module], tuple[Tensors, Tensors]],
    without_data: Callable[[torch.Tensor, torch.nn.Module], torch.Tensor],
) -> dict[torch.nn.Module, torch.nn.Module]:
    """Returns a copy of each module of the model, by module. The copies refer to each other.

    Changes by loaders to the copies do not reach the model.

    ``before_loading``: gives the parameters and buffers of a module in the form that its loaders fill.
    ``without_data``: gives such a tensor of a module on meta, with the attributes that loaders read.
    """
    modules = list(model.modules())
    shadows = {module: _empty_copy(module) for module in modules}
    # Attributes that are modules or parameters of the model, such as the owners of loaders.
    replaced: dict[int, Any] = {id(module): shadow for module, shadow in shadows.items()}
    shared: dict[int, torch.Tensor] = {}
    for module in modules:
        parameters, buffers = before_loading(module)
        used = module._parameters | module._buffers
        made: dict[str, torch.Tensor] = {}
        for name, tensor in parameters.items():
            # A parameter that two layers share is shared here as well.
            owner = used.get(name)
            key = id(tensor if owner is None else owner)
            made[name] = shared.get(key, tensor)
            if key not in shared:
                made[name] = shared[key] = without_data(tensor, module)
        shadow = vars(shadows[module])
        # Parameters that are None are attributes, too.
        shadow["_parameters"] = _absent(module._parameters) | made
        shadow["_buffers"] = _absent(module._buffers) | {
            name: without_data(tensor, module) for name, tensor in buffers.items()
        }
        shadow["_modules"] = {
            name: None if child is None else shadows[child] for name, child in module._modules.items()
        }
    replaced |= shared
    for module, shadow_module in shadows.items():
        attributes = vars(shadow_module)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                attributes[name] = _of_shadow(value, replaced)
        for tensor in (attributes["_parameters"] | attributes["_buffers"]).values():
            for name, value in vars(tensor).items() if tensor is not None else ():
                vars(tensor)[name] = _of_shadow(value, replaced)
    return shadows


def loadable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the model's parameters and the buffers that checkpoints may have, shared ones once."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    return found


def loaded_names(geometry: Geometry, wanted: Callable[[str], int]) -> set[str]:
    """Returns the names of the parameters that the recorded loaders fill.

    ``wanted``: number of elements that a parameter needs. Raises RecordError if a parameter receives fewer.
    """
    loaded: Counter[str] = Counter()
    for write in geometry.writes:
        loaded[geometry.parameters[write.parameter].name] += write.elements
    for constant in geometry.constants:
        loaded[geometry.parameters[constant.parameter].name] += math.prod(constant.extent)
    for name, elements in loaded.items():
        if elements < (whole := wanted(name)):
            raise RecordError(f"{ABSENT}: {whole - elements:,} of {whole:,} elements of {name}")
    return set(loaded)


def _empty_copy(module: torch.nn.Module) -> torch.nn.Module:
    copy: torch.nn.Module = object.__new__(type(module))
    return copy


def _absent(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None for name, tensor in tensors.items() if tensor is None}


def _of_shadow(value: Any, replaced: Mapping[int, Any]) -> Any:
    """Returns an attribute's value as the shadow has it.

    ``replaced``: what replaces a module or parameter, by id.
    """
    if isinstance(value, MethodType) and id(value.__self__) in replaced:
        return MethodType(value.__func__, replaced[id(value.__self__)])
    if type(value) in (list, tuple):
        return type(value)(replaced.get(id(one), one) for one in value)
    if type(value) is dict and any(id(one) in replaced for one in value.values()):
        return {key: replaced.get(id(one), one) for key, one in value.items()}
    return replaced.get(id(value), value)
