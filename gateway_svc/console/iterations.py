"""One traced iteration as the console's timeline takes it: what lasts, by lane, with neighbours of a kind joined."""

from collections.abc import Iterator
from typing import Any

from neoflex.v1 import executor_pb2 as pb

_LINEAR, _ATTENTION, _OTHER, _WAIT, _COPY = "linear", "attention", "other", "wait", "copy"
_CLASSES = {
    pb.TRACE_KIND_BOOKKEEPING: _OTHER,
    pb.TRACE_KIND_SWAP: _COPY,
    pb.TRACE_KIND_PRE_ATTENTION: _LINEAR,
    pb.TRACE_KIND_SUBMIT: _COPY,
    pb.TRACE_KIND_ATTEND_PREFILLS: _ATTENTION,
    pb.TRACE_KIND_ATTEND_DECODES: _ATTENTION,
    pb.TRACE_KIND_WAIT: _WAIT,
    pb.TRACE_KIND_POST_ATTENTION: _LINEAR,
    pb.TRACE_KIND_REPORT: _WAIT,
    pb.TRACE_KIND_HEAD: _LINEAR,
    pb.TRACE_KIND_CPU_WAIT: _WAIT,
    pb.TRACE_KIND_CPU_ATTEND: _ATTENTION,
}
_MODE_PREFIX = "EXECUTION_MODE_"
Segment = tuple[str, int, int, int]
"""Class, sub-batch (-1: the whole iteration, 2: a cohort), start after the iteration's, length; microseconds."""


def described(trace: pb.IterationTrace) -> dict[str, Any]:
    """Times in microseconds; `start_us` on a clock that only differences make sense of."""
    gpu = list(_joined(trace.gpu))
    return {
        "epoch": trace.epoch,
        "iteration": trace.iteration,
        "mode": pb.ExecutionMode.Name(trace.mode).removeprefix(_MODE_PREFIX).lower(),
        "start_us": trace.start_ns // 1000,
        "duration_us": trace.duration_ns // 1000,
        "predicted_us": trace.predicted_ns // 1000,
        "prefill_tokens": sum(batch.prefill_tokens for batch in trace.sub_batches),
        "gpu_decodes": sum(batch.gpu_decodes for batch in trace.sub_batches),
        "cpu_decodes": sum(batch.cpu_decodes for batch in trace.sub_batches),
        # Waits are where nothing is drawn.
        "gpu": [segment for segment in gpu if segment[0] not in (_WAIT, _COPY)],
        "links": [segment for segment in gpu if segment[0] == _COPY],
        # A row for each service.
        "cpu": [[segment for segment in _joined(events) if segment[0] != _WAIT] for events in trace.cpu],
    }


def num_events(trace: pb.IterationTrace) -> int:
    return sum(len(events.kinds) for events in (trace.gpu, *trace.cpu))


def _joined(events: pb.TraceEvents) -> Iterator[Segment]:
    """In order; those that touch and are of one class and sub-batch as one."""
    before: tuple[str, int, int, int] | None = None  # Class, sub-batch, start and end in ns.
    columns = (events.kinds, events.sub_batches, events.offsets_ns, events.durations_ns)
    for kind, sub_batch, start_ns, lasts_ns in zip(*columns, strict=True):
        what = _CLASSES.get(kind, _OTHER)
        if before is not None and before[:2] == (what, sub_batch) and before[3] == start_ns:
            before = (what, sub_batch, before[2], start_ns + lasts_ns)
            continue
        if before is not None:
            yield _segment(*before)
        before = (what, sub_batch, start_ns, start_ns + lasts_ns)
    if before is not None:
        yield _segment(*before)


def _segment(what: str, sub_batch: int, start_ns: int, end_ns: int) -> Segment:
    """By its rounded ends, so that what touches still does."""
    return what, sub_batch, start_ns // 1000, end_ns // 1000 - start_ns // 1000
