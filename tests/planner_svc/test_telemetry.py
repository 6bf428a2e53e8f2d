"""What the planner tells of requests and iterations, with fabricated workers behind it."""

import asyncio
import json
from collections.abc import Iterator

import grpc
import pytest
from support.fake_workers import FakeExecutor
from support.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from support.planner_rig import StartRig, collect, first_delta, refused, request, streaming

from neoflex.v1 import executor_pb2
from neoflex.v1 import inference_pb2 as pb
from planner_svc.iteration_meters import hops
from svc_common.config import TelemetryConfig
from svc_common.telemetry.telemetry import Telemetry
from svc_common.trace import TraceEvent, TraceKind

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
CHAT = {"chat": {"ttft_s": 1000.0, "tpot_s": 1000.0}, "hasty": {"ttft_s": 0.001, "tpot_s": 0.001}}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


def telemetry_to(receiver: OtlpReceiver | None, **keys: object) -> Telemetry:
    """With a registry to read metrics from."""
    endpoint = {"otlp_endpoint": receiver.endpoint} if receiver else {}
    values = {"export_interval_s": 0.1, "layer_sample_s": 0, **endpoint, **keys}
    telemetry = Telemetry("planner_svc", TelemetryConfig.model_validate(values))
    assert telemetry.registry is not None
    return telemetry


def reading(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


async def spans_of(receiver: OtlpReceiver, telemetry: Telemetry) -> list[ReceivedSpan]:
    """All, once the service has ended its telemetry."""
    await asyncio.to_thread(telemetry.close)
    return receiver.spans


async def test_requests_by_how_they_ended(start_rig: StartRig) -> None:
    telemetry = telemetry_to(None)
    executor = FakeExecutor(gpu_blocks=16)
    rig = await start_rig(executor, telemetry=telemetry, classes=CHAT, default_class="chat", max_waiting_requests=1)
    await rig.stub.Generate(request(max_tokens=3))
    await rig.stub.Generate(request(max_tokens=1))
    executor.iteration_s = 0.02
    late = request(max_tokens=3)
    late.service_class = "hasty"
    await rig.stub.Generate(late)
    assert (await refused(rig.stub.Generate(pb.GenerateRequest())))[1] == "INVALID_ARGUMENT"
    stream = rig.stub.GenerateStream(streaming(request(max_tokens=50)))
    await first_delta(stream)
    stream.cancel()
    await rig.until_free()
    gone = {"reason": "CALLER_GONE", "service_class": "chat"}
    await rig.until(lambda: reading(telemetry, "neoflex_request_failure_total", **gone) == 1)

    def counted(name: str, **labels: str) -> float | None:
        return reading(telemetry, f"neoflex_{name}_total", **labels)

    assert counted("request_success", finished_reason="length", service_class="chat") == 2
    assert counted("request_success", finished_reason="length", service_class="hasty") == 1
    assert counted("refused_requests", reason="INVALID_ARGUMENT") == 1
    assert counted("accepted_requests") == 4
    met = {"service_class": "chat", "outcome": "met"}
    assert counted("slo_targets", kind="ttft", **met) == 2
    assert counted("slo_targets", kind="tpot", **met) == 1  # One token has none.
    assert counted("slo_targets", kind="ttft", service_class="hasty", outcome="missed") == 1
    assert counted("requests_by_slo", outcome="late", service_class="hasty") == 1
    assert counted("generation_tokens") >= 7
    assert reading(telemetry, "neoflex_inter_token_latency_seconds_count", service_class="hasty") == 2
    assert reading(telemetry, "neoflex_time_to_first_token_seconds_count", service_class="chat") == 3
    labels = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "neoflex",
        "gen_ai_request_model": "tiny",
        "gen_ai_response_model": "tiny",
        "server_address": "127.0.0.1",
        "server_port": "0",
    }
    duration = "gen_ai_server_request_duration_seconds_count"
    assert reading(telemetry, duration, error_type="", **labels) == 3
    assert reading(telemetry, duration, error_type="INVALID_ARGUMENT", **labels) == 1
    assert reading(telemetry, duration, error_type="CALLER_GONE", **labels) == 1
    usage = "gen_ai_client_token_usage_sum"
    assert reading(telemetry, usage, gen_ai_token_type="output", **labels) == 7


