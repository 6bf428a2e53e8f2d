"""Traces of real iterations, with a real cpu_attn_svc: what is there, in which order, on one clock."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.gpu import Driver, load_decoder

from svc_common.model.store import ModelFiles
from svc_common.plan import CohortStep, IterationResult, NewSequence, PrefillChunk, SubBatch, Tier
from svc_common.trace import COHORT, IterationTrace, TracedSubBatch, TraceEvent, TraceKind

NUM_LAYERS = 3
PROMPTS = {1: 40, 2: 23, 3: 31, 4: 12}

MakeDriver = Callable[..., Driver]


@pytest.fixture
def driver(checkpoint: Callable[[str], ModelFiles], make_driver: MakeDriver, cpu_attention: Any) -> Driver:
    """Sequences 1 and 4 on the GPU, 2 and 3 on the host."""
    driver = make_driver(load_decoder(checkpoint("llama")), 60, cpu_attention)
    for sequence_id, num_tokens in PROMPTS.items():
        tier = Tier.GPU if sequence_id in (1, 4) else Tier.HOST
        driver.prefill(sequence_id, list(range(num_tokens)), tier, room_tokens=8)
    return driver


def trace_of(result: IterationResult) -> IterationTrace:
    assert result.trace is not None
    return result.trace


def by_place(events: list[TraceEvent]) -> dict[tuple[TraceKind, int, int], TraceEvent]:
    """By kind, layer and sub-batch; each occurs once."""
    found = {(event.kind, event.layer, event.sub_batch): event for event in events if event.layer >= 0}
    assert len(found) == sum(event.layer >= 0 for event in events)
    return found


def test_nothing_is_noted_unless_asked_for(driver: Driver) -> None:
    assert driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(2,))).trace is None


def test_two_sub_batches(driver: Driver) -> None:
    new = NewSequence(5, np.arange(9, dtype="i4"), Tier.GPU, driver.blocks(Tier.GPU, 12))
    result = driver.run(
        SubBatch((PrefillChunk(5, 0, 9),), gpu_decodes=(1, 4), cpu_decodes=(3,)),
        SubBatch(cpu_decodes=(2,)),
        new_sequences=(new,),
        trace=True,
    )
    trace = trace_of(result)
    assert (trace.epoch, trace.iteration) == (result.epoch, result.iteration)
    assert trace.duration_ns == result.timings.total_ns
    assert trace.sub_batches == (TracedSubBatch(0, 9, 2, 1, 32), TracedSubBatch(1, 0, 0, 1, 24))
    gpu, cpu = list(trace.events(trace.gpu)), list(trace.events(*trace.cpu))

    assert gpu[0].start_ns == trace.start_ns
    assert all(after.start_ns == before.end_ns for before, after in itertools.pairwise(gpu))
    assert trace.end_ns - gpu[-1].end_ns >= 0
    assert [event.kind for event in gpu if event.layer < 0] == [
        TraceKind.BOOKKEEPING,
        TraceKind.SWAP,
        TraceKind.BOOKKEEPING,
        TraceKind.REPORT,
        TraceKind.HEAD,
        TraceKind.BOOKKEEPING,
    ]
    on_gpu, on_cpu = by_place(gpu), by_place(cpu)
    layers, both = range(NUM_LAYERS), (0, 1)
    kinds = (TraceKind.PRE_ATTENTION, TraceKind.SUBMIT, TraceKind.WAIT, TraceKind.POST_ATTENTION)
    own = (TraceKind.ATTEND_PREFILLS, TraceKind.ATTEND_DECODES)
    assert set(on_gpu) == {(kind, layer, i) for kind in kinds for layer in layers for i in both} | {
        (kind, layer, 0) for kind in own for layer in layers
    }
    assert list(on_cpu) == [
        (kind, layer, i) for layer in layers for i in (1, 0) for kind in (TraceKind.CPU_WAIT, TraceKind.CPU_ATTEND)
    ]
    for layer in layers:
        for i in both:
            submit, wait = on_gpu[TraceKind.SUBMIT, layer, i], on_gpu[TraceKind.WAIT, layer, i]
            attend = on_cpu[TraceKind.CPU_ATTEND, layer, i]
            assert submit.start_ns < attend.start_ns < attend.end_ns
            # It rings before it looks at the clock, so the waiter may be first to do so.
            assert attend.start_ns < wait.end_ns
            assert wait.end_ns > submit.end_ns
    assert sum(e.duration_ns for e in cpu if e.kind is TraceKind.CPU_ATTEND) == result.timings.cpu_attention_ns


def test_one_batch_and_the_next_iteration(driver: Driver) -> None:
    """Nothing of the iteration before is left."""
    driver.run(SubBatch(gpu_decodes=(1,), cpu_decodes=(3,)), SubBatch(cpu_decodes=(2,)), trace=True)
    trace = trace_of(driver.run(SubBatch(cpu_decodes=(2, 3)), trace=True))
    assert trace.sub_batches == (TracedSubBatch(0, 0, 0, 2, sum(PROMPTS[i] + 2 for i in (2, 3))),)
    per_layer = (TraceKind.PRE_ATTENTION, TraceKind.SUBMIT, TraceKind.WAIT, TraceKind.POST_ATTENTION)
    assert [(e.kind, e.layer) for e in trace.events(trace.gpu) if e.layer >= 0] == [
        (kind, layer) for layer in range(NUM_LAYERS) for kind in per_layer
    ]
    [on_cpu] = trace.cpu
    assert len(on_cpu) == 2 * NUM_LAYERS
    gpu_only = trace_of(driver.run(SubBatch(gpu_decodes=(1,)), trace=True))
    assert gpu_only.cpu == ()
    assert TraceKind.REPORT not in gpu_only.gpu.kinds
    released = trace_of(driver.run(released=(1,), trace=True))
    assert {TraceKind(kind) for kind in released.gpu.kinds} == {TraceKind.BOOKKEEPING, TraceKind.SWAP, TraceKind.HEAD}


def test_a_cohort_beside_a_batch(driver: Driver) -> None:
    """A step's second part alone is traced; it stands between the batch's layers."""
    driver.run(SubBatch(gpu_decodes=(1,)), cohort=CohortStep((2, 3), 0, 1))
    trace = trace_of(driver.run(SubBatch(gpu_decodes=(1,)), cohort=CohortStep((2, 3), 1, 2), trace=True))
    context = sum(PROMPTS[i] + 1 for i in (2, 3))
    assert trace.sub_batches == (TracedSubBatch(0, 0, 1, 0, 0), TracedSubBatch(COHORT, 0, 0, 2, context))
    own = (TraceKind.PRE_ATTENTION, TraceKind.ATTEND_DECODES, TraceKind.POST_ATTENTION)
    before, after = (TraceKind.PRE_ATTENTION, TraceKind.SUBMIT), (TraceKind.WAIT, TraceKind.POST_ATTENTION)

    def cohort(kinds: tuple[TraceKind, ...], layer: int) -> list[tuple[TraceKind, int, int]]:
        return [(kind, layer, COHORT) for kind in kinds]

    assert [(e.kind, e.layer, e.sub_batch) for e in trace.events(trace.gpu) if e.layer >= 0] == [
        *cohort(before, 1),
        *((kind, 0, 0) for kind in own),
        *cohort(after, 1),
        *cohort(before, 2),
        *((kind, layer, 0) for layer in (1, 2) for kind in own),
        *cohort(after, 2),
    ]
    assert [(e.kind, e.layer, e.sub_batch) for e in trace.events(*trace.cpu)] == [
        (kind, layer, COHORT) for layer in (1, 2) for kind in (TraceKind.CPU_WAIT, TraceKind.CPU_ATTEND)
    ]
