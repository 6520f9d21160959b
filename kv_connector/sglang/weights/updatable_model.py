"""UpdatableModel: a model that SGLang has loaded.

It finds out what SGLang's loaders do with a checkpoint, and copies new contents into the parameters. SGLang's
own updates load into the same parameters while the model serves. CUDA graphs know their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kv_connector.weights.mapping.coverage import some_of
from kv_connector.weights.mapping.geometry import Geometry, Tensor
from kv_connector.weights.mapping.recorder import RecordError, record
from kv_connector.weights.mapping.shadow import ABSENT, Tensors, loadable, loaded_names, shadows_of
from kv_connector.weights.worker.applying import Take

_NAMED = 5  # parameters that an error names


class UpdatableModel:
    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Make it when the model is loaded, before it serves."""
        self._model = model
        self._device = device
        self._shadow = shadows_of(model, _tensors, _without_data)[model]
        self.changed = False
        """Whether the last new_contents() has written into the model."""

    def record(self, tensors: Sequence[Tensor]) -> Geometry:
        """Returns what the model's loaders do with a checkpoint of ``tensors``.

        Any thread may call it while the model serves, one at a time. Raises RecordError if the loaders do
        more than copy, or if the checkpoint lacks a parameter.
        """
        targets = loadable(self._shadow)
        geometry = record(self._shadow.load_weights, targets, tensors)
        loaded = loaded_names(geometry, lambda name: targets[name].numel())
        # Some loaders of SGLang copy on threads of their own, where the recorder does not see them. So a
        # parameter without a copy is refused.
        lacking = [name for name, _ in self._shadow.named_parameters() if name not in loaded]
        if lacking:
            raise RecordError(f"{ABSENT}: {some_of(lacking, _NAMED)}")
        return geometry

    @contextmanager
    def new_contents(self) -> Iterator[Take]:
        """Yields a function that gives the model new contents: the elements of each recorded parameter, flat.

        Use it only on the thread that computes, while nothing is computed.
        """
        self.changed = False
        with torch.no_grad():
            yield self._take

    def _take(self, contents: Mapping[str, torch.Tensor]) -> None:
        used, recorded = loadable(self._model), loadable(self._shadow)
        for name in contents:
            if _form(used[name]) != _form(recorded[name]):
                raise RuntimeError(f"{name} has another form than when the checkpoint was recorded")
        self.changed = True
        for name, content in contents.items():
            used[name].data.copy_(content.as_strided(used[name].shape, used[name].stride()))
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # from here on contents may be written again


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _tensors(module: torch.nn.Module) -> tuple[Tensors, Tensors]:
    """Returns a module's parameters and buffers. SGLang leaves unquantised ones as its loaders fill them."""
    return (
        {name: tensor for name, tensor in module._parameters.items() if tensor is not None},
        {name: tensor for name, tensor in module._buffers.items() if tensor is not None},
    )


def _without_data(tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Returns a tensor without data, with the attributes that SGLang has set on it, such as its loader."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=False)
    made.__class__ = type(tensor)
    vars(made).update(vars(tensor))
    return made
