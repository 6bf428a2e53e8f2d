"""Which sequences yield their blocks in one plan: of the lowest priority first, then late ones, then the cheapest."""

from heapq import heapify, heappop, heappush

from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.pools import HostPools
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import Tier

Ranked = tuple[int, bool, float, int, Sequence]
"""Priority, whether its targets still hold, seconds to bring back a block of it, minus its place by arrival; itself."""


class Victims:
    """Made for each plan, in which beneficiaries come in order of arrival: who is older than one is never asked again.

    All of a plan's evictions together cost no more than sorting the residents once.
    """

    def __init__(self, residency: Residency, pools: HostPools, costs: Costs) -> None:
        self._residency = residency
        self._pools = pools
        self._costs = costs
        self._ranked: dict[int | None, list[Ranked]] = {}
        """Heaps by host pool, that of the GPU under None, made when they are first needed."""

    def take(self, pool: int | None, num_blocks: int, beneficiary: Sequence) -> list[Sequence] | None:
        """Younger ones than the beneficiary that hold so many blocks together, none of them without need.

        In a host pool, or on the GPU: None. The answer is None where all of them together don't hold enough.
        """
        if pool not in self._ranked:
            residents = self._residency.sequences
            if pool is None:
                there = [item for item in residents if item.tier is Tier.GPU]
            else:
                there = [item for item in residents if item.tier is Tier.HOST and item.pool == pool]
            free = self._pools.free()
            self._ranked[pool] = [self._rank(item, free) for item in there]
            heapify(self._ranked[pool])
        ranked, taken = self._ranked[pool], list[Ranked]()
        while num_blocks > 0 and ranked:
            best = heappop(ranked)
            sequence = best[-1]
            is_there = sequence.state is State.RUNNING and _place(sequence) == pool
            if is_there and sequence.sequence_id > beneficiary.sequence_id:
                taken.append(best)
                num_blocks -= self._residency.num_freed_by(sequence)
        if num_blocks > 0:
            for item in taken:
                heappush(ranked, item)
            return None
        needed = []
        for item in reversed(taken):  # The worst to lose first: what came cheaper may be enough without it.
            num_freed = self._residency.num_freed_by(item[-1])
            if num_blocks + num_freed <= 0:
                num_blocks += num_freed
                heappush(ranked, item)
            else:
                needed.append(item[-1])
        return needed

    def arrive_on_host(self, sequence: Sequence) -> None:
        """It was moved there in this plan, and may yet have to leave it."""
        if sequence.pool in self._ranked:
            heappush(self._ranked[sequence.pool], self._rank(sequence, self._pools.free()))

    def refuge(self, sequence: Sequence) -> int | None:
        """The host pool it moves to: where that is possible, and no dearer than computing it again; else None."""
        swaps = self._swaps(sequence, self._pools.free())
        return self._pools.for_resident(sequence, len(sequence.blocks)) if swaps else None

    def _swaps(self, sequence: Sequence, free: list[int]) -> bool:
        if sequence.tier is not Tier.GPU or self._residency.has_moved(sequence):
            return False
        num_blocks = len(sequence.blocks)
        if not self._pools.has_room(sequence, num_blocks, free):
            return False
        return num_blocks * self._costs.swap_block_s <= self._costs.recompute_s(sequence)

    def _rank(self, sequence: Sequence, free: list[int]) -> Ranked:
        """`free`: blocks to be had in the host's pools."""
        recompute_s = self._costs.recompute_s(sequence) / len(sequence.blocks)
        cost_s = self._costs.swap_block_s if self._swaps(sequence, free) else recompute_s
        return (
            sequence.request.service_class.priority,
            not sequence.is_late,
            cost_s,
            -sequence.sequence_id,
            sequence,
        )


def _place(sequence: Sequence) -> int | None:
    """Its host pool; None on the GPU."""
    return sequence.pool if sequence.tier is Tier.HOST else None
