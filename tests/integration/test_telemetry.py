"""Traces, metrics and logs of the real services, as a collector and as Prometheus get them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from prometheus_client.parser import text_string_to_metric_families
from support.otlp import OtlpReceiver, ReceivedSpan, attributes_of, otlp_receiver

from neoflex import Client, UnavailableError
from neoflex.supervisor import LocalStack
from svc_common.telemetry.declaration import Kind
from svc_common.telemetry.instruments import CPU_ATTN, GATEWAY, GPU, PLANNER, SERVICES, instruments_of

MODEL = "smollm2-135m-instruct"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
PROMPT = "The capital of France is"
QUIET = {"neoflex.epochs_ended"}
"""Metrics without a series until something happens that this module's first tests do not bring about."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def stack(start_module: Any, receiver: OtlpReceiver) -> LocalStack:
    """Host sequences from the start, and every signal sent each quarter of a second."""
    started: LocalStack = start_module(
        planner={
            "mode": "asymmetric",
            "metrics_listen": "127.0.0.1:0",
            "classes": {"chat": {"ttft_s": 60, "tpot_s": 10}},
            "default_class": "chat",
        },
        gpu={"kv_bytes": "4MiB", "metrics_listen": "127.0.0.1:0"},
        cpu_attn={"kv_bytes": "256MiB", "metrics_listen": "127.0.0.1:0"},
        gateway={"listen": "127.0.0.1:0"},
        telemetry={
            "otlp_endpoint": receiver.endpoint,
            "headers": {"x-collector-key": "k"},
            "export_interval_s": 0.25,
            "layer_sample_s": 0.1,
        },
    )
    return started


@pytest.fixture(scope="module")
def answered(stack: LocalStack) -> str:
    """A request by HTTP with a trace context, and eight long ones beside it; returns the answer's text."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with OpenAI(base_url=f"{stack.http_url}/v1", api_key="none", max_retries=0, timeout=120) as openai:
        many = openai.completions.create(
            model=MODEL, prompt=[PROMPT * 12] * 8, max_tokens=40, extra_body={"ignore_eos": True}
        )
        assert len(many.choices) == 8
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "traced-1"}
    with httpx2.Client(base_url=str(stack.http_url), timeout=120) as http:
        answer = http.post("/v1/completions", json=body, headers=headers).json()
        assert http.get("/v1/nothing").status_code == 404
    return str(answer["choices"][0]["text"])


def of_trace(receiver: OtlpReceiver, service: str, name: str) -> list[ReceivedSpan]:
    return [span for span in receiver.named(service, name) if span.trace_id == TRACE]


def test_the_span_tree(answered: str, receiver: OtlpReceiver) -> None:
    [door] = receiver.until(lambda: of_trace(receiver, GATEWAY, "POST /v1/completions"))
    [request] = receiver.until(lambda: of_trace(receiver, PLANNER, f"text_completion {MODEL}"))
    assert (door.parent_id, request.parent_id) == (CALLER, door.span_id)
    assert door.attributes["http.response.status_code"] == 200
    assert door.attributes["neoflex.request_id"] == "traced-1"
    assert door.start_ns <= request.start_ns <= request.end_ns <= door.end_ns
    given = request.attributes
    assert given["gen_ai.operation.name"] == "text_completion"
    assert given["gen_ai.provider.name"] == "neoflex"
    assert given["gen_ai.request.model"] == given["gen_ai.response.model"] == MODEL
    assert given["gen_ai.request.max_tokens"] == given["gen_ai.usage.output_tokens"] == 12
    assert given["gen_ai.response.finish_reasons"] == ["length"]
    assert given["server.address"] == "127.0.0.1"
    assert given["neoflex.service_class"] == "chat"
    phases = [of_trace(receiver, PLANNER, name) for name in ("queue", "prefill", "decode")]
    [queue], [prefill], [decode] = phases
    assert {span.parent_id for span in (queue, prefill, decode)} == {request.span_id}
    ends = [request.start_ns, queue.end_ns, prefill.end_ns, decode.end_ns, request.end_ns]
    assert ends == sorted(ends)
    assert (queue.start_ns, prefill.start_ns, decode.start_ns) == (request.start_ns, queue.end_ns, prefill.end_ns)


def children(receiver: OtlpReceiver, span: ReceivedSpan) -> list[ReceivedSpan]:
    return [item for item in receiver.named(GPU, "execute") if item.parent_id == span.span_id]


def test_iterations_are_linked_to_their_requests(answered: str, receiver: OtlpReceiver) -> None:
    [request] = receiver.until(lambda: of_trace(receiver, PLANNER, f"text_completion {MODEL}"))
    link = (TRACE, request.span_id)
    linked = receiver.until(
        lambda: (
            found
            if len(found := [span for span in receiver.named(PLANNER, "iteration") if link in span.links]) >= 12
            else None
        )
    )
    assert all(span.parent_id == "" for span in linked)
    assert all(len(set(span.links)) == len(span.links) for span in linked)
    for span in linked:
        [executed] = receiver.until(partial(children, receiver, span))
        assert executed.trace_id == span.trace_id
        assert executed.attributes["neoflex.iteration"] == span.attributes["neoflex.iteration"]
        assert span.start_ns <= executed.end_ns
    attended = receiver.until(lambda: receiver.named(CPU_ATTN, "attend"))
    executions = {span.span_id: span for span in receiver.named(GPU, "execute")}
    below = [(span, executions[span.parent_id]) for span in attended if span.parent_id in executions]
    assert below
    for span, executed in below:
        assert span.trace_id == executed.trace_id
        assert executed.start_ns <= span.start_ns < span.end_ns <= executed.end_ns
        assert span.attributes["neoflex.pool"] == 0
        assert 0 < span.attributes["neoflex.busy_s"] <= (span.end_ns - span.start_ns) / 1e9
    together = [span for span in receiver.named(PLANNER, "iteration") if len(span.links) > 1]
    assert any(span.attributes["neoflex.cpu_decodes"] > 1 for span in together), [s.attributes for s in together]


def complete(receiver: OtlpReceiver, service: str, names: set[str]) -> dict[str, Metric] | None:
    """A service's metrics, once all are there."""
    metrics = receiver.metrics.get(service, {})
    return metrics if names <= metrics.keys() else None


