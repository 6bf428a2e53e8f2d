"""What passes between planner and executor, as values: IterationPlan down, IterationResult up.

Meanings are those of executor.proto. Each service's `wire.py` converts its direction to and from protobuf; nothing else
in the reach of scheduler or pipeline knows protobuf.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # It needs Mode.
    from svc_common.trace import IterationTrace


class Mode(Enum):
    """How an iteration uses the two processors."""

    GPU_ONLY = "gpu_only"
    ASYMMETRIC = "asymmetric"
    SAME_LAYER = "same_layer"
    DECOUPLED = "decoupled"


class Tier(Enum):
    """Where a sequence's KV lies."""

    GPU = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn, every default resolved. Meanings as in SequenceSampling of the proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), each token once."""
    grammar: str = ""
    num_prompt_logprobs: int = -1

    @property
    def has_penalties(self) -> bool:
        """Whether it depends on which tokens came before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class NewSequence:
    sequence_id: int
    token_ids: tuple[int, ...]
    tier: Tier
    blocks: tuple[int, ...]
    sampling: Sampling = Sampling()
    num_generated_tokens: int = 0
    """How many of token_ids were generated: not 0 after a recomputation."""
    num_cached_tokens: int = 0
    """The first so many are computed: their blocks, all full, may have other owners and are not written to."""


@dataclass(frozen=True, slots=True)
class Swap:
    sequence_id: int
    target: Tier
    blocks: tuple[int, ...]
    """All blocks owned in the target tier, in order."""


@dataclass(frozen=True, slots=True)
class NewBlocks:
    sequence_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    sequence_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SubBatch:
    prefills: tuple[PrefillChunk, ...] = ()
    gpu_decodes: tuple[int, ...] = ()
    cpu_decodes: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that pass the linear operations."""
        return sum(chunk.num_tokens for chunk in self.prefills) + len(self.gpu_decodes) + len(self.cpu_decodes)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        return tuple(chunk.sequence_id for chunk in self.prefills) + self.gpu_decodes + self.cpu_decodes


@dataclass(frozen=True, slots=True)
class CohortStep:
    """Some layers of one decode step of host sequences that advance at their own pace beside the batch.

    A step's parts name the same sequences and follow one another; until it ends they are neither released nor moved,
    and are in no sub-batch. The part that reaches the last layer yields their tokens.
    """

    sequence_ids: tuple[int, ...]
    start_layer: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Everything one iteration does; applied in the order released, new, swaps, new blocks, sub-batches.

    Of two sub-batches the second holds no GPU decodes; a prompt may go on from the first to the second. Beside a
    cohort there is at most one, without CPU decodes. No sub-batch holds work and there is no cohort: the plan only
    releases.
    """

    epoch: int
    iteration: int
    mode: Mode
    released: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    swaps: tuple[Swap, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    sub_batches: tuple[SubBatch, ...] = ()
    cohort: CohortStep | None = None
    trace: bool = False
    traceparent: str = ""
    """Context of the iteration's span, W3C's; empty where it has none that is sampled."""
    predicted_s: float = 0.0
    """The estimator's word on how long it takes; stays with the planner."""
    pool_decodes: tuple[int, ...] = ()
    """Sequences attended in each host pool, where there are several; stays with the planner."""

    @property
    def sequence_ids(self) -> frozenset[int]:
        """Those that it computes or moves."""
        ids = {sequence_id for batch in self.sub_batches for sequence_id in batch.sequence_ids}
        moved = {swap.sequence_id for swap in self.swaps}
        return frozenset(ids | moved | set(self.cohort.sequence_ids if self.cohort else ()))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of consecutive tokens of one prompt, as columns: a chunk has thousands."""

    start: int
    """Place of the first of these tokens in the prompt."""
    chosen: tuple[float, ...]
    """Of the prompt's tokens."""
    top_token_ids: tuple[int, ...]
    """The likeliest at each position, as many for each."""
    top_logprobs: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    def position(self, index: int) -> TokenLogprobs:
        """Of the token at `start` + `index`."""
        num_top = len(self.top_token_ids) // len(self.chosen)
        part = slice(index * num_top, (index + 1) * num_top)
        return TokenLogprobs(
            self.chosen[index], tuple(zip(self.top_token_ids[part], self.top_logprobs[part], strict=True))
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds, meanings as in IterationTimings of the proto."""

    total_ns: int = 0
    cpu_wait_ns: int = 0
    cpu_attention_ns: int = 0
    swap_ns: int = 0
    head_ns: int = 0
    idle_ns: int = 0
    prompt_logprobs_ns: int = 0
    weight_wait_ns: int = 0
    weight_bytes: int = 0
    start_ns: int = 0
    """CLOCK_MONOTONIC; stays with the executor. 0 where nothing was computed."""


@dataclass(frozen=True, slots=True)
class PoolWork:
    """What the CPU attention service of one host pool did in an iteration."""

    attention_ns: int = 0
    attended_tokens: int = 0
    """Those of a cohort when its step ends."""


@dataclass(frozen=True, slots=True)
class ServiceWork:
    """When a CPU attention service had work in an iteration."""

    pool: int
    start_ns: int
    """It was told of the iteration; CLOCK_MONOTONIC."""
    busy_ns: int
    wait_ns: int
    """For submits, meanwhile."""


class ExecutionError(Enum):
    CPU_ATTENTION_LOST = "cpu_attention_lost"
    STALE = "stale"
    INVALID_PLAN = "invalid_plan"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class IterationResult:
    """What an iteration yielded: one token for each decode and for each prompt that was finished."""

    epoch: int
    iteration: int
    tokens: tuple[tuple[int, int], ...] = ()
    """(sequence_id, token_id)"""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By sequence_id, for those that asked."""
    prompt_logprobs: tuple[tuple[int, PromptLogprobs], ...] = ()
    """(sequence_id, part), in the plan's order; after a recomputation positions may come again."""
    grammar_failures: dict[int, str] = field(default_factory=dict)
    """Why a sequence can't go on in its grammar, by sequence_id: its token is of no use."""
    not_finite: tuple[int, ...] = ()
    """Sequences for which the model computed NaN or infinity: their tokens are of no use."""
    timings: Timings = Timings()
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    gpu_attended_tokens: int = 0
    cpu_attended_tokens: int = 0
    pool_work: tuple[PoolWork, ...] = ()
    """By host pool, where there are several."""
    services: tuple[ServiceWork, ...] = ()
    """Of CPU attention services that had work; stay with the executor."""
    error: ExecutionError | None = None
    error_message: str = ""
    trace: "IterationTrace | None" = None
    """Where the plan asked for it."""
