"""What becomes of iterations: metrics; spans where a request in one is sampled; and now and then layer by layer."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from opentelemetry.trace import NonRecordingSpan, SpanContext, use_span

from planner_svc.request_span import RequestSpan
from svc_common.plan import ExecutionError, IterationPlan, IterationResult
from svc_common.telemetry import instruments
from svc_common.telemetry.noted_spans import NotedSpan, SpanForm, Value, new_context
from svc_common.telemetry.propagation import traceparent_of
from svc_common.telemetry.telemetry import Telemetry
from svc_common.trace import IterationTrace, TraceEvent, TraceKind

_OF_PLAN: tuple[tuple[str, type[Value]], ...] = (
    ("neoflex.epoch", int),
    ("neoflex.iteration", int),
    ("neoflex.mode", str),
    ("neoflex.prefill_tokens", int),
    ("neoflex.gpu_decodes", int),
    ("neoflex.cpu_decodes", int),
    ("neoflex.cohort_decodes", int),
    ("neoflex.predicted_s", float),
)
_OF_RESULT: tuple[tuple[str, type[Value]], ...] = (
    ("neoflex.measured_s", float),
    ("neoflex.cpu_wait_s", float),
    ("neoflex.cpu_attention_s", float),
    ("neoflex.weight_wait_s", float),
    ("neoflex.swapped_out_bytes", int),
    ("neoflex.swapped_in_bytes", int),
    ("neoflex.num_tokens", int),
)
_DONE = SpanForm("iteration", attributes=_OF_PLAN + _OF_RESULT)
_FAILED = SpanForm("iteration", attributes=_OF_PLAN)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An iteration whose span is still to be noted."""

    context: SpanContext
    start_ns: int
    plan: IterationPlan
    links: tuple[SpanContext, ...]


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
        self._under_way: dict[int, _UnderWay] = {}
        """Those that have a span, by number."""
        self._linked: tuple[list[int], tuple[SpanContext, ...]] = [], ()
        """The latest plan's sequences, and those of their requests' spans that are sampled."""
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
            context = new_context()
            self._under_way[plan.iteration] = _UnderWay(context, time.time_ns(), plan, links)
            plan = replace(plan, traceparent=traceparent_of(context))
        return plan

    def _links(self, plan: IterationPlan) -> tuple[SpanContext, ...]:
        """To the sampled requests that have a part in it. Mostly those of the plan before."""
        sequences = [item for batch in plan.sub_batches for item in batch.sequence_ids]
        if plan.cohort:
            sequences += plan.cohort.sequence_ids
        if sequences != self._linked[0]:
            spans = map(self._span_of, dict.fromkeys(sequences))
            self._linked = sequences, tuple([span.sampled for span in spans if span and span.sampled])
        return self._linked[1]

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
        if done := self._under_way.pop(plan.iteration, None):
            self._note(_DONE, done, _describe(plan) + _figures(result))

    def _note(
        self, form: SpanForm, ended: _UnderWay, values: tuple[Value, ...], error: str = "", text: str = ""
    ) -> None:
        times = ended.start_ns, time.time_ns()
        self._telemetry.note_span(NotedSpan(form, ended.context, None, *times, values, ended.links, error, text))

    @contextmanager
    def failed(self, result: IterationResult) -> Iterator[None]:
        """It was not. What is logged within belongs to its span."""
        assert result.error is not None
        reason = result.error.value
        self._failed.add(1, reason)
        lost = self._under_way.pop(result.iteration, None)
        if lost is None:
            yield
            return
        with use_span(NonRecordingSpan(lost.context)):
            yield
        self._note(_FAILED, lost, _describe(lost.plan), reason, result.error_message)

    def epoch_ended(self, reason: str) -> None:
        """Plans without a result have none any more."""
        self._epochs.add(1, reason)
        self._sampled_iteration = 0
        for lost in self._under_way.values():
            self._note(_FAILED, lost, _describe(lost.plan), reason, reason)
        self._under_way.clear()
        self._linked = [], ()


def _describe(plan: IterationPlan) -> tuple[Value, ...]:
    """As in _OF_PLAN."""
    batches = plan.sub_batches
    return (
        plan.epoch,
        plan.iteration,
        plan.mode.value,
        sum([chunk.num_tokens for batch in batches for chunk in batch.prefills]),
        sum([len(batch.gpu_decodes) for batch in batches]),
        sum([len(batch.cpu_decodes) for batch in batches]),
        len(plan.cohort.sequence_ids) if plan.cohort else 0,
        plan.predicted_s,
    )


def _figures(result: IterationResult) -> tuple[Value, ...]:
    """As in _OF_RESULT."""
    timings = result.timings
    return (
        timings.total_ns / 1e9,
        timings.cpu_wait_ns / 1e9,
        timings.cpu_attention_ns / 1e9,
        timings.weight_wait_ns / 1e9,
        result.swapped_out_bytes,
        result.swapped_in_bytes,
        len(result.tokens),
    )


class LayerMeters:
    """Steps of layers, and the hop to the CPU and back, out of an iteration's trace."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._steps = telemetry.meters.histogram(instruments.LAYER_TIME)
        self._hops = telemetry.meters.histogram(instruments.HOP_LATENCY)

    def observe(self, trace: IterationTrace, device: str) -> None:
        """On "cuda" the executor's steps are launches, which say nothing of what they take: those are left out."""
        services = [list(trace.events(events)) for events in trace.cpu]
        gpu = list(trace.events(trace.gpu)) if device == "cpu" else []
        for event in chain(gpu, *services):
            if event.layer >= 0:
                self._steps.of(event.kind.name.lower()).observe(event.duration_ns / 1e9)
        for direction, hop_ns in hops(gpu, services):
            self._hops.of(direction).observe(hop_ns / 1e9)


def hops(gpu: Iterable[TraceEvent], services: Iterable[Iterable[TraceEvent]]) -> list[tuple[str, int]]:
    """(direction, ns) of each layer's hops, "to_cpu" and "to_gpu", where the receiving side waited for it already.

    `services`: events of each CPU attention service. The executor goes on when the last of them has come to an end.
    """
    of_gpu = {(event.kind, event.layer, event.sub_batch): event for event in gpu}
    found: list[tuple[str, int]] = []
    ends_ns: dict[tuple[int, int], int] = {}
    for events in services:
        waits = {}
        for event in events:
            place = event.layer, event.sub_batch
            if event.kind is TraceKind.CPU_WAIT:
                waits[place] = event
            elif event.kind is TraceKind.CPU_ATTEND:
                submitted, waited = of_gpu.get((TraceKind.SUBMIT, *place)), waits.get(place)
                if submitted and waited and waited.start_ns < submitted.end_ns:
                    found.append(("to_cpu", max(0, event.start_ns - submitted.end_ns)))
                ends_ns[place] = max(event.end_ns, ends_ns.get(place, 0))
    for place, end_ns in ends_ns.items():
        taken = of_gpu.get((TraceKind.WAIT, *place))
        if taken and taken.start_ns < end_ns:
            found.append(("to_gpu", max(0, taken.end_ns - end_ns)))
    return found
