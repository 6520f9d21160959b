"""LoadedModel: a model that vLLM has loaded.

It finds out what the loaders do with a checkpoint, and replaces the contents. Loaders leave parameters in one
form, and vLLM makes those of its kernels from it. At each reload vLLM makes them again, into the existing
tensors, as CUDA graphs know their addresses. This class uses that part of vLLM. Contents that already have
the loaders' form are taken from memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import msgspec
import torch

from kv_connector.vllm.internals import (
    current_platform,
    is_deferred_attention_layer,
    reload,
    set_current_vllm_config,
)
from kv_connector.weights.mapping.coverage import some_of
from kv_connector.weights.mapping.geometry import Geometry, Tensor, to_be_quantised
from kv_connector.weights.mapping.recorder import RecordError, record
from kv_connector.weights.mapping.shadow import ABSENT, loadable, loaded_names, shadows_of

logger = logging.getLogger(__name__)

_NAMED = 5  # parameters that a log line names: a log line is for reading


@dataclass(frozen=True)
class _Layer:
    """A module of the model, without its children."""

    module: torch.nn.Module
    names: dict[str, str]
    """The model's name of each parameter, by the layer's name of it.

    Parameters that two layers share have one name.
    """
    remade: frozenset[str]
    """Tensors that vLLM has changed in form or dropped. Their loaded contents exist nowhere any more."""


class LoadedModel:
    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        """Make it when the model is loaded, before it serves."""
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._shadow, self._layers = _shadow(model)
        self._unset = frozenset[str]()
        """Parameters with random values, which no version has filled."""
        if vllm_config.load_config.load_format == "dummy":
            self._unset = frozenset(loadable(self._shadow))
        self._as_loaded: dict[torch.nn.Module, bool] = {}
        """Whether a layer's kernels take the loaders' form as it is.

        It has only layers for which that is known.
        """
        self.changed = False
        """Whether new_contents() has written into the model."""

    def refusal(self) -> str | None:
        """Returns the reason why this engine cannot take weights, and what to change. None: it can."""
        config = self._vllm_config
        offload = config.offload_config
        reasons = {
            "--enable-eplb moves experts between ranks": config.parallel_config.enable_eplb,
            "--enable-sleep-mode unmaps weights": config.model_config.enable_sleep_mode,
            "--enable-lora wraps the layers that load them": config.lora_config is not None,
            "weights are offloaded (--cpu-offload-gb, --offload-group-size)": bool(
                offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size
            ),
            f"only block fp8 quantization has been tested ({config.model_config.quantization})": (
                config.quant_config is not None and not _is_block_fp8(config.quant_config)
            ),
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found:
            return f"{'; '.join(found)}: start the engine without this"
        if (derives := self._derives()) is not None:
            return f"{derives} computes values from weights, which an update would leave stale"
        return None

    def _derives(self) -> str | None:
        """Returns the part of the model that keeps values computed from weights outside of vLLM's layers.

        None: no part does.
        """
        # vLLM calls this hook once, after the last layer's. Its own reload leaves the hook out, too.
        if hasattr(self._model, "process_weights_after_loading"):
            return f"{type(self._model).__name__}.process_weights_after_loading()"
        for name, module in self._model.named_modules():
            # The first forward pass keeps both gates of these experts as one matrix (AITER's, on ROCm).
            if getattr(module, "_fse_fuse_gate", False):
                return f"{name} ({type(module).__name__}, fused gates)"
        return None

    def drafter(self) -> str | None:
        """Returns the speculative method whose draft model keeps its weights at an update.

        None: no such model.
        """
        config = self._vllm_config.speculative_config
        drafts = getattr(config, "draft_model_config", None)
        # A method without its own weights has the target's configuration, or a copy of this configuration.
        if drafts is None or drafts is config.target_model_config or config.method == "extract_hidden_states":
            return None
        return str(config.method)

    def record(self, tensors: Sequence[Tensor]) -> Geometry:
        """Returns what the model's loaders do with a checkpoint of ``tensors``.

        Any thread may call it while the model serves, one at a time. Raises RecordError if the loaders do
        more than copy, or if the checkpoint lacks something that cannot be kept.

        Tensors that are still to be quantised are recorded without their scales. The sender sees from the
        answer which tensors these are.
        """
        targets = loadable(self._shadow)
        geometry = record(self._shadow.load_weights, targets, tensors)
        loaded = loaded_names(geometry, lambda name: int(reload.utils.get_tensor_load_numel(targets[name])))
        quantised = to_be_quantised(tensors, geometry)
        scaled = (
            geometry.parameters[one.parameter].name for one in geometry.writes if one.tensor in quantised
        )
        coming = loaded | {f"{name}{_SCALES}" for name in scaled}
        for name in targets:
            scales = f"{name}{_SCALES}"
            if scales in targets and (name in coming) != (scales in coming):
                lost, there = (scales, name) if name in coming else (name, scales)
                raise RecordError(f"{ABSENT}: {lost}, beside {there}")
        self._written(coming)
        kept = tuple(
            name
            for name, _ in self._shadow.named_parameters()
            if name not in coming and not name.endswith(_OPTIONAL)
        )
        if kept:
            logger.warning("weights: parameters %s keep their values: %s", ABSENT, some_of(kept, _NAMED))
        rounds = self._rounds()
        return msgspec.structs.replace(
            geometry,
            parameters=tuple(
                msgspec.structs.replace(parameter, round=rounds[parameter.name])
                for parameter in geometry.parameters
            ),
            kept=kept,
            unset=tuple(name for name in kept if name in self._unset),
        )

    @contextmanager
    def new_contents(self) -> Iterator[Callable[[Mapping[str, torch.Tensor]], None]]:
        """Yields a function that gives the model new contents: the elements of each recorded parameter, flat.

        It takes all parameters at once, or round by round, and has copied them when it returns. Use it only
        on the thread that computes, while nothing is computed.

        After an error the model can compute. It has old and new weights if ``changed``, else only old ones.
        It is whole again once it has received all parameters. RecordError: contents of a layer are missing,
        and none of that call was taken.
        """
        self.changed = False
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            yield self._take
            for module in self._model.modules():  # these layers keep values made from other layers' weights
                if is_deferred_attention_layer(module):
                    module.process_weights_after_loading(self._vllm_config.model_config.dtype)

    def _take(self, contents: Mapping[str, torch.Tensor]) -> None:
        layers = self._written(contents)
        self._make([layer for layer in layers if not self._as_loaded.get(layer.module)], contents)
        for layer in layers:
            if self._as_loaded.get(layer.module):
                self._change()
                _copy(layer, contents)
        self._unset -= contents.keys()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # from here on contents may be written again

    def _make(self, layers: Sequence[_Layer], contents: Mapping[str, torch.Tensor]) -> None:
        """Makes the kernels' tensors from the contents.

        Notes whether the kernels take the contents as they are.
        """
        try:
            reload.layerwise.initialize_layerwise_reload(_Modules([layer.module for layer in layers]))
            for layer in layers:
                before = _attributes(layer.module)
                form = _load(layer, contents, self._change)
                if layer.module not in self._as_loaded:
                    found = _same(before, _attributes(layer.module)) and _is_as_loaded(layer, contents, form)
                    if found is not None:
                        self._as_loaded[layer.module] = found
        except BaseException:
            for layer in layers:
                _put_back(layer.module)
            raise

    def _change(self) -> None:
        self.changed = True

    def _rounds(self) -> dict[str, int]:
        """Returns the round of each parameter, by the model's name.

        The parameters of a layer are in one round, and so are those of layers that share a parameter.
        """
        rounds: dict[str, int] = {}
        for number, layer in enumerate(self._layers):
            own = set(layer.names.values())
            joined = {rounds[name] for name in own if name in rounds}
            first = min(joined, default=number)
            rounds |= {name: first for name, round in rounds.items() if round in joined}
            rounds |= dict.fromkeys(own, first)
        return rounds

    def _written(self, names: Collection[str]) -> list[_Layer]:
        """Returns the layers that have any of these parameters.

        Raises RecordError if such a layer also has parameters that are lost.
        """
        found = []
        for layer in self._layers:
            own = {name for name, parameter in layer.names.items() if parameter in names}
            if not own:
                continue
            if is_deferred_attention_layer(layer.module):
                raise RecordError(
                    f"{_full_names(layer, own)}: attention's own parameters have not been tested"
                )
            if lost := layer.remade - own:
                raise RecordError(f"{ABSENT}: {_full_names(layer, lost)}, beside {_full_names(layer, own)}")
            found.append(layer)
        return found


_SCALES = "_scale_inv"  # suffix of the scales of a parameter's blocks
# Scales of an attention layer's KV cache and query (BaseKVCacheMethod), for any name of the layer. Few
# checkpoints have them, and vLLM uses 1.0 otherwise.
_OPTIONAL = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")


def _is_block_fp8(quantization: Any) -> bool:
    """Returns whether this is vLLM's own Fp8Config, for a checkpoint with a scale for each block."""
    return (
        getattr(quantization, "weight_block_size", None) is not None
        and quantization.get_name() == "fp8"
        and getattr(quantization, "store_dtype", None) is None  # experts in another format
    )


