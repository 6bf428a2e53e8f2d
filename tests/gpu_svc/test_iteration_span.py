"""Spans of what the executor did, and of what CPU attention services reported to it."""

import time
from dataclasses import replace

from opentelemetry.trace import SpanContext, TraceFlags

from gpu_svc import iteration_span
from svc_common.plan import ExecutionError, IterationResult, ServiceWork, Timings
from svc_common.telemetry.noted_spans import NotedSpan

PARENT = SpanContext(2**100, 2**50, is_remote=True, trace_flags=TraceFlags(1))
TIMINGS = Timings(total_ns=9_000_000, cpu_wait_ns=1_000_000, swap_ns=2_000_000, head_ns=500_000)


def noted(result: IterationResult) -> list[NotedSpan]:
    spans: list[NotedSpan] = []
    iteration_span.note(spans.append, PARENT, result)
    return spans


def test_an_iteration_without_services() -> None:
    before_ns = time.time_ns()
    [span] = noted(IterationResult(3, 7, timings=TIMINGS, gpu_attended_tokens=11, cpu_attended_tokens=5))
    assert (span.form.name, span.parent, span.error) == ("execute", PARENT, "")
    assert (span.context.trace_id, span.context.span_id != PARENT.span_id) == (PARENT.trace_id, True)
    assert before_ns <= span.end_ns <= time.time_ns()
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
    start_ns, told_ns = time.perf_counter_ns(), time.time_ns()
    services = (ServiceWork(0, start_ns, 4_000_000, 1_000_000), ServiceWork(2, start_ns, 2_000_000, 0))
    executed, *attended = noted(IterationResult(3, 7, timings=TIMINGS, services=services))
    assert [span.form.name for span in attended] == ["attend", "attend"]
    for span in attended:
        assert (span.form.service, span.parent) == ("cpu_attn_svc", executed.context)
        assert span.context.trace_id == PARENT.trace_id
    assert [span.values for span in attended] == [(0, 0.004, 0.001), (2, 0.002, 0.0)]
    assert [span.end_ns - span.start_ns for span in attended] == [5_000_000, 2_000_000]
    # Both clocks were read one after the other.
    assert all(abs(span.start_ns - told_ns) < 1_000_000_000 for span in attended)


def test_one_that_failed() -> None:
    lost = IterationResult(3, 7, error=ExecutionError.CPU_ATTENTION_LOST, error_message="gone")
    [span] = noted(replace(lost, timings=TIMINGS))
    assert (span.error, span.error_message) == ("cpu_attention_lost", "gone")
