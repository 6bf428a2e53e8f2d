"""The executor's part of an iteration, a child of the planner's span; below it that of each CPU attention service."""

import time

from opentelemetry.trace import SpanContext, SpanKind

from svc_common.plan import IterationResult
from svc_common.telemetry import instruments
from svc_common.telemetry.noted_spans import NotedSpan, NoteSpan, SpanForm, new_context

_FORM = SpanForm(
    "execute",
    SpanKind.SERVER,
    (
        ("neoflex.epoch", int),
        ("neoflex.iteration", int),
        ("neoflex.cpu_wait_s", float),
        ("neoflex.swap_s", float),
        ("neoflex.head_s", float),
        ("neoflex.gpu_attended_tokens", int),
        ("neoflex.cpu_attended_tokens", int),
    ),
)


_OF_SERVICE = SpanForm(
    "attend",
    SpanKind.SERVER,
    (("neoflex.pool", int), ("neoflex.busy_s", float), ("neoflex.wait_s", float)),
    instruments.CPU_ATTN,
)


def note(note_span: NoteSpan, parent: SpanContext, result: IterationResult) -> None:
    """To be called when the result has just been sent: nothing waits for this any more."""
    timings = result.timings
    offset_ns = time.time_ns() - time.perf_counter_ns()
    start_ns = offset_ns + (timings.start_ns or time.perf_counter_ns())
    values = (
        result.epoch,
        result.iteration,
        timings.cpu_wait_ns / 1e9,
        timings.swap_ns / 1e9,
        timings.head_ns / 1e9,
        result.gpu_attended_tokens,
        result.cpu_attended_tokens,
    )
    error = result.error.value if result.error else ""
    times, context = (start_ns, start_ns + timings.total_ns), new_context(parent)
    note_span(NotedSpan(_FORM, context, parent, *times, values, (), error, result.error_message))
    for service in result.services:
        start_ns = service.start_ns + offset_ns
        times = start_ns, start_ns + service.busy_ns + service.wait_ns
        reported = service.pool, service.busy_ns / 1e9, service.wait_ns / 1e9
        note_span(NotedSpan(_OF_SERVICE, new_context(context), context, *times, reported))
