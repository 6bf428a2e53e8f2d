"""Plays the executor: follows each plan's sequences, says how long the plan takes, and fabricates its tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from planner_svc.estimator import (
    EMPTY_LOAD,
    NO_COHORT,
    CohortLoad,
    Estimator,
    IterationLoad,
    PoolLoads,
    SubBatchLoad,
    Terms,
    Timeline,
)
from svc_common.plan import CohortStep, IterationPlan, IterationResult, PoolWork, PrefillChunk, SubBatch, Tier, Timings

_TOKEN = 0


@dataclass(slots=True)
class _Held:
    """A sequence as the executor knows it."""

    prompt_tokens: int
    on_host: bool
    pool: int
    """Where it is on the host."""
    computed_tokens: int = 0


class Truth(Estimator, Protocol):
    """An estimator that also says how long each lane works."""

    def timeline(self, load: IterationLoad) -> Timeline: ...


class SimulatedExecutor:
    """Times come from an estimator: the truth of the simulation, whatever the policy believes."""

    def __init__(self, estimator: Truth, kv_bytes_per_token: int, host_pools: Sequence[int] = ()) -> None:
        """`host_pools`: blocks of each, where there are several."""
        self._estimator = estimator
        self._pool_ends = [*accumulate(host_pools)] if len(host_pools) > 1 else []
        self._kv_bytes_per_token = kv_bytes_per_token
        self._held: dict[int, _Held] = {}
        self.worked = Timeline()
        """All iterations so far, one after the other."""
        self.latest = Timeline()
        """The last iteration."""
        self.latest_result = IterationResult(0, 0)

    def run(self, plan: IterationPlan) -> tuple[float, IterationResult]:
        """Seconds, and the result that then comes."""
        for sequence_id in plan.released:
            self._held.pop(sequence_id)
        for new in plan.new_sequences:
            self._held[new.sequence_id] = _Held(
                len(new.token_ids), new.tier is Tier.HOST, self._pool(new.blocks), new.num_cached_tokens
            )
        out_tokens = in_tokens = 0
        for swap in plan.swaps:
            held = self._held[swap.sequence_id]
            held.on_host, held.pool = swap.target is Tier.HOST, self._pool(swap.blocks)
            if held.on_host:
                out_tokens += held.computed_tokens
            else:
                in_tokens += held.computed_tokens
        tokens: list[tuple[int, int]] = []
        loads = [self._advance(batch, tokens) for batch in plan.sub_batches]
        cohort = self._step(plan.cohort, tokens) if plan.cohort else NO_COHORT
        timeline, timings, pool_work = Timeline(), Timings(), tuple[PoolWork, ...]()
        if loads or plan.swaps or plan.cohort:
            first, second = (*loads, EMPTY_LOAD, EMPTY_LOAD)[:2]
            size = self._kv_bytes_per_token
            load = IterationLoad(first, second, out_tokens * size, in_tokens * size, cohort)
            timeline = self._estimator.timeline(load)
            terms = self._estimator.terms(load)
            timings = timings_of(timeline.total_s, terms)
            pool_work = tuple(PoolWork(round(seconds * 1e9)) for seconds in terms.cpu_pools_s)
        self.worked += timeline
        self.latest = timeline
        self.latest_result = IterationResult(
            plan.epoch,
            plan.iteration,
            tuple(tokens),
            timings=timings,
            gpu_attended_tokens=sum(load.gpu_context_tokens for load in loads),
            cpu_attended_tokens=sum(load.cpu_context_tokens for load in loads)
            + cohort.context_tokens * cohort.num_layers // self._estimator.num_layers,
            pool_work=pool_work,
        )
        return timeline.total_s, self.latest_result

    def _advance(self, batch: SubBatch, tokens: list[tuple[int, int]]) -> SubBatchLoad:
        """Counts the batch's work as done; appends its tokens in the result's order."""
        chunks = tuple((chunk.num_tokens, chunk.start) for chunk in batch.prefills)
        on_host = [chunk for chunk in batch.prefills if self._held[chunk.sequence_id].on_host]
        num_finished = sum(self._prefill(chunk, tokens) for chunk in batch.prefills)
        gpu_context = self._decode(batch.gpu_decodes, tokens)
        cpu_context = self._decode(batch.cpu_decodes, tokens)
        cpu_pools = self._pool_loads(batch.cpu_decodes)
        return SubBatchLoad(
            prefill_chunks=chunks,
            num_gpu_decodes=len(batch.gpu_decodes),
            gpu_context_tokens=gpu_context,
            num_cpu_decodes=len(batch.cpu_decodes),
            cpu_context_tokens=cpu_context,
            host_prefill_tokens=sum(chunk.num_tokens for chunk in on_host),
            host_past_tokens=sum(chunk.start for chunk in on_host),
            num_outputs=num_finished + len(batch.gpu_decodes) + len(batch.cpu_decodes),
            cpu_pools=cpu_pools,
        )

    def _step(self, step: CohortStep, tokens: list[tuple[int, int]]) -> CohortLoad:
        """The step's tokens come with its last layer."""
        num_sequences = len(step.sequence_ids)
        ends = step.start_layer + step.num_layers == self._estimator.num_layers
        if ends:
            context = self._decode(step.sequence_ids, tokens)
        else:
            context = num_sequences + sum(self._held[sequence_id].computed_tokens for sequence_id in step.sequence_ids)
        cpu_pools = self._pool_loads(step.sequence_ids, num_more=0 if ends else 1)
        return CohortLoad(num_sequences, context, step.num_layers, num_sequences if ends else 0, cpu_pools)

    def _pool(self, blocks: tuple[int, ...]) -> int:
        """Where these are, if on the host."""
        return bisect_right(self._pool_ends, blocks[0]) if self._pool_ends else 0

    def _pool_loads(self, sequence_ids: tuple[int, ...], num_more: int = 0) -> PoolLoads:
        """Of decodes on the host, by pool where there are several. `num_more`: tokens of each not counted yet."""
        counts, contexts = [0] * len(self._pool_ends), [0] * len(self._pool_ends)
        for held in map(self._held.__getitem__, sequence_ids) if self._pool_ends else ():
            counts[held.pool] += 1
            contexts[held.pool] += held.computed_tokens + num_more
        return tuple(zip(counts, contexts, strict=True))

    def _prefill(self, chunk: PrefillChunk, tokens: list[tuple[int, int]]) -> bool:
        held = self._held[chunk.sequence_id]
        held.computed_tokens += chunk.num_tokens
        if held.computed_tokens < held.prompt_tokens:
            return False
        tokens.append((chunk.sequence_id, _TOKEN))
        return True

    def _decode(self, sequence_ids: tuple[int, ...], tokens: list[tuple[int, int]]) -> int:
        """Context tokens of them all, those being processed included."""
        context = 0
        for sequence_id in sequence_ids:
            held = self._held[sequence_id]
            held.computed_tokens += 1
            context += held.computed_tokens
            tokens.append((sequence_id, _TOKEN))
        return context


def timings_of(total_s: float, terms: Terms) -> Timings:
    """As a real executor sees its iteration: a swap counts as far as nothing hides it."""
    return Timings(
        total_ns=round(total_s * 1e9),
        cpu_wait_ns=round(terms.cpu_wait_s * 1e9),
        cpu_attention_ns=round(terms.cpu_decode_s * 1e9),
        swap_ns=round(max(0.0, terms.swap_s - terms.swap_hidden_s) * 1e9),
        head_ns=round(terms.head_s * 1e9),
        weight_wait_ns=round(terms.weight_wait_s * 1e9),
    )
