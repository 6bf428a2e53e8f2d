"""What one iteration may compute, while it is being put together; mutable until the plan is made from it."""

from dataclasses import dataclass, field

from planner_svc.estimator import SubBatchLoad
from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import Mode, PrefillChunk, SubBatch, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Part of a prompt that may be computed. Of a waiting sequence: it would be admitted to `tier`."""

    sequence: Sequence
    start: int
    num_tokens: int
    total_tokens: int
    """Of the whole prompt, outputs to recompute included."""
    tier: Tier

    @property
    def is_admission(self) -> bool:
        return self.sequence.state is State.WAITING

    @property
    def is_last(self) -> bool:
        """Whether it yields a token."""
        return self.start + self.num_tokens == self.total_tokens


@dataclass(slots=True)
class Batch:
    """One or two sub-batches. The second holds CPU decodes only."""

    chunks: list[Chunk] = field(default_factory=list)
    gpu_decodes: list[Sequence] = field(default_factory=list)
    cpu_decodes: tuple[list[Sequence], list[Sequence]] = field(default_factory=lambda: ([], []))
    """Of the first and of the second sub-batch."""

    def decodes(self) -> list[Sequence]:
        """In the order of the executor's result."""
        return [*self.gpu_decodes, *self.cpu_decodes[0], *self.cpu_decodes[1]]

    @property
    def num_cpu_decodes(self) -> int:
        return len(self.cpu_decodes[0]) + len(self.cpu_decodes[1])

    @property
    def mode(self) -> Mode:
        return Mode.ASYMMETRIC if self.num_cpu_decodes else Mode.GPU_ONLY

    @property
    def has_work(self) -> bool:
        return bool(self.chunks or self.gpu_decodes or self.num_cpu_decodes)

    @property
    def tokens_out(self) -> float:
        """Tokens towards answers. Part of a prompt counts as that part of its first token."""
        prompts = sum(chunk.num_tokens / chunk.total_tokens for chunk in self.chunks)
        return prompts + len(self.gpu_decodes) + self.num_cpu_decodes

    def loads(self) -> tuple[SubBatchLoad, SubBatchLoad]:
        """As the estimator takes them, before the work is scheduled."""
        first, second = self.cpu_decodes
        return (
            SubBatchLoad(
                prefill_chunks=tuple((chunk.num_tokens, chunk.start) for chunk in self.chunks),
                num_gpu_decodes=len(self.gpu_decodes),
                gpu_context_tokens=context_tokens(self.gpu_decodes),
                num_cpu_decodes=len(first),
                cpu_context_tokens=context_tokens(first),
                num_outputs=sum(chunk.is_last for chunk in self.chunks) + len(self.gpu_decodes) + len(first),
            ),
            SubBatchLoad(
                num_cpu_decodes=len(second), cpu_context_tokens=context_tokens(second), num_outputs=len(second)
            ),
        )

    def sub_batches(self) -> tuple[SubBatch, ...]:
        """As the plan carries them; empty ones are left out."""
        first, second = (tuple(item.sequence_id for item in decodes) for decodes in self.cpu_decodes)
        batches = (
            SubBatch(
                prefills=tuple(
                    PrefillChunk(chunk.sequence.sequence_id, chunk.start, chunk.num_tokens) for chunk in self.chunks
                ),
                gpu_decodes=tuple(item.sequence_id for item in self.gpu_decodes),
                cpu_decodes=first,
            ),
            SubBatch(cpu_decodes=second),
        )
        return tuple(batch for batch in batches if batch != SubBatch())

    def sequences_with_output(self) -> list[Sequence]:
        """That get a token, in the order of the executor's result."""
        return [*(chunk.sequence for chunk in self.chunks if chunk.is_last), *self.decodes()]


def context_tokens(decodes: list[Sequence]) -> int:
    """Tokens that these decodes attend, the ones being processed included."""
    return sum(sequence.num_computed_tokens for sequence in decodes) + len(decodes)
