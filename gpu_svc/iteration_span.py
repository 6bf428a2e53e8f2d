"""The executor's part of an iteration, as a child of the planner's span."""

import time

from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from svc_common.plan import IterationResult
from svc_common.telemetry.propagation import parent_of


def record(tracer: Tracer, traceparent: str, result: IterationResult) -> None:
    """To be called when the result has just been sent: nothing waits for this any more."""
    end_ns = time.time_ns()
    timings = result.timings
    span = tracer.start_span(
        "execute",
        parent_of([("traceparent", traceparent)]),
        SpanKind.SERVER,
        {
            "neoflex.epoch": result.epoch,
            "neoflex.iteration": result.iteration,
            "neoflex.cpu_wait_s": timings.cpu_wait_ns / 1e9,
            "neoflex.swap_s": timings.swap_ns / 1e9,
            "neoflex.head_s": timings.head_ns / 1e9,
            "neoflex.gpu_attended_tokens": result.gpu_attended_tokens,
            "neoflex.cpu_attended_tokens": result.cpu_attended_tokens,
        },
        start_time=end_ns - timings.total_ns,
    )
    if result.error is not None:
        span.set_attribute("error.type", result.error.value)
        span.set_status(Status(StatusCode.ERROR, result.error_message))
    span.end(end_ns)
