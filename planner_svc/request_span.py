"""The span of one request, with its phases as children: queue, prefill and decode. Attributes are OpenTelemetry's."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.context import Context, attach
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from svc_common.model.chat_template import Turn
from svc_common.telemetry.noted_spans import NotedSpan, NoteSpan, SpanForm, new_context, nobody
from svc_common.telemetry.propagation import parent_of

if TYPE_CHECKING:
    from planner_svc.generation import Finished, GenerationRequest, Marks

PROVIDER = "neoflex"
_MAX_INT = 2**63 - 1
"""OTLP knows no larger one; a caller's seed may be."""
_QUEUE, _PREFILL, _DECODE = SpanForm("queue"), SpanForm("prefill"), SpanForm("decode")


@dataclass(frozen=True, slots=True)
class Face:
    """What all requests have in common: the model, and where it is reached."""

    model: str
    address: str
    port: str
    """Empty for a Unix socket."""


def face_of(model: str, listen: str) -> Face:
    """`listen` is "host:port" or "unix:path"."""
    if listen.startswith("unix:"):
        return Face(model, listen.removeprefix("unix:"), "")
    host, _, port = listen.rpartition(":")
    return Face(model, host.strip("[]"), port)


class RequestSpan:
    """Costs next to nothing where the request is not sampled. Times are those of CLOCK_MONOTONIC, in ns."""

    def __init__(
        self,
        tracer: Tracer,
        face: Face,
        operation: str,
        metadata: Iterable[tuple[str, str | bytes]],
        arrival_ns: int,
        *,
        captures_content: bool = False,
        note_span: NoteSpan = nobody,
    ) -> None:
        """`operation` is "chat" or "text_completion"; `metadata` is the call's, with its trace context. `note_span`
        takes the phases."""
        self.operation = operation
        self._note_span = note_span
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._arrival_ns = arrival_ns
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": face.model,
            "server.address": face.address,
        }
        if face.port:
            attributes["server.port"] = int(face.port)
        self._span = tracer.start_span(
            f"{operation} {face.model}",
            parent_of(metadata),
            SpanKind.SERVER,
            attributes,
            start_time=arrival_ns + self._offset_ns,
        )
        self._face = face
        self.is_sampled = self._span.is_recording()
        self.captures_content = captures_content and self.is_sampled
        """Whether it is to have the prompt's and the answer's text."""
        self.sampled = self._span.get_span_context() if self.is_sampled else None
        """What the spans of its iterations are linked to."""

    def enter(self) -> None:
        """What this call's task logs from here on belongs to the span."""
        if self.is_sampled:
            attach(self._context)

    @property
    def _context(self) -> Context:
        return set_span_in_context(self._span, Context())

    def accept(self, request: "GenerationRequest") -> None:
        """Notes what is asked for."""
        if not self.is_sampled:
            return
        sampling = request.sampling
        self._span.set_attributes(
            {
                "neoflex.request_id": request.request_id,
                "neoflex.service_class": request.service_class.name,
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.seed": sampling.seed if sampling.seed <= _MAX_INT else str(sampling.seed),
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.stop_sequences": list(request.stops),
                "gen_ai.usage.input_tokens": len(request.prompt),
            }
        )

    def note_prompt(self, turns: Iterable[Turn]) -> None:
        """The prompt's text, where it is captured."""
        self._note("gen_ai.input.messages", [{"role": turn.role, "parts": _parts(turn.content)} for turn in turns])

    def _note(self, name: str, messages: list[dict[str, object]]) -> None:
        if self.captures_content:
            self._span.set_attribute(name, json.dumps(messages, ensure_ascii=False))

    def finish(self, finished: "Finished", marks: "Marks", now_ns: int) -> None:
        """The request ended well."""
        if not self.is_sampled:
            return
        self._span.set_attributes(
            {
                "gen_ai.response.model": self._face.model,
                "gen_ai.response.finish_reasons": [finished.reason.word],
                "neoflex.cached_tokens": finished.cached_tokens,
                "neoflex.recomputations": finished.recomputations,
            }
        )
        self._end(finished.reason.word, marks, now_ns)

    def fail(self, reason: str, marks: "Marks | None", now_ns: int) -> None:
        """It was refused, or ended with an error; `marks` where it had been accepted."""
        if not self.is_sampled:
            return
        self._span.set_attribute("error.type", reason)
        self._span.set_status(Status(StatusCode.ERROR, reason))
        self._end("error", marks, now_ns)

    def _end(self, finish_reason: str, marks: "Marks | None", now_ns: int) -> None:
        if marks is not None:
            message: dict[str, object] = {
                "role": "assistant",
                "parts": _parts(marks.text),
                "finish_reason": finish_reason,
            }
            self._note("gen_ai.output.messages", [message])
            self._span.set_attribute("gen_ai.usage.output_tokens", marks.num_tokens)
            self._end_phases(marks, now_ns)
        self._span.end(now_ns + self._offset_ns)

    def _end_phases(self, marks: "Marks", now_ns: int) -> None:
        """Each ends where the next begins, or with the request."""
        assert self.sampled is not None
        starts = (_QUEUE, self._arrival_ns), (_PREFILL, marks.planned_ns), (_DECODE, marks.first_token_ns)
        begun = [(form, start_ns) for form, start_ns in starts if start_ns]
        ends = [start_ns for _, start_ns in begun[1:]] + [now_ns]
        for (form, start_ns), end_ns in zip(begun, ends, strict=True):
            times = start_ns + self._offset_ns, end_ns + self._offset_ns
            self._note_span(NotedSpan(form, new_context(self.sampled), self.sampled, *times))


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "content": text}]