def test_metrics_over_otlp(answered: str, receiver: OtlpReceiver) -> None:
    for service in SERVICES:
        declared = {instrument.name: instrument for instrument in instruments_of(service)}
        wanted = declared.keys() - QUIET
        found = receiver.until(partial(complete, receiver, service, wanted))
        assert found.keys() - QUIET == wanted
        for name, metric in found.items():
            instrument = declared[name]
            assert (metric.unit, metric.description) == (instrument.unit, instrument.text), name
            kind = metric.WhichOneof("data")
            assert kind == {Kind.COUNTER: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}[instrument.kind]
            points = getattr(metric, kind).data_points
            assert all(attributes_of(point.attributes).keys() <= set(instrument.attributes) for point in points), name
            if kind == "sum":
                assert metric.sum.is_monotonic
                cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
                assert metric.sum.aggregation_temporality == cumulative
            if kind == "histogram":
                assert {tuple(point.explicit_bounds) for point in points} == {instrument.bounds}, name
                assert all(sum(point.bucket_counts) == point.count for point in points)
        resource = receiver.resources[service]
        assert (resource["service.name"], resource["service.namespace"]) == (service, "neoflex")
    assert all(headers["x-collector-key"] == "k" for headers in receiver.headers)


def metrics_url(stack: LocalStack, service: str) -> str:
    if service == GATEWAY:
        return f"{stack.http_url}/metrics"
    found = re.search(r"metrics at (http\S+)", stack.log_paths[service].read_text())
    assert found
    return found[1]


def scrape(stack: LocalStack, service: str) -> dict[str, Any]:
    """Families by name, as Prometheus' own parser reads them."""
    text = httpx2.get(metrics_url(stack, service)).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics_for_prometheus(answered: str, stack: LocalStack) -> None:
    for service in SERVICES:
        families = scrape(stack, service)
        del families["target_info"]
        declared = {instrument.prometheus_name: instrument for instrument in instruments_of(service)}
        quiet = {instrument.prometheus_name for instrument in declared.values() if instrument.name in QUIET}
        # The parser takes _total off the names of counters.
        names = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
        assert names - quiet == declared.keys() - quiet
        for name, family in families.items():
            instrument = declared[f"{name}_total" if family.type == "counter" else name]
            assert family.type == instrument.kind.value
            if instrument.kind is Kind.HISTOGRAM:
                bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
                assert bounds == {*instrument.bounds, float("inf")}


