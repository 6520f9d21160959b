"""The identity of the checkpoint that vLLM has loaded."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm_stage import model, vllm_config

from kv_connector.agent.checkpoint_reader import read_checkpoint
from kv_connector.lab.model import make_llama
from kv_connector.vllm.model import checkpoint
from kv_connector.vllm.model.checkpoint import loaded_checkpoint

__all__ = ["model"]

SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")


@pytest.fixture(scope="module")
def configured(model: Path) -> Any:
    return vllm_config(model, "kv_both")


@pytest.fixture
def config(configured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration with a model of the test. A test may change it with monkeypatch."""
    directory = make_llama(tmp_path / "model", layers=1, hidden=64, intermediate=64)
    monkeypatch.setattr(configured.model_config, "model", str(directory))
    return configured


@pytest.mark.parametrize("load_format", SAFETENSORS)
def test_loaded_checkpoint_is_that_of_the_models_directory(
    config: Any, tmp_path: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.load_config, "load_format", load_format)
    assert loaded_checkpoint(config) == read_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("load_format", "consolidated"), [*product(SAFETENSORS, (False, True)), ("mistral", True)]
)
@pytest.mark.parametrize("index", [False, True])
def test_files_are_those_that_vllm_loads(
    config: Any,
    tmp_path: Path,
    load_format: str,
    index: bool,
    consolidated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "model"
    weights = load_file(directory / "model.safetensors")
    if consolidated:
        save_file(weights, directory / "consolidated.safetensors")
    if index:
        listed = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listed))
    monkeypatch.setattr(config.load_config, "load_format", load_format)
    loader = DefaultModelLoader(config.load_config)
    _, loaded, _, _ = loader._prepare_weights(str(directory), None, None, True, None)
    read = []

    def header(self: object, path: Path) -> list[object]:
        read.append(str(path))
        return []

    monkeypatch.setattr("kv_connector.agent.checkpoint_reader._Reading.header", header)
    assert loaded_checkpoint(config) is None  # because this header() finds no tensors
    assert sorted(read) == sorted(loaded)


@pytest.mark.parametrize("load_format", ["dummy", "pt", "npcache", "runai_streamer", "tensorizer", "own"])
def test_checkpoint_of_another_format_is_unknown(
    config: Any, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.load_config, "load_format", load_format)
    assert loaded_checkpoint(config) is None


def test_checkpoint_in_an_object_store_is_unknown(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.model_config, "model_weights", "s3://bucket/model")
    assert loaded_checkpoint(config) is None


@pytest.mark.parametrize(("backend", "known"), [("write_imm", True), ("nccl", False)])
def test_weights_that_another_backend_replaces_are_unknown(
    config: Any, backend: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "weight_transfer_config", SimpleNamespace(backend=backend))
    assert (loaded_checkpoint(config) is not None) is known


def test_checkpoint_of_modelscope_is_unknown(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert loaded_checkpoint(config) is None


def test_name_of_the_hub_is_read_with_its_revision_and_cache(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(checkpoint, "identify", lambda *args, **options: given.append((args[0], options)))
    monkeypatch.setattr(config.model_config, "model", "some/model")
    monkeypatch.setattr(config.model_config, "revision", "v1")
    monkeypatch.setattr(config.load_config, "download_dir", "/cache")
    loaded_checkpoint(config)
    assert given == [("some/model", {"revision": "v1", "cache": "/cache"})]
