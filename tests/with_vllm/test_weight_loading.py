"""New weights in running engines: their tokens are those of an engine that was started from the weights.

The engines are all in one process: the second starts in 3 s after the first, which takes 30.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file

from kv_connector.lab.model import SCORE_SPREAD, make_gemma3, make_llama, make_mixtral

if TYPE_CHECKING:
    import torch

    from kv_connector.vllm.weights.loaded_model import LoadedModel
    from kv_connector.weights.mapping.geometry import Geometry, Tensor

MODELS = (
    "qwen3_moe",
    "llama",
    "gemma3",
    "qwen3_moe_fp8",
)  # experts first: a process's first engine makes their group of ranks
SMALL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
# Blocks of 128 x 128. vLLM requires each part of a fused matrix to have whole blocks.
FP8 = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 384}
VOCABULARY = 300  # vLLM pads it to 320


def make(name: str, directory: Path, seed: int) -> Path:
    if name == "qwen3_moe_fp8":
        from fp8_checkpoints import in_bfloat16, quantised

        plain = make_qwen3_moe(directory.with_name(f"{directory.name}16"), FP8, experts=4, seed=seed)
        return quantised(in_bfloat16(plain), directory)
    if name == "gemma3":  # input and output embeddings are one parameter
        return make_gemma3(directory, **SMALL, full_attention_every=2, seed=seed)
    if name == "llama":
        make_llama(directory, **SMALL, seed=seed)
        return change(directory, {"vocab_size": VOCABULARY}, short_vocabulary)
    return make_qwen3_moe(directory, SMALL, experts=8, seed=seed)


def make_qwen3_moe(directory: Path, sizes: Mapping[str, int], experts: int, seed: int) -> Path:
    make_mixtral(directory, **sizes, experts=experts, seed=seed)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "moe_intermediate_size": sizes["intermediate"],
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    return change(directory, config, partial(qwen3_moe, sizes))


Weights = dict[str, Any]


def change(directory: Path, config: Mapping[str, Any], weights: Callable[[Weights], Weights]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    path = directory / "model.safetensors"
    save_file(weights(load_file(path)), path, metadata={"format": "pt"})
    return directory


def short_vocabulary(weights: Weights) -> Weights:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return weights | {name: weights[name][:VOCABULARY].copy() for name in names}


def qwen3_moe(sizes: Mapping[str, int], weights: Weights) -> Weights:
    """Converts Mixtral's weights."""
    changed = {}
    for name, tensor in weights.items():
        name = name.replace("block_sparse_moe", "mlp").replace(".w1.", ".gate_proj.")
        changed[name.replace(".w2.", ".down_proj.").replace(".w3.", ".up_proj.")] = tensor
    for layer in range(sizes["layers"]):
        for norm in ("q_norm", "k_norm"):
            spread = np.full(sizes["head_dim"], SCORE_SPREAD**0.5, np.float32)
            changed[f"model.layers.{layer}.self_attn.{norm}.weight"] = spread
    return changed


# --- In the engines' process


@dataclass
class Loaded:
    llm: Any
    model: torch.nn.Module
    loaded: LoadedModel
    geometry: Geometry | None = None


engines: dict[str, Loaded] = {}


def start(name: str, path: Path) -> None:
    import torch
    from vllm import LLM

    from kv_connector.vllm.weights.loaded_model import LoadedModel

    fp8 = name.startswith("qwen3_moe_fp8")
    if fp8:
        import fp8_on_cpu  # noqa: F401
    llm = LLM(
        str(path),
        dtype="bfloat16" if fp8 else "float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=32,
        kv_cache_memory_bytes=32 << 20,
    )
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    engines[name] = Loaded(llm, model, LoadedModel(model, worker.vllm_config, torch.device("cpu")))


def tokens(name: str) -> list[list[int]]:
    """Returns the tokens of prompts of 1 to 200 tokens."""
    from vllm import SamplingParams

    llm = engines[name].llm
    llm.reset_prefix_cache()
    drawn = random.Random(0)
    prompts = [{"prompt_token_ids": drawn.choices(range(256), k=length)} for length in (1, 7, 40, 100, 200)]
    parameters = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, parameters, use_tqdm=False)]