def test_metrics_are_what_happened(answered: str, stack: LocalStack) -> None:
    families = scrape(stack, PLANNER)

    def total(name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    with Client(stack.address) as client:
        counters = client.server_info().counters
    assert total("neoflex_request_success_total", finished_reason="length", service_class="chat") == 9
    assert total("neoflex_slo_targets_total", outcome="met") == 18
    assert total("neoflex_requests_by_slo_total", outcome="in_time") == 9
    assert total("neoflex_generation_tokens_total") == counters.generated_tokens == 8 * 40 + 12
    assert total("neoflex_inter_token_latency_seconds_count") == 8 * 39 + 11
    assert total("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 8 * 40 + 12
    assert total("neoflex_iterations_total", mode="asymmetric") == counters.asymmetric_iterations > 0
    assert total("neoflex_iteration_duration_seconds_count") == total("neoflex_iterations_total")
    assert total("neoflex_attended_tokens_total", device="cpu") == counters.cpu_attended_tokens > 0
    assert total("neoflex_num_requests_running") == total("neoflex_num_requests_waiting") == 0
    assert total("neoflex_kv_blocks", tier="host", pool="0") > 0
    assert total("neoflex_health") == 2
    assert total("neoflex_hop_latency_seconds_count", direction="to_cpu") > 0
    assert total("neoflex_layer_duration_seconds_count", step="cpu_attend") > 0
    assert total("neoflex_gpu_time_seconds_total", state="wait_cpu") == pytest.approx(counters.cpu_wait_ns / 1e9)
    families = scrape(stack, CPU_ATTN)
    assert total("neoflex_cpu_attention_time_seconds_total", state="busy") > 0
    assert total("neoflex_cpu_attention_threads") == 1
    families = scrape(stack, GPU)
    assert total("neoflex_model_layers", place="resident") == 30
    families = scrape(stack, GATEWAY)
    route = {"http_route": "/v1/completions", "http_response_status_code": "200"}
    assert total("http_server_request_duration_seconds_count", **route) == 2
    assert total("http_server_request_duration_seconds_count", http_route="other") == 1


def test_content_is_not_in_spans(answered: str, receiver: OtlpReceiver) -> None:
    assert answered
    for span in list(receiver.spans):
        assert not any(key.endswith(".messages") for key in span.attributes)
        assert PROMPT not in json.dumps(span.attributes)


def test_logs_with_the_trace_of_a_failed_iteration(answered: str, stack: LocalStack, receiver: OtlpReceiver) -> None:
    """The CPU attention service dies under a load: what is logged of the iteration names its span."""
    receiver.until(lambda: {record.service for record in list(receiver.records)} == set(SERVICES))
    with Client(stack.address) as client:
        stream = client.stream(PROMPT, max_tokens=300, ignore_eos=True)
        next(iter(stream))
        os.kill(stack.pids[CPU_ATTN], signal.SIGKILL)
        with pytest.raises(UnavailableError, match="CPU_ATTENTION_LOST"):  # It is too long for the GPU's cache.
            list(stream)

    def failure(service: str) -> Any:
        return next(
            (r for r in list(receiver.records) if r.service == service and r.trace_id and "iteration" in r.text), None
        )

    planned, executed = (receiver.until(partial(failure, service)) for service in (PLANNER, GPU))
    assert planned.trace_id == executed.trace_id
    assert (planned.severity, executed.severity) == ("ERROR", "ERROR")
    [span] = receiver.until(lambda: [s for s in receiver.named(PLANNER, "iteration") if s.trace_id == planned.trace_id])
    assert span.is_error
    assert span.attributes["error.type"] == "cpu_attention_lost"
    assert planned.span_id == executed.span_id == span.span_id
    ended = receiver.until(lambda: receiver.metrics[PLANNER].get("neoflex.epochs_ended"))
    assert {attributes_of(point.attributes)["reason"] for point in ended.sum.data_points} >= {"host_lost"}
