"""Notes what the executor's thread does when, for plans that ask for a trace.

Steps follow one another on that thread, so each starts where the one before ended: one reading of the clock a step.
On cuda these are times of launches; times of execution need events on the stream.
"""

import time
from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gpu_svc.batch import Batch
from gpu_svc.cpu_program import CpuProgram
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.pipeline import Stage
from gpu_svc.weight_stream import Copied
from svc_common.decoder.decoder import Decoder
from svc_common.plan import IterationPlan
from svc_common.tensor_plane import EventKind, WorkEvent
from svc_common.trace import IterationTrace, TracedSubBatch, TraceEvents, TraceKind

_MAX_EVENTS_PER_LAYER = 2 * 7  # Two sub-batches, or one and a cohort; seven kinds.
_MAX_EVENTS_BESIDE = 16


class NullRecorder:
    """For plans that ask for none."""

    is_on = False

    def mark(self, kind: TraceKind, layer: int = -1, sub_batch: int = -1) -> None:
        """Ends a step."""

    def stage(
        self, batch: Batch, decoder: Decoder, cache: GpuKvCache, host: HostTier | None, hidden: Tensor | None = None
    ) -> Stage:
        return Stage(batch, decoder, cache, host, hidden)

    def describe(self, batches: Sequence[Batch], program: CpuProgram) -> None:
        """Batches with work, and which of it is the CPU's."""

    def take_cpu_events(self, events: Sequence[tuple[int, int, int, int]], pool: int) -> None:
        """As in the plane's Report, of that host pool's service."""


NO_RECORDER = NullRecorder()
_NOTHING = CpuProgram((), (), ())


class Recorder(NullRecorder):
    """One iteration at a time; the memory is kept."""

    is_on = True

    def __init__(self, num_layers: int) -> None:
        capacity = _MAX_EVENTS_PER_LAYER * num_layers + _MAX_EVENTS_BESIDE
        self._kinds, self._layers, self._sub_batches = (array("i", bytes(4 * capacity)) for _ in range(3))
        self._ends_ns = array("q", bytes(8 * capacity))
        self._num_events = 0
        self._start_ns = 0
        self._batches: Sequence[Batch] = ()
        self._program = _NOTHING
        self._cpu_events: dict[int, Sequence[tuple[int, int, int, int]]] = {}
        """By host pool."""

    def begin(self, start_ns: int) -> None:
        """Forgets the iteration before."""
        self._num_events = 0
        self._start_ns = start_ns
        self._batches = ()
        self._cpu_events.clear()
        self._program = _NOTHING

    def mark(self, kind: TraceKind, layer: int = -1, sub_batch: int = -1) -> None:
        i = self._num_events
        self._ends_ns[i] = time.perf_counter_ns()
        self._kinds[i] = kind
        self._layers[i] = layer
        self._sub_batches[i] = sub_batch
        self._num_events = i + 1

    def stage(
        self, batch: Batch, decoder: Decoder, cache: GpuKvCache, host: HostTier | None, hidden: Tensor | None = None
    ) -> Stage:
        """That marks each of its steps."""
        return _RecordedStage(self, batch, decoder, cache, host, hidden)

    def describe(self, batches: Sequence[Batch], program: CpuProgram) -> None:
        self._batches, self._program = batches, program

    def take_cpu_events(self, events: Sequence[tuple[int, int, int, int]], pool: int) -> None:
        self._cpu_events[pool] = events

    def trace(self, plan: IterationPlan, end_ns: int, copied: Sequence[Copied] = ()) -> IterationTrace:
        """What was noted since `begin`; `copied` are layers that came meanwhile."""
        num, start_ns = self._num_events, self._start_ns
        offsets = np.concatenate([[0], np.frombuffer(self._ends_ns, np.int64, num) - start_ns])
        return IterationTrace(
            epoch=plan.epoch,
            iteration=plan.iteration,
            mode=plan.mode,
            start_ns=start_ns,
            duration_ns=end_ns - start_ns,
            sub_batches=tuple(map(_describe, self._batches)),
            gpu=TraceEvents(
                tuple(self._kinds[:num]),
                tuple(self._layers[:num]),
                tuple(self._sub_batches[:num]),
                tuple(offsets[:-1].tolist()),
                tuple(np.diff(offsets).tolist()),
            ),
            cpu=tuple(map(self._cpu_trace, self._cpu_events)),
            link=self._link_events(copied, end_ns),
        )

    def _link_events(self, copied: Sequence[Copied], end_ns: int) -> TraceEvents:
        """Of one that began before the iteration, the part in it; likewise at its end."""
        inside = [(max(one.start_ns, self._start_ns), min(one.end_ns, end_ns)) for one in copied]
        return TraceEvents(
            (TraceKind.WEIGHT_COPY,) * len(copied),
            tuple(one.layer for one in copied),
            (-1,) * len(copied),
            tuple(start_ns - self._start_ns for start_ns, _ in inside),
            tuple(stop_ns - start_ns for start_ns, stop_ns in inside),
        )

    def _cpu_trace(self, pool: int) -> TraceEvents:
        """Two of each event of that worker's: waiting, then computing."""
        events = [WorkEvent.of(*event) for event in self._cpu_events[pool]]
        kind_of = {EventKind.ATTENTION: TraceKind.CPU_ATTEND, EventKind.LAYER: TraceKind.CPU_LAYER}
        batches_of = {
            EventKind.ATTENTION: self._program.attended_in(pool),
            EventKind.LAYER: [index for index, _ in self._program.passing],
        }
        rows = [
            (kind, event.layer, batches_of[event.kind][event.index], start_ns - self._start_ns, end_ns - start_ns)
            for event in events
            for kind, start_ns, end_ns in (
                (TraceKind.CPU_WAIT, event.waiting_ns, event.start_ns),
                (kind_of[event.kind], event.start_ns, event.end_ns),
            )
        ]
        kinds, layers, sub_batches, offsets_ns, durations_ns = (tuple([row[i] for row in rows]) for i in range(5))
        return TraceEvents(kinds, layers, sub_batches, offsets_ns, durations_ns, pool)


