"""Meters, their export to Prometheus and over OTLP, and collectors that are away, silent or guarded."""

import logging
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from support.metrics_page import PAGE, metrics_table, replaced
from support.otlp import OtlpReceiver, attributes_of, otlp_receiver

from svc_common.config import ConfigError, TelemetryConfig, parse
from svc_common.telemetry import exporters, instruments
from svc_common.telemetry.meters import Distribution, Meters, Sample, value
from svc_common.telemetry.noted_spans import NotedSpan, SpanForm, new_context
from svc_common.telemetry.propagation import headers_of, parent_of, traceparent_of
from svc_common.telemetry.span_exporter import SpanEncoder
from svc_common.telemetry.telemetry import Telemetry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.exporter"


def config(endpoint: str, **more: Any) -> TelemetryConfig:
    return TelemetryConfig(otlp_endpoint=endpoint, **{"export_interval_s": 0.1, **more})


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"otlp_endpoint": "collector:4317"}, 'telemetry.otlp_endpoint: must be "http://host:port"'),
        ({"otlp_endpoint": "http://collector:70000"}, "telemetry.otlp_endpoint: must be"),
        ({"otlp_endpoint": "http://a collector:4317"}, "telemetry.otlp_endpoint: must be"),
        ({"headers": {"X-Key": "k"}}, "telemetry.headers: a header's name"),
        ({"headers": {"key-bin": "k"}}, "telemetry.headers: a header's name"),  # gRPC wants bytes there.
        ({"headers": {"key": "k\n"}}, "telemetry.headers: key: a header's text must be of printable ASCII"),
        ({"client_key": "key.pem"}, "telemetry: client_certificate and client_key must both be set"),
        ({"otlp_endpoint": "http://c:4317", "certificate": "ca.pem"}, "certificates are for an https:// endpoint"),
        ({"traces_sample_ratio": 1.5}, "telemetry.traces_sample_ratio: must be less than or equal to 1"),
        ({"export_interval_s": 0}, "telemetry.export_interval_s: must be greater than or equal to 0.1"),
        ({"traces": True}, "telemetry.traces: unknown key"),
    ],
)
def test_what_configuration_refuses(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"telemetry": values}, "test")
    assert complaint in str(caught.value)


def test_metrics_addresses_are_host_and_port() -> None:
    with pytest.raises(ConfigError, match=r'gpu.metrics_listen: must be "host:port", is "?\'unix:/x'):
        parse({"gpu": {"metrics_listen": "unix:/x"}}, "test")


def test_buckets_include_their_bound() -> None:
    series = Distribution((0.1, 1, 10))
    for number in (0, 0.1, 0.2, 1, 1.5, 10, 10.5):
        series.observe(number)
    series.observe(5, num=3)
    assert series.counts == [2, 2, 5, 1]
    assert series.total == pytest.approx(0.1 + 0.2 + 1 + 1.5 + 10 + 10.5 + 15)


def test_an_instrument_belongs_to_its_services_and_is_there_once() -> None:
    meters = Meters("gpu_svc")
    with pytest.raises(AssertionError, match="is not gpu_svc's"):
        meters.histogram(instruments.TTFT)
    meters.observe(instruments.GPU_MEMORY, value(lambda: 1))
    with pytest.raises(AssertionError, match="is there twice"):
        meters.observe(instruments.GPU_MEMORY, value(lambda: 2))


def test_every_name_is_there_once() -> None:
    for names in (
        [instrument.name for instrument in instruments.INSTRUMENTS],
        [instrument.prometheus_name for instrument in instruments.INSTRUMENTS],
    ):
        assert len(set(names)) == len(names)
    for instrument in instruments.INSTRUMENTS:
        assert list(instrument.bounds) == sorted(set(instrument.bounds))


def test_prometheus_reads_it() -> None:
    telemetry = Telemetry("planner_svc")
    ttft = telemetry.meters.histogram(instruments.TTFT)
    refused = telemetry.meters.counter(instruments.REFUSED, ("QUEUE_FULL",))
    telemetry.meters.observe(instruments.KV_BLOCKS, lambda: [Sample(7, ("gpu", "")), Sample(9, ("host", "0"))])
    telemetry.start_metrics("127.0.0.1:0", "planner.metrics_listen")
    ttft.of("chat").observe(0.25)
    refused.add(2, "DRAINING")
    assert telemetry._endpoint is not None
    asked = urllib.request.Request(telemetry._endpoint.url, headers={"accept": "application/openmetrics-text"})
    with urllib.request.urlopen(asked) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    samples = {(item.name, *item.labels.values()): item.value for family in families for item in family.samples}
    assert samples["neoflex_refused_requests_total", "DRAINING"] == 2
    assert samples["neoflex_refused_requests_total", "QUEUE_FULL"] == 0
    assert samples["neoflex_time_to_first_token_seconds_bucket", "0.25", "chat"] == 1
    assert samples["neoflex_time_to_first_token_seconds_bucket", "0.1", "chat"] == 0
    assert samples["neoflex_time_to_first_token_seconds_sum", "chat"] == 0.25
    assert samples["neoflex_kv_blocks", "", "gpu"] == 7
    assert samples["neoflex_kv_blocks", "0", "host"] == 9
    telemetry.close()


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"gpu.metrics_listen: cannot listen on {listen}: Address already"):
            Telemetry("gpu_svc").start_metrics(listen, "gpu.metrics_listen")