async def test_waiting_requests_by_reason_and_by_class(start_rig: StartRig) -> None:
    telemetry = telemetry_to(None)
    executor = FakeExecutor(gpu_blocks=8)
    rig = await start_rig(executor, telemetry=telemetry, max_running_sequences=1)
    executor.gate.clear()
    calls = [asyncio.create_task(collect(rig.stub.GenerateStream(streaming(request())))) for _ in range(3)]
    await rig.until(lambda: reading(telemetry, "neoflex_num_requests_waiting") == 2)
    assert reading(telemetry, "neoflex_num_requests_waiting_by_reason", reason="capacity") == 2
    assert reading(telemetry, "neoflex_num_requests_waiting_by_reason", reason="preempted") == 0
    assert reading(telemetry, "neoflex_requests_by_class", state="waiting", service_class="default") == 2
    assert reading(telemetry, "neoflex_num_requests_running") == 1
    assert reading(telemetry, "neoflex_kv_blocks", tier="gpu") == 8
    used = reading(telemetry, "neoflex_kv_blocks_used", tier="gpu")
    assert used
    assert reading(telemetry, "neoflex_kv_cache_usage_perc") == used / 8
    executor.gate.set()
    await asyncio.gather(*calls)


async def test_a_failed_request_s_span(start_rig: StartRig, receiver: OtlpReceiver) -> None:
    telemetry = telemetry_to(receiver)
    executor = FakeExecutor(not_finite=lambda prompt, num: num == 1)
    rig = await start_rig(executor, telemetry=telemetry)
    metadata = (("traceparent", PARENT),)
    executor.fail_next = (executor_pb2.EXECUTION_ERROR_DEVICE, "broken")  # Computed again.
    code, reason, _ = await refused(rig.stub.Generate(request(), metadata=metadata))
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS")
    executor.not_finite = lambda prompt, num: False
    await refused(rig.stub.Generate(pb.GenerateRequest(), metadata=metadata))
    await rig.stub.Generate(request(), metadata=(("traceparent", PARENT[:-1] + "0"),))
    assert reading(telemetry, "neoflex_failed_iterations_total", reason="device") == 1
    assert reading(telemetry, "neoflex_epochs_ended_total", reason="failed") == 1
    assert reading(telemetry, "neoflex_calibration", part="weights") == 1
    spans = await spans_of(receiver, telemetry)
    failed, turned_away = [span for span in spans if span.name == "text_completion tiny"]
    assert (failed.attributes["error.type"], failed.is_error) == ("NON_FINITE_LOGITS", True)
    assert (turned_away.attributes["error.type"], turned_away.is_error) == ("INVALID_ARGUMENT", True)
    assert {failed.trace_id, turned_away.trace_id} == {TRACE}
    iterations = [span for span in spans if span.name == "iteration"]
    assert {span.attributes.get("error.type") for span in iterations} == {"device", "failed", None}
    assert {span.links for span in iterations} == {((TRACE, failed.span_id),)}


async def test_plans_carry_their_span_only_where_it_is_sampled(start_rig: StartRig, receiver: OtlpReceiver) -> None:
    telemetry = telemetry_to(receiver, traces_sample_ratio=0)
    executor = FakeExecutor()
    rig = await start_rig(executor, telemetry=telemetry)
    await rig.stub.Generate(request())
    assert {plan.traceparent for plan in executor.plans} == {""}
    executor.plans.clear()
    await rig.stub.Generate(request(), metadata=(("traceparent", PARENT),))
    sent = {plan.traceparent for plan in executor.plans if plan.sub_batches}
    spans = await spans_of(receiver, telemetry)
    made = {f"00-{span.trace_id}-{span.span_id}-01" for span in spans if span.name == "iteration"}
    assert sent - {""} == made
    assert len(made) >= 5