class _RecordedStage(Stage):
    """Marks what it did; where there was nothing to do, no mark."""

    def __init__(
        self,
        recorder: Recorder,
        batch: Batch,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        hidden: Tensor | None,
    ) -> None:
        super().__init__(batch, decoder, cache, host, hidden)
        self._recorder = recorder
        self._index = batch.index
        self._layer = 0

    def _mark(self, kind: TraceKind) -> None:
        self._recorder.mark(kind, self._layer, self._index)

    def _await_weights(self, layer: int) -> bool:
        self._layer = layer
        streamed = super()._await_weights(layer)
        if streamed:
            self._mark(TraceKind.WEIGHT_WAIT)
        return streamed

    def pre_attention(self, layer: int) -> None:
        super().pre_attention(layer)
        self._mark(TraceKind.PRE_ATTENTION)

    def submit(self) -> None:
        super().submit()
        if self.batch.cpu_work:
            self._mark(TraceKind.SUBMIT)

    def hand_over(self) -> None:
        super().hand_over()
        if self.batch.prompt_pass or self.batch.last_pass:
            self._recorder.mark(TraceKind.SUBMIT, -1, self._index)

    def begin_prompts(self) -> None:
        super().begin_prompts()
        if self.batch.prompt_pass:
            self._recorder.mark(TraceKind.WAIT, -1, self._index)

    def run_prompts(self, layer: int) -> None:
        super().run_prompts(layer)
        self._recorder.mark(TraceKind.RUN_PROMPTS, layer, self._index)

    def take_over(self) -> None:
        super().take_over()
        if self.batch.last_pass:
            self._recorder.mark(TraceKind.WAIT, -1, self._index)

    def attend_prefills(self, layer: int) -> None:
        super().attend_prefills(layer)
        if self.batch.chunks:
            self._mark(TraceKind.ATTEND_PREFILLS)

    def attend_decodes(self, layer: int) -> None:
        super().attend_decodes(layer)
        if self.batch.gpu_decode is not None:
            self._mark(TraceKind.ATTEND_DECODES)

    def wait(self) -> None:
        super().wait()
        if self.batch.cpu_work:
            self._mark(TraceKind.WAIT)

    def post_attention(self, layer: int) -> None:
        super().post_attention(layer)
        self._mark(TraceKind.POST_ATTENTION)


def _describe(batch: Batch) -> TracedSubBatch:
    return TracedSubBatch(
        index=batch.index,
        prefill_tokens=sum(chunk.rows.stop - chunk.rows.start for chunk in batch.chunks),
        gpu_decodes=batch.gpu_decode_rows.stop - batch.gpu_decode_rows.start,
        cpu_decodes=batch.cpu_decode_rows.stop - batch.cpu_decode_rows.start,
        cpu_context_tokens=batch.cpu_attended_tokens,
    )
