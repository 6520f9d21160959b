"""Spans of transfers, in the traces of their requests: `kv.push` at P, `kv.receive` at D.

vLLM gives a request's trace context to its scheduler, and has set up where spans go in each worker, if it was
told to (--otlp-traces-endpoint). The context travels to the workers with the step's metadata.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kv_connector.agent.ledger import Timing
from kv_connector.protocol.actions import Ended, Outcome
from kv_connector.protocol.messages import Role

# Requests whose contexts are remembered; some come to no transfer. Above what an engine has at a time.
_REMEMBERED = 8192


class TransferSpans:
    """Of one worker. A transfer is told on its agent's thread, contexts on the framework's."""

    def __init__(self, rank: int) -> None:
        self._tracer = trace.get_tracer("kv_connector.vllm")
        self._rank = rank
        self._contexts: dict[str, Mapping[str, str]] = {}  # by request id

    def remember(self, contexts: Mapping[str, Mapping[str, str]]) -> None:
        """The headers that make the contexts of these requests."""
        self._contexts.update(contexts)
        while len(self._contexts) > _REMEMBERED:
            del self._contexts[next(iter(self._contexts))]

    def over(self, ended: Ended, timing: Timing) -> None:
        """A transfer has ended: its span."""
        headers = self._contexts.get(ended.request_id)
        if headers is None:
            return  # of a request that nobody traces
        end = time.time_ns()
        begin = end - round(timing.seconds * 1e9)
        pushes = ended.side is Role.PREFILL
        span = self._tracer.start_span(
            "kv.push" if pushes else "kv.receive",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.PRODUCER if pushes else SpanKind.CONSUMER,
            {
                "kv.transfer_id": ended.transfer_id,
                "kv.outcome": ended.outcome.value,
                "kv.lane": timing.lane,
                "kv.pages": timing.pages,
                "kv.rank": self._rank,
            },
            start_time=begin,
        )
        if pushes:
            span.set_attribute("kv.bytes", timing.nbytes)
        if ended.outcome is Outcome.COMPLETED:
            if pushes:
                span.add_event("first push", timestamp=begin + round(timing.first_push_seconds * 1e9))
            span.add_event("last landing", timestamp=end)
        elif ended.outcome not in (Outcome.CANCELLED, Outcome.RELEASED):
            span.set_status(Status(StatusCode.ERROR, ended.reason))
        span.end(end)
