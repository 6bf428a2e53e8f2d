"""What becomes of iterations: metrics; spans where a request in one is sampled; and now and then layer by layer."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Status, StatusCode, use_span

from planner_svc.request_span import RequestSpan
from svc_common.plan import ExecutionError, IterationPlan, IterationResult
from svc_common.telemetry import instruments
from svc_common.telemetry.propagation import traceparent_of
from svc_common.telemetry.telemetry import Telemetry
from svc_common.trace import IterationTrace, TraceEvent, TraceKind


class IterationMeters:
    """Used by the executor loop, on the event loop's thread. Plans and their results come in the same order."""

    def __init__(self, telemetry: Telemetry, span_of: Callable[[int], RequestSpan | None]) -> None:
        """`span_of` returns that of a sequence's request, None where it has ended."""
        meters = telemetry.meters
        self._telemetry = telemetry
        self._span_of = span_of
        self._duration = meters.histogram(instruments.ITERATION_TIME)
        self._predicted = meters.histogram(instruments.PREDICTED_TIME)
        self._ratio = meters.histogram(instruments.PREDICTION_RATIO)
        self._tokens = meters.histogram(instruments.ITERATION_TOKENS).of()
        self._layers = LayerMeters(telemetry)
        self._failed = meters.counter(instruments.FAILED_ITERATIONS, *((error.value,) for error in ExecutionError))
        self._epochs = meters.counter(instruments.EPOCHS_ENDED)
        self._spans: dict[int, Span] = {}
        """Of iterations under way, by number."""
        self._sample_s = telemetry.config.layer_sample_s
        self._next_sample_s = 0.0
        self._sampled_iteration = 0

    def planned(self, plan: IterationPlan) -> IterationPlan:
        """The plan as it is to be sent: with the context of its span, and where a sample is due with `trace`."""
        if not plan.sub_batches and plan.cohort is None:
            return plan
        if self._telemetry.is_measured and self._sample_s and time.monotonic() >= self._next_sample_s:
            self._next_sample_s = time.monotonic() + self._sample_s
            self._sampled_iteration = plan.iteration
            plan = replace(plan, trace=True)
        if self._telemetry.is_exporting and (links := self._links(plan)):
            span = self._spans[plan.iteration] = self._telemetry.tracer.start_span(
                "iteration", Context(), attributes=_describe(plan), links=links
            )
            plan = replace(plan, traceparent=traceparent_of(span))
        return plan

    def _links(self, plan: IterationPlan) -> list[Link]:
        """To the sampled requests that have a part in it."""
        sequences = [item for batch in plan.sub_batches for item in batch.sequence_ids]
        if plan.cohort:
            sequences += plan.cohort.sequence_ids
        spans = map(self._span_of, dict.fromkeys(sequences))
        return [span.link for span in spans if span and span.link]

    def applied(self, plan: IterationPlan, result: IterationResult, device: str) -> None:
        """The plan was carried out, on a `device` that is "cpu" or "cuda"."""
        measured_s = result.timings.total_ns / 1e9
        num_tokens = sum(batch.num_tokens for batch in plan.sub_batches)
        if num_tokens or plan.cohort:
            mode = plan.mode.value
            self._duration.of(mode).observe(measured_s)
            self._predicted.of(mode).observe(plan.predicted_s)
            self._ratio.of(mode).observe(plan.predicted_s / max(measured_s, 1e-9))
            self._tokens.observe(num_tokens)
        if result.trace is not None and plan.iteration == self._sampled_iteration:
            self._layers.observe(result.trace, device)
        if span := self._spans.pop(plan.iteration, None):
            span.set_attributes(_figures(result))
            span.end()

    def failed(self, result: IterationResult) -> AbstractContextManager[object]:
        """It was not. What is logged within belongs to its span."""
        assert result.error is not None
        reason = result.error.value
        self._failed.add(1, reason)
        span = self._spans.pop(result.iteration, None)
        if span is None:
            return nullcontext()
        span.set_attribute("error.type", reason)
        span.set_status(Status(StatusCode.ERROR, result.error_message))
        return use_span(span, end_on_exit=True)

    def epoch_ended(self, reason: str) -> None:
        """Plans without a result have none any more."""
        self._epochs.add(1, reason)
        self._sampled_iteration = 0
        for span in self._spans.values():
            span.set_attribute("error.type", reason)
            span.set_status(Status(StatusCode.ERROR, reason))
            span.end()
        self._spans.clear()


def _describe(plan: IterationPlan) -> dict[str, str | int | float]:
    batches = plan.sub_batches
    return {
        "neoflex.epoch": plan.epoch,
        "neoflex.iteration": plan.iteration,
        "neoflex.mode": plan.mode.value,
        "neoflex.prefill_tokens": sum(chunk.num_tokens for batch in batches for chunk in batch.prefills),
        "neoflex.gpu_decodes": sum(len(batch.gpu_decodes) for batch in batches),
        "neoflex.cpu_decodes": sum(len(batch.cpu_decodes) for batch in batches),
        "neoflex.cohort_decodes": len(plan.cohort.sequence_ids) if plan.cohort else 0,
        "neoflex.predicted_s": plan.predicted_s,
    }


def _figures(result: IterationResult) -> dict[str, int | float]:
    timings = result.timings
    return {
        "neoflex.measured_s": timings.total_ns / 1e9,
        "neoflex.cpu_wait_s": timings.cpu_wait_ns / 1e9,
        "neoflex.cpu_attention_s": timings.cpu_attention_ns / 1e9,
        "neoflex.weight_wait_s": timings.weight_wait_ns / 1e9,
        "neoflex.swapped_out_bytes": result.swapped_out_bytes,
        "neoflex.swapped_in_bytes": result.swapped_in_bytes,
        "neoflex.num_tokens": len(result.tokens),
    }


class LayerMeters:
    """Steps of layers, and the hop to the CPU and back, out of an iteration's trace."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._steps = telemetry.meters.histogram(instruments.LAYER_TIME)
        self._hops = telemetry.meters.histogram(instruments.HOP_LATENCY)

    def observe(self, trace: IterationTrace, device: str) -> None:
        """On "cuda" the executor's steps are launches, which say nothing of what they take: those are left out."""
        cpu = list(trace.events(trace.cpu))
        gpu = list(trace.events(trace.gpu)) if device == "cpu" else []
        for event in (*gpu, *cpu):
            if event.layer >= 0:
                self._steps.of(event.kind.name.lower()).observe(event.duration_ns / 1e9)
        for direction, hop_ns in hops(gpu, cpu):
            self._hops.of(direction).observe(hop_ns / 1e9)


def hops(gpu: list[TraceEvent], cpu: list[TraceEvent]) -> list[tuple[str, int]]:
    """(direction, ns) of each layer's hops, "to_cpu" and "to_gpu", where the receiving side waited for it already."""
    by_place = {(event.kind, event.layer, event.sub_batch): event for event in (*gpu, *cpu)}
    found = []
    for attended in cpu:
        if attended.kind is not TraceKind.CPU_ATTEND:
            continue
        place = attended.layer, attended.sub_batch
        submitted = by_place.get((TraceKind.SUBMIT, *place))
        waited = by_place.get((TraceKind.CPU_WAIT, *place))
        if submitted and waited and waited.start_ns < submitted.end_ns:
            found.append(("to_cpu", max(0, attended.start_ns - submitted.end_ns)))
        taken = by_place.get((TraceKind.WAIT, *place))
        if taken and taken.start_ns < attended.end_ns:
            found.append(("to_gpu", max(0, taken.end_ns - attended.end_ns)))
    return found
