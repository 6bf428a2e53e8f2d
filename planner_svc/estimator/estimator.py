"""What the scheduler may ask of any estimator, and the load it asks about."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from planner_svc.estimator.terms import Factors, Terms

PoolLoads = tuple[tuple[int, int], ...]
"""(sequences, context tokens of them all) attended in each host pool, by its number."""


@dataclass(frozen=True, slots=True)
class SubBatchLoad:
    """The work of one sub-batch, in the quantities that set its time."""

    prefill_chunks: tuple[tuple[int, int], ...] = ()
    """(tokens of the chunk, tokens of the sequence before it)"""
    num_gpu_decodes: int = 0
    gpu_context_tokens: int = 0
    """Tokens attended by all GPU decodes together, the one being processed included."""
    num_cpu_decodes: int = 0
    cpu_context_tokens: int = 0
    host_prefill_tokens: int = 0
    """Prompt tokens of host sequences, whose K and V go to the host layer by layer."""
    host_past_tokens: int = 0
    """Tokens before those chunks, whose K and V come back for their attention."""
    num_outputs: int = 0
    """Sequences that get a token: every decode and every prompt that ends here."""
    cpu_pools: PoolLoads = ()
    """The CPU decodes by host pool, where there are several."""

    @property
    def num_tokens(self) -> int:
        """Tokens that pass the linear operations."""
        return sum(chunk for chunk, _ in self.prefill_chunks) + self.num_gpu_decodes + self.num_cpu_decodes

    @property
    def num_items(self) -> int:
        """Prefill chunks and decodes."""
        return len(self.prefill_chunks) + self.num_gpu_decodes + self.num_cpu_decodes


@dataclass(frozen=True, slots=True)
class CohortLoad:
    """Some layers of one decode step of sequences on the host, beside a batch."""

    num_sequences: int = 0
    context_tokens: int = 0
    """Tokens attended by all of them together, the one being processed included."""
    num_layers: int = 0
    """Of the step, in this iteration."""
    num_outputs: int = 0
    """Sequences that get a token: all where the step ends here, else none."""
    cpu_pools: PoolLoads = ()
    """All of them by host pool, where there are several."""


EMPTY_LOAD = SubBatchLoad()
NO_COHORT = CohortLoad()


@dataclass(frozen=True, slots=True)
class IterationLoad:
    """All that an iteration does, as an estimator prices it.

    Without a second sub-batch and CPU decodes this is the GPU-only batch. Beside a cohort there is no second one.
    """

    first: SubBatchLoad = EMPTY_LOAD
    second: SubBatchLoad = EMPTY_LOAD
    swap_out_bytes: int = 0
    """Over all layers, to the host."""
    swap_in_bytes: int = 0
    """Over all layers, to the GPU."""
    cohort: CohortLoad = NO_COHORT

    @property
    def num_outputs(self) -> int:
        """Sequences that get a token."""
        return self.first.num_outputs + self.second.num_outputs + self.cohort.num_outputs


def hidden_cohort_layers(num_layers: int, layer_s: float, attention_s: float) -> float:
    """Layers of a cohort's step that a batch hides whose layers take `layer_s` each; greater than 0.

    A cohort's layer takes its attention on the CPU, `attention_s`, and until the GPU is free for its linear operations
    half a layer of the batch on average: `num_layers * layer_s` hide so many of these. Beside no batch, all.
    """
    hidden_by_s = attention_s + layer_s / 2
    return num_layers if layer_s <= 0 or hidden_by_s <= 0 else num_layers * layer_s / hidden_by_s


def slowest_pool_s(estimator: "Estimator", num_sequences: int, context_tokens: int, pools: PoolLoads) -> float:
    """Attention on the CPU in one layer: the services of all pools attend at the same time."""
    if not pools:
        return estimator.cpu_decode_s(num_sequences, context_tokens)
    return max([estimator.cpu_decode_s(*load, pool) for pool, load in enumerate(pools)])


def pools_s(load: IterationLoad, num_layers: int, attention_s: Callable[[int, int, int], float]) -> tuple[float, ...]:
    """Seconds that each pool's service attends in a whole iteration, one entry where there is but one.

    `attention_s`: of one layer, by sequences, their context tokens and the pool.
    """
    totals: dict[int, float] = {0: 0.0}
    for layers, num, context, pools in (
        (num_layers, load.first.num_cpu_decodes, load.first.cpu_context_tokens, load.first.cpu_pools),
        (num_layers, load.second.num_cpu_decodes, load.second.cpu_context_tokens, load.second.cpu_pools),
        (load.cohort.num_layers, load.cohort.num_sequences, load.cohort.context_tokens, load.cohort.cpu_pools),
    ):
        for pool, one in enumerate(pools or ((num, context),)):
            totals[pool] = totals.get(pool, 0.0) + layers * attention_s(*one, pool)
    return tuple(totals.values())


class Estimator(Protocol):
    """Predicted seconds. Operations are per layer unless they say otherwise; none is negative."""

    @property
    def num_layers(self) -> int:
        """Of the model."""
        ...

    def linear_s(self, num_tokens: int) -> float:
        """All linear operations of a layer; 0 for no tokens."""
        ...

    def prefill_s(self, chunk_tokens: int, past_tokens: int) -> float:
        """Attention of one prefill chunk."""
        ...

    def gpu_decode_s(self, num_sequences: int, context_tokens: int) -> float:
        """Attention of decodes on the GPU; `context_tokens` of all sequences together."""
        ...

    def cpu_decode_s(self, num_sequences: int, context_tokens: int, pool: int = 0) -> float:
        """Attention of decodes by the service of one host pool, from submit to wait."""
        ...

    def head_s(self, num_outputs: int) -> float:
        """Output head and sampling, per iteration."""
        ...

    def iteration_s(self, load: IterationLoad) -> float:
        """A whole iteration."""
        ...

    def terms(self, load: IterationLoad) -> Terms:
        """The parts of `iteration_s`, in seconds of the whole iteration."""
        ...

    def calibrated(self, factors: Factors) -> Self:
        """The same estimator with its operations multiplied by `factors`, which may change later on."""
        ...
