"""Which prompt chunks an iteration may compute, and where new prompts would go. Changes nothing."""

from planner_svc.scheduler.batch import Chunk
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.placement import Placement
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import Tier


def propose(
    capacity: Capacity, residency: Residency, placement: Placement, queue: WaitingQueue, budget: int
) -> list[Chunk]:
    """Chunks of at most `budget` tokens together: begun prompts first, then waiting ones, each in order of arrival."""
    chunks: list[Chunk] = []
    for sequence in residency.sequences:
        if budget == 0:
            return chunks
        if sequence.prefilling and placement.computes_in(sequence.tier):
            start, total = sequence.num_computed_tokens, sequence.num_prefill_tokens
            num_tokens = min(budget, total - start)
            chunks.append(Chunk(sequence, start, num_tokens, total, sequence.tier))
            budget -= num_tokens
    admissions = _Admissions(capacity, residency, placement)
    for sequence in queue:
        # Tokens in flight are part of what must be computed again, and not known yet.
        if budget == 0 or sequence.num_in_flight:
            break
        total = sequence.num_tokens
        tier = admissions.place(capacity.blocks_for(total), sequence.sequence_id)
        if tier is None:
            break
        num_tokens = min(budget, total)
        chunks.append(Chunk(sequence, 0, num_tokens, total, tier))
        budget -= num_tokens
    return chunks


class _Admissions:
    """Room for prompts, counted down as they are proposed."""

    def __init__(self, capacity: Capacity, residency: Residency, placement: Placement) -> None:
        self._placement = placement
        self._free = {tier: residency.free(tier) for tier in Tier}
        self._residents = {tier: residency.num_on(tier) for tier in Tier}
        self._num_left = capacity.max_sequences - len(residency.sequences)
        self._gpu_is_full = False
        parked = (item.sequence_id for item in residency.sequences if not placement.computes_in(item.tier))
        self._oldest_parked = next(parked, None)

    def place(self, num_blocks: int, sequence_id: int) -> Tier | None:
        """The GPU while prompts fit there, then the host; None ends admission, so that none overtakes another."""
        if self._num_left == 0 or (self._oldest_parked is not None and self._oldest_parked < sequence_id):
            return None
        for tier in (Tier.GPU, Tier.HOST):
            if tier is Tier.GPU and self._gpu_is_full:
                continue
            margin = self._placement.margin(tier, self._residents[tier])
            if self._placement.computes_in(tier) and num_blocks + margin <= self._free[tier]:
                self._free[tier] -= num_blocks
                self._residents[tier] += 1
                self._num_left -= 1
                return tier
            self._gpu_is_full = True
        return None