def checkpoint(path: Path, but: str = "nothing") -> list[Tensor]:
    from kv_connector.weights.mapping.geometry import Tensor

    weights = safetensors.torch.load_file(path / "model.safetensors")
    return [
        Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in sorted(weights.items())
        if not re.search(but, name)
    ]


def record_while_serving(name: str, path: Path) -> list[list[int]]:
    """Records a checkpoint while the engine serves. Returns the engine's tokens in that time."""
    engine, errors = engines[name], []

    def record() -> None:
        try:
            for _ in range(3):
                engine.geometry = engine.loaded.record(checkpoint(path))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    found = tokens(name)
    thread.join()
    if errors:
        raise errors[0]
    return found


def refusal(name: str, path: Path, but: str) -> str:
    """Returns why a checkpoint without the tensors that match is not recorded."""
    try:
        engines[name].loaded.record(checkpoint(path, but))
    except ValueError as error:
        return str(error)
    return "it is"


def arena(geometry: Geometry, path: Path) -> dict[str, torch.Tensor]:
    """Fills an arena as a trainer's ranks do."""
    import torch

    weights = safetensors.torch.load_file(path / "model.safetensors")
    tensors = [weights[one.name] for one in checkpoint(path)]
    contents = [torch.zeros(one.elements, dtype=getattr(torch, one.dtype)) for one in geometry.parameters]
    for write in geometry.writes:
        box = tuple(slice(at, at + size) for at, size in zip(write.start, write.extent, strict=True))
        to = contents[write.parameter].as_strided(write.extent, write.strides, write.offset)
        to.copy_(tensors[write.tensor][box])
    for one in geometry.constants:
        contents[one.parameter].as_strided(one.extent, one.strides, one.offset).fill_(one.value)
    return {one.name: content for one, content in zip(geometry.parameters, contents, strict=True)}


def apply(name: str, path: Path) -> dict[str, int]:
    """Applies a checkpoint. Returns the addresses of the model's parameters."""
    engine = engines[name]
    assert engine.geometry is not None
    contents = arena(engine.geometry, path)
    rounds = engine.geometry.in_few_rounds()
    with engine.loaded.new_contents() as take:
        for number in range(rounds.rounds):
            names = [parameter.name for parameter in rounds.parameters if parameter.round == number]
            take({name: contents[name] for name in names})
            for name in names:
                contents[name].fill_(float("nan"))  # the next round lands
    return {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}


def apply_with_a_failure(name: str, path: Path, layer: str) -> str:
    """Applies a checkpoint, and fails in the middle, at the kernels' form of `layer`."""
    engine = engines[name]
    broken = engine.model.get_submodule(layer)
    with mock.patch.object(
        broken.quant_method, "process_weights_after_loading", side_effect=OSError("broken")
    ):
        try:
            apply(name, path)
        except OSError as error:
            on_meta = [key for key, parameter in engine.model.named_parameters() if parameter.is_meta]
            return f"{error}{on_meta}"
    return "nothing"


def refusals(name: str) -> dict[str, str | None]:
    loaded = engines[name].loaded
    config = loaded._vllm_config
    found = {"": loaded.refusal()}
    for part, setting in (
        (config.parallel_config, "enable_eplb"),
        (config.model_config, "enable_sleep_mode"),
        (config, "lora_config"),
        (config, "quant_config"),
        (config.offload_config.uva, "cpu_offload_gb"),
        (config.offload_config.prefetch, "offload_group_size"),
    ):
        before = getattr(part, setting)
        object.__setattr__(part, setting, 1)
        found[setting] = loaded.refusal()
        object.__setattr__(part, setting, before)
    with mock.patch.object(config, "quant_config", mock.Mock(weight_block_size=None, store_dtype=None)):
        config.quant_config.get_name.return_value = "fp8"
        found["per tensor"] = loaded.refusal()
    return found


