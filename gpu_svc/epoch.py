"""Runs one plan start to end: state changes, swaps, layers, sampling. Holds all that an epoch's end drops."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from gpu_svc.attention import make_backend
from gpu_svc.batch import Batch
from gpu_svc.batch_builder import BatchBuilder
from gpu_svc.cohort import CohortSteps
from gpu_svc.forward import CohortPart, Done, Forward
from gpu_svc.grammars import Grammars
from gpu_svc.graph_options import GraphOptions
from gpu_svc.graphs import Graphs
from gpu_svc.host_tier import HostTier
from gpu_svc.kv_cache import GpuKvCache
from gpu_svc.kv_layout import KvBlocks
from gpu_svc.kv_swap import copy_blocks
from gpu_svc.limits import InvalidPlanError, Limits
from gpu_svc.link import Link
from gpu_svc.lower_pool import LowerTables
from gpu_svc.pipeline import Stage
from gpu_svc.profiler import Profiler
from gpu_svc.prompt_logprobs import prompt_logprobs
from gpu_svc.recorder import NullRecorder
from gpu_svc.sampling import sample
from gpu_svc.sequences import Moves, SequenceTable
from gpu_svc.stopwatch import since_now
from svc_common.decoder.decoder import Decoder
from svc_common.plan import (
    CohortStep,
    IterationPlan,
    IterationResult,
    PoolWork,
    PromptLogprobs,
    ServiceWork,
    SubBatch,
    Timings,
    TokenLogprobs,
)
from svc_common.policy import ExecutionPolicy
from svc_common.tensor_plane import PeerLostError, Report
from svc_common.trace import COHORT, TraceKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an iteration drew; meanings as in IterationResult."""

    tokens: tuple[tuple[int, int], ...] = ()
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    grammar_failures: dict[int, str] = field(default_factory=dict)
    not_finite: tuple[int, ...] = ()
    head_ns: int = 0
    """Of the output head and of sampling."""


def nobody() -> None:
    """To be told that a plan has begun."""


