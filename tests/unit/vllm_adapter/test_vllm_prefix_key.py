"""The part of a registration about prefixes: the key of the block hashes, and whether the engine borrows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_stage import BLOCK, FULL, SLIDING, MakeStage, Stage, model, stage, vllm_config

from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.scheduling.content import prefix_key

__all__ = ["model", "stage"]

STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 96), (4, 32, 16)),
    dtypes=(torch.float32, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


JOINS = {"routers": ["127.0.0.1:8500"], "api_url": "http://127.0.0.1:8100"}


def reported(engine: Stage) -> tuple[str, bool]:
    connector = engine.scheduler.connector
    assert isinstance(connector, WriteImmConnector)
    return connector._prefixes, connector._borrows


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
@pytest.mark.parametrize("specs", [(FULL,), (FULL, SLIDING)])
def test_engines_of_all_roles_and_windows_report_one_key(
    stage: MakeStage, role: str, specs: tuple[Any, ...]
) -> None:
    assert reported(stage(role, *specs)) == (prefix_key("sha256", BLOCK), True)


@pytest.mark.parametrize("takes_weights", [True, False])
def test_engine_that_keeps_its_cache_over_updates_reports_another_key(
    model: Path, monkeypatch: pytest.MonkeyPatch, takes_weights: bool
) -> None:
    """From the first update on it refuses an engine that clears its cache. So routers must not pair them."""
    keys = set()
    for settings in ("", '{"clear_cache": true}', '{"clear_cache": false}'):
        monkeypatch.setenv("KV_CONNECTOR_WEIGHTS", settings)
        config = vllm_config(model, "kv_consumer")
        if takes_weights:
            config.weight_transfer_config = WeightTransferConfig(backend="write_imm")
        keys.add(reported(Stage(config, [FULL]))[0])
    assert len(keys) == 1 + takes_weights
    assert prefix_key("sha256", BLOCK) in keys


def test_prefill_engine_with_several_steps_in_flight_lends_and_does_not_borrow(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "kv_connector.vllm.connector._no_prefixes"
    monkeypatch.setattr(reason, lambda *_: "several steps are in flight")
    assert reported(stage("kv_producer")) == (prefix_key("sha256", BLOCK), False)


@pytest.mark.parametrize(("scheduler", "prefetches"), [(None, True), ("my.Scheduler", False)])
def test_engine_reports_that_it_prefetches_with_a_scheduler_of_this_project(
    model: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str | None, prefetches: bool
) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    config = vllm_config(model, "kv_consumer")
    config.scheduler_config.scheduler_cls = scheduler
    connector = Stage(config, [FULL]).scheduler.connector
    assert isinstance(connector, WriteImmConnector)
    assert connector._prefetches is prefetches


@pytest.mark.parametrize(
    ("specs", "interval", "keeps"),
    [
        ((FULL,), 0, True),
        ((FULL, SLIDING), 0, False),
        ((FULL, SLIDING), BLOCK, True),
        ((SLIDING,), None, True),
    ],
)
def test_engine_with_windows_keeps_answers_if_vllm_retains_them(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    specs: tuple[Any, ...],
    interval: int | None,
    keeps: bool,
) -> None:
    config = vllm_config(model, "kv_consumer", extra=JOINS)
    config.cache_config.prefix_cache_retention_interval = interval
    connector = Stage(config, specs).scheduler.connector
    assert isinstance(connector, WriteImmConnector)
    assert connector._keeps_answers is keeps
    lines = [line for line in caplog.messages if "lends no answers" in line]
    assert len(lines) == (not keeps), "one line, which names the engine and the option"
    assert all("engine engine" in line and f"interval {BLOCK}" in line for line in lines)


@pytest.mark.parametrize(("role", "extra"), [("kv_producer", JOINS), ("kv_consumer", {})])
def test_engine_that_lends_no_answers_logs_nothing_of_them(
    model: Path, caplog: pytest.LogCaptureFixture, role: str, extra: dict[str, Any]
) -> None:
    """A prefill engine generates none, and no router proposes to load from an engine that does not join."""
    connector = Stage(vllm_config(model, role, extra=extra), (FULL, SLIDING)).scheduler.connector
    assert isinstance(connector, WriteImmConnector)
    assert connector._keeps_answers is (role == "kv_producer"), "older routers do not know the flag"
    assert "lends no answers" not in caplog.text


def test_engine_with_recurrent_states_reports_no_key(model: Path) -> None:
    config = vllm_config(model, "kv_consumer")
    config.cache_config.mamba_cache_mode = "align"
    assert reported(Stage(config, [FULL, STATE])) == ("", False)


def test_engine_without_prefix_caching_reports_no_key(model: Path) -> None:
    config = vllm_config(model, "kv_consumer")
    config.cache_config.enable_prefix_caching = False
    assert reported(Stage(config, [FULL])) == ("", False)