def test_the_environment_says_where_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,host.name=other")
        telemetry = Telemetry("gpu_svc", TelemetryConfig(export_interval_s=0.1))
        telemetry.start_metrics()
        receiver.until(lambda: receiver.metrics.get("gpu_svc"))
        telemetry.close()
        resource = receiver.resources["gpu_svc"]
    assert (resource["deployment.environment.name"], resource["host.name"]) == ("test", "other")


def test_log_records_bring_their_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = logging.getLogger("tests.telemetry")
    with otlp_receiver() as receiver:
        telemetry = Telemetry("gpu_svc", config(receiver.endpoint))
        with telemetry.tracer.start_as_current_span("span") as span:
            log.warning("within %d", 1, extra={"request_id": "r-1"})
        try:
            raise ValueError("wrong")
        except ValueError:
            log.exception("outside")
        logging.getLogger("opentelemetry.sdk").warning("their own")
        log.debug("too fine")
        telemetry.close()
        log.info("too late")
    found = {record.text: record for record in receiver.records}
    inside, outside = found["within 1"], found["outside"]
    assert inside.trace_id == f"{span.get_span_context().trace_id:032x}"
    assert inside.span_id == f"{span.get_span_context().span_id:016x}"
    assert (inside.severity, inside.attributes["request_id"]) == ("WARNING", "r-1")
    assert inside.attributes["logger.name"] == "tests.telemetry"
    assert (outside.trace_id, outside.severity, outside.attributes["exception.type"]) == ("", "ERROR", "ValueError")
    assert not found.keys() & {"their own", "too fine", "too late"}


@pytest.mark.parametrize("ratio", [0, 1])
def test_what_is_sampled(ratio: int) -> None:
    with otlp_receiver() as receiver:
        telemetry = Telemetry("gpu_svc", config(receiver.endpoint, traces_sample_ratio=ratio))

        def is_sampled(parent: str) -> bool:
            return telemetry.tracer.start_span("x", parent_of([("traceparent", parent)])).is_recording()

        assert is_sampled("") == bool(ratio)
        assert is_sampled(PARENT)
        assert not is_sampled(PARENT[:-1] + "0")
        telemetry.close()


FORM = SpanForm("noted", SpanKind.SERVER, (("text", str), ("whole", int), ("real", float)))
VALUES = ("a", -3, 0.5)


