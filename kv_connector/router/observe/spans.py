"""Spans: one trace of a request through the router and both engines, for OpenTelemetry.

OpenTelemetry is imported only if an endpoint for spans is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from kv_connector.router.engines.endpoint import Endpoint
from kv_connector.router.engines.members import Side

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# The variable of vLLM, so that one environment serves both.
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
SERVICE_NAME = "kv-connector-router"


class SpansError(RuntimeError):
    """Spans cannot be sent; the message says what to install or set."""


class Spans:
    """Creates no spans. The base class of those that do."""

    @classmethod
    def to(cls, endpoint: str | None) -> Spans:
        """Returns spans that go to this OTLP endpoint. Raises SpansError."""
        return Spans() if endpoint is None else _OtlpSpans(endpoint)

    def server(
        self, path: str, request_id: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        """Opens the span of a client's request, for the length of a block; ``headers`` are the client's."""
        return nullcontext()

    def client(
        self, side: Side, endpoint: Endpoint, headers: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Opens the span of a request to an engine, for the length of a block. Yields the headers to send in
        place of ``headers``. The block may be left in another task."""
        return nullcontext(headers)

    def name_transfer(self, transfer_id: str) -> None:
        """Sets the transfer id of the request's pages on the current span."""

    def close(self) -> None:
        """Blocks until all spans have been sent, or for a few seconds."""


class _OtlpSpans(Spans):
    def __init__(self, endpoint: str) -> None:
        exporter = _exporter(endpoint)
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME as KEY
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {KEY: SERVICE_NAME}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kv_connector.router")
        self._contexts = TraceContextTextMapPropagator()
        self._trace = trace

    def server(
        self, path: str, request_id: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[object]:
        about = {"http.request.method": "POST", "url.path": path, "kv.request_id": request_id}
        context, kind = self._contexts.extract(headers), self._trace.SpanKind.SERVER
        return self._tracer.start_as_current_span(f"POST {path}", context, kind, about)

    @contextmanager
    def client(
        self, side: Side, endpoint: Endpoint, headers: Mapping[str, str]
    ) -> Iterator[Mapping[str, str]]:
        about = {"url.full": endpoint.url, "kv.side": side.value, "kv.engine": str(endpoint)}
        span = self._tracer.start_span(side.value, kind=self._trace.SpanKind.CLIENT, attributes=about)
        passed = dict(headers)
        # The span is not made the current one: the block may end in another task.
        self._contexts.inject(passed, self._trace.set_span_in_context(span))
        try:
            yield passed
        except Exception as error:
            span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            # The client disconnected, or the other engine failed.
            span.set_attribute("kv.cancelled", True)
            raise
        finally:
            span.end()

    def name_transfer(self, transfer_id: str) -> None:
        self._trace.get_current_span().set_attribute("kv.transfer_id", transfer_id)

    def close(self) -> None:
        self._provider.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    protocol = os.environ.get(PROTOCOL_VARIABLE, "grpc")
    try:
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

            return http.OTLPSpanExporter(endpoint=endpoint)
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            return grpc.OTLPSpanExporter(endpoint=endpoint, insecure=True)
    except ImportError as error:
        raise SpansError(f"{error}; install it: pip install 'kv-connector[otel]'") from None
    raise SpansError(f"{PROTOCOL_VARIABLE} is {protocol!r}: set it to grpc or http/protobuf")
