"""Spans of transfers: what the scheduler side sends the workers for them, and what the workers export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from recording_agent import RecordingAgent, agent
from vllm_stage import FULL, PARAMS_OF_D, PARAMS_OF_P, Stage, model, prompt, vllm_config

from kv_connector.agent.reports.ledger import Timing
from kv_connector.protocol.actions import Ended, Outcome
from kv_connector.protocol.wire.messages import Role
from kv_connector.vllm import spans
from kv_connector.vllm.metadata import StepMetadata
from kv_connector.vllm.spans import TransferSpans
from kv_connector.vllm.worker_side import WorkerSide

__all__ = ["agent", "model"]

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans.trace, "get_tracer", provider.get_tracer)
    return exporter


def of(exported: InMemorySpanExporter, ended: Ended, timing: Timing) -> ReadableSpan:
    traced = TransferSpans(rank=3)
    traced.remember({"r": HEADERS})
    traced.over(ended, timing)
    (span,) = exported.get_finished_spans()
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    return span


def test_span_of_a_push_has_the_times_of_its_first_and_last_page(exported: InMemorySpanExporter) -> None:
    ended = Ended(Role.PREFILL, "t", 1, Outcome.COMPLETED, seconds=2.0, request_id="r")
    span = of(exported, ended, Timing(Role.PREFILL, "tcp", 2.0, 0.5, nbytes=640, pages=10))
    assert span.name == "kv.push"
    assert span.attributes == {
        "kv.transfer_id": "t",
        "kv.outcome": "completed",
        "kv.lane": "tcp",
        "kv.pages": 10,
        "kv.rank": 3,
        "kv.bytes": 640,
    }
    assert span.start_time is not None
    assert span.end_time == span.start_time + 2_000_000_000
    events = {event.name: event.timestamp - span.start_time for event in span.events}
    assert events == {"first push": 500_000_000, "last landing": 2_000_000_000}


def test_load_of_a_prefix_has_a_separate_span(exported: InMemorySpanExporter) -> None:
    ended = Ended(Role.DECODE, "t", 1, Outcome.COMPLETED, seconds=2.0, request_id="r", prefix_tokens=96)
    span = of(exported, ended, Timing(Role.DECODE, "tcp", 2.0, pages=10))
    assert span.name == "kv.borrow"
    assert span.attributes is not None
    assert span.attributes["kv.tokens"] == 96


def test_failed_transfer_is_an_error_with_its_reason(exported: InMemorySpanExporter) -> None:
    ended = Ended(Role.DECODE, "t", 1, Outcome.FAILED, "the peer is gone", 1.0, request_id="r")
    span = of(exported, ended, Timing(Role.DECODE, "tcp", 1.0))
    assert span.name == "kv.receive"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the peer is gone")
    assert not span.events


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.RELEASED])
def test_transfer_abandoned_by_its_client_or_decode_is_no_error(
    exported: InMemorySpanExporter, outcome: Outcome
) -> None:
    ended = Ended(Role.PREFILL, "t", 1, outcome, "its client left", 1.0, request_id="r")
    span = of(exported, ended, Timing(Role.PREFILL, "tcp", 1.0))
    assert span.attributes is not None
    assert span.attributes["kv.outcome"] == outcome.value
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events


def test_untraced_request_has_no_span(exported: InMemorySpanExporter) -> None:
    ended = Ended(Role.DECODE, "t", 1, Outcome.COMPLETED, seconds=1.0, request_id="another")
    TransferSpans(rank=0).over(ended, Timing(Role.DECODE, "tcp", 1.0))
    assert not exported.get_finished_spans()


def test_contexts_of_requests_that_come_to_nothing_are_forgotten(exported: InMemorySpanExporter) -> None:
    traced = TransferSpans(rank=0)
    for number in range(2 * spans._REMEMBERED):
        traced.remember({str(number): HEADERS})
    assert len(traced._contexts) == spans._REMEMBERED
    assert str(2 * spans._REMEMBERED - 1) in traced._contexts


def test_worker_receives_contexts_with_the_step_and_ends_from_its_agent(
    agent: RecordingAgent, exported: InMemorySpanExporter
) -> None:
    class NoLastBlocks:
        pass

    traced = TransferSpans(rank=0)
    last_blocks: Any = NoLastBlocks()
    worker = WorkerSide(agent, ("layer",), agent.signal.store, last_blocks, traced)  # type: ignore[arg-type]
    assert agent.take_calls() == [("report_ends", traced.over)]
    worker.begin_step(StepMetadata(contexts={"r": HEADERS}))
    assert traced._contexts == {"r": HEADERS}


@pytest.mark.parametrize(("role", "params"), [("kv_producer", PARAMS_OF_P), ("kv_consumer", PARAMS_OF_D)])
def test_the_context_of_a_request_goes_to_the_workers_once(
    role: str, params: dict[str, Any], model: Path
) -> None:
    stage = Stage(vllm_config(model, role), [FULL])
    stage.add("traced", prompt(64), params, trace_headers=HEADERS)
    stage.add("plain", prompt(65), params | {"transfer_id": "u"})
    assert stage.step().contexts == {"traced": HEADERS}
    assert stage.step().contexts == {}


def test_a_request_of_no_transfer_has_no_context(model: Path) -> None:
    stage = Stage(vllm_config(model, "kv_producer"), [FULL])
    stage.add("alone", prompt(64), None, trace_headers=HEADERS)
    assert stage.step().contexts == {}
