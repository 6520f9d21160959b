"""New contents of SGLang's own model classes: bit for bit those that SGLang loads from the new checkpoint.

The models are in a separate process, because SGLang keeps one configuration for each process.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from kinds import SMALL, write
from mla_model import make_mla
from transformers import Qwen2Config, Qwen3MoeConfig

from kv_connector.lab.free_ports import free_ports
from kv_connector.lab.model import make_gemma3, make_llama

LAYERS = {"num_hidden_layers": 2}
# Rank and number of ranks in tensor parallelism.
PLACES = ((0, 1), (0, 2), (1, 2))


def make_qwen2(directory: Path) -> Path:
    """Writes a model with biases and tied embeddings."""
    return write(directory, Qwen2Config(**SMALL | LAYERS | {"tie_word_embeddings": True}))


def make_qwen3_moe(directory: Path) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    return write(directory, Qwen3MoeConfig(**SMALL, **LAYERS, **experts))


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda directory: make_llama(directory, layers=2),
    "gemma3": lambda directory: make_gemma3(directory, layers=2),
    "qwen2": make_qwen2,
    "qwen3_moe": make_qwen3_moe,
}


def other_weights(directory: Path, model: Path) -> Path:
    """Writes a checkpoint of the same model with other weights."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(1)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    drawn = {
        name: torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in weights.items()
    }
    safetensors.torch.save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# --- In the process of the models


def publish(model: Path, port: int) -> None:
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1"}
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks
    from sglang.srt.runtime_context import publish as publish_arguments

    from kv_connector.sglang import plugin

    torch.set_num_threads(1)
    arguments = server_arguments(model, custom_weight_loader=[plugin.LOADER], warmups=plugin.BACKEND)
    publish_arguments(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=0,
        backend="gloo",
    )
    parallel_state.initialize_model_parallel()


