"""Traces exported by OTLP. Imported only if the environment asks for it; needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from engine.protocol import BadRequest
from router.telemetry.receipts import Leg, Receipt

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Span, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise BadRequest(
        f"OTEL_* asks for traces: pip install -e '.[otel]' in the clone ({error.name})"
    ) from error

__all__ = ["OtelTracing"]

_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracing:
    """Endpoint, headers, sampling and resource come from the environment (`OTEL_*`).

    A thread of the SDK sends the spans. If the collector does not answer, only spans are lost.
    """

    def __init__(self) -> None:
        resource = Resource.create({"service.name": "microserve-router"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("microserve.router")

    def begin(self, headers: Mapping[str, str]) -> _OtelTrace:
        parent = _PROPAGATOR.extract(dict(headers))
        span = self._tracer.start_span("request", context=parent, kind=SpanKind.SERVER)
        return _OtelTrace(self._tracer, span)  # type: ignore[arg-type]  # a Span of the SDK's

    def close(self) -> None:
        self._provider.force_flush(2000)
        self._provider.shutdown()


class _OtelTrace:
    """One request's spans.

    The request's own span begins on arrival, since the legs carry its id. The legs' spans are made
    from the receipt at the end, so tracing adds no work per token.
    """

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self.headers: Mapping[str, str] = {}
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span))
        self.headers = carrier

    def finish(self, receipt: Receipt) -> None:
        span = self._span
        if span.is_recording():
            began = time.time() - receipt.elapsed_ms() / 1e3
            span.set_attributes(_attributes(receipt))
            context = set_span_in_context(span)
            for leg in receipt.legs:
                child = self._tracer.start_span(
                    leg.call, context, SpanKind.CLIENT, start_time=_ns(began, leg.start_ms)
                )
                child.set_attributes(_leg_attributes(leg))
                if leg.error is not None:
                    child.set_status(Status(StatusCode.ERROR, leg.error["type"]))
                ended = receipt.ms if leg.ms is None else leg.start_ms + leg.ms
                child.end(_ns(began, ended or leg.start_ms))
            if receipt.error is not None:
                span.set_status(Status(StatusCode.ERROR, receipt.error["type"]))
        span.end()


def _attributes(receipt: Receipt) -> dict[str, str | int | float]:
    """Named by OpenTelemetry's conventions for generative AI where those have a name."""
    return {
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.completion_tokens,
        "gen_ai.request.id": receipt.id,
        "microserve.strategy": receipt.strategy,
        "microserve.generation": receipt.generation,
        "microserve.cached_tokens": receipt.cached_tokens,
        "microserve.retries": len(receipt.retries),
        "microserve.status": receipt.status,
    }


def _leg_attributes(leg: Leg) -> dict[str, str | int | float]:
    return {
        "microserve.engine": leg.engine,
        "microserve.request_id": leg.request_id,
        "microserve.choice": leg.choice,
        "microserve.attempt": leg.attempt,
        "microserve.begin": leg.begin,
        "microserve.end": leg.end,
        "microserve.bytes": leg.bytes,
        "microserve.tokens": leg.tokens,
    }


def _ns(began: float, ms: float) -> int:
    return int((began + ms / 1e3) * 1e9)
