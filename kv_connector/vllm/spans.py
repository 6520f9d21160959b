"""Spans of transfers in the traces of their requests: `kv.push` at P, `kv.receive` at D, `kv.borrow` for a
prefix.

vLLM gives a request's trace context to its scheduler. It has configured the export of spans in each worker,
if --otlp-traces-endpoint is set. The context travels to the workers with the step's metadata.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kv_connector.agent.reports.ledger import Timing
from kv_connector.protocol.actions import Ended, Outcome
from kv_connector.protocol.wire.messages import Role

# Requests whose contexts are kept. Some requests never have a transfer. The number exceeds the requests of an
# engine.
_REMEMBERED = 8192


class TransferSpans:
    """The spans of one worker.

    The agent's thread reports transfers, and the engine's thread reports contexts.
    """

    def __init__(self, rank: int) -> None:
        self._tracer = trace.get_tracer("kv_connector.vllm")
        self._rank = rank
        self._contexts: dict[str, Mapping[str, str]] = {}  # by request id

    def remember(self, contexts: Mapping[str, Mapping[str, str]]) -> None:
        """Keeps the headers of these requests' trace contexts."""
        self._contexts.update(contexts)
        while len(self._contexts) > _REMEMBERED:
            del self._contexts[next(iter(self._contexts))]

    def over(self, ended: Ended, timing: Timing) -> None:
        """Sends the span of a transfer that has ended."""
        headers = self._contexts.get(ended.request_id)
        if headers is None:
            return  # the request is not traced
        end = time.time_ns()
        begin = end - round(timing.seconds * 1e9)
        pushes = ended.side is Role.PREFILL
        receives = "kv.borrow" if ended.prefix_tokens else "kv.receive"
        span = self._tracer.start_span(
            "kv.push" if pushes else receives,
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
        if ended.prefix_tokens:
            span.set_attribute("kv.tokens", ended.prefix_tokens)
        if ended.outcome is Outcome.COMPLETED:
            if pushes:
                span.add_event("first push", timestamp=begin + round(timing.first_push_seconds * 1e9))
            span.add_event("last landing", timestamp=end)
        elif ended.outcome not in (Outcome.CANCELLED, Outcome.RELEASED):
            span.set_status(Status(StatusCode.ERROR, ended.reason))
        span.end(end)
