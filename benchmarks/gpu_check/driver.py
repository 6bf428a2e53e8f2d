"""Plays the planner for checks of tokens: keeps the blocks of both tiers, sends plans, collects what they yield."""

from collections.abc import Sequence
from typing import Any

from gpu_svc.executor import Executor
from gpu_svc.host_tier import HostTier
from gpu_svc.limits import Limits
from svc_common.plan import (
    CohortStep,
    IterationPlan,
    IterationResult,
    Mode,
    NewSequence,
    PrefillChunk,
    Sampling,
    SubBatch,
    Swap,
    Tier,
)
from svc_common.policy import ExecutionPolicy

GREEDY = Sampling()


class Driver:
    """One epoch."""

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        host: HostTier | None = None,
        policy: ExecutionPolicy | None = None,
        epoch: int = 1,
    ) -> None:
        executor.open_epoch(epoch, limits, host, policy)
        self._executor = executor
        self._epoch = epoch
        self._iteration = 0
        # Not in their natural order: tables must be followed.
        self._free = {
            Tier.GPU: list(range(executor.num_gpu_blocks(policy)))[::-1],
            Tier.HOST: list(range(host.num_blocks if host else 0))[::-1],
        }
        self.tokens: dict[int, list[int]] = {}

    def run(self, *sub_batches: SubBatch, mode: Mode, **changes: Any) -> IterationResult:
        """One iteration; raises RuntimeError where it fails."""
        self._iteration += 1
        plan = IterationPlan(self._epoch, self._iteration, mode, sub_batches=sub_batches, **changes)
        result = self._executor.run(plan)
        if result.error is not None:
            raise RuntimeError(f"iteration {plan.iteration}, {mode.value}: {result.error_message}")
        for sequence_id, token in result.tokens:
            self.tokens.setdefault(sequence_id, []).append(token)
        return result

    def prefill(
        self,
        sequence_id: int,
        prompt: Sequence[int],
        tier: Tier,
        room_tokens: int,
        chunk_tokens: int,
        sampling: Sampling = GREEDY,
    ) -> list[IterationResult]:
        """A whole prompt, chunk by chunk; yields its first token."""
        new: tuple[NewSequence, ...] = (self.new_sequence(sequence_id, prompt, tier, room_tokens, sampling),)
        results = []
        for start in range(0, len(prompt), chunk_tokens):
            chunk = PrefillChunk(sequence_id, start, min(chunk_tokens, len(prompt) - start))
            results.append(self.run(SubBatch(prefills=(chunk,)), mode=Mode.GPU_ONLY, new_sequences=new))
            new = ()
        return results

    def new_sequence(
        self, sequence_id: int, prompt: Sequence[int], tier: Tier, room_tokens: int, sampling: Sampling = GREEDY
    ) -> NewSequence:
        """To be part of a plan."""
        blocks = self._blocks(tier, len(prompt) + room_tokens)
        return NewSequence(sequence_id, tuple(prompt), tier, blocks, sampling)

    def swap(self, sequence_id: int, target: Tier, num_tokens: int) -> Swap:
        """To be part of a plan; the blocks left behind are not used again."""
        return Swap(sequence_id, target, self._blocks(target, num_tokens))

    def step_cohort(self, ids: tuple[int, ...], parts: Sequence[int], batch: SubBatch) -> None:
        """One decode step of a cohort, in parts of so many layers, each beside the batch."""
        start = 0
        for num_layers in parts:
            self.run(batch, mode=Mode.DECOUPLED, cohort=CohortStep(ids, start, num_layers))
            start += num_layers

    def _blocks(self, tier: Tier, num_tokens: int) -> tuple[int, ...]:
        num = -(-num_tokens // self._executor.kv_shape.block_tokens)
        free = self._free[tier]
        return tuple(free.pop() for _ in range(num))