def _full_names(layer: _Layer, names: Collection[str]) -> str:
    return " and ".join(
        sorted(layer.names.get(name, f"{name} of {type(layer.module).__name__}") for name in names)
    )


class _Modules:
    """Some modules of a model, in the form in which vLLM's functions expect a model."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._modules = modules

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules)


_Form = Mapping[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
"""Shape, strides and dtype of a layer's tensors, by their names in the layer."""


def _attributes(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the attributes, beside tensors, of a layer and of its quantization method."""
    apart = ("_parameters", "_buffers", "_modules", "_already_called_process_weights_after_loading")
    method = getattr(module, "quant_method", None)
    return {
        (owner, name): value
        for owner, values in (("layer", vars(module)), ("method", getattr(method, "__dict__", {})))
        for name, value in values.items()
        if name not in apart
    }


def _same(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> bool:
    return before.keys() == after.keys() and all(value is after[name] for name, value in before.items())


def _is_as_loaded(layer: _Layer, contents: Mapping[str, torch.Tensor], form: _Form) -> bool | None:
    """Returns whether the kernels' tensors equal the contents. None: undecided.

    It is undecided if the contents have the same value everywhere, as their order does not show then.
    """
    compared = getattr(layer.module, "quant_method", None) is not None  # else nothing is made of them
    told = True
    for name, tensor in reload.utils.get_layer_tensors(layer.module).items():
        content = contents.get(layer.names.get(name, ""))
        if content is None:
            continue
        if form[name] != (tensor.shape, tensor.stride(), tensor.dtype):
            return False
        loaded = content.as_strided(tensor.shape, tensor.stride())
        if compared and not torch.equal(tensor, loaded):
            return False
        told = told and not (compared and bool((loaded == loaded.flatten()[0]).all()))
    return told or None


def _copy(layer: _Layer, contents: Mapping[str, torch.Tensor]) -> None:
    """Copies the contents into the tensors that the kernels use."""
    for name, tensor in reload.utils.get_layer_tensors(layer.module).items():
        if (content := contents.get(layer.names.get(name, ""))) is not None:
            tensor.data.copy_(content.as_strided(tensor.shape, tensor.stride()))


def _load(layer: _Layer, contents: Mapping[str, torch.Tensor], change: Callable[[], None]) -> _Form:
    """Loads contents in the loaders' form, and copies what vLLM makes of them into the kernels' tensors.

    Returns the loaders' form. ``change``: called before the kernels' tensors change.
    """
    module = layer.module
    info = reload.layerwise.get_layerwise_info(module)
    parameters, buffers = info.kernel_tensors
    used = parameters | buffers
    with _packed_again(module):
        reload.meta.materialize_layer(module, info)
        form = {
            name: (tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in reload.utils.get_layer_tensors(module).items()
        }
        for name, tensor in reload.utils.get_layer_tensors(module).items():
            content = contents.get(layer.names.get(name, ""))
            if content is not None:
                # A copy, because vLLM may keep the tensor, and contents are written again.
                tensor.data.copy_(content.as_strided(tensor.shape, tensor.stride()))
            elif tensor is not used[name]:
                tensor.data.copy_(used[name])
        change()
        reload.layerwise._layerwise_process(module, info)
    return form


def _put_back(module: torch.nn.Module) -> None:
    info = reload.layerwise.get_layerwise_info(module)
    if info.kernel_tensors is not None:
        reload.layerwise._place_kernel_tensors(module, info)
    info.reset()


@contextmanager
def _packed_again(module: torch.nn.Module) -> Iterator[None]:
    """Has vLLM pack experts again on a CPU.

    There vLLM packs experts only if their layer has no kernel yet, and otherwise copies them unpacked over
    the packed ones. On a CPU nothing keeps the addresses of a kernel.
    """
    method = getattr(module, "quant_method", None)
    if method is None or getattr(method, "moe_kernel", None) is None or not current_platform.is_cpu():
        yield
        return
    before = dict(vars(method))
    method.moe_kernel = None
    try:
        yield
    except BaseException:
        vars(method).update(before)
        raise


def _shadow(model: torch.nn.Module) -> tuple[torch.nn.Module, list[_Layer]]:
    """Returns a copy of the model's modules as before loading, without data, and the model's own layers."""
    shadows = shadows_of(model, _before_loading, _without_data)
    shadow = shadows[model]
    names = {id(tensor): name for name, tensor in loadable(shadow).items()}
    layers = [
        _Layer(
            module,
            {
                own: names[id(tensor)]
                for own, tensor in reload.utils.get_layer_tensors(shadows[module]).items()
                if id(tensor) in names
            },
            _remade(module),
        )
        for module in shadows
    ]
    return shadow, layers


def _remade(module: torch.nn.Module) -> frozenset[str]:
    """Returns the names of the tensors that vLLM has changed in form or dropped."""
    parameters, buffers = _before_loading(module)
    used = module._parameters | module._buffers
    return frozenset(
        name for name, tensor in (parameters | buffers).items() if not _is_like(tensor, used.get(name))
    )


def _before_loading(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns parameters and buffers by name: those that vLLM has noted, and those that it leaves alone."""
    parameters, buffers = reload.layerwise.get_layerwise_info(module).restore_metadata
    used, used_buffers = reload.utils.get_layer_params_buffers(module)
    alone = reload.meta.SKIP_TENSORS
    return (
        parameters | {name: tensor for name, tensor in used.items() if name in alone},
        buffers | {name: tensor for name, tensor in used_buffers.items() if name in alone},
    )


def _is_like(tensor: torch.Tensor, used: torch.Tensor | None) -> bool:
    return used is not None and (used.shape, used.dtype) == (tensor.shape, tensor.dtype)


def _without_data(tensor: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Returns a tensor without data, with the attributes that vLLM has set on it.

    Its loader is often a method of the layer.
    """
    made: torch.Tensor = reload.meta.to_meta_tensor(tensor)
    for name, value in vars(made).items():
        if isinstance(value, MethodType) and value.__self__ is reload.sanitize.layer_ref_sentinel:
            vars(made)[name] = MethodType(value.__func__, module)
    return made
