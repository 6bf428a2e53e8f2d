"""What becomes of requests, as metrics and, where they are sampled, as spans."""

import time
from collections.abc import Iterable

from planner_svc.generation import EndReason, Generation
from planner_svc.request_span import PROVIDER, Face, RequestSpan
from svc_common.telemetry import instruments
from svc_common.telemetry.meters import Distribution
from svc_common.telemetry.telemetry import Telemetry

CALLER_GONE = "CALLER_GONE"
"""Why a request ended whose call was cancelled, broke, or passed its deadline."""


class RequestMeters:
    """One for all requests; on the event loop's thread."""

    def __init__(self, telemetry: Telemetry, face: Face, class_names: Iterable[str]) -> None:
        meters = telemetry.meters
        names = sorted(class_names)
        self._tracer, self._note_span = telemetry.tracer, telemetry.note_span
        self._captures_content = telemetry.config.capture_content
        self._face = face
        self._duration = meters.histogram(instruments.REQUEST_DURATION)
        self._gen_ai_ttft = meters.histogram(instruments.GEN_AI_TTFT)
        self._gen_ai_tpot = meters.histogram(instruments.GEN_AI_TPOT)
        self._usage = meters.histogram(instruments.TOKEN_USAGE)
        self._ttft = meters.histogram(instruments.TTFT)
        self._inter_token = meters.histogram(instruments.INTER_TOKEN)
        self._latency = meters.histogram(instruments.LATENCY)
        self._queue_time = meters.histogram(instruments.QUEUE_TIME)
        self._prefill_time = meters.histogram(instruments.PREFILL_TIME)
        self._decode_time = meters.histogram(instruments.DECODE_TIME)
        self._refused = meters.counter(instruments.REFUSED, ("QUEUE_FULL",))
        words = sorted({reason.word for reason in EndReason})
        self._finished = meters.counter(instruments.FINISHED, *((word, name) for word in words for name in names))
        self._failed = meters.counter(instruments.FAILED, *((CALLER_GONE, name) for name in names))
        kinds = [(kind, outcome) for kind in ("ttft", "tpot") for outcome in ("met", "missed")]
        self._targets = meters.counter(instruments.SLO_TARGETS, *((*kind, name) for kind in kinds for name in names))

    # --- the servicer's side

    def begin(self, operation: str, metadata: Iterable[tuple[str, str | bytes]] | None, arrival_ns: int) -> RequestSpan:
        """A request is at the door."""
        return RequestSpan(
            self._tracer,
            self._face,
            operation,
            metadata or (),
            arrival_ns,
            captures_content=self._captures_content,
            note_span=self._note_span,
        )

    def refused(self, span: RequestSpan, reason: str, arrival_ns: int) -> None:
        """It was not let in."""
        now_ns = time.monotonic_ns()
        self._refused.add(1, reason)
        self._observe_duration(span.operation, reason, now_ns - arrival_ns)
        span.fail(reason, None, now_ns)

    # --- the engine's side

    def inter_token(self, class_name: str) -> Distribution:
        """Seconds from token to token."""
        return self._inter_token.of(class_name)

    def finished(self, generation: Generation, now_ns: int) -> None:
        """It ended well."""
        request, finished = generation.request, generation.finished
        name = request.service_class.name
        self._finished.add(1, finished.reason.word, name)
        for kind, met in (("ttft", finished.ttft_met), ("tpot", finished.tpot_met)):
            if met is not None:
                self._targets.add(1, kind, "met" if met else "missed", name)
        self._observe_phases(generation, now_ns)
        self._latency.of(name).observe(finished.duration_ns / 1e9)
        self._observe_gen_ai(generation)
        request.span.finish(finished, generation.marks, now_ns)

    def failed(self, generation: Generation, reason: str, now_ns: int) -> None:
        """It ended with an error, or nobody waits for it any more."""
        request = generation.request
        self._failed.add(1, reason, request.service_class.name)
        self._observe_phases(generation, now_ns)
        self._observe_duration(request.span.operation, reason, now_ns - request.arrival_ns)
        request.span.fail(reason, generation.marks, now_ns)

    def _observe_phases(self, generation: Generation, now_ns: int) -> None:
        """Those that came to their end."""
        name, marks, arrival_ns = generation.request.service_class.name, generation.marks, generation.request.arrival_ns
        if marks.planned_ns:
            self._queue_time.of(name).observe((marks.planned_ns - arrival_ns) / 1e9)
        if marks.first_token_ns:
            self._ttft.of(name).observe((marks.first_token_ns - arrival_ns) / 1e9)
            self._prefill_time.of(name).observe((marks.first_token_ns - marks.planned_ns) / 1e9)
            self._decode_time.of(name).observe((now_ns - marks.first_token_ns) / 1e9)

    def _observe_gen_ai(self, generation: Generation) -> None:
        finished, marks = generation.finished, generation.marks
        labels = self._labels(generation.request.span.operation)
        self._duration.of(*labels, "").observe(finished.duration_ns / 1e9)
        self._usage.of(*labels, "input").observe(finished.prompt_tokens)
        self._usage.of(*labels, "output").observe(finished.completion_tokens)
        if finished.completion_tokens > 0:
            self._gen_ai_ttft.of(*labels).observe(finished.time_to_first_token_ns / 1e9)
        if finished.completion_tokens > 1:
            rest_ns = marks.last_token_ns - marks.first_token_ns
            self._gen_ai_tpot.of(*labels).observe(rest_ns / 1e9 / (finished.completion_tokens - 1))

    def _observe_duration(self, operation: str, reason: str, duration_ns: int) -> None:
        self._duration.of(*self._labels(operation), reason).observe(duration_ns / 1e9)

    def _labels(self, operation: str) -> tuple[str, ...]:
        face = self._face
        return operation, PROVIDER, face.model, face.model, face.address, face.port
