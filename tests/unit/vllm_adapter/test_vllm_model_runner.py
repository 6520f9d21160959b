"""The order of calls in a step of model runner V2, which differs from V1's."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm.v1.worker.gpu import model_runner

from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.patches import report_preemptions_first


def update(metadata: Any, heard: list[Any]) -> None:
    """Runs the part of a V2 step that comes before V2 calls its connector."""
    runner = MagicMock()
    runner.req_states.num_computed_tokens_np = np.zeros(4, np.int32)
    runner.req_states.prefill_len.np = np.zeros(4, np.int32)
    runner.req_states.num_computed_prefill_tokens = np.zeros(4, np.int32)
    runner.kv_block_zeroer.zero_block_ids = heard.append
    none = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    step = SimpleNamespace(
        scheduled_cached_reqs=none,
        new_block_ids_to_zero=[5, 6],
        kv_cache_block_copies=None,
        kv_connector_metadata=metadata,
    )
    model_runner.GPUModelRunner.update_requests(runner, step)


def test_preemption_is_reported_before_new_blocks_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = model_runner.GPUModelRunner
    monkeypatch.setattr(runner, "update_requests", runner.update_requests)  # and back
    step, heard, before = StepMetadata(preempted=("t",)), [], []  # type: ignore[var-annotated]
    report_preemptions_first(StepMetadata, before.append)
    report_preemptions_first(StepMetadata, heard.append)  # of an engine that is made anew in this process
    update(step, heard)
    assert heard == [step, [5, 6]]
    heard.clear()
    other = object()
    update(SimpleNamespace(metadata=(other, step)), heard)  # a MultiConnector's
    assert heard == [step, [5, 6]]
    heard.clear()
    for metadata in (other, None):
        update(metadata, heard)
    assert heard == [[5, 6], [5, 6]]
    assert before == []


def test_another_wrapper_of_the_method_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler wraps the method, below this project's wrapper or above it."""
    runner = model_runner.GPUModelRunner
    monkeypatch.setattr(runner, "update_requests", runner.update_requests)  # and back
    heard: list[Any] = []

    def profile(name: str) -> None:
        wrapped = runner.update_requests

        @functools.wraps(wrapped)
        def profiled(self: Any, scheduler_output: Any) -> Any:
            heard.append(name)
            return wrapped(self, scheduler_output)

        monkeypatch.setattr(runner, "update_requests", profiled)

    step, before = StepMetadata(), []  # type: ignore[var-annotated]
    profile("below")
    report_preemptions_first(StepMetadata, before.append)
    profile("above")
    report_preemptions_first(StepMetadata, heard.append)  # of an engine that is made anew in this process
    update(step, heard)
    assert heard == ["above", step, "below", [5, 6]]
    assert before == []