def toy() -> dict[str, Any]:
    """Returns the effects of an update on a small model of which a checkpoint has only a part, and on its
    attention."""
    import torch
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from kv_connector.vllm.weights import loaded_model
    from kv_connector.weights.mapping.geometry import Tensor

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(4))
            self.shift = torch.nn.Parameter(torch.zeros(4))
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("map", None)
            self.register_parameter("bias", None)
            self.scale.weight_loader = self.load
            self.loads = 0

        def load(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
            self.loads += 1
            parameter.data.copy_(tensor)

    class Method(QuantizeMethodBase):
        """Converts the loaded weights with `make`."""

        def __init__(self, make: Callable[[Layer], None]) -> None:
            self.make = make

        def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None: ...
        def apply(self, layer: torch.nn.Module, *_: Any, **__: Any) -> torch.Tensor: ...

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            calls.append(self.make.__name__)
            self.make(layer)

    calls: list[str] = []

    def nothing(layer: Layer) -> None: ...

    def twice(layer: Layer) -> None:
        layer.scale.data *= 2

    def aside(layer: Layer) -> None:
        layer.largest = layer.scale.max()

    class Attention(Layer, AttentionLayerBase):
        processed = None

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            self.processed = dtype

        def get_attn_backend(self) -> None: ...
        def get_kv_cache_spec(self, vllm_config: Any) -> None: ...

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({name: Layer() for name in ("loaded", "left", "packed")})
            self.attention = Attention()
            self.made = torch.nn.ModuleDict({make.__name__: Layer() for make in (nothing, twice, aside)})
            for make in (nothing, twice, aside):
                self.made[make.__name__].quant_method = Method(make)
            self.heads = [self.layers["loaded"]]

        def load_weights(self, weights: Any) -> None:
            assert self.heads[0] is self.layers["loaded"]
            assert (self.heads[0].map, self.heads[0].bias) == (None, None)
            parameters = dict(self.named_parameters()) | dict(self.named_buffers())
            for name, tensor in weights:
                getattr(parameters[name], "weight_loader", torch.Tensor.copy_)(parameters[name], tensor)

    model = Toy()
    record_metadata_for_reloading(model)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(len(name))
    packed, loaded = model.layers["packed"], model.layers["loaded"]
    packed.shift = torch.nn.Parameter(torch.empty(0))
    loaded.seen.fill_(7)
    config = next(iter(engines.values())).loaded._vllm_config
    mine = loaded_model.LoadedModel(model, config, torch.device("cpu"))
    before = dict(model.named_parameters())

    def refused(*names: str) -> str:
        try:
            mine.record([Tensor(name, "float32", (4,)) for name in names])
        except ValueError as error:
            return str(error)
        return "it is not"

    found: dict[str, Any] = {
        "packed": refused("layers.packed.scale"),
        "attention": refused("attention.scale"),
        "unknown": refused("layers.loaded.offset"),
    }
    with mock.patch.object(loaded_model.logger, "warning") as warning:
        geometry = mine.record([Tensor("layers.loaded.scale", "float32", (4,))])
    found["warning"] = warning.call_args.args[0] % warning.call_args.args[1:]
    found["recorded"] = [parameter.name for parameter in geometry.parameters]
    found["kept"] = geometry.kept, geometry.unset
    found["loads"] = loaded.loads

    def take(contents: dict[str, torch.Tensor]) -> None:
        with mine.new_contents() as taken:
            taken(contents)

    try:
        take({"layers.packed.scale": torch.ones(4), "layers.loaded.scale": torch.ones(4)})
    except ValueError as error:
        found["incomplete"] = str(error)
    found["before"] = loaded.scale.tolist(), model.attention.processed
    take({"layers.loaded.scale": torch.arange(4.0)})
    found["same"] = all(before[name] is parameter for name, parameter in model.named_parameters())
    found["values"] = {
        name: parameter.tolist() for name, parameter in model.named_parameters() if "made" not in name
    }
    found["seen"] = loaded.seen.tolist()
    found["processed"] = model.attention.processed == config.model_config.dtype
    geometry = mine.record([Tensor("layers.left.seen", "float32", (2,))])
    take({geometry.parameters[0].name: torch.ones(2)})
    # Equal values do not show whether a layer is converted. Later values show which layers are not.
    for values in ([3.0] * 4, [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]):
        before_this = len(calls)
        take({f"made.{name}.scale": torch.tensor(values) for name in model.made})
        found.setdefault("made", []).append(
            (calls[before_this:], {name: layer.scale.tolist() for name, layer in model.made.items()})
        )
    with mock.patch.object(loaded_model.reload.layerwise, "_layerwise_process") as processed:
        take({"layers.loaded.scale": torch.ones(4)})
    found["copied"] = processed.call_count, loaded.scale.tolist()
    found["buffer"] = model.layers["left"].seen.tolist(), model.layers["left"].scale.tolist()
    with mock.patch.object(config.load_config, "load_format", "dummy"):
        dummy = loaded_model.LoadedModel(model, config, torch.device("cpu"))
    for _ in range(2):
        unset = dummy.record([Tensor("layers.left.scale", "float32", (4,))]).unset
        found.setdefault("unset", []).append("layers.loaded.scale" in unset)
        with dummy.new_contents() as taken:
            taken({"layers.loaded.scale": torch.ones(4)})
    return found


# --- In pytest's process


@dataclass(frozen=True)
class Model:
    """One model with two checkpoints, and an engine that was started from each."""

    name: str
    a: Path
    b: Path
    process: ProcessPoolExecutor
    tokens_of_a: list[list[int]]
    tokens_of_b: list[list[int]]

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.process.submit(function, self.name, *arguments).result()


def one_process_engines() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, initializer=one_process_engines)
    yield pool
    ended = pool.submit(os._exit, 0)  # engines take 20 s to end by themselves
    with pytest.raises(BrokenProcessPool):
        ended.result()
    pool.shutdown()


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, process: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    """Starts a model's engine with the weights of a, which it has recorded while it served."""
    directory = tmp_path_factory.mktemp(request.param)
    a, b = make(request.param, directory / "a", seed=1), make(request.param, directory / "b", seed=2)
    process.submit(start, f"{request.param} b", b).result()
    process.submit(start, request.param, a).result()
    tokens_of_b = process.submit(tokens, f"{request.param} b").result()
    tokens_of_a = process.submit(tokens, request.param).result()
    assert all(one != other for one, other in zip(tokens_of_a, tokens_of_b, strict=True)), (
        "they tell a from b"
    )
    found = Model(request.param, a, b, process, tokens_of_a, tokens_of_b)
    assert found.do(record_while_serving, b) == tokens_of_a
    return found