class Epoch:
    """Sequences and caches from one OpenEpoch to the next. Not usable after `run` has raised."""

    def __init__(
        self,
        number: int,
        limits: Limits,
        decoder: Decoder,
        cache: GpuKvCache,
        host: HostTier | None,
        link: Link,
        policy: ExecutionPolicy,
        grammars: Grammars | None = None,
        graphs: GraphOptions | None = None,
    ) -> None:
        """`cache` and `host` are made for the policy's CPU layers. Without `grammars` no sequence may have one.

        Without `graphs` all iterations are eager; with them `cache` has a scratch block.
        """
        self.number = number
        self.policy = policy
        self.last_iteration = 0
        self.cache = cache
        self.host = host
        self._limits = limits
        self._decoder = decoder
        self._link = link
        shape = cache.shape
        host_pools = host.pool_blocks if host else ()
        self.table = SequenceTable(
            limits, shape.block_tokens, cache.num_blocks, host_pools, decoder.spec.vocab_size, grammars
        )
        self._backend = make_backend(decoder.spec, shape, decoder.dtype, decoder.device)
        self._lower_tables = LowerTables(cache.num_blocks)
        self._builder = BatchBuilder(self.table, self._backend, shape, decoder.device, policy, self._lower_tables)
        self._cohort_steps = CohortSteps(self.table, decoder.spec.num_layers)
        self._forward = Forward(decoder, cache, host, policy, self.table, self._cohort_steps)
        self._graphs = Graphs(graphs, decoder, cache, host, self._backend, limits) if graphs else None

    def capture(self) -> None:
        """Iterations, where they are to be; before the first plan only, as it writes into blocks.

        Raises PlaneError when the host tier is lost, and what has left it without an end.
        """
        if self._graphs is not None:
            self._graphs.capture_all()

    def profiler(self) -> Profiler:
        """Measures on this epoch's caches; before the first plan only, as it writes into blocks."""
        return Profiler(
            self._limits,
            self._decoder,
            self.cache,
            self.host,
            self._backend,
            self._link,
            self.policy,
            self._graphs,
        )

    def run(self, plan: IterationPlan, recorder: NullRecorder, begun: Callable[[], None] = nobody) -> IterationResult:
        """Raises InvalidPlanError before anything is computed, PlaneError when the host tier is lost.

        Timings lack what only the caller knows: total and idle time. So does the result its trace, which the caller
        takes from `recorder`. `begun` is told when the layers are about to run.
        """
        if plan.iteration != self.last_iteration + 1:
            raise InvalidPlanError(f"iteration {plan.iteration} follows {self.last_iteration}")
        if plan.cohort is not None and self.policy.decode_cpu_layers:
            raise InvalidPlanError("a cohort, but the CPU computes layers of all sequences in this epoch")
        if self.host is not None and not self.host.is_alive:
            raise PeerLostError("a CPU attention service is gone")
        self._cohort_steps.check_changes(plan)
        moves = self.table.apply(plan)
        self.table.check_work(plan)
        self._cohort_steps.check_work(plan)
        recorder.mark(TraceKind.BOOKKEEPING)
        swap_ns = self._swap(moves)
        recorder.mark(TraceKind.SWAP)
        run_layers = self._prepare(plan, recorder)
        waited_before_ns = self.host.wait_ns if self.host else 0
        weights_before = self._decoder.traffic
        begun()
        done = run_layers()
        cpu_wait_ns = self.host.wait_ns - waited_before_ns if self.host else 0
        for sub_batch in plan.sub_batches:
            self.table.advance(sub_batch)
        elapsed_ns = since_now(self._decoder.device)
        prompt_parts = self._prompt_logprobs(plan, done.stages)
        prompt_logprobs_ns = elapsed_ns() if prompt_parts else 0
        sampled = self._sample(done)
        weights = self._decoder.traffic  # By now a device knows how long it waited for them.
        recorder.mark(TraceKind.HEAD)
        self.last_iteration = plan.iteration
        moved_blocks = [len(blocks) * self._moved_block_bytes for blocks in (moves.to_host, moves.to_gpu)]
        return IterationResult(
            epoch=plan.epoch,
            iteration=plan.iteration,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_parts,
            grammar_failures=sampled.grammar_failures,
            not_finite=self._note_not_finite(prompt_parts, sampled.not_finite),
            timings=Timings(
                cpu_wait_ns=cpu_wait_ns,
                cpu_attention_ns=sum([report.compute_ns for report in done.reports.values()]),
                swap_ns=swap_ns,
                head_ns=sampled.head_ns,
                prompt_logprobs_ns=prompt_logprobs_ns,
                weight_wait_ns=weights.wait_ns - weights_before.wait_ns,
                weight_bytes=weights.num_bytes - weights_before.num_bytes,
            ),
            swapped_out_bytes=moved_blocks[0] + sum(map(self._prompt_bytes, done.batches)),
            swapped_in_bytes=moved_blocks[1],
            gpu_attended_tokens=sum(batch.gpu_attended_tokens for batch in done.batches),
            cpu_attended_tokens=sum(batch.cpu_attended_tokens for batch in done.batches),
            pool_work=self._pool_work(done.batches, done.reports),
            services=tuple(
                [
                    ServiceWork(pool, self._forward.cpu_start_ns, report.compute_ns, report.wait_ns)
                    for pool, report in done.reports.items()
                ]
            ),
        )

    def _prepare(self, plan: IterationPlan, recorder: NullRecorder) -> Callable[[], Done]:
        """What a checked plan computes, on the device but for its layers, which the result runs."""
        ready = self._graphs.ready(plan.sub_batches, self._builder) if self._graphs and not plan.cohort else None
        if ready is not None:
            return partial(self._forward.replay, ready, recorder)
        first_rows = accumulate((sub_batch.num_tokens for sub_batch in plan.sub_batches), initial=0)
        batches = [
            self._builder.build(sub_batch, index, first_row)
            for (index, sub_batch), first_row in zip(enumerate(plan.sub_batches), first_rows, strict=False)
            if sub_batch.num_tokens
        ]
        part = self._part(plan.cohort) if plan.cohort else None
        return partial(self._forward.run, batches, part, recorder)

    def _pool_work(self, done: list[Batch], reports: dict[int, Report]) -> tuple[PoolWork, ...]:
        num_pools = len(self.host.pools) if self.host else 0
        if num_pools < 2:
            return ()
        tokens = [0] * num_pools
        for batch in done:
            for part in batch.cpu_work:
                tokens[part.pool] += int(part.context_tokens.sum())
        times_ns = [reports[pool].compute_ns if pool in reports else 0 for pool in range(num_pools)]
        return tuple(map(PoolWork, times_ns, tokens))

    def _swap(self, moves: Moves) -> int:
        """All moves to the host, then all to the GPU, which may reuse the blocks. Nanoseconds that layers begin later
        for it: 0 where a device moves them beside its layers.
        """
        start_ns = time.perf_counter_ns()
        if self.host is not None:
            gpu, shape, cpu_layers = KvBlocks(self.cache.blocks), self.cache.shape, self.policy.decode_cpu_layers
            if cpu_layers:
                lower, tables = self.host.only_pool.lower, self._lower_tables
                copy_blocks(lower, lower, tables.to_host(moves.to_host), shape.head_dim)
            if cpu_layers < self._decoder.spec.num_layers:
                self.host.swap(self._link, gpu, moves.to_host, moves.to_gpu, shape)
            if cpu_layers:
                copy_blocks(lower, lower, tables.to_gpu(moves.to_gpu), shape.head_dim)
        if self._backend.reads_tails:
            if self.host is not None:
                self.host.settle()
            self.cache.clear(moves.new_gpu_blocks)
            self.cache.clear_tails(moves.to_gpu.target, moves.to_gpu.num_tokens)
        beside_layers = self.host is not None and self.host.swaps_beside_layers
        return 0 if beside_layers else time.perf_counter_ns() - start_ns

    @property
    def _moved_block_bytes(self) -> int:
        """Of a swap, in the host's type: also the part that stays in host memory, in the lower pool, is copied."""
        return replace(self.cache.shape, num_layers=self._decoder.spec.num_layers).host_block_bytes

    def _prompt_bytes(self, batch: Batch) -> int:
        """That prompts wrote to host memory."""
        layer_bytes = self.cache.shape.host_layer_token_bytes
        lower = self.policy.decode_cpu_layers - self.policy.prefill_cpu_layers
        num_prompt_tokens = batch.prompt_rows.stop if self.policy.decode_cpu_layers else 0
        upper = self.cache.shape.num_layers
        return (batch.host_chunk_tokens * upper + num_prompt_tokens * lower) * layer_bytes

    def _part(self, step: CohortStep) -> CohortPart:
        if self._forward.resting is not None:
            return CohortPart(step, *self._forward.resting)
        return CohortPart(step, self._builder.build(SubBatch(cpu_decodes=step.sequence_ids), COHORT), None)

    def _prompt_logprobs(self, plan: IterationPlan, stages: list[Stage]) -> tuple[tuple[int, PromptLogprobs], ...]:
        return tuple(
            part
            for stage in stages
            if stage.batch.chunks
            for part in prompt_logprobs(plan.sub_batches[stage.batch.index], stage.hidden, self.table, self._decoder)
        )

    @staticmethod
    def _note_not_finite(
        prompt_parts: tuple[tuple[int, PromptLogprobs], ...], sampled: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Sequences with numbers that are none, in their prompts or their next tokens."""
        in_prompts = [sequence_id for sequence_id, part in prompt_parts if not math.isfinite(sum(part.chosen))]
        not_finite = tuple(dict.fromkeys((*in_prompts, *sampled)))
        if not_finite:
            logger.error("the model computed NaN or infinity for sequences %s", list(not_finite))
        return not_finite

    def _sample(self, done: Done) -> Sampled:
        """One token for each row of output. A device has done all of the iteration when this returns."""
        elapsed_ns = since_now(self._decoder.device)
        slots = np.concatenate([np.zeros(0, np.int64), *(batch.output_slots for batch in done.batches)])
        if not len(slots):
            elapsed_ns()
            return Sampled()
        sampling = self.table.sampling
        drawn = sample(done.logits(self._decoder), sampling.rows(slots), sampling.changes(slots))
        failures = sampling.failures(slots)
        self.table.take_tokens(slots, drawn.tokens)
        ids = self.table.sequence_ids
        return Sampled(
            tuple(zip(ids[slots].tolist(), drawn.tokens.tolist(), strict=True)),
            {int(ids[slots[row.row]]): TokenLogprobs(row.chosen, row.top) for row in drawn.logprobs},
            {int(ids[slot]): error for slot, error in failures.items()},
            tuple(ids[slots[drawn.bad_rows]].tolist()),
            elapsed_ns(),
        )
