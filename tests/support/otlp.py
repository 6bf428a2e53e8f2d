"""An OTLP/gRPC receiver that keeps what it is sent, as a collector would get it."""

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

T = TypeVar("T")


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    links: tuple[tuple[str, str], ...]
    """(trace id, span id)"""
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int
    is_error: bool


@dataclass(frozen=True)
class ReceivedRecord:
    service: str
    text: str
    severity: str
    trace_id: str
    """Empty where it belongs to no span."""
    span_id: str
    attributes: dict[str, Any]


class OtlpReceiver:
    """Lists grow on gRPC's threads. Metrics: what each service sent last, by name."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.spans: list[ReceivedSpan] = []
        self.records: list[ReceivedRecord] = []
        self.metrics: dict[str, dict[str, Metric]] = {}
        self.resources: dict[str, dict[str, Any]] = {}
        """Attributes, by service."""
        self.headers: list[dict[str, str | bytes]] = []
        """Metadata of each export."""
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)  # type: ignore[no-untyped-call]
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Logs(self), self._server)  # type: ignore[no-untyped-call]
        if credentials is None:
            self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            self.endpoint = f"https://localhost:{self._server.add_secure_port('127.0.0.1:0', credentials)}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    @staticmethod
    def until(find: Callable[[], T | None]) -> T:
        """What `find` returns once that is something. The test's own time limit is the only one."""
        while True:
            if found := find():
                return found
            time.sleep(0.05)

    def named(self, service: str, name: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.service == service and span.name == name]


@contextmanager
def otlp_receiver(credentials: grpc.ServerCredentials | None = None) -> Iterator[OtlpReceiver]:
    """On loopback; with TLS where there are credentials."""
    receiver = OtlpReceiver(credentials)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._receiver.headers.append(dict(context.invocation_metadata()))
        for resource in request.resource_spans:
            service = _service(self._receiver, resource)
            for scope in resource.scope_spans:
                self._receiver.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_metrics:
            service = _service(self._receiver, resource)
            metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
            self._receiver.metrics[service] = metrics
        return metrics_service_pb2.ExportMetricsServiceResponse()


class _Logs(logs_service_pb2_grpc.LogsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_logs:
            service = _service(self._receiver, resource)
            for scope in resource.scope_logs:
                self._receiver.records += [
                    ReceivedRecord(
                        service,
                        record.body.string_value,
                        record.severity_text,
                        record.trace_id.hex(),
                        record.span_id.hex(),
                        attributes_of(record.attributes),
                    )
                    for record in scope.log_records
                ]
        return logs_service_pb2.ExportLogsServiceResponse()


def _service(receiver: OtlpReceiver, item: Any) -> str:
    attributes = attributes_of(item.resource.attributes)
    service = str(attributes["service.name"])
    receiver.resources[service] = attributes
    return service


def _span(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        attributes_of(span.attributes),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def attributes_of(attributes: Iterator[KeyValue] | Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