@pytest.mark.parametrize("captures", [False, True])
async def test_content_only_where_it_is_asked_for(start_rig: StartRig, receiver: OtlpReceiver, captures: bool) -> None:
    telemetry = telemetry_to(receiver, capture_content=captures)
    rig = await start_rig(telemetry=telemetry)
    answer = await rig.stub.Generate(request("the question"))
    streamed = await collect(rig.stub.GenerateStream(streaming(request("the question"))))
    assert "".join(message.delta.text for message in streamed) == answer.text
    spans = [span for span in await spans_of(receiver, telemetry) if span.name == "text_completion tiny"]
    assert len(spans) == 2
    for span in spans:
        if captures:
            [asked] = json.loads(span.attributes["gen_ai.input.messages"])
            assert asked == {"role": "user", "parts": [{"type": "text", "content": "the question"}]}
            [said] = json.loads(span.attributes["gen_ai.output.messages"])
            parts = [{"type": "text", "content": answer.text}]
            assert said == {"role": "assistant", "parts": parts, "finish_reason": "length"}
        else:
            assert "question" not in json.dumps(span.attributes)
            assert answer.text not in json.dumps(span.attributes)


@pytest.mark.parametrize(("seed", "told"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, str(2**63)), (None, int)])
async def test_each_seed_is_in_its_span(
    start_rig: StartRig, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, seed: int | None, told: object
) -> None:
    telemetry = telemetry_to(receiver)
    rig = await start_rig(telemetry=telemetry)
    message = request(max_tokens=1)
    message.sampling.ClearField("seed")
    if seed is not None:
        message.sampling.seed = seed
    num_requests = 20 if seed is None else 1  # Half of all 64-bit seeds are too large for OTLP.
    for _ in range(num_requests):
        await rig.stub.Generate(message)
    spans = [span for span in await spans_of(receiver, telemetry) if span.name == "text_completion tiny"]
    seeds = [span.attributes["gen_ai.request.seed"] for span in spans]
    assert [type(found) if told is int else found for found in seeds] == [told] * num_requests
    assert "Failed to encode" not in caplog.text


async def test_an_iteration_is_traced_each_so_many_seconds(start_rig: StartRig) -> None:
    executor = FakeExecutor()
    rig = await start_rig(executor, telemetry=telemetry_to(None, layer_sample_s=3600))
    await rig.stub.Generate(request())
    await rig.stub.Generate(request())
    assert [plan.trace for plan in executor.plans if plan.sub_batches].count(True) == 1


def test_hops_where_the_other_side_waited() -> None:
    def event(kind: TraceKind, start_ns: int, end_ns: int, layer: int = 0) -> TraceEvent:
        return TraceEvent(kind, layer, 0, start_ns, end_ns)

    gpu = [
        event(TraceKind.SUBMIT, 90, 100),
        event(TraceKind.WAIT, 110, 250),
        event(TraceKind.SUBMIT, 300, 310, layer=1),
        event(TraceKind.WAIT, 600, 610, layer=1),
    ]
    cpu = [
        event(TraceKind.CPU_WAIT, 0, 104),
        event(TraceKind.CPU_ATTEND, 104, 243),
        event(TraceKind.CPU_WAIT, 400, 400, layer=1),
        event(TraceKind.CPU_ATTEND, 400, 500, layer=1),
    ]
    # Of layer 1 the CPU was busy elsewhere when it was submitted, and the executor came when it was done.
    assert hops(gpu, [cpu]) == [("to_cpu", 4), ("to_gpu", 7)]
    # A second service is later: the executor waited for that one.
    second = [event(TraceKind.CPU_WAIT, 0, 106), event(TraceKind.CPU_ATTEND, 106, 245)]
    assert hops(gpu, [cpu, second]) == [("to_cpu", 4), ("to_cpu", 6), ("to_gpu", 5)]
