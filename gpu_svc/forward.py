"""Takes an iteration's batches through the layers: eagerly, or by replaying what was captured."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_svc.batch import Batch
from gpu_svc.cohort import CohortSteps
from gpu_svc.cpu_program import CpuProgram
from gpu_svc.graphs import Ready
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.pipeline import (
    Stage,
    beside_cohort,
    layers_in_order,
    outputs,
    run_above_cpu_layers,
    run_beside_cohort,
    run_layers,
)
from gpu_svc.recorder import NullRecorder
from gpu_svc.sequences import SequenceTable
from svc_common.decoder.decoder import Decoder
from svc_common.plan import CohortStep
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import Report
from svc_common.trace import TraceKind


@dataclass(frozen=True, slots=True)
class CohortPart:
    """What one iteration does of a cohort's step."""

    step: CohortStep
    batch: Batch
    """The same through the whole step."""
    hidden: torch.Tensor | None
    """[n, hidden_size] after the layer before `step`; None before the first."""

    @property
    def layers(self) -> range:
        return range(self.step.start_layer, self.step.start_layer + self.step.num_layers)


@dataclass(frozen=True, slots=True)
class Done:
    """What is after the last layer now."""

    batches: list[Batch]
    """Sub-batches, then a cohort whose step has ended."""
    stages: list[Stage]
    """Theirs; none of a replay."""
    reports: dict[int, Report]
    """Of each host pool that had work."""
    replayed: Tensor | None = None
    """[num_outputs, vocab_size]: the logits of a replay."""

    def logits(self, decoder: Decoder) -> Tensor:
        """[num_outputs, vocab_size], fp32, of the rows that yield a token, in the plan's order."""
        return decoder.logits(outputs(self.stages)) if self.replayed is None else self.replayed


class Forward:
    """Of one epoch; between two parts of a cohort's step it keeps the cohort."""

    def __init__(
        self,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        policy: ExecutionPolicy,
        table: SequenceTable,
        cohort_steps: CohortSteps,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._host = host
        self._policy = policy
        self._table = table
        self._cohort_steps = cohort_steps
        self.resting: tuple[Batch, Tensor] | None = None
        """A cohort between two parts of its step, with its hidden states."""
        self.cpu_start_ns = 0
        """The CPU attention services were told of the latest iteration."""

    def run(self, batches: list[Batch], part: CohortPart | None, recorder: NullRecorder) -> Done:
        """Eagerly. Raises PlaneError when the host tier is lost."""
        at_work = [*batches, part.batch] if part else batches
        num_layers, cpu_layers = self._decoder.spec.num_layers, self._policy.decode_cpu_layers
        program = self._begin(at_work, part, recorder)
        stages = [recorder.stage(batch, self._decoder, self._cache, self._host) for batch in batches]
        first, second = [*stages, None, None][:2]
        if part:
            cohort = recorder.stage(part.batch, self._decoder, self._cache, self._host, part.hidden)
            self._decoder.begin(beside_cohort(part.layers, num_layers) if first else part.layers)
            recorder.mark(TraceKind.BOOKKEEPING)
            run_beside_cohort(first, cohort, part.layers, num_layers)
            self.resting = cohort.batch, cohort.hidden
            if self._cohort_steps.advance(part.step):
                self.resting = None
                stages.append(cohort)
        else:
            self._decoder.begin(layers_in_order(stages, self._policy, num_layers))
            recorder.mark(TraceKind.BOOKKEEPING)
            if self._host is not None and cpu_layers:
                stage_of = {stage.batch.index: stage for stage in stages}
                in_order = [stage_of[batch.index] for batch in program.order]
                run_above_cpu_layers(in_order, self._host.only_pool, self._policy, num_layers, program.in_turn)
            elif first:
                run_layers(first, second, num_layers)
        return Done([stage.batch for stage in stages], stages, self._reports(program, recorder))

    def replay(self, ready: Ready, recorder: NullRecorder) -> Done:
        """The same of an iteration that was captured."""
        program = self._begin(ready.batches, None, recorder)
        if self._host is not None:
            self._host.settle()  # What is swapped in is there, and what is swapped out may be written over.
        recorder.mark(TraceKind.BOOKKEEPING)
        ready.run()
        recorder.mark(TraceKind.REPLAY)
        return Done(ready.batches, [], self._reports(program, recorder), ready.logits)

    def _begin(self, at_work: list[Batch], part: CohortPart | None, recorder: NullRecorder) -> CpuProgram:
        """Tells the CPU of its work."""
        program = CpuProgram.of(at_work, self._policy, self._decoder.spec.num_layers)
        if self._host is not None:
            layers = part.layers if part else None
            passing = [work for _, work in program.passing]
            used = self._table.pool_blocks_used
            self.cpu_start_ns = time.perf_counter_ns()
            self._host.begin(program.cpu_work, used, recorder.is_on, layers, passing, program.in_turn)
        recorder.describe(at_work, program)
        return program

    def _reports(self, program: CpuProgram, recorder: NullRecorder) -> dict[int, Report]:
        """Once all the CPU's work is done."""
        if self._host is None or not program.has_work:
            return {}
        reports = self._host.finish()
        for pool, report in reports.items():
            recorder.take_cpu_events(report.events, pool)
        recorder.mark(TraceKind.REPORT)
        return reports
