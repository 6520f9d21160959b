"""A sample of `make fuzz-scheduler`, the smallest scenarios of faults that it found, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connector.lab.model import make_llama
from kv_connector.protocol.admission import AdmissionGate
from kv_connector.vllm import kept_cache
from kv_connector.vllm.kept_cache import SaltedHasher
from kv_connector.vllm.scheduling.decode_scheduler import DecodeScheduler
from kv_connector.vllm.scheduling.gated_scheduler import GatedQueue
from tests.fuzz.scheduler import failure, report, scenario


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), layers=1, hidden=64, intermediate=64)


@pytest.mark.parametrize("seed", range(12))
def test_scenario_reads_no_wrong_contents_and_leaves_nothing(model: Path, seed: int) -> None:
    if text := report(seed, model):
        pytest.fail(text)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a reset keeps what is loaded": (DecodeScheduler, "after_reset", lambda self: None),
    "stale pages are used": (DecodeScheduler, "discard", lambda self, request_ids: None),
    "the gate keeps the place of finished requests": (AdmissionGate, "leave", lambda self, one: None),
    "new requests find KV of earlier weights": (
        SaltedHasher,
        "__call__",
        lambda self, request: self.hasher(request),
    ),
    "new requests find KV behind KV of earlier weights": (kept_cache, "_diverge", lambda *_: None),
    "prompts go on over an update": (kept_cache, "_preempt_prompts", lambda *_: None),
    "requests stay aside": (GatedQueue, "_return", lambda self, request_id: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found(model: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*PLANTED[fault])
    assert any(failure(*scenario(seed), model) for seed in range(20))