def test_tokens_are_those_of_an_engine_started_from_the_weights(model: Model) -> None:
    places = model.do(apply, model.b)
    assert model.do(tokens) == model.tokens_of_b
    assert model.do(apply, model.a) == places, "parameters stay where they are"
    assert model.do(tokens) == model.tokens_of_a
    assert model.do(record_while_serving, model.b) == model.tokens_of_a, "it can be recorded again"
    model.do(apply, model.b)
    assert model.do(tokens) == model.tokens_of_b
    model.do(apply, model.a)


BROKEN = {
    "llama": ("model.layers.0.mlp.down_proj", "lm_head"),
    "qwen3_moe": ("model.layers.0.mlp.experts.routed_experts", "model.layers.1.self_attn.qkv_proj"),
    "gemma3": ("model.layers.1.mlp.gate_up_proj",),
    "qwen3_moe_fp8": ("model.layers.0.self_attn.qkv_proj",),
}


def test_an_update_that_failed_in_the_middle_is_whole_when_it_is_repeated(model: Model) -> None:
    for layer in BROKEN[model.name]:
        assert model.do(apply_with_a_failure, model.b, layer) == "broken[]"
        assert len(model.do(tokens)) == len(model.tokens_of_a), "it can compute"
        model.do(apply, model.b)
        assert model.do(tokens) == model.tokens_of_b
        assert model.do(apply_with_a_failure, model.a, layer) == "broken[]"
        model.do(apply, model.a)
        assert model.do(tokens) == model.tokens_of_a


