"""Which prompt chunks an iteration may compute, in what order, and where new prompts would go. Changes nothing."""

from dataclasses import dataclass

from planner_svc.scheduler.batch import Chunk
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.order import in_order, num_prefilled, num_to_prefill
from planner_svc.scheduler.pace import Pace
from planner_svc.scheduler.placement import Placement
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State
from planner_svc.scheduler.urgency import bounds, is_aged, is_aged_prompt
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import Tier

_TIME_SHARE = 0.5
"""Of the time that a first token has left, in which its prompt should be computed."""
MAX_OVERTAKEN = 16
"""Plans in which shorter prompts may overtake one without targets for which there is no room."""
_WINDOW = 48
"""Waiting prompts of a kind that a plan looks at: its cost must not depend on how many wait."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where a prompt that waits would go."""

    tier: Tier
    pool: int
    """Where the tier is the host."""
    num_blocks: int
    """Free ones that it takes."""
    num_cached_tokens: int
    """Computed there already, in blocks that it shares."""


class Prompts:
    """Begun prompts and the first of those that wait."""

    def __init__(
        self, capacity: Capacity, residency: Residency, placement: Placement, queue: WaitingQueue, pace: Pace
    ) -> None:
        self._capacity = capacity
        self._placement = placement
        self._pace = pace
        self._shares = queue.shares
        self._residency = residency
        # Tokens in flight are part of what must be computed again, and not known yet.
        waiting = [item for item in queue.first(_WINDOW) if not item.num_in_flight]
        self.candidates = [
            item
            for item in residency.sequences
            if item.num_computed_tokens < item.num_prefill_tokens and placement.computes_in(item.tier)
        ] + waiting
        self._num_gpu_free, self._num_on_gpu = residency.free(Tier.GPU), residency.num_on(Tier.GPU)
        self._pools = placement.pools.states()
        self._num_left = capacity.max_sequences - len(residency.sequences)
        self._oldest_parked: int | None = None
        if not placement.computes_in(Tier.HOST) and residency.num_on(Tier.HOST):
            self._oldest_parked = next(item.sequence_id for item in residency.sequences if item.tier is Tier.HOST)
        self._start_s = 0.0
        num_blocks = sum([capacity.blocks_for(item.num_tokens) for item in waiting])
        # Those that are not looked at are about as long.
        self.is_crowded = num_blocks * len(queue) > self._num_gpu_free * max(1, len(waiting))
        """More wait than the GPU has room for."""
        self.held_back: list[Sequence] = []
        """Had room on the host, but not the CPU's time."""

    def propose(self, budget: int, start_s: float, prefill_tokens_per_s: float) -> list[Chunk]:
        """Chunks of at most `budget` tokens together."""
        chunks: list[Chunk] = []
        self._start_s = start_s
        is_closed = False
        for sequence in in_order(self.candidates, start_s, prefill_tokens_per_s, self._shares):
            if budget <= 0:
                break
            place, start = (sequence.tier, sequence.pool), num_prefilled(sequence)
            if sequence.state is State.WAITING:
                room = None if is_closed else self._find_room(sequence)
                if room is None:
                    # A shorter one may have room; ageing keeps this one from waiting for ever. Who only waits for a
                    # parked one keeps out nobody that is older than that.
                    if not (is_closed or self._waits_for_parked(sequence)):
                        self.held_back.append(sequence)
                        is_closed = self._num_left == 0 or self._is_impatient(sequence)
                    continue
                self._take_room(sequence, room)
                place, start = (room.tier, room.pool), room.num_cached_tokens
            total = num_to_prefill(sequence)
            num_tokens = min(budget, total - start)
            chunks.append(Chunk(sequence, start, num_tokens, total, *place))
            budget -= num_tokens
        return chunks

    def _find_room(self, sequence: Sequence) -> Room | None:
        """The GPU where the prompt fits, else the host pool where its decodes would keep everybody's pace."""
        if self._num_left == 0 or self._waits_for_parked(sequence):
            return None
        room = self._room_in(sequence, Tier.GPU)
        if room.num_blocks + self._placement.gpu_margin(self._num_on_gpu) <= self._num_gpu_free:
            return room
        if not self._placement.computes_in(Tier.HOST):
            return None
        num_blocks = self._capacity.blocks_for(sequence.num_tokens)
        pool = self._placement.pools.for_newcomer(sequence, num_blocks, self._pools)
        if pool is None or not self._is_welcome(sequence, num_blocks):
            return None
        return self._room_in(sequence, Tier.HOST, pool)

    def _room_in(self, sequence: Sequence, tier: Tier, pool: int = 0) -> Room:
        num_shared, num_owned = self._residency.shared_prefix(sequence, tier, pool)
        num_blocks = self._capacity.blocks_for(sequence.num_tokens) - num_owned
        return Room(tier, pool, num_blocks, num_shared * self._capacity.block_tokens)

    def _is_impatient(self, sequence: Sequence) -> bool:
        """Whether none may overtake it any more."""
        if bounds(sequence):
            return is_aged_prompt(sequence, self._start_s)
        return sequence.num_passed_over >= MAX_OVERTAKEN or is_aged_prompt(sequence, self._start_s)

    def _waits_for_parked(self, sequence: Sequence) -> bool:
        return self._oldest_parked is not None and self._oldest_parked < sequence.sequence_id

    def _take_room(self, sequence: Sequence, room: Room) -> None:
        if room.tier is Tier.GPU:
            self._num_gpu_free -= room.num_blocks
            self._num_on_gpu += 1
        else:
            self._pools[room.pool].take(room.num_blocks)
        self._num_left -= 1
        self._pace.join(sequence, room.tier)

    def _is_welcome(self, sequence: Sequence, num_blocks: int) -> bool:
        has_company = self._num_on_gpu or any(state.num_sequences for state in self._pools)
        if not has_company or self._pace.allows(sequence):
            return True
        # The GPU is no alternative to one that is larger: it must come in whatever that costs.
        has_no_other = num_blocks > self._capacity.gpu_blocks
        return is_aged_prompt(sequence, self._start_s) or (has_no_other and is_aged(sequence))


def needed_tokens_per_s(chunks: list[Chunk], start_s: float) -> float:
    """The prefill rate that brings each first token in a part of the time it has left."""
    rate, num_tokens = 0.0, 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        left_s = chunk.sequence.due_s - start_s
        if bounds(chunk.sequence) and left_s > 0:
            rate = max(rate, num_tokens / (left_s * _TIME_SHARE))
    return rate
