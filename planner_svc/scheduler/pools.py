"""Which host pool a sequence goes to: the one whose service would attend all that it then holds soonest.

A pool's blocks in use stand for its context tokens: prompts that are still computed will decode, too.
"""

from dataclasses import dataclass

from planner_svc.estimator import Estimator
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence

_SHARE_SEQUENCES, _SHARE_CONTEXT = 16, 16 * 512
"""A load by which the services' speeds are compared."""


@dataclass(slots=True)
class PoolState:
    """One pool, as it is or as a plan being made would leave it."""

    num_free: int
    """Blocks to be had."""
    num_used: int
    num_sequences: int

    def take(self, num_blocks: int) -> None:
        """One more sequence would come."""
        self.num_free -= num_blocks
        self.num_used += num_blocks
        self.num_sequences += 1


class HostPools:
    """All of an epoch; changes nothing."""

    def __init__(self, capacity: Capacity, residency: Residency, estimator: Estimator, margin_share: float) -> None:
        """`margin_share`: of a pool, which a newcomer leaves free."""
        self._capacity = capacity
        self._residency = residency
        self._estimator = estimator
        self._margin_share = margin_share
        self._numbers = range(len(capacity.host_pools))

    def states(self) -> list[PoolState]:
        """By pool."""
        residency = self._residency
        return [
            PoolState(residency.free_in(pool), residency.used_in(pool), residency.num_in(pool))
            for pool in self._numbers
        ]

    def for_newcomer(self, sequence: Sequence, num_blocks: int, states: list[PoolState]) -> int | None:
        """Where one that waits would get so many blocks and leave a margin; None where there is no such room."""
        has_room = [
            num_blocks + margin_blocks(size, self._margin_share, state.num_sequences) <= state.num_free
            for size, state in zip(self._capacity.host_pools, states, strict=True)
        ]
        return self._soonest(sequence, num_blocks, states, has_room)

    def free(self) -> list[int]:
        """Blocks to be had in this plan, by pool."""
        return [self._residency.free_in(pool) for pool in self._numbers]

    def has_room(self, sequence: Sequence, num_blocks: int, free: list[int]) -> bool:
        """Whether one that leaves the GPU finds so many blocks. Asked for every sequence there: it costs little."""
        if len(free) == 1:
            return num_blocks <= free[0]
        return any(num_blocks <= num_free and self._suits(sequence, pool) for pool, num_free in enumerate(free))

    def for_resident(self, sequence: Sequence, num_blocks: int) -> int | None:
        """Where one that leaves the GPU finds so many blocks."""
        states = self.states()
        return self._soonest(sequence, num_blocks, states, [num_blocks <= state.num_free for state in states])

    def by_size(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Those that can hold so many blocks once they are empty, the one with most free first."""
        pools = [
            pool
            for pool, size in enumerate(self._capacity.host_pools)
            if num_blocks <= size and self._suits(sequence, pool)
        ]
        return sorted(pools, key=lambda pool: -self._residency.free_in(pool))

    def shares(self) -> tuple[float, ...]:
        """Of the attention on the CPU, by pool, with which all services take equally long; () for less than two."""
        sizes = self._capacity.host_pools
        if len(sizes) < 2:
            return ()
        speeds = [
            1 / max(1e-12, self._estimator.cpu_decode_s(_SHARE_SEQUENCES, _SHARE_CONTEXT, pool)) if size else 0.0
            for pool, size in enumerate(sizes)
        ]
        total = sum(speeds)
        return tuple([speed / total for speed in speeds]) if total else ()

    def _soonest(
        self, sequence: Sequence, num_blocks: int, states: list[PoolState], has_room: list[bool]
    ) -> int | None:
        pools = [pool for pool, fits in enumerate(has_room) if fits and self._suits(sequence, pool)]
        if len(pools) < 2:
            return pools[0] if pools else None
        block_tokens = self._capacity.block_tokens

        def attention_s(pool: int) -> tuple[float, int]:
            state = states[pool]
            context = (state.num_used + num_blocks) * block_tokens
            return self._estimator.cpu_decode_s(state.num_sequences + 1, context, pool), -state.num_free

        return min(pools, key=attention_s)

    def _suits(self, sequence: Sequence, pool: int) -> bool:
        """It could stay to its end: there is no way from pool to pool but by way of a GPU that can hold it."""
        capacity, request = self._capacity, sequence.request
        if len(self._numbers) == 1:  # Who was admitted fits there or on the GPU.
            return True
        # The last token needs no room.
        num_blocks = capacity.blocks_for(len(request.prompt) + request.max_new_tokens - 1)
        return num_blocks <= max(capacity.host_pools[pool], capacity.gpu_blocks)


def margin_blocks(num_blocks: int, share: float, num_residents: int) -> int:
    """Blocks to leave free when a sequence comes to a tier or pool of so many, so that none is soon moved away.

    A share, or the next block of each resident where that is more; none in an empty one, which must take whatever fits.
    """
    if num_residents == 0:
        return 0
    return max(round(num_blocks * share), num_residents)
