"""One service's telemetry: its meters, its tracer, and who is told."""

import logging
import os
import socket
import uuid
from collections.abc import Callable
from functools import cached_property
from importlib import metadata
from typing import TYPE_CHECKING

from opentelemetry.trace import NoOpTracer, Tracer
from opentelemetry.util.types import AnyValue

from svc_common.config import ConfigError, TelemetryConfig
from svc_common.telemetry.meters import Meters
from svc_common.telemetry.noted_spans import NoteSpan, nobody
from svc_common.telemetry.process_meters import observe_process

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import CollectorRegistry

    from svc_common.telemetry.endpoint import MetricsEndpoint
    from svc_common.telemetry.exporters import Exporters

_CLOSE_S = 0.8
"""For what still waits to be sent when the service ends."""

logger = logging.getLogger(__name__)


class Telemetry:
    """Made once by a service's `__main__`, closed once. Without a collector nothing is sent and no span is made.

    Whoever has something to count adds it to `meters` before `start_metrics`.
    """

    def __init__(self, service: str, config: TelemetryConfig | None = None) -> None:
        """Traces and logs go to the collector from here on. Raises ConfigError."""
        self.config = config or TelemetryConfig()
        self.meters = Meters(service)
        observe_process(self.meters)
        self.tracer: Tracer = NoOpTracer()
        self.note_span: NoteSpan = nobody
        self._exporters: Exporters | None = None
        self._handler: logging.Handler | None = None
        self._provider: MeterProvider | None = None
        self._registry: CollectorRegistry | None = None
        self._endpoint: MetricsEndpoint | None = None
        if self.config.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
            self._export()

    @property
    def is_exporting(self) -> bool:
        """Whether there is a collector."""
        return self._exporters is not None

    @property
    def is_measured(self) -> bool:
        """Whether anybody is told of metrics."""
        return self._provider is not None

    def start_metrics(self, listen: str | None = None, key: str = "") -> None:
        """From here on metrics go to the collector, and to whoever asks at `listen`, "host:port" of the configuration's
        `key`. Does nothing where there is neither. Raises ConfigError where the address can't be had.
        """
        registry = self._registry if listen is None else self.registry
        if self._exporters is None and registry is None:
            return
        from svc_common.telemetry.metrics import make_meter_provider

        exporter = self._exporters.metrics if self._exporters else None
        interval_s = self.config.export_interval_s
        self._provider = make_meter_provider(self.meters, self._resource, exporter, interval_s, registry)
        if listen is not None:
            from svc_common.telemetry.endpoint import MetricsEndpoint

            try:
                self._endpoint = MetricsEndpoint(listen, self.registry)
            except OSError as error:
                raise ConfigError(f"{key}: cannot listen on {listen}: {error.strerror or error}") from error
            logger.info("metrics at %s", self._endpoint.url)

    @property
    def registry(self) -> "CollectorRegistry":
        """Prometheus' view of the metrics, once they are started. To be asked for before that."""
        if self._registry is None:
            from prometheus_client import CollectorRegistry

            self._registry = CollectorRegistry()
        return self._registry

    def close(self) -> None:
        """Sends what waits to be sent, if that takes no longer than a second."""
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
        ends: list[Callable[[], None]] = []
        if self._endpoint:
            ends.append(self._endpoint.close)
        if self._provider:
            ends.append(self._provider.shutdown)
        if self._exporters:
            self._exporters.close(_CLOSE_S, *ends)
        else:
            for end in ends:
                end()

    @cached_property
    def _resource(self) -> "Resource":
        """Who sends. What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say goes before it."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        own: dict[str, AnyValue] = {
            "service.name": self.meters.service,
            "service.namespace": "neoflex",
            "service.version": _version(),
            "service.instance.id": uuid.uuid4().hex,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
        return Resource.create(own).merge(OTELResourceDetector().detect())

    def _export(self) -> None:
        from svc_common.telemetry.exporters import Exporters
        from svc_common.telemetry.log_records import OtlpHandler

        self._exporters = Exporters(self.config, self._resource)
        self.tracer, self.note_span = self._exporters.tracer, self._exporters.note_span
        self._handler = OtlpHandler(self._exporters.logger)
        logging.getLogger().addHandler(self._handler)
        logger.info("traces, metrics and logs go to %s", self.config.otlp_endpoint or "the collector")


def _version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("neoflex")
    except metadata.PackageNotFoundError:
        return "uninstalled"