def test_a_checkpoint_without_a_part_of_a_parameter(model: Model) -> None:
    message = model.do(refusal, model.b, "layers.0.self_attn.k_proj")
    sizes = "32,768 of 131,072" if model.name == "qwen3_moe_fp8" else "8,192 of 32,768"
    assert re.match(rf"not in the checkpoint: {sizes} elements of .*0\.self_attn\.qkv_proj\.weight$", message)


def test_values_without_their_scales_and_scales_without_their_values(model: Model) -> None:
    if model.name != "qwen3_moe_fp8":
        assert model.do(refusal, model.b, "_scale_inv") == "it is"  # there are no such tensors
        return
    values = "layers.0.self_attn.o_proj.weight"
    for lost, there in ((f"{values}_scale_inv", values), (values, f"{values}_scale_inv")):
        message = model.do(refusal, model.b, f"{lost}$")
        assert message == f"not in the checkpoint: model.{lost}, beside model.{there}"


def test_engine_refuses_unsupported_settings(model: Model) -> None:
    found = model.do(refusals)
    assert found.pop("") is None
    assert found.pop("per tensor").startswith("only block fp8 quantization has been tested (")
    assert {setting: re.findall("[a-z-]*", reason)[0] for setting, reason in found.items()} == {
        "enable_eplb": "--enable-eplb",
        "enable_sleep_mode": "--enable-sleep-mode",
        "lora_config": "--enable-lora",
        "quant_config": "only",
        "cpu_offload_gb": "weights",
        "offload_group_size": "weights",
    }


def test_tensors_that_are_not_in_a_checkpoint_stay(model: Model) -> None:
    found = model.process.submit(toy).result()
    names = (
        "layers.loaded.shift, layers.left.scale, layers.left.shift, layers.packed.scale, layers.packed.shift"
    )
    assert (
        found["warning"] == f"weights: parameters not in the checkpoint keep their values: {names} and 8 more"
    )
    assert found["recorded"] == ["layers.loaded.scale"]
    kept, unset = found["kept"]
    assert (len(kept), unset, kept[0]) == (13, (), "layers.loaded.shift")
    assert found["loads"] == 0, "recording is not seen by the model"
    absent = "not in the checkpoint: layers.packed.shift, beside layers.packed.scale"
    assert found["packed"] == absent
    assert found["attention"] == "attention.scale: attention's own parameters have not been tested"
    assert found["unknown"].startswith("the model does not load tensor 'layers.loaded.offset': KeyError")
    assert (found["incomplete"], found["before"]) == (absent, ([19.0] * 4, None)), "nothing is changed"
    assert found["same"]
    assert found["values"] == {
        "layers.loaded.scale": [0.0, 1.0, 2.0, 3.0],
        "layers.loaded.shift": [19.0] * 4,
        "layers.left.scale": [17.0] * 4,
        "layers.left.shift": [17.0] * 4,
        "layers.packed.scale": [19.0] * 4,
        "layers.packed.shift": [],
        "attention.scale": [15.0] * 4,
        "attention.shift": [15.0] * 4,
    }
    assert found["seen"] == [7.0, 7.0]
    assert found["buffer"] == ([1.0, 1.0], [17.0] * 4)
    assert found["unset"] == [True, False], "of a dummy engine, until a version fills it"
    assert found["processed"], "attention may have made something of other layers' weights"
    assert found["copied"] == (0, [1.0] * 4)
    every = ["nothing", "twice", "aside"]
    assert [(made, values["twice"], values["nothing"]) for made, values in found["made"]] == [
        (every, [6.0] * 4, [3.0] * 4),
        (every, [2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0]),
        (["twice", "aside"], [10.0, 12.0, 14.0, 16.0], [5.0, 6.0, 7.0, 8.0]),
    ]
