"""Turns traces into protobuf messages and back: gpu_svc makes them, planner_svc relays them, the command reads them."""

from neoflex.v1 import executor_pb2 as pb
from svc_common.plan import Mode
from svc_common.trace import IterationTrace, TracedSubBatch, TraceEvents

_MODES = {
    Mode.GPU_ONLY: pb.EXECUTION_MODE_GPU_ONLY,
    Mode.ASYMMETRIC: pb.EXECUTION_MODE_ASYMMETRIC,
    Mode.SAME_LAYER: pb.EXECUTION_MODE_SAME_LAYER,
    Mode.DECOUPLED: pb.EXECUTION_MODE_DECOUPLED,
}
_MODE_OF = {value: mode for mode, value in _MODES.items()}


def trace_to_message(trace: IterationTrace) -> pb.IterationTrace:
    return pb.IterationTrace(
        epoch=trace.epoch,
        iteration=trace.iteration,
        mode=_MODES[trace.mode],
        start_ns=trace.start_ns,
        duration_ns=trace.duration_ns,
        sub_batches=[
            pb.TracedSubBatch(
                index=batch.index,
                prefill_tokens=batch.prefill_tokens,
                gpu_decodes=batch.gpu_decodes,
                cpu_decodes=batch.cpu_decodes,
                cpu_context_tokens=batch.cpu_context_tokens,
            )
            for batch in trace.sub_batches
        ],
        gpu=_events_to_message(trace.gpu),
        cpu=map(_events_to_message, trace.cpu),
        link=_events_to_message(trace.link),
        predicted_ns=trace.predicted_ns,
    )


def _events_to_message(events: TraceEvents) -> pb.TraceEvents:
    return pb.TraceEvents(
        kinds=events.kinds,  # type: ignore[arg-type]  # The stubs want the enum's own class.
        layers=events.layers,
        sub_batches=events.sub_batches,
        offsets_ns=events.offsets_ns,
        durations_ns=events.durations_ns,
        pool=events.pool,
    )


def trace_from_message(message: pb.IterationTrace) -> IterationTrace:
    """Raises ValueError where the mode is none."""
    if message.mode not in _MODE_OF:
        raise ValueError(f"mode {message.mode} is none")
    return IterationTrace(
        epoch=message.epoch,
        iteration=message.iteration,
        mode=_MODE_OF[message.mode],
        start_ns=message.start_ns,
        duration_ns=message.duration_ns,
        sub_batches=tuple(
            TracedSubBatch(
                batch.index, batch.prefill_tokens, batch.gpu_decodes, batch.cpu_decodes, batch.cpu_context_tokens
            )
            for batch in message.sub_batches
        ),
        gpu=_events_from_message(message.gpu),
        cpu=tuple(map(_events_from_message, message.cpu)),
        link=_events_from_message(message.link),
        predicted_ns=message.predicted_ns,
    )


def _events_from_message(events: pb.TraceEvents) -> TraceEvents:
    return TraceEvents(
        tuple(events.kinds),
        tuple(events.layers),
        tuple(events.sub_batches),
        tuple(events.offsets_ns),
        tuple(events.durations_ns),
        events.pool,
    )
