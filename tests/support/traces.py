"""Traces whose sums are worked out by hand, and a scripted TraceService that yields them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from neoflex.v1 import trace_pb2 as pb
from neoflex.v1 import trace_pb2_grpc
from svc_common.plan import Mode
from svc_common.trace import COHORT, IterationTrace, TracedSubBatch, TraceEvents, TraceKind
from svc_common.trace_wire import trace_to_message

K = TraceKind
# kind, layer, sub-batch, end; each starts where the one before ended.
GPU_STEPS = (
    (K.BOOKKEEPING, -1, -1, 10),
    (K.PRE_ATTENTION, 0, 1, 20),
    (K.SUBMIT, 0, 1, 22),
    (K.PRE_ATTENTION, 0, 0, 30),
    (K.SUBMIT, 0, 0, 32),
    (K.WAIT, 0, 1, 45),
    (K.POST_ATTENTION, 0, 1, 60),
    (K.WAIT, 0, 0, 66),
    (K.POST_ATTENTION, 0, 0, 80),
    (K.REPORT, -1, -1, 84),
    (K.HEAD, -1, -1, 100),
)
CPU_START = 5
CPU_STEPS = (
    (K.CPU_WAIT, 0, 1, 25),
    (K.CPU_ATTEND, 0, 1, 42),
    (K.CPU_WAIT, 0, 0, 42),
    (K.CPU_ATTEND, 0, 0, 64),
)


def columns(steps: Sequence[tuple[TraceKind, int, int, int]], start: int, unit_ns: int) -> TraceEvents:
    kinds, layers, sub_batches, ends = zip(*steps, strict=True)
    starts = (start, *ends[:-1])
    return TraceEvents(
        kinds,
        layers,
        sub_batches,
        tuple(unit_ns * time for time in starts),
        tuple(unit_ns * (end - begin) for begin, end in zip(starts, ends, strict=True)),
    )


def pipelined(iteration: int, start_ns: int, unit_ns: int = 1) -> IterationTrace:
    """One layer and two sub-batches, 100 units long."""
    return IterationTrace(
        epoch=1,
        iteration=iteration,
        mode=Mode.ASYMMETRIC,
        start_ns=start_ns,
        duration_ns=100 * unit_ns,
        sub_batches=(TracedSubBatch(0, 7, 3, 1, 40), TracedSubBatch(1, 0, 0, 2, 90)),
        gpu=columns(GPU_STEPS, 0, unit_ns),
        cpu=(columns(CPU_STEPS, CPU_START, unit_ns),),
    )


SECOND_CPU_STEPS = ((K.CPU_WAIT, 0, 1, 26), (K.CPU_ATTEND, 0, 1, 44), (K.CPU_WAIT, 0, 0, 50), (K.CPU_ATTEND, 0, 0, 58))


def by_two_services(iteration: int, start_ns: int) -> IterationTrace:
    """The same, where a service beside the one of pool 0 attends too; it is later in sub-batch 1, earlier in 0."""
    trace = pipelined(iteration, start_ns)
    second = replace(columns(SECOND_CPU_STEPS, CPU_START + 1, 1), pool=2)
    return replace(trace, cpu=(*trace.cpu, second))


def gpu_only(iteration: int, start_ns: int) -> IterationTrace:
    """100 ns long."""
    steps = ((K.BOOKKEEPING, -1, -1, 40), (K.PRE_ATTENTION, 0, 0, 50), (K.POST_ATTENTION, 0, 0, 100))
    return IterationTrace(
        1, iteration, Mode.GPU_ONLY, start_ns, 100, (TracedSubBatch(0, 0, 4, 0, 0),), columns(steps, 0, 1)
    )


# One layer of a batch and the fifth of a cohort.
DECOUPLED_STEPS = (
    (K.BOOKKEEPING, -1, -1, 10),
    (K.PRE_ATTENTION, 4, COHORT, 15),
    (K.SUBMIT, 4, COHORT, 18),
    (K.PRE_ATTENTION, 0, 0, 40),
    (K.POST_ATTENTION, 0, 0, 60),
    (K.WAIT, 4, COHORT, 67),
    (K.POST_ATTENTION, 4, COHORT, 80),
    (K.REPORT, -1, -1, 82),
    (K.HEAD, -1, -1, 100),
)
DECOUPLED_CPU_STEPS = ((K.CPU_WAIT, 4, COHORT, 20), (K.CPU_ATTEND, 4, COHORT, 65))
DECOUPLED_CPU_START = 8


def decoupled(iteration: int, start_ns: int, with_batch: bool = True, unit_ns: int = 1) -> IterationTrace:
    """100 units long."""
    steps = [step for step in DECOUPLED_STEPS if with_batch or step[2] != 0]
    batches = (TracedSubBatch(0, 0, 4, 0, 0), TracedSubBatch(COHORT, 0, 0, 2, 90))
    return IterationTrace(
        1,
        iteration,
        Mode.DECOUPLED,
        start_ns,
        100 * unit_ns,
        batches if with_batch else batches[1:],
        columns(steps, 0, unit_ns),
        (columns(DECOUPLED_CPU_STEPS, DECOUPLED_CPU_START, unit_ns),),
    )


class ScriptedTraces(trace_pb2_grpc.TraceServiceServicer):
    """Yields its traces, then waits as a server does that has nothing to do."""

    def __init__(self) -> None:
        self.traces: list[IterationTrace] = []
        self.ended = asyncio.Semaphore(0)
        """Released at the end of each call."""

    async def TraceIterations(  # noqa: N802
        self, request: pb.TraceIterationsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[pb.TraceIterationsResponse]:
        try:
            for trace in self.traces:
                yield pb.TraceIterationsResponse(trace=trace_to_message(trace))
            await asyncio.Event().wait()
        finally:
            self.ended.release()
