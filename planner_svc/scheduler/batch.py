"""What one iteration computes, before a plan is made from it."""

from collections import Counter
from dataclasses import dataclass, field

from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import CohortStep, Mode, PrefillChunk, SubBatch, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Part of a prompt that may be computed. Of a waiting sequence: it would be admitted to `tier`."""

    sequence: Sequence
    start: int
    num_tokens: int
    total_tokens: int
    """Of the whole prompt, outputs to recompute included."""
    tier: Tier
    pool: int = 0
    """Where the tier is the host."""

    @property
    def is_admission(self) -> bool:
        return self.sequence.state is State.WAITING

    @property
    def is_last(self) -> bool:
        """Whether it yields a token."""
        return self.start + self.num_tokens == self.total_tokens


@dataclass(frozen=True, slots=True, eq=False)
class CohortPart:
    """Some layers of one decode step of sequences on the host."""

    sequences: list[Sequence]
    start_layer: int
    num_layers: int
    is_last: bool
    """Whether the step ends with it: then they get their tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One or two sub-batches. GPU decodes run in the first; one prompt may go on from the first to the second.

    Beside a cohort there is no second one, and no CPU decode in the first.
    """

    chunks: tuple[list[Chunk], list[Chunk]] = field(default_factory=lambda: ([], []))
    gpu_decodes: list[Sequence] = field(default_factory=list)
    cpu_decodes: tuple[list[Sequence], list[Sequence]] = field(default_factory=lambda: ([], []))

    cohort: CohortPart | None = None

    def decodes(self) -> list[Sequence]:
        """That get a token here."""
        return [*self.gpu_decodes, *self.cpu_decodes[0], *self.cpu_decodes[1], *self._ended()]

    def pool_decodes(self, num_pools: int) -> tuple[int, ...]:
        """Sequences attended in each host pool; () where there is but one."""
        if num_pools < 2:
            return ()
        cohort = self.cohort.sequences if self.cohort else ()
        counts = Counter(item.pool for item in (*self.cpu_decodes[0], *self.cpu_decodes[1], *cohort))
        return tuple(counts[pool] for pool in range(num_pools))

    @property
    def num_cpu_decodes(self) -> int:
        return len(self.cpu_decodes[0]) + len(self.cpu_decodes[1])

    @property
    def mode(self) -> Mode:
        if self.cohort:
            return Mode.DECOUPLED
        if not self.num_cpu_decodes:
            return Mode.GPU_ONLY
        is_split = (self.chunks[0] or self.gpu_decodes or self.cpu_decodes[0]) and (
            self.chunks[1] or self.cpu_decodes[1]
        )
        return Mode.ASYMMETRIC if is_split else Mode.SAME_LAYER

    @property
    def has_work(self) -> bool:
        return bool(self.chunks[0] or self.chunks[1] or self.gpu_decodes or self.num_cpu_decodes or self.cohort)

    def sub_batches(self) -> tuple[SubBatch, ...]:
        """As the plan carries them; empty ones are left out."""
        batches = (
            SubBatch(_prefills(self.chunks[0]), _ids(self.gpu_decodes), _ids(self.cpu_decodes[0])),
            SubBatch(_prefills(self.chunks[1]), (), _ids(self.cpu_decodes[1])),
        )
        return tuple(batch for batch in batches if batch != SubBatch())

    def cohort_step(self) -> CohortStep | None:
        """As the plan carries it."""
        part = self.cohort
        return CohortStep(_ids(part.sequences), part.start_layer, part.num_layers) if part else None

    def sequences_with_output(self) -> list[Sequence]:
        """That get a token, in the order of the executor's result."""
        return [
            *(chunk.sequence for chunk in self.chunks[0] if chunk.is_last),
            *self.gpu_decodes,
            *self.cpu_decodes[0],
            *(chunk.sequence for chunk in self.chunks[1] if chunk.is_last),
            *self.cpu_decodes[1],
            *self._ended(),
        ]

    def _ended(self) -> list[Sequence]:
        return self.cohort.sequences if self.cohort and self.cohort.is_last else []


def _prefills(chunks: list[Chunk]) -> tuple[PrefillChunk, ...]:
    return tuple(PrefillChunk(chunk.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in chunks)


def _ids(sequences: list[Sequence]) -> tuple[int, ...]:
    return tuple([sequence.sequence_id for sequence in sequences])
