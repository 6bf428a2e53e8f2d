"""From a service's meters to the SDK and its readers: one set of instruments, read for OTLP and for Prometheus."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from svc_common.telemetry.declaration import Instrument, Kind
from svc_common.telemetry.meters import Distribution, Histogram, Meters, Read

SCOPE = "neoflex"
"""Of all that the services record themselves."""


class _Histograms:
    """Those of the meters as the SDK's data, from when the service started."""

    def __init__(self, histograms: Sequence[Histogram]) -> None:
        self._histograms = histograms
        self._start_ns = time.time_ns()

    def added_to(self, data: MetricsData) -> MetricsData:
        """Beside the SDK's own, in their scope: of these there always are some."""
        now_ns = time.time_ns()
        metrics = [self._metric(item, now_ns) for item in self._histograms if item.series()]
        [of_resource] = data.resource_metrics
        scopes = [
            replace(scope, metrics=[*scope.metrics, *metrics]) if scope.scope.name == SCOPE else scope
            for scope in of_resource.scope_metrics
        ]
        return MetricsData([replace(of_resource, scope_metrics=scopes)])

    def _metric(self, histogram: Histogram, now_ns: int) -> Metric:
        instrument = histogram.instrument
        points = [self._point(instrument, labels, series, now_ns) for labels, series in histogram.series()]
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return Metric(instrument.name, instrument.text, instrument.unit, data)

    def _point(
        self, instrument: Instrument, labels: tuple[str, ...], series: Distribution, now_ns: int
    ) -> HistogramDataPoint:
        counts = series.counts.copy()
        return HistogramDataPoint(
            attributes=_attributes(instrument, labels),
            start_time_unix_nano=self._start_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=series.total,
            bucket_counts=counts,
            explicit_bounds=tuple(map(float, instrument.bounds)),
            min=None,  # type: ignore[arg-type]  # OTLP has none where it is not known.
            max=None,  # type: ignore[arg-type]
        )


class _PeriodicReader(PeriodicExportingMetricReader):
    def __init__(self, exporter: MetricExporter, interval_s: float, histograms: _Histograms) -> None:
        self._histograms = histograms
        super().__init__(exporter, export_interval_millis=interval_s * 1e3)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._histograms.added_to(metrics_data), timeout_millis, **kwargs)


class _PrometheusReader(PrometheusMetricReader):
    def __init__(self, registry: CollectorRegistry, histograms: _Histograms) -> None:
        self._histograms = histograms
        super().__init__(registry=registry, scope_info_enabled=False)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._histograms.added_to(metrics_data), timeout_millis, **kwargs)


def make_meter_provider(
    meters: Meters,
    resource: Resource,
    exporter: MetricExporter | None,
    interval_s: float,
    registry: CollectorRegistry | None,
) -> MeterProvider:
    """`exporter` is given all metrics each `interval_s`; `registry` answers with them when it is asked."""
    histograms = _Histograms(meters.histograms)
    readers: list[MetricReader] = []
    if exporter is not None:
        readers.append(_PeriodicReader(exporter, interval_s, histograms))
    if registry is not None:
        readers.append(_PrometheusReader(registry, histograms))
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    meter = provider.get_meter(SCOPE)
    for instrument, read in meters.observed:
        create = meter.create_observable_counter if instrument.kind is Kind.COUNTER else meter.create_observable_gauge
        create(instrument.name, [_callback(instrument, read)], instrument.unit, instrument.text)
    return provider


def _callback(instrument: Instrument, read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(options: CallbackOptions) -> list[Observation]:
        return [Observation(sample.value, _attributes(instrument, sample.labels)) for sample in read()]

    return observe


def _attributes(instrument: Instrument, labels: tuple[str, ...]) -> dict[str, str]:
    return {name: label for name, label in zip(instrument.attributes, labels, strict=True) if label}
