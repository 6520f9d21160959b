"""Each model class of the installed vLLM has a verdict, and docs/models.md has that of this release."""

from __future__ import annotations

import re
from pathlib import Path

import models
import models_of_vllm
import pytest
from models_of_vllm import GPU_LAYERS, GPU_RUN, NAME, RUN, TESTS, Cache, vllm_rows

# GPU cases ran with one release. With another one, their classes have not run.
ON_GPUS = "supported" if NAME in GPU_RUN else "not run"


@pytest.fixture(scope="module")
def rows() -> list[models.Row]:
    return vllm_rows()


def test_no_model_class_is_unknown(rows: list[models.Row]) -> None:
    assert [row.name for row in rows if row.verdict == "unknown"] == []
    assert {row.verdict for row in rows} == {"supported", "refused", "not run", "no KV cache"}


def test_record_of_model_classes_is_that_of_the_installed_release(rows: list[models.Row]) -> None:
    file = models.DATA / f"{models_of_vllm.NAME}.json"
    assert file.read_text() == models.record(rows), "python scripts/models.py --record; make reference"


def test_tests_of_model_classes_exist() -> None:
    cases = (Path(__file__).parents[2] / "topologies" / "cases.py").read_text()
    assert {*TESTS.values(), *RUN.values()} <= {*re.findall(r'Case\("([^"]+)"', cases)}
    families = (Path(__file__).parents[2] / "gpu" / "families.py").read_text()
    on_gpus = [*GPU_RUN.values(), *GPU_LAYERS.values()]
    assert {case for one in on_gpus for case in one.values()} <= {*re.findall(r'Family\("([^"]+)"', families)}


@pytest.mark.parametrize(
    ("name", "verdict", "cache"),
    [
        ("LlamaForCausalLM", "supported", "FullAttentionSpec"),
        ("Llama4ForCausalLM", "supported", "ChunkedLocalAttentionSpec"),
        ("DeepseekV2ForCausalLM", "supported", "MLAAttentionSpec"),
        ("Qwen3NextForCausalLM", "supported", "MambaSpec of QwenGatedDeltaNetAttention"),
        ("DeepseekV4ForCausalLM", "not run", "SlidingWindowMLASpec"),
        ("DeepseekV4ForCausalLM", "not run", "MLAAttentionSpec with tokens_per_state"),
        ("KimiLinearForCausalLM", ON_GPUS, "MambaSpec of KimiK3DeltaAttention"),
        ("KimiK3ForConditionalGeneration", "not run", "MambaSpec of KimiK3DeltaAttention"),
        ("DeepseekV41ForCausalLM", "not run", "CircularBufferSpec"),
        ("WhisperForConditionalGeneration", "refused", "CrossAttentionSpec"),
    ],
)
def test_model_class_has_the_caches_of_its_layers(
    rows: list[models.Row], name: str, verdict: str, cache: str
) -> None:
    (row,) = (row for row in rows if row.name == name)
    assert row.verdict == verdict
    assert cache in row.caches


def test_encoder_of_whisper_alone_has_no_cross_attention(rows: list[models.Row]) -> None:
    (row,) = (row for row in rows if row.name == "UltravoxModel")
    assert "CrossAttentionSpec" not in row.caches


def test_verdict_is_the_connectors_own() -> None:
    assert Cache("a", "MLAAttentionSpec", packed="4").problem is None
    assert "whole states" in (Cache("a", "FullAttentionSpec", packed="Fraction(1, 2)").problem or "")
    replayed = Cache("a", "SlidingWindowMLASpec", replays=True).problem
    assert "--no-swa-bounded-replay" in (replayed or "")
    assert "sinks" in (Cache("a", "SinkFullAttentionSpec").problem or "")
