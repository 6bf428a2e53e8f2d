"""Who holds blocks, and where: swapping in, room for decodes, preemption. The memory side of a plan.

Liveness rests on one rule: room is made for a sequence by sequences that arrived after it, never before. The oldest
one thus always progresses, and no two can evict one another for ever. Which of the later ones yields is a question of
priority, lateness and cost alone.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.events import Tally
from planner_svc.scheduler.limits import Capacity, ModePolicy
from planner_svc.scheduler.pools import HostPools, margin_blocks
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State
from planner_svc.scheduler.victims import Victims
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import Tier

_MARGIN, _SWAP_MARGIN = 0.02, 0.01
"""Share of a tier that neither admission nor swapping in may fill; the second where one that must leave is swapped."""


@dataclass(slots=True)
class Decodes:
    """Sequences with room for their next token, by arrival."""

    gpu: list[Sequence] = field(default_factory=list)
    host: list[Sequence] = field(default_factory=list)


class Placement:
    """Moves sequences in, out and between the tiers, for one plan at a time."""

    def __init__(
        self,
        capacity: Capacity,
        policy: ModePolicy,
        residency: Residency,
        queue: WaitingQueue,
        tally: Tally,
        costs: Costs,
    ) -> None:
        self._capacity = capacity
        self._host_decodes = policy != "gpu_only"
        self._margin = _SWAP_MARGIN if capacity.host_blocks else _MARGIN
        self.pools = HostPools(capacity, residency, costs.estimator, self._margin)
        self._residency = residency
        self._queue = queue
        self._tally = tally
        self._costs = costs
        self._victims = Victims(residency, self.pools, costs)
        self._spent: list[Sequence] = []

    def computes_in(self, tier: Tier) -> bool:
        """Whether a sequence there can be worked on. GPU-only, the host merely parks."""
        return tier is Tier.GPU or self._host_decodes

    def retire_spent(self) -> None:
        """Frees the blocks of sequences whose last token is scheduled, a result earlier than it is known."""
        for sequence in self._spent:
            if sequence.state is State.RUNNING:
                self._residency.leave(sequence, State.DRAINING)
        self._spent.clear()

    def note_spent(self, sequence: Sequence) -> None:
        """Its last token is scheduled."""
        self._spent.append(sequence)

    def gpu_margin(self, num_residents: int) -> int:
        """Blocks to leave free on the GPU when a sequence comes to it."""
        return margin_blocks(self._capacity.gpu_blocks, self._margin, num_residents)

    def swap_in(self) -> None:
        """Brings sequences back from the host, oldest first, while a margin stays free.

        Where the host computes, prompts have first claim on the GPU: they use its room without a copy, and those on
        the host progress meanwhile. Where it only parks, parked sequences and prompts come in order of arrival.
        """
        head = self._queue.head
        residency = self._residency
        kept = 0
        if self._host_decodes and head is not None and self._fits_empty_gpu(head):
            kept = self._capacity.blocks_for(head.num_tokens)
        room = residency.free(Tier.GPU) - kept - self.gpu_margin(residency.num_on(Tier.GPU))
        if room <= 0 or residency.num_on(Tier.HOST) == 0:
            return
        for sequence in residency.sequences:
            if sequence.tier is not Tier.HOST or sequence.state is not State.RUNNING:
                continue
            if head is not None and not self._host_decodes and head.sequence_id < sequence.sequence_id:
                return
            if len(sequence.blocks) + residency.lacks_block(sequence) <= room:
                residency.move(sequence, Tier.GPU)
                room = residency.free(Tier.GPU) - kept - self.gpu_margin(residency.num_on(Tier.GPU))
            elif not self._host_decodes:
                return  # A parked one only waits; none may overtake it.

    def _fits_empty_gpu(self, sequence: Sequence) -> bool:
        return self._capacity.blocks_for(sequence.num_tokens) <= self._capacity.gpu_blocks

    def reserve_decodes(self, max_tokens: int, cohort: Collection[Sequence] = ()) -> Decodes:
        """Finds room for one more token of each decoding sequence, at most `max_tokens` with the cohort, oldest first.

        Blocks on the GPU are given now; on the host promised, since the balance may yet pass a sequence over. While a
        cohort is in its step, nobody else decodes on the host.
        """
        budget, host_decodes = max_tokens - len(cohort), self._host_decodes and not cohort
        decodes, residency = Decodes(), self._residency
        self._victims = Victims(residency, self.pools, self._costs)
        block_tokens, running, gpu = self._capacity.block_tokens, State.RUNNING, Tier.GPU
        for sequence in list(residency.sequences):
            if budget == 0:
                break
            num_computed = sequence.num_computed_tokens
            # Earlier, older ones may have evicted it.
            if sequence.state is not running or num_computed < sequence.num_prefill_tokens:
                continue
            if not (host_decodes or sequence.tier is gpu):
                continue
            lacks_block = num_computed >= len(sequence.blocks) * block_tokens
            if lacks_block and not self._find_room(sequence):
                continue
            budget -= 1
            if sequence.tier is gpu:
                decodes.gpu.append(sequence)
                if lacks_block:
                    residency.grow(sequence)
            elif host_decodes:
                decodes.host.append(sequence)
                if lacks_block:
                    residency.promise_host_block(sequence.pool)
        return decodes

    def _find_room(self, sequence: Sequence) -> bool:
        """Room for one more block, in its tier or the other. False: it keeps what it has and waits for older ones."""
        residency, capacity = self._residency, self._capacity
        on_gpu = sequence.tier is Tier.GPU
        if self._make_room(None if on_gpu else sequence.pool, 1, sequence):
            return True
        if residency.has_moved(sequence) or (on_gpu and not self._host_decodes):
            return False
        needed = len(sequence.blocks) + 1
        if not on_gpu:
            # On the host it may as well wait, but where it has outgrown its pool.
            if needed <= capacity.host_pools[sequence.pool] or not self._make_room(None, needed, sequence):
                return False
            residency.move(sequence, Tier.GPU)
            return True
        # The youngest on the GPU moves out of the way.
        pool = self.pools.for_resident(sequence, needed)
        if pool is None and needed > capacity.gpu_blocks:
            pools = self.pools.by_size(sequence, needed)
            pool = next((item for item in pools if self._make_room(item, needed, sequence)), None)
        if pool is None:
            return False
        residency.move(sequence, Tier.HOST, pool)
        return True

    def _make_room(self, pool: int | None, num_blocks: int, beneficiary: Sequence) -> bool:
        """Evicts sequences younger than the beneficiary; none where that would not be enough. None: on the GPU."""
        residency = self._residency
        short = num_blocks - (residency.free(Tier.GPU) if pool is None else residency.free_in(pool))
        victims = self._victims.take(pool, short, beneficiary) if short > 0 else []
        if victims is None:
            return False
        for victim in victims:
            self._evict(victim)
        return True

    def _evict(self, victim: Sequence) -> None:
        """To the host, or its KV is given up and computed again later: what costs less and is possible."""
        residency = self._residency
        self._tally.add(preemptions=1)
        refuge = self._victims.refuge(victim)
        if refuge is not None:
            residency.move(victim, Tier.HOST, refuge)
            self._victims.arrive_on_host(victim)
            return
        victim.num_recomputations += 1
        victim.num_passed_over = 0
        residency.leave(victim, State.WAITING)
        self._queue.put_back(victim)
