"""The executor's part of an iteration, as a child of the planner's span."""

import time

from opentelemetry.trace import SpanContext, SpanKind

from svc_common.plan import IterationResult
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


def note(note_span: NoteSpan, parent: SpanContext, result: IterationResult) -> None:
    """To be called when the result has just been sent: nothing waits for this any more."""
    end_ns = time.time_ns()
    timings = result.timings
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
    times = end_ns - timings.total_ns, end_ns
    note_span(NotedSpan(_FORM, new_context(parent), parent, *times, values, (), error, result.error_message))
