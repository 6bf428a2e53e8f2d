"""Sends the SDK's spans and those that were noted as plain values in the same exports."""

from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, SpanKind

from svc_common.telemetry.noted_spans import NotedSpan, SpanForm

_MAX_LINKS = 128
"""As the SDK has it, which keeps the last."""
_OF_PROCESS = {"service.instance.id", "process.pid"}
_KINDS = {SpanKind.INTERNAL: Span.SPAN_KIND_INTERNAL, SpanKind.SERVER: Span.SPAN_KIND_SERVER}


class SpanEncoder:
    """On the exporter's thread."""

    def __init__(self, resource: Resource, scope: str) -> None:
        """Of whom all spans are, and the name of what makes them."""
        self._resource, self._scope = resource, scope
        self._envelopes: dict[str, ResourceSpans] = {}
        """Without spans, by service."""
        self._templates: dict[SpanForm, bytes] = {}
        self._links: tuple[tuple[SpanContext, ...], bytes] = ((), b"")
        """The latest, and what is encoded of them."""

    def request(self, spans: Sequence[ReadableSpan | NotedSpan]) -> ExportTraceServiceRequest:
        request = encode_spans([span for span in spans if isinstance(span, ReadableSpan)])
        groups: dict[str, ScopeSpans] = {}
        for span in spans:
            if isinstance(span, NotedSpan):
                service = span.form.service
                if service not in groups:
                    of_service = request.resource_spans.add()
                    of_service.CopyFrom(self._envelope(service))
                    groups[service] = of_service.scope_spans[0]
                self._add(groups[service], span)
        return request

    def _envelope(self, service: str) -> ResourceSpans:
        """Of another service all is said but which process it is: that is not known here."""
        envelope = self._envelopes.get(service)
        if envelope is None:
            attributes = dict(self._resource.attributes)
            if service:
                attributes = {key: attributes[key] for key in attributes if key not in _OF_PROCESS}
                attributes["service.name"] = service
            # The encoder has no public way to encode a resource but as part of a span's.
            resource, scope = Resource(attributes, self._resource.schema_url), InstrumentationScope(self._scope)
            nothing = ReadableSpan("", INVALID_SPAN_CONTEXT, resource=resource, instrumentation_scope=scope)
            [envelope] = encode_spans([nothing]).resource_spans
            del envelope.scope_spans[0].spans[:]
            self._envelopes[service] = envelope
        return envelope

    def _add(self, group: ScopeSpans, noted: NotedSpan) -> None:
        """Protobuf reads one message after another as one: what is the same in many spans is encoded once."""
        span = group.spans.add()
        span.MergeFromString(self._template(noted.form) + self._links_of(noted))
        context, parent = noted.context, noted.parent
        span.trace_id, span.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
        if parent:
            span.parent_span_id = parent.span_id.to_bytes(8, "big")
        span.flags = _flags(parent)
        span.start_time_unix_nano, span.end_time_unix_nano = noted.start_ns, noted.end_ns
        for attribute, (_, kind), value in zip(span.attributes, noted.form.attributes, noted.values, strict=True):
            if kind is float:
                attribute.value.double_value = value  # type: ignore[assignment]  # The form says so.
            elif kind is int:
                attribute.value.int_value = value  # type: ignore[assignment]
            else:
                attribute.value.string_value = value  # type: ignore[assignment]
        if noted.error:
            span.attributes.add(key="error.type").value.string_value = noted.error
            span.status.code, span.status.message = Status.STATUS_CODE_ERROR, noted.error_message

    def _template(self, form: SpanForm) -> bytes:
        template = self._templates.get(form)
        if template is None:
            span = Span(name=form.name, kind=_KINDS[form.kind], status=Status())
            for name, _ in form.attributes:
                span.attributes.add(key=name)
            template = self._templates[form] = span.SerializeToString()
        return template

    def _links_of(self, noted: NotedSpan) -> bytes:
        if noted.links is not self._links[0]:
            span = Span(dropped_links_count=max(0, len(noted.links) - _MAX_LINKS))
            for link in noted.links[-_MAX_LINKS:]:
                ids = link.trace_id.to_bytes(16, "big"), link.span_id.to_bytes(8, "big")
                span.links.add(trace_id=ids[0], span_id=ids[1], flags=_flags(link))
            self._links = noted.links, span.SerializeToString()
        return self._links[1]


def _flags(context: SpanContext | None) -> int:
    known = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    return known | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK if context and context.is_remote else known


class SpanExporter(OTLPSpanExporter):
    """The SDK's, but for how spans are encoded."""

    def __init__(self, encoder: SpanEncoder, **options: Any) -> None:
        super().__init__(**options)
        self._encoder = encoder

    def _translate_data(self, data: Sequence[ReadableSpan | NotedSpan]) -> ExportTraceServiceRequest:
        return self._encoder.request(data)
