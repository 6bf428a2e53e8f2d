"""Spans of what the executor did, and of what CPU attention services reported to it."""

import time

from opentelemetry.trace import SpanContext, TraceFlags

from gpu_svc import iteration_span
from svc_common.plan import ExecutionError, IterationResult, ServiceWork, Timings
from svc_common.telemetry.noted_spans import NotedSpan

PARENT = SpanContext(2**100, 2**50, is_remote=True, trace_flags=TraceFlags(1))
START_NS = 5_000_000_000
TIMINGS = Timings(start_ns=START_NS, total_ns=9_000_000, cpu_wait_ns=1_000_000, swap_ns=2_000_000, head_ns=500_000)


def noted(result: IterationResult) -> list[NotedSpan]:
    spans: list[NotedSpan] = []
    iteration_span.note(spans.append, PARENT, result)
    return spans


def test_an_iteration_without_services() -> None:
    [span] = noted(IterationResult(3, 7, timings=TIMINGS, gpu_attended_tokens=11, cpu_attended_tokens=5))
    assert (span.form.name, span.parent, span.error) == ("execute", PARENT, "")
    assert (span.context.trace_id, span.context.span_id != PARENT.span_id) == (PARENT.trace_id, True)
    assert abs(span.start_ns - START_NS - (time.time_ns() - time.monotonic_ns())) < 60_000_000_000  # Read one by one.
    assert span.end_ns - span.start_ns == TIMINGS.total_ns
    assert dict(zip((name for name, _ in span.form.attributes), span.values, strict=True)) == {
        "neoflex.epoch": 3,
        "neoflex.iteration": 7,
        "neoflex.cpu_wait_s": 0.001,
        "neoflex.swap_s": 0.002,
        "neoflex.head_s": 0.0005,
        "neoflex.gpu_attended_tokens": 11,
        "neoflex.cpu_attended_tokens": 5,
    }


def test_services_that_attended_are_below_it() -> None:
    told_ns = START_NS + 3_000_000
    services = (ServiceWork(0, told_ns, 4_000_000, 1_000_000), ServiceWork(2, told_ns, 2_000_000, 0))
    executed, *attended = noted(IterationResult(3, 7, timings=TIMINGS, services=services))
    assert [span.form.name for span in attended] == ["attend", "attend"]
    for span in attended:
        assert (span.form.service, span.parent) == ("cpu_attn_svc", executed.context)
        assert span.context.trace_id == PARENT.trace_id
    assert [span.values for span in attended] == [(0, 0.004, 0.001), (2, 0.002, 0.0)]
    assert [span.end_ns - span.start_ns for span in attended] == [5_000_000, 2_000_000]
    assert {span.start_ns - executed.start_ns for span in attended} == {3_000_000}


def test_one_that_failed() -> None:
    before_ns = time.time_ns()
    [span] = noted(IterationResult(3, 7, error=ExecutionError.CPU_ATTENTION_LOST, error_message="gone"))
    assert abs(span.start_ns - before_ns) < 60_000_000_000
    assert span.end_ns == span.start_ns
    assert (span.error, span.error_message) == ("cpu_attention_lost", "gone")
