"""What one iteration could compute, as sums from which any part of it is priced quickly. Changes nothing."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate

from planner_svc.estimator import (
    EMPTY_LOAD,
    NO_COHORT,
    CohortLoad,
    Estimator,
    IterationLoad,
    PoolLoads,
    SubBatchLoad,
    hidden_cohort_layers,
    slowest_pool_s,
)
from planner_svc.scheduler.batch import Batch, Chunk, CohortPart
from planner_svc.scheduler.sequence import Sequence
from svc_common.plan import Mode, Tier


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of the work an iteration takes, and in how many sub-batches."""

    num_prefill_tokens: int
    num_cpu_decodes: int
    is_split: bool = False
    """Two sub-batches. The CPU attends for the second while the GPU computes the first's linear operations."""
    num_cohort_layers: int = 0
    """By which the cohort advances beside the batch."""

    @property
    def mode(self) -> Mode:
        if self.num_cohort_layers:
            return Mode.DECOUPLED
        if self.num_cpu_decodes == 0:
            return Mode.GPU_ONLY
        return Mode.ASYMMETRIC if self.is_split else Mode.SAME_LAYER


class Work:
    """Prompt chunks, GPU decodes and CPU decodes, each in order of preference: a shape takes them from the front."""

    def __init__(
        self,
        estimator: Estimator,
        gpu_decodes: list[Sequence],
        cpu_decodes: list[Sequence],
        swap_bytes: tuple[int, int],
        cohort: list[Sequence] | None = None,
        cohort_start_layer: int = 0,
        num_pools: int = 1,
    ) -> None:
        """`swap_bytes`: out to the host and in to the GPU. `cohort`: who would step, or does already.

        `num_pools`: of the host.
        """
        self._estimator = estimator
        self.chunks: list[Chunk] = []
        self.gpu_decodes = gpu_decodes
        self.cpu_decodes = cpu_decodes
        self._swap_bytes = swap_bytes
        self.cohort = cohort or []
        self._cohort_start_layer = cohort_start_layer
        self._cohort_context = sum([item.num_computed_tokens for item in self.cohort]) + len(self.cohort)
        self._chunk_ends: list[int] = []
        self._gpu_context = sum([item.num_computed_tokens for item in gpu_decodes]) + len(gpu_decodes)
        self._gpu_decode_s = estimator.gpu_decode_s(len(gpu_decodes), self._gpu_context)
        self._cpu_contexts = [0, *accumulate([item.num_computed_tokens + 1 for item in cpu_decodes])]
        self._cpu_sums = _PoolSums(cpu_decodes, num_pools)
        self._cohort_pools: PoolLoads = ()
        if self.cohort:
            self._cohort_pools = _PoolSums(self.cohort, num_pools).between(0, len(self.cohort))

    def take(self, chunks: list[Chunk]) -> None:
        """Adds the prompts; decodes alone come first, since they set how long an iteration may be."""
        self.chunks = chunks
        self._chunk_ends = list(accumulate(chunk.num_tokens for chunk in chunks))

    @property
    def num_prefill_tokens(self) -> int:
        """Of all chunks."""
        return self._chunk_ends[-1] if self.chunks else 0

    def seconds(self, shape: Shape) -> float:
        """Predicted, before the mode's own factor."""
        return self._estimator.iteration_s(self.load(shape))

    def load(self, shape: Shape) -> IterationLoad:
        """As an estimator prices it."""
        first, second = self.loads(shape)
        swap_out_bytes, swap_in_bytes = self._swap_bytes
        return IterationLoad(first, second, swap_out_bytes, swap_in_bytes, self._cohort_load(shape))

    def num_decodes(self, shape: Shape) -> float:
        """Tokens decoded; of a cohort that part of each which its layers make up."""
        num_stepping = len(self.cohort) * shape.num_cohort_layers / self._estimator.num_layers
        return len(self.gpu_decodes) + shape.num_cpu_decodes + num_stepping

    @property
    def num_cohort_layers_left(self) -> int:
        """Until the cohort's step ends, or the one that would begin."""
        return self._estimator.num_layers - self._cohort_start_layer

    def hidden_cohort_layers(self, shape: Shape) -> float:
        """That the shape's batch hides."""
        estimator, batch = self._estimator, self.loads(shape)[0]
        layer_s = estimator.linear_s(batch.num_tokens)
        layer_s += estimator.gpu_decode_s(batch.num_gpu_decodes, batch.gpu_context_tokens)
        layer_s += sum([estimator.prefill_s(*chunk) for chunk in batch.prefill_chunks])
        attention_s = slowest_pool_s(estimator, len(self.cohort), self._cohort_context, self._cohort_pools)
        return hidden_cohort_layers(estimator.num_layers, layer_s, attention_s)

    def cpu_excess_s(self, shape: Shape) -> float:
        """By how much CPU attention outlasts the GPU's work beside it, in a layer's worse half. 0 and less: hidden."""
        estimator = self._estimator
        loads = self.loads(shape)
        linear_s = [estimator.linear_s(load.num_tokens) for load in loads]
        prefill_s = sum(estimator.prefill_s(*chunk) for load in loads for chunk in load.prefill_chunks)
        decode_s = estimator.gpu_decode_s(loads[0].num_gpu_decodes, loads[0].gpu_context_tokens)
        cpu_s = [
            slowest_pool_s(estimator, load.num_cpu_decodes, load.cpu_context_tokens, load.cpu_pools) for load in loads
        ]
        if not shape.is_split:
            return cpu_s[0] - prefill_s - decode_s
        # As the executor's pipeline: all prefills run while the CPU attends for the second, see gpu_svc/pipeline.py.
        return max(cpu_s[1] - linear_s[0] - prefill_s, cpu_s[0] - linear_s[1] - decode_s)

    def loads(self, shape: Shape) -> tuple[SubBatchLoad, SubBatchLoad]:
        """As the estimator takes them."""
        num_first_tokens, num_second = self._division(shape)
        first = self._load(
            self._pieces(0, num_first_tokens),
            (len(self.gpu_decodes), self._gpu_context),
            (num_second, shape.num_cpu_decodes),
        )
        if not shape.is_split:
            return first, EMPTY_LOAD
        pieces = self._pieces(num_first_tokens, shape.num_prefill_tokens)
        return first, self._load(pieces, (0, 0), (0, num_second))

    def batch(self, shape: Shape) -> Batch:
        """The work itself."""
        num_first_tokens, num_second = self._division(shape)
        num_layers = shape.num_cohort_layers
        is_last = num_layers == self.num_cohort_layers_left
        part = CohortPart(self.cohort, self._cohort_start_layer, num_layers, is_last) if num_layers else None
        return Batch(
            chunks=(
                self._cut(0, num_first_tokens),
                self._cut(num_first_tokens, shape.num_prefill_tokens),
            ),
            gpu_decodes=self.gpu_decodes,
            cpu_decodes=(self.cpu_decodes[num_second : shape.num_cpu_decodes], self.cpu_decodes[:num_second]),
            cohort=part,
        )

    def _cohort_load(self, shape: Shape) -> CohortLoad:
        num_layers, num_sequences = shape.num_cohort_layers, len(self.cohort)
        if num_layers == 0:
            return NO_COHORT
        num_outputs = num_sequences if num_layers == self.num_cohort_layers_left else 0
        return CohortLoad(num_sequences, self._cohort_context, num_layers, num_outputs, self._cohort_pools)

    def _division(self, shape: Shape) -> tuple[int, int]:
        """(prefill tokens of the first sub-batch, CPU decodes of the second).

        Both get the same number of tokens as far as prompts allow, so that a second read of the weights costs least.
        The CPU's attention is divided as the GPU's work that hides it: beside the first's lie also the GPU decodes.
        """
        if not shape.is_split:
            return shape.num_prefill_tokens, 0
        num_tokens = shape.num_prefill_tokens + len(self.gpu_decodes) + shape.num_cpu_decodes
        linear_s = self._estimator.linear_s((num_tokens + 1) // 2)
        share = linear_s / (2 * linear_s + self._gpu_decode_s) if linear_s else 0.5
        second_context = share * self._cpu_contexts[shape.num_cpu_decodes]
        num_second = bisect_left(self._cpu_contexts, second_context, 0, shape.num_cpu_decodes)
        num_second_tokens = min(shape.num_prefill_tokens, max(0, num_tokens // 2 - num_second))
        return shape.num_prefill_tokens - num_second_tokens, num_second

    def _load(self, pieces: list[tuple[Chunk, int, int]], gpu: tuple[int, int], cpu: tuple[int, int]) -> SubBatchLoad:
        """`gpu`: decodes and their context tokens; `cpu`: first of the CPU decodes, and the one after the last."""
        start, end = cpu
        on_host = [(num_tokens, past) for chunk, num_tokens, past in pieces if chunk.tier is Tier.HOST]
        num_finished = sum([past + num_tokens == chunk.total_tokens for chunk, num_tokens, past in pieces])
        return SubBatchLoad(
            prefill_chunks=tuple([(num_tokens, past) for _, num_tokens, past in pieces]),
            num_gpu_decodes=gpu[0],
            gpu_context_tokens=gpu[1],
            num_cpu_decodes=end - start,
            cpu_context_tokens=self._cpu_contexts[end] - self._cpu_contexts[start],
            host_prefill_tokens=sum([num_tokens for num_tokens, _ in on_host]),
            host_past_tokens=sum([past for _, past in on_host]),
            num_outputs=num_finished + gpu[0] + end - start,
            cpu_pools=self._cpu_sums.between(start, end),
        )

    def _cut(self, start: int, end: int) -> list[Chunk]:
        return [
            chunk if num_tokens == chunk.num_tokens else replace(chunk, start=past, num_tokens=num_tokens)
            for chunk, num_tokens, past in self._pieces(start, end)
        ]

    def _pieces(self, start: int, end: int) -> list[tuple[Chunk, int, int]]:
        """(chunk, tokens of it, tokens of its sequence before them) between two places in the line of all chunks."""
        pieces = []
        index = bisect_left(self._chunk_ends, start + 1)
        while start < end:
            chunk = self.chunks[index]
            chunk_start = self._chunk_ends[index] - chunk.num_tokens
            num_tokens = min(end, self._chunk_ends[index]) - start
            pieces.append((chunk, num_tokens, chunk.start + start - chunk_start))
            start += num_tokens
            index += 1
        return pieces


class _PoolSums:
    """Sequences and their context tokens by host pool, of any stretch of a list; of nothing where there is one pool."""

    def __init__(self, sequences: list[Sequence], num_pools: int) -> None:
        self._sums: list[tuple[list[int], list[int]]] = []
        for pool in range(num_pools) if num_pools > 1 else ():
            counts = [item.pool == pool for item in sequences]
            contexts = [item.num_computed_tokens + 1 if item.pool == pool else 0 for item in sequences]
            self._sums.append(([0, *accumulate(counts)], [0, *accumulate(contexts)]))

    def between(self, start: int, end: int) -> PoolLoads:
        """Of those from `start` on, `end` excluded."""
        return tuple([(counts[end] - counts[start], sums[end] - sums[start]) for counts, sums in self._sums])
