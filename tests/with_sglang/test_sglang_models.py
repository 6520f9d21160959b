"""Each model class of the installed SGLang has a verdict, and docs/models.md has that of this release."""

from __future__ import annotations

import models
import models_of_sglang
import pytest


@pytest.fixture(scope="module")
def rows() -> list[models.Row]:
    return models_of_sglang.sglang_rows()


def test_no_model_class_of_sglang_is_unknown(rows: list[models.Row]) -> None:
    assert [row.name for row in rows if row.verdict == "unknown"] == []


def test_record_of_sglangs_model_classes_is_that_of_the_installed_release(rows: list[models.Row]) -> None:
    file = models.DATA / f"{models_of_sglang.NAME}.json"
    assert file.read_text() == models.record(rows), "python scripts/models.py --record; make reference"


@pytest.mark.parametrize(
    ("name", "verdict", "pool"),
    [
        ("LlamaForCausalLM", "supported", "MHATokenToKVPool"),
        ("DeepseekV2ForCausalLM", "supported", "MLATokenToKVPool"),
        ("DeepseekV32ForCausalLM", "not run", "DSATokenToKVPool"),
        ("DeepseekV4ForCausalLM", "refused", "DeepSeekV4TokenToKVPool"),
        ("Qwen3NextForCausalLM", "not run", "HybridLinearKVPool"),
    ],
)
def test_model_class_of_sglang_has_its_pools(
    rows: list[models.Row], name: str, verdict: str, pool: str
) -> None:
    (row,) = (row for row in rows if row.name == name)
    assert row.verdict == verdict
    assert pool in row.caches