def by_the_sdk(noted: NotedSpan, resource: Resource) -> ExportTraceServiceRequest:
    """The same span, made and encoded by the SDK; ids are its own."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    span = provider.get_tracer("neoflex").start_span(
        noted.form.name,
        set_span_in_context(NonRecordingSpan(noted.parent), Context()) if noted.parent else Context(),
        noted.form.kind,
        dict(zip((name for name, _ in noted.form.attributes), noted.values, strict=True)),
        [Link(link) for link in noted.links],
        start_time=noted.start_ns,
    )
    if noted.error:
        span.set_attribute("error.type", noted.error)
        span.set_status(Status(StatusCode.ERROR, noted.error_message))
    span.end(noted.end_ns)
    return encode_spans(kept.get_finished_spans())


@pytest.mark.parametrize(
    "parent", [None, SpanContext(2**127 + 1, 2**63 + 1, is_remote=True, trace_flags=TraceFlags(1))]
)
@pytest.mark.parametrize("num_links", [0, 3, 130])
@pytest.mark.parametrize("error", ["", "device"])
def test_noted_spans_are_encoded_as_the_sdk_s(parent: SpanContext | None, num_links: int, error: str) -> None:
    links = tuple(SpanContext(1, 2 + number, number == 0, TraceFlags(1)) for number in range(num_links))
    context = new_context(parent)
    noted = NotedSpan(FORM, context, parent, 2**60, 2**60 + 7, VALUES, links, error, error and "in words")
    resource = Resource({"service.name": "gpu_svc"})
    encoder = SpanEncoder(resource, "neoflex")
    encoder.request([noted])  # What is kept of one has to do for the next.
    wanted = by_the_sdk(noted, resource)
    [span] = wanted.resource_spans[0].scope_spans[0].spans
    span.trace_id, span.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    assert encoder.request([noted]) == wanted


def test_spans_of_another_service() -> None:
    form = SpanForm("attend", SpanKind.SERVER, (), "cpu_attn_svc")
    spans = [NotedSpan(of, new_context(), None, 1, 2) for of in (form, SpanForm("execute"), form)]
    resource = {"service.name": "gpu_svc", "host.name": "h", "process.pid": 7, "service.instance.id": "i"}
    sent = SpanEncoder(Resource(resource), "neoflex").request(spans).resource_spans
    found = {group.scope_spans[0].spans[0].name: attributes_of(group.resource.attributes) for group in sent}
    assert found == {"execute": resource, "attend": {"service.name": "cpu_attn_svc", "host.name": "h"}}
    assert [len(group.scope_spans[0].spans) for group in sent] == [2, 1]
    assert {group.scope_spans[0].scope.name for group in sent} == {"neoflex"}


def test_noted_spans_go_with_the_tracer_s() -> None:
    with otlp_receiver() as receiver:
        telemetry = Telemetry("gpu_svc", config(receiver.endpoint))
        telemetry.tracer.start_span("made").end()
        first, second = new_context(), new_context()
        for context in (first, second):
            telemetry.note_span(NotedSpan(FORM, context, None, 1, 2, VALUES, (first,)))
        telemetry.close()
    made, *noted = sorted(receiver.spans, key=lambda span: span.name)
    assert (made.name, made.service) == ("made", "gpu_svc")
    assert {(span.service, span.links) for span in noted} == {
        ("gpu_svc", ((f"{first.trace_id:032x}", f"{first.span_id:016x}"),))
    }
    assert {span.span_id for span in noted} == {f"{context.span_id:016x}" for context in (first, second)}
    assert noted[0].attributes == {"text": "a", "whole": -3, "real": 0.5}


def test_trace_context_goes_through_where_nothing_is_traced() -> None:
    tracer = Telemetry("gateway_svc").tracer
    span = tracer.start_span("x", parent_of([("traceparent", PARENT), ("tracestate", "a=b"), ("other", "1")]))
    assert headers_of(span) == (("traceparent", PARENT), ("tracestate", "a=b"))
    assert traceparent_of(span.get_span_context()) == PARENT
    for nothing in ("", "00-1", PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)):
        assert headers_of(tracer.start_span("x", parent_of([("traceparent", nothing)]))) == ()


def test_a_collector_that_is_away_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    telemetry = Telemetry("gpu_svc", config(f"http://127.0.0.1:{port}"))
    for item in logging.getLogger(EXPORTER).filters:  # Other tests may have used it up.
        vars(item).update(_next_s=0.0)
    telemetry.start_metrics()
    for number in range(3):
        telemetry.tracer.start_span(f"span {number}").end()
        logging.getLogger("tests").warning("record %d", number)
    OtlpReceiver.until(lambda: [item for item in caplog.records if item.name == EXPORTER] or None)
    telemetry.close()
    records = [item for item in caplog.records if item.name.startswith("opentelemetry")]
    assert [record.levelname for record in records] == ["WARNING"]
    assert "UNAVAILABLE" in records[0].getMessage()


def test_a_collector_that_never_answers_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit on the end it would last as long as an export may: here an hour."""
    monkeypatch.setattr(exporters, "_TIMEOUT_S", 3600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telemetry = Telemetry("gpu_svc", config(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        telemetry.start_metrics()
        telemetry.tracer.start_span("span").end()
        telemetry.close()


def test_a_collector_behind_mutual_tls(tmp_path: Path) -> None:
    for name in ("server", "client"):
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        command += "-subj /CN=localhost "
        command += f"-addext subjectAltName=DNS:localhost -keyout {tmp_path}/{name}.key -out {tmp_path}/{name}.pem"
        subprocess.run(command.split(), check=True, capture_output=True)
    pem = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    guarded = grpc.ssl_server_credentials(
        [(pem["server.key"], pem["server.pem"])], pem["client.pem"], require_client_auth=True
    )
    with otlp_receiver(guarded) as receiver:
        options = {
            "certificate": tmp_path / "server.pem",
            "client_certificate": tmp_path / "client.pem",
            "client_key": tmp_path / "client.key",
            "headers": {"x-key": "secret"},
        }
        telemetry = Telemetry("gpu_svc", config(receiver.endpoint, **options))
        telemetry.tracer.start_span("guarded").end()
        receiver.until(lambda: receiver.named("gpu_svc", "guarded"))
        telemetry.close()
        assert receiver.headers[0]["x-key"] == "secret"


def test_a_certificate_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"telemetry.certificate: /nowhere: No such file"):
        Telemetry("gpu_svc", config("https://localhost:4317", certificate=Path("/nowhere")))


def test_the_page_has_every_metric() -> None:
    assert replaced(PAGE.read_text(), metrics_table()) == PAGE.read_text(), (
        "PYTHONPATH=. python tests/support/metrics_page.py"
    )