def server_arguments(model: Path, **more: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    words = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", **more}
    return ServerArgs(model_path=str(model), **words)


def loaded(path: Path, rank: int, ranks: int) -> torch.nn.Module:
    """Returns the model of one rank, as SGLang loads it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader

    config = ModelConfig.from_server_args(server_arguments(path))
    loader = get_model_loader(LoadConfig(load_format="auto"), config)
    with as_rank(rank, ranks):
        model: torch.nn.Module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    return model


def as_rank(rank: int, ranks: int) -> ExitStack:
    """Has SGLang's layers take this rank's part. Loading does not communicate."""
    from sglang.srt.runtime_context import get_parallel

    stack = ExitStack()
    if ranks > 1:
        cpu_group = get_parallel().tp_group.cpu_group
        group = SimpleNamespace(world_size=ranks, rank_in_group=rank, cpu_group=cpu_group)
        given = {"size": ranks, "rank": rank, "group": group}
        names = {f"{of}_{what}": value for of in ("tp", "attn_tp", "moe_tp") for what, value in given.items()}
        stack.enter_context(get_parallel().override(**names))
    return stack


def tensors_of(path: Path, without: str = "nothing") -> list[Any]:
    from kv_connector.weights.mapping.geometry import Tensor

    weights = safetensors.torch.load_file(path / "model.safetensors")
    return [
        Tensor(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in sorted(weights.items())
        if without not in name
    ]


def landed(geometry: Any, path: Path) -> dict[str, torch.Tensor]:
    """Fills an arena as a trainer's ranks do."""
    weights = safetensors.torch.load_file(path / "model.safetensors")
    tensors = [weights[one.name] for one in tensors_of(path)]
    contents = [torch.zeros(one.elements, dtype=getattr(torch, one.dtype)) for one in geometry.parameters]
    for one in geometry.writes:
        box = tuple(slice(at, at + size) for at, size in zip(one.start, one.extent, strict=True))
        contents[one.parameter].as_strided(one.extent, one.strides, one.offset).copy_(
            tensors[one.tensor][box]
        )
    for one in geometry.constants:
        contents[one.parameter].as_strided(one.extent, one.strides, one.offset).fill_(one.value)
    return {one.name: content for one, content in zip(geometry.parameters, contents, strict=True)}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def updated(a: Path, b: Path, rank: int, ranks: int) -> tuple[list[str], list[str], bool]:
    """Updates a model of ``a`` with ``b``.

    Returns the tensors that recording has changed, those that are not those of ``b`` after the update, and
    whether all parameters are where they were.
    """
    from kv_connector.sglang.weights.updatable_model import UpdatableModel

    model, wanted = loaded(a, rank, ranks), state(loaded(b, rank, ranks))
    before, places = state(model), [one.data_ptr() for one in model.parameters()]
    updatable = UpdatableModel(model, torch.device("cpu"))
    with as_rank(rank, ranks):
        geometry = updatable.record(tensors_of(b))
        updatable.record(tensors_of(b))
    touched = differing(state(model), before)
    assert differing(before, wanted), "the checkpoints are alike"
    with updatable.new_contents() as take:
        take(landed(geometry, b))
    return (
        touched,
        differing(state(model), wanted),
        places == [one.data_ptr() for one in model.parameters()],
    )


def refusal_of_tensors(path: Path, without: str = "nothing") -> str:
    """Returns why a checkpoint is not recorded."""
    from kv_connector.sglang.weights.updatable_model import UpdatableModel

    try:
        UpdatableModel(loaded(path, 0, 1), torch.device("cpu")).record(tensors_of(path, without))
    except ValueError as error:
        return str(error)
    return "recorded"


def take_another_form(path: Path) -> str:
    """Changes a parameter's form after recording. Returns the error, if the model is as before."""
    from kv_connector.sglang.weights.updatable_model import UpdatableModel

    model = loaded(path, 0, 1)
    updatable = UpdatableModel(model, torch.device("cpu"))
    geometry = updatable.record(tensors_of(path))
    last = list(model.parameters())[-1]
    last.data = last.data.double()
    before = state(model)
    try:
        with updatable.new_contents() as take:
            take({name: content + 1 for name, content in landed(geometry, path).items()})
    except RuntimeError as error:
        assert not differing(state(model), before)
        return str(error)
    return "taken"


def refusal_of_engine(path: Path, setting: str) -> str:
    """Returns why an engine with this setting is refused."""
    from sglang.srt.runtime_context import (
        get_exec,
        get_lora,
        get_memory,
        get_model,
        get_parallel,
        get_serving,
        get_spec,
    )

    from kv_connector.sglang.internals import UnsupportedConfiguration, check_takes_weights

    execution = get_exec()
    settings: dict[str, Callable[[], Any]] = {
        "--enable-lora": lambda: get_lora().override(enable_lora=True),
        "--enable-memory-saver": lambda: execution.features.override(enable_memory_saver=True),
        "--enable-eplb": lambda: execution.moe.override(enable_eplb=True),
        "--cpu-offload-gb": lambda: execution.offload.override(cpu_offload_gb=1),
        "--offload-group-size": lambda: execution.offload.override(offload_group_size=1),
        "--hicache-storage-backend": lambda: get_memory().override(hicache_storage_backend="file"),
        "--enable-unified-cache-external-linker": lambda: get_memory().override(
            enable_unified_cache_external_linker=True
        ),
        "--enable-lmcache": lambda: get_memory().override(enable_lmcache=True),
        "--enable-flexkv": lambda: get_memory().override(enable_flexkv=True),
        "--weight-cache-mode": lambda: get_model().override(weight_cache_mode="client"),
        "--speculative-algorithm": lambda: get_spec().override(speculative_algorithm="EAGLE"),
        "--pp-size": lambda: get_parallel().override(
            pp_size=2, pp_group=SimpleNamespace(world_size=2, rank_in_group=0)
        ),
        "--dp-size": lambda: get_parallel().override(dp_size=2),
        "--nnodes": lambda: get_parallel().override(nnodes=2),
        "--tokenizer-worker-num": lambda: get_serving().override(tokenizer_worker_num=2),
        "gRPC in place of HTTP": lambda: get_serving().override(grpc_mode=True),
        "--warmups write_imm": lambda: get_serving().override(warmups=None),
        "--custom-weight-loader kv_connector.sglang.weights.loader.take": lambda: get_model().override(
            custom_weight_loader=[]
        ),
    }
    model = loaded(path, 0, 1)
    if setting == "packed":
        next(model.children()).use_intel_amx_backend = True  # type: ignore[assignment]
    if setting == "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=1":
        next(model.children()).quant_method = SimpleNamespace(w13_swiglu_interleaved=True)  # type: ignore[assignment]
    with settings.get(setting, ExitStack)():
        try:
            check_takes_weights(model, "fp8" if setting == "quantization (fp8)" else None)
        except UnsupportedConfiguration as error:
            return str(error)
    return "taken"


# --- Tests


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS["llama"](tmp_path_factory.mktemp("llama") / "a")


@pytest.fixture(scope="module")
def process(llama: Path) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    with ProcessPoolExecutor(1, context, initializer=publish, initargs=(llama, port)) as pool:
        yield pool


@pytest.mark.parametrize("name", MODELS)
def test_updated_model_equals_sglangs_own(name: str, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    a = MODELS[name](tmp_path / "a")
    b = other_weights(tmp_path / "b", a)
    for rank, ranks in PLACES:
        touched, wrong, in_place = process.submit(updated, a, b, rank, ranks).result()
        assert (touched, wrong, in_place) == ([], [], True), (rank, ranks)


def test_checkpoint_without_a_parameter_is_refused(process: ProcessPoolExecutor, llama: Path) -> None:
    assert process.submit(refusal_of_tensors, llama).result() == "recorded"
    whole = process.submit(refusal_of_tensors, llama, "o_proj").result()
    lacking = ", ".join(f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2))
    assert whole == f"not in the checkpoint: {lacking}"
    part = process.submit(refusal_of_tensors, llama, "layers.0.self_attn.k_proj").result()
    assert part.startswith(
        "not in the checkpoint: 32,768 of 131,072 elements of model.layers.0.self_attn.qkv"
    )


def test_parameter_of_another_form_than_recorded_changes_nothing(
    process: ProcessPoolExecutor, llama: Path
) -> None:
    error = process.submit(take_another_form, llama).result()
    assert error.endswith("has another form than when the checkpoint was recorded")


def test_model_that_derives_weights_is_refused(process: ProcessPoolExecutor, tmp_path: Path) -> None:
    model = make_mla(tmp_path / "model")
    reason = process.submit(refusal_of_engine, model, "nothing").result()
    assert "engines with post_load_weights() of DeepseekV2ForCausalLM. Start it without" in reason


@pytest.mark.parametrize(
    "setting",
    [
        "quantization (fp8)",
        "--enable-lora",
        "--enable-memory-saver",
        "--enable-eplb",
        "--cpu-offload-gb",
        "--offload-group-size",
        "--hicache-storage-backend",
        "--enable-unified-cache-external-linker",
        "--enable-lmcache",
        "--enable-flexkv",
        "--weight-cache-mode",
        "--speculative-algorithm",
        "--pp-size",
        "--dp-size",
        "--nnodes",
        "--tokenizer-worker-num",
        "gRPC in place of HTTP",
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=1",
    ],
)
def test_engine_with_an_untested_setting_is_refused(
    setting: str, process: ProcessPoolExecutor, llama: Path
) -> None:
    reason = process.submit(refusal_of_engine, llama, setting).result()
    assert reason.startswith("this engine cannot take weights: ")
    assert f"engines with {setting}. Start it without" in reason


def test_engine_with_packed_weights_is_refused(process: ProcessPoolExecutor, llama: Path) -> None:
    assert process.submit(refusal_of_engine, llama, "nothing").result() == "taken"
    assert "packed for AMX" in process.submit(refusal_of_engine, llama, "packed").result()


@pytest.mark.parametrize(
    "option", ["--warmups write_imm", "--custom-weight-loader kv_connector.sglang.weights.loader.take"]
)
def test_engine_with_one_of_the_two_options_is_refused(
    option: str, process: ProcessPoolExecutor, llama: Path
) -> None:
    reason = process.submit(refusal_of_engine, llama, option).result()
    assert reason.startswith(f"An engine that takes weights needs {option} beside --")
