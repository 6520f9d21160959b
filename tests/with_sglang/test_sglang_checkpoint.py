"""The identity of the checkpoint that SGLang has loaded."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_connector.agent.checkpoint_reader import read_checkpoint
from kv_connector.lab.model import make_llama
from kv_connector.protocol.session.checkpoint import Checkpoint
from kv_connector.sglang import internals


def loaded(directory: Path, load_format: str) -> Checkpoint | None:
    model = SimpleNamespace(
        model_path=str(directory), load_format=load_format, revision=None, download_dir=None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "get_model", lambda: model)
        return internals.loaded_checkpoint()


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "instanttensor"])
def test_sglang_checkpoint_is_that_of_the_models_directory(tmp_path: Path, load_format: str) -> None:
    directory = make_llama(tmp_path, layers=1, hidden=64, intermediate=64)
    assert loaded(directory, load_format) == read_checkpoint(directory)


@pytest.mark.parametrize("load_format", ["dummy", "pt", "gguf", "remote", "mistral"])
def test_sglang_checkpoint_of_another_format_is_unknown(tmp_path: Path, load_format: str) -> None:
    assert loaded(make_llama(tmp_path, layers=1, hidden=64, intermediate=64), load_format) is None


def test_sglang_checkpoint_of_modelscope_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "1")
    assert loaded(make_llama(tmp_path, layers=1, hidden=64, intermediate=64), "auto") is None
