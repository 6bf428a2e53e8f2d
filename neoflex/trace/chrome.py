"""Writes traces as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from neoflex.trace.services import service_names
from svc_common.trace import COHORT, IterationTrace, TraceEvent, TraceKind, batch_name

NAMES = {
    TraceKind.BOOKKEEPING: "bookkeeping",
    TraceKind.SWAP: "swap",
    TraceKind.PRE_ATTENTION: "pre-attention",
    TraceKind.SUBMIT: "submit",
    TraceKind.ATTEND_PREFILLS: "attend prefills",
    TraceKind.ATTEND_DECODES: "attend decodes",
    TraceKind.WAIT: "wait for CPU",
    TraceKind.POST_ATTENTION: "post-attention",
    TraceKind.REPORT: "wait for report",
    TraceKind.HEAD: "head and sampling",
    TraceKind.CPU_WAIT: "wait for submit",
    TraceKind.CPU_ATTEND: "attend",
    TraceKind.CPU_LAYER: "layer",
    TraceKind.RUN_PROMPTS: "prompts' layers",
    TraceKind.REPLAY: "replay of a graph",
    TraceKind.WEIGHT_WAIT: "wait for weights",
    TraceKind.WEIGHT_COPY: "weights",
}
GPU_PID, CPU_PID, LINK_PID = 1, 2, 1000
"""The second is of the first host pool's service; the others' follow. By these the lanes are sorted."""
_ITERATIONS, _STEPS = 1, 2


def to_chrome(traces: Sequence[IterationTrace]) -> dict[str, Any]:
    """The JSON object, of at least one iteration. Times in it are microseconds after the first iteration's start."""
    base_ns = traces[0].start_ns
    return {
        "displayTimeUnit": "ms",
        "otherData": {"clock": "CLOCK_MONOTONIC", "base_ns": base_ns},
        "traceEvents": [
            *_metadata(traces),
            *_idle(traces, base_ns),
            *(e for t in traces for e in _iteration(t, base_ns)),
        ],
    }


def _metadata(traces: Sequence[IterationTrace]) -> Iterator[dict[str, Any]]:
    """The link has a lane where weights crossed it."""
    lanes = [(GPU_PID, "gpu_svc", _ITERATIONS, "iterations"), (GPU_PID, "gpu_svc", _STEPS, "steps")]
    lanes += [(CPU_PID + pool, name, _STEPS, "steps") for pool, name in service_names(traces).items()]
    if any(len(trace.link) for trace in traces):
        lanes.append((LINK_PID, "link", _STEPS, "weights"))
    for pid, process, tid, lane in lanes:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": tid, "args": {"name": process}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _idle(traces: Sequence[IterationTrace], base_ns: int) -> Iterator[dict[str, Any]]:
    """Between iterations."""
    for before, after in pairwise(traces):
        if after.start_ns > before.end_ns:
            lasts_ns = after.start_ns - before.end_ns
            yield _complete("idle", (GPU_PID, _STEPS), before.end_ns - base_ns, lasts_ns, {})


def _iteration(trace: IterationTrace, base_ns: int) -> Iterator[dict[str, Any]]:
    arguments = {
        "iteration": trace.iteration,
        "epoch": trace.epoch,
        "mode": trace.mode.value,
        "predicted_ms": trace.predicted_ns / 1e6,
        "sub_batches": [
            {
                "index": _place(batch.index),
                "prefill_tokens": batch.prefill_tokens,
                "gpu_decodes": batch.gpu_decodes,
                "cpu_decodes": batch.cpu_decodes,
                "cpu_context_tokens": batch.cpu_context_tokens,
            }
            for batch in trace.sub_batches
        ],
    }
    name = f"{trace.iteration}: {trace.mode.value}"
    yield _complete(name, (GPU_PID, _ITERATIONS), trace.start_ns - base_ns, trace.duration_ns, arguments)
    services = ((CPU_PID + events.pool, events) for events in trace.cpu)
    for pid, events in ((GPU_PID, trace.gpu), *services, (LINK_PID, trace.link)):
        for event in trace.events(events):
            lane, where = (pid, _STEPS), _arguments(trace, event)
            yield _complete(NAMES[event.kind], lane, event.start_ns - base_ns, event.duration_ns, where)


def _place(sub_batch: int) -> int | str:
    return batch_name(sub_batch) if sub_batch == COHORT else sub_batch


def _arguments(trace: IterationTrace, event: TraceEvent) -> dict[str, int | str]:
    arguments: dict[str, int | str] = {"iteration": trace.iteration}
    if event.layer >= 0:
        arguments["layer"] = event.layer
    if event.sub_batch >= 0:
        arguments["sub_batch"] = _place(event.sub_batch)
    return arguments


def _complete(
    name: str, lane: tuple[int, int], start_ns: int, lasts_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """`lane` is process and thread."""
    pid, tid = lane
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": lasts_ns / 1e3,
        "args": arguments,
    }
