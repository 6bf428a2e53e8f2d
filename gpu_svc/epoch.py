"""Runs one plan start to end: state changes, swaps, layers, sampling. Holds all that an epoch's end drops."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from gpu_svc.attention import make_backend
from gpu_svc.batch import Batch, BatchBuilder
from gpu_svc.cohort import CohortSteps
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import cross
from gpu_svc.limits import InvalidPlanError, Limits
from gpu_svc.link import Link
from gpu_svc.pipeline import Stage, beside_cohort, outputs, run_beside_cohort, run_layers
from gpu_svc.profiler import Profiler
from gpu_svc.recorder import NullRecorder
from gpu_svc.sampling import sample
from gpu_svc.sequences import Moves, SequenceTable
from svc_common.decoder.decoder import Decoder
from svc_common.plan import CohortStep, IterationPlan, IterationResult, SubBatch, Timings, TokenLogprobs
from svc_common.tensor_plane import PeerLostError
from svc_common.trace import COHORT, TraceKind


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


class Epoch:
    """Sequences and caches from one OpenEpoch to the next. Not usable after `run` has raised."""

    def __init__(
        self, number: int, limits: Limits, decoder: Decoder, cache: GpuKvCache, host: HostTier | None, link: Link
    ) -> None:
        self.number = number
        self.last_iteration = 0
        self.cache = cache
        self.host = host
        self._limits = limits
        self._decoder = decoder
        self._link = link
        shape = cache.shape
        num_host_blocks = host.num_blocks if host else 0
        self.table = SequenceTable(
            limits, shape.block_tokens, cache.num_blocks, num_host_blocks, decoder.spec.vocab_size
        )
        self._backend = make_backend(decoder.spec, shape, decoder.dtype, decoder.device)
        self._builder = BatchBuilder(self.table, self._backend, shape, decoder.device)
        self._cohort_steps = CohortSteps(self.table, decoder.spec.num_layers)
        self._resting: tuple[Batch, torch.Tensor] | None = None
        """A cohort between two parts of its step, with its hidden states."""
        self._announced_host_blocks = 0

    def profiler(self) -> Profiler:
        """Measures on this epoch's caches; before the first plan only, as it writes into blocks."""
        return Profiler(self._limits, self._decoder, self.cache, self.host, self._backend, self._link)

    def run(self, plan: IterationPlan, recorder: NullRecorder) -> IterationResult:
        """Raises InvalidPlanError before anything is computed, PlaneError when the host tier is lost.

        Timings lack what only the caller knows: total and idle time. So does the result its trace, which the caller
        takes from `recorder`.
        """
        if plan.iteration != self.last_iteration + 1:
            raise InvalidPlanError(f"iteration {plan.iteration} follows {self.last_iteration}")
        if self.host is not None and not self.host.is_alive:
            raise PeerLostError("the CPU attention service is gone")
        self._cohort_steps.check_changes(plan)
        moves = self.table.apply(plan)
        self.table.check_work(plan)
        self._cohort_steps.check_work(plan)
        recorder.mark(TraceKind.BOOKKEEPING)
        swap_ns = self._swap(moves)
        recorder.mark(TraceKind.SWAP)
        batches = [
            self._builder.build(sub_batch, index)
            for index, sub_batch in enumerate(plan.sub_batches)
            if sub_batch.num_tokens
        ]
        part = self._part(plan.cohort) if plan.cohort else None
        waited_before_ns = self.host.wait_ns if self.host else 0
        weights_before = self._decoder.traffic
        stages, cpu_attention_ns = self._run_layers(batches, part, plan.host_blocks_used, recorder)
        cpu_wait_ns = self.host.wait_ns - waited_before_ns if self.host else 0
        weights = self._decoder.traffic
        for sub_batch in plan.sub_batches:
            self.table.advance(sub_batch)
        tokens, logprobs, head_ns = self._sample(stages)
        recorder.mark(TraceKind.HEAD)
        self.last_iteration = plan.iteration
        done = [stage.batch for stage in stages]
        block_bytes, token_bytes = self.cache.shape.host_block_bytes, self.cache.shape.host_token_bytes
        return IterationResult(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=tokens,
            logprobs=logprobs,
            timings=Timings(
                cpu_wait_ns=cpu_wait_ns,
                cpu_attention_ns=cpu_attention_ns,
                swap_ns=swap_ns,
                head_ns=head_ns,
                weight_wait_ns=weights.wait_ns - weights_before.wait_ns,
                weight_bytes=weights.num_bytes - weights_before.num_bytes,
            ),
            swapped_out_bytes=len(moves.to_host) * block_bytes
            + sum(batch.host_chunk_tokens for batch in done) * token_bytes,
            swapped_in_bytes=len(moves.to_gpu) * block_bytes,
            gpu_attended_tokens=sum(batch.gpu_attended_tokens for batch in done),
            cpu_attended_tokens=sum(batch.cpu_attended_tokens for batch in done),
        )

    def _swap(self, moves: Moves) -> int:
        """All moves to the host, then all to the GPU, which may reuse the blocks. Nanoseconds."""
        start_ns = time.perf_counter_ns()
        if self.host is not None:
            cross(
                self._link, KvBlocks(self.cache.blocks), self.host.blocks, moves.to_host, moves.to_gpu, self.cache.shape
            )
        return time.perf_counter_ns() - start_ns

    def _part(self, step: CohortStep) -> CohortPart:
        if self._resting is not None:
            return CohortPart(step, *self._resting)
        return CohortPart(step, self._builder.build(SubBatch(cpu_decodes=step.sequence_ids), COHORT), None)

    def _run_layers(
        self, batches: list[Batch], part: CohortPart | None, host_blocks_used: int, recorder: NullRecorder
    ) -> tuple[list[Stage], int]:
        """What is after the last layer now: sub-batches, then a cohort whose step has ended.

        And nanoseconds the CPU attention service computed.
        """
        at_work = [*batches, part.batch] if part else batches
        # Sub-batch 1 is submitted first in each layer, see pipeline.py.
        for_cpu = [batch for batch in reversed(at_work) if len(batch.cpu_work)]
        if self.host is not None and (for_cpu or host_blocks_used != self._announced_host_blocks):
            cpu_work = [batch.cpu_work for batch in for_cpu]
            self.host.begin(cpu_work, host_blocks_used, recorder.is_on, part.layers if part else None)
            self._announced_host_blocks = host_blocks_used
        recorder.describe(at_work, [batch.index for batch in for_cpu], part.layers.start if part else 0)
        stages = [recorder.stage(batch, self._decoder, self.cache, self.host) for batch in batches]
        first, second = [*stages, None, None][:2]
        num_layers = self._decoder.spec.num_layers
        if part:
            cohort = recorder.stage(part.batch, self._decoder, self.cache, self.host, part.hidden)
            self._decoder.begin(beside_cohort(part.layers, num_layers) if first else part.layers)
            recorder.mark(TraceKind.BOOKKEEPING)
            run_beside_cohort(first, cohort, part.layers, num_layers)
            self._resting = cohort.batch, cohort.hidden
            if self._cohort_steps.advance(part.step):
                self._resting = None
                stages.append(cohort)
        else:
            self._decoder.begin(range(num_layers) if first else ())
            recorder.mark(TraceKind.BOOKKEEPING)
            if first:
                run_layers(first, second, num_layers)
        if self.host is None or not for_cpu:
            return stages, 0
        report = self.host.finish()
        recorder.take_cpu_times(report.times_ns)
        recorder.mark(TraceKind.REPORT)
        return stages, report.compute_ns

    def _sample(self, stages: list[Stage]) -> tuple[tuple[tuple[int, int], ...], dict[int, TokenLogprobs], int]:
        """Tokens by sequence id, log-probabilities, and nanoseconds of head and sampling."""
        start_ns = time.perf_counter_ns()
        slots = np.concatenate([np.zeros(0, np.int64), *(stage.batch.output_slots for stage in stages)])
        if not len(slots):
            return (), {}, 0
        logits = self._decoder.logits(outputs(stages))
        tokens, logprobs = sample(logits, self.table.sampling_rows(slots))
        self.table.take_tokens(slots, tokens)
        ids = self.table.sequence_ids[slots].tolist()
        return (
            tuple(zip(ids, tokens.tolist(), strict=True)),
            {ids[row.row]: TokenLogprobs(row.chosen, row.top) for row in logprobs},
            time.perf_counter_ns() - start_ns,
        )
