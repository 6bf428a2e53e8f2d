"""Both tiers' blocks and the sequences that hold them, and what the executor has yet to be told about them."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter

from planner_svc.scheduler.blocks import BlockAllocator
from planner_svc.scheduler.limits import Capacity
from planner_svc.scheduler.prefix import extend_keys
from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import NewBlocks, NewSequence, Swap, Tier

_arrival = attrgetter("sequence_id")


@dataclass(slots=True)
class Changes:
    """The difference from what the last plan left in the executor. The next plan carries it."""

    released: list[int] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    swaps: dict[int, Swap] = field(default_factory=dict)
    """By sequence: at most one move in a plan."""
    new_blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    moved: list[Sequence] = field(default_factory=list)
    """What they hold in their new blocks can be shared once the copies are made: from the next plan on."""
    vacated_host_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    """(pool, blocks) left by swaps to the GPU. The copies to the host run first, so these can't be handed out in the
    same plan."""

    def __bool__(self) -> bool:
        return bool(self.released or self.new_sequences or self.swaps or self.new_blocks)

    def ordered_swaps(self) -> tuple[Swap, ...]:
        """Out before in: what leaves the GPU makes room for what comes."""
        return tuple(sorted(self.swaps.values(), key=lambda swap: swap.target is Tier.GPU))

    def ordered_new_blocks(self) -> tuple[NewBlocks, ...]:
        return tuple(NewBlocks(sequence_id, blocks) for sequence_id, blocks in self.new_blocks.items())


class Residency:
    """Every operation keeps three things in step: the sequence, its tier's allocator, and `changes`."""

    def __init__(self, capacity: Capacity) -> None:
        self._block_tokens = capacity.block_tokens
        self._gpu = BlockAllocator(capacity.gpu_blocks)
        ends = accumulate(capacity.host_pools)
        self._pools = [BlockAllocator(size, end - size) for size, end in zip(capacity.host_pools, ends, strict=True)]
        self._num_on = dict.fromkeys(Tier, 0)
        self._num_in = [0] * len(self._pools)
        self._promised_blocks = [0] * len(self._pools)
        self.sequences: list[Sequence] = []
        """Running ones, by arrival."""
        self.num_tokens_to_prefill = 0
        """Of their prompts, not yet scheduled."""
        self.changes = Changes()

    def free(self, tier: Tier) -> int:
        """Blocks to be had in this plan. Excludes those promised in it."""
        if tier is Tier.GPU:
            return self._gpu.num_free
        return sum(map(self.free_in, range(len(self._pools))))

    def free_in(self, pool: int) -> int:
        """The same of one host pool."""
        return self._pools[pool].num_free - self._promised_blocks[pool]

    def used(self, tier: Tier) -> int:
        """Blocks owned by sequences."""
        if tier is Tier.GPU:
            return self._gpu.num_used
        return sum(map(self.used_in, range(len(self._pools))))

    def used_in(self, pool: int) -> int:
        """The same of one host pool."""
        allocator, vacated = self._pools[pool], self.changes.vacated_host_blocks
        return allocator.num_used - sum(allocator.num_owned_alone(blocks) for of, blocks in vacated if of == pool)

    def num_on(self, tier: Tier) -> int:
        """Sequences that hold blocks of the tier."""
        return self._num_on[tier]

    def num_in(self, pool: int) -> int:
        """Sequences that hold blocks of a host pool."""
        return self._num_in[pool]

    def has_moved(self, sequence: Sequence) -> bool:
        """Whether the next plan already moves it."""
        return sequence.sequence_id in self.changes.swaps

    def lacks_block(self, sequence: Sequence) -> bool:
        """Whether one more token needs one more block."""
        return sequence.num_computed_tokens >= len(sequence.blocks) * self._block_tokens

    # --- what begins alike

    def shared_prefix(self, sequence: Sequence, tier: Tier, pool: int = 0) -> tuple[int, int]:
        """Blocks there that hold the first tokens of one that waits, and how many of them take no room to share.

        At least its last token stays to be computed: something must yield the next one.
        """
        allocator = self._allocator_of(tier, pool)
        blocks = allocator.find(self._keys(sequence)[: (sequence.num_tokens - 1) // self._block_tokens])
        return len(blocks), allocator.num_owned(blocks)

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """Of all full blocks of its known tokens; none where it shares with nobody."""
        salt, keys = sequence.request.cache_salt, sequence.block_keys
        if salt is not None and len(keys) < sequence.num_tokens // self._block_tokens:
            extend_keys(keys, salt, sequence.token_ids, self._block_tokens)
        return keys

    def claim_prefix(self, sequence: Sequence, tier: Tier, pool: int, num_tokens: int) -> None:
        """Keeps the blocks that `shared_prefix` found, before others are handed out. `admit` follows in this plan."""
        allocator = self._allocator_of(tier, pool)
        sequence.blocks = allocator.find(sequence.block_keys[: num_tokens // self._block_tokens])
        allocator.share(sequence.blocks)

    def note_prefix(self, sequence: Sequence) -> None:
        """Its full blocks that are computed, or will be by the plan being made, can be shared from the next one on."""
        if sequence.request.cache_salt is None:
            return
        num_blocks = min(sequence.num_computed_tokens, sequence.num_tokens) // self._block_tokens
        self._allocator(sequence).note_content(sequence.blocks, self._keys(sequence)[:num_blocks])

    def forget_content(self, sequence: Sequence) -> None:
        """Nobody else is to share what it computed, or will compute."""
        self._allocator(sequence).forget_content(sequence.blocks)
        sequence.request = replace(sequence.request, cache_salt=None)

    # --- coming, growing, moving, leaving

    def admit(self, sequence: Sequence, tier: Tier, pool: int = 0) -> None:
        """Gives it blocks for all it has to prefill, so that a prompt once begun never runs out of room.

        `pool`: on the host. Blocks that it shares are its already.
        """
        tokens = sequence.token_ids
        num_shared = len(sequence.blocks)
        sequence.state = State.RUNNING
        self._settle(sequence, tier, pool)
        num_blocks = -(-len(tokens) // self._block_tokens)
        sequence.blocks = sequence.blocks + self._allocator(sequence).allocate(num_blocks - num_shared)
        sequence.num_prefill_tokens = len(tokens)
        sequence.num_computed_tokens = num_shared * self._block_tokens
        sequence.num_passed_over = 0
        self.num_tokens_to_prefill += len(tokens) - sequence.num_computed_tokens
        insort(self.sequences, sequence, key=_arrival)
        self.changes.new_sequences.append(
            NewSequence(
                sequence_id=sequence.sequence_id,
                token_ids=tokens,
                tier=tier,
                blocks=tuple(sequence.blocks),
                sampling=sequence.remaining_sampling,
                num_generated_tokens=len(sequence.outputs),
                num_cached_tokens=sequence.num_computed_tokens,
            )
        )

    def _allocator(self, sequence: Sequence) -> BlockAllocator:
        """Of the blocks where it lies."""
        return self._allocator_of(sequence.tier, sequence.pool)

    def _allocator_of(self, tier: Tier, pool: int) -> BlockAllocator:
        return self._gpu if tier is Tier.GPU else self._pools[pool]

    def num_freed_by(self, sequence: Sequence) -> int:
        """Blocks that would be free without it: those that it shares would not."""
        if sequence.request.cache_salt is None:
            return len(sequence.blocks)
        return self._allocator(sequence).num_owned_alone(sequence.blocks)

    def _settle(self, sequence: Sequence, tier: Tier, pool: int) -> None:
        sequence.tier, sequence.pool = tier, pool
        self._count(sequence, 1)

    def _count(self, sequence: Sequence, by: int) -> None:
        self._num_on[sequence.tier] += by
        if sequence.tier is Tier.HOST:
            self._num_in[sequence.pool] += by

    def note_prefilled(self, num_tokens: int) -> None:
        """So many more tokens of prompts are scheduled."""
        self.num_tokens_to_prefill -= num_tokens

    def promise_host_block(self, pool: int) -> None:
        """Keeps a block of it for a sequence that lacks one and may yet be passed over in this plan."""
        self._promised_blocks[pool] += 1

    def redeem_promises(self) -> None:
        """From here on, promised blocks are given by `grow` or free again."""
        self._promised_blocks = [0] * len(self._pools)

    def grow(self, sequence: Sequence) -> None:
        """Gives it the block that it lacks for one more token."""
        blocks = self._allocator(sequence).allocate(1)
        sequence.blocks += blocks
        self.changes.new_blocks[sequence.sequence_id] = tuple(blocks)

    def move(self, sequence: Sequence, target: Tier, pool: int = 0) -> None:
        """Swaps it out, to a host pool, or in, at most once in a plan. It keeps as many blocks as it had."""
        self.note_prefix(sequence)
        if target is Tier.GPU:
            self.changes.vacated_host_blocks.append((sequence.pool, sequence.blocks))
        else:
            self._gpu.free(sequence.blocks)
        self._count(sequence, -1)
        self._settle(sequence, target, pool)
        sequence.blocks = blocks = self._allocator(sequence).allocate(len(sequence.blocks))
        self.changes.swaps[sequence.sequence_id] = Swap(sequence.sequence_id, target, tuple(blocks))
        self.changes.moved.append(sequence)

    def leave(self, sequence: Sequence, state: State) -> None:
        """Takes its blocks back at once: the executor runs plans in order, so the next owner writes later."""
        if not self.has_moved(sequence):  # Else its copy is never made.
            self.note_prefix(sequence)
        self._allocator(sequence).free(sequence.blocks)
        self._count(sequence, -1)
        self.num_tokens_to_prefill -= max(0, sequence.num_prefill_tokens - sequence.num_computed_tokens)
        del self.sequences[bisect_left(self.sequences, sequence.sequence_id, key=_arrival)]
        sequence.blocks = []
        sequence.state = state
        # Releases come first in a plan: whatever else it says of the sequence would speak of a stranger.
        self.changes.swaps.pop(sequence.sequence_id, None)
        self.changes.new_blocks.pop(sequence.sequence_id, None)
        self.changes.released.append(sequence.sequence_id)

    def take_changes(self) -> Changes:
        """Hands over what the plan being made must carry."""
        changes, self.changes = self.changes, Changes()
        for pool, blocks in changes.vacated_host_blocks:
            self._pools[pool].free(blocks)
        for sequence in changes.moved:
            if sequence.blocks:
                self.note_prefix(sequence)
        return changes
