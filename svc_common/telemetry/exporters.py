"""What sends to the collector: one exporter for each of traces, metrics and logs, and what becomes of one unreachable.

Imported only where there is a collector: the SDK and its exporters take half a second and some 20 MB.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from opentelemetry._logs import Logger
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Tracer

from svc_common.config import ConfigError, TelemetryConfig
from svc_common.telemetry.metrics import SCOPE
from svc_common.telemetry.noted_spans import NotedSpan
from svc_common.telemetry.span_exporter import SpanEncoder, SpanExporter

_TIMEOUT_S = 5
"""Of one export, retries included."""
_MAX_QUEUED = 8192
"""Spans or log records that wait to be sent; further ones push out the oldest."""
_WARN_EVERY_S = 600.0

logger = logging.getLogger(__name__)


class Exporters:
    """Each sends from a thread of its own. `close` once."""

    def __init__(self, config: TelemetryConfig, resource: Resource) -> None:
        """Without an endpoint in `config` that of the environment counts. Raises ConfigError for no such file."""
        _warn_once()
        options = _options(config)
        interval_ms = config.export_interval_s * 1e3
        self.metrics = OTLPMetricExporter(**options)
        spans, logs = SpanExporter(SpanEncoder(resource, SCOPE), **options), OTLPLogExporter(**options)
        self._exporters = (self.metrics, spans, logs)
        # As the caller sampled; of requests whose caller has not decided it a share.
        sampler = ParentBasedTraceIdRatio(config.traces_sample_ratio)
        self._tracers = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._spans = BatchSpanProcessor(spans, max_queue_size=_MAX_QUEUED, schedule_delay_millis=interval_ms)
        self._tracers.add_span_processor(self._spans)
        self._loggers = LoggerProvider(resource, shutdown_on_exit=False)
        self._loggers.add_log_record_processor(
            BatchLogRecordProcessor(logs, max_queue_size=_MAX_QUEUED, schedule_delay_millis=interval_ms)
        )
        self.tracer: Tracer = self._tracers.get_tracer(SCOPE)
        self.logger: Logger = self._loggers.get_logger(SCOPE)

    def note_span(self, span: NotedSpan) -> None:
        """It is sent with those of the tracer."""
        self._spans.on_end(span)  # type: ignore[arg-type]  # All it asks a span for is its context.

    def close(self, limit_s: float, *more: Callable[[], None]) -> None:
        """Sends what waits, beside whatever else is to end; what has not gone within `limit_s` is lost."""
        ends = (*more, self._tracers.shutdown, self._loggers.shutdown)
        threads = [threading.Thread(target=end, daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for exporter in self._exporters:
            if not exporter._shutdown:  # Still sending, or trying to: the channel's end ends that.
                exporter.shutdown()


def _options(config: TelemetryConfig) -> dict[str, Any]:
    """Those that all three exporters take; what is not set is the environment's to say."""
    options: dict[str, Any] = {
        "endpoint": config.otlp_endpoint,
        "timeout": _TIMEOUT_S,
        "headers": tuple(config.headers.items()) or None,
    }
    if config.certificate or config.client_certificate:
        options["credentials"] = grpc.ssl_channel_credentials(
            _pem("certificate", config.certificate),
            _pem("client_key", config.client_key),
            _pem("client_certificate", config.client_certificate),
        )
    return options


def _pem(key: str, path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"telemetry.{key}: {path}: {error.strerror}") from error


class _OnceInAWhile(logging.Filter):
    """Of a collector that is away each export would say so, thrice."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _WARN_EVERY_S
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def _warn_once() -> None:
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
        found = logging.getLogger(name)
        if not any(isinstance(item, _OnceInAWhile) for item in found.filters):
            found.addFilter(_OnceInAWhile())
