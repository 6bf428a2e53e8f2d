"""Trace context as it stands in HTTP headers, gRPC metadata and plans: W3C's traceparent and tracestate."""

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_FIELDS = ("traceparent", "tracestate")


def parent_of(headers: Iterable[tuple[str, str | bytes]]) -> Context:
    """What the caller says; empty where that is nothing, or no trace context. Header names are in lower case."""
    carrier = {name: text for name, text in headers if name in _FIELDS and isinstance(text, str)}
    return _PROPAGATOR.extract(carrier, Context())


def headers_of(span: Span) -> tuple[tuple[str, str], ...]:
    """For those whom `span` calls; none where it has no context."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return tuple(carrier.items())


def traceparent_of(context: SpanContext) -> str:
    """Empty where it is not sampled."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if context.trace_flags.sampled else ""
