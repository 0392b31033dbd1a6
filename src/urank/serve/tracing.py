"""Traces by OpenTelemetry: a span of every request, exported by OTLP over HTTP as the `OTEL_*` variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope


class Tracing:
    """Starts and ends the spans of requests, as parts of their clients' traces."""

    def __init__(self) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "urank")
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("urank.serve")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, scope: Scope) -> Span:
        """Start the span of a request, whose headers may have the context of a trace (W3C `traceparent`)."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.start_span(
            scope["method"],
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": scope["method"]},
        )

    def end(self, span: Span, scope: Scope, facts: Mapping[str, Any]) -> None:
        """End it with what is known about the request."""
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", facts["status"])
        for name in ("request_id", "candidates", "queue_ms"):
            if name in facts:
                span.set_attribute(f"urank.{name}", facts[name])
        if facts["status"] >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
