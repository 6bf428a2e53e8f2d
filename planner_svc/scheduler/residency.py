"""Both tiers' blocks and the sequences that hold them, and what the executor has yet to be told about them."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from planner_svc.scheduler.blocks import BlockAllocator
from planner_svc.scheduler.limits import Capacity
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
    vacated_host_blocks: list[int] = field(default_factory=list)
    """Left by swaps to the GPU. The copies to the host run first, so these can't be handed out in the same plan."""

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
        self._allocators = {tier: BlockAllocator(capacity.blocks(tier)) for tier in Tier}
        self._num_on = dict.fromkeys(Tier, 0)
        self._promised_host_blocks = 0
        self.sequences: list[Sequence] = []
        """Running ones, by arrival."""
        self.num_tokens_to_prefill = 0
        """Of their prompts, not yet scheduled."""
        self.changes = Changes()

    def free(self, tier: Tier) -> int:
        """Blocks to be had in this plan. Excludes those promised in it."""
        promised = self._promised_host_blocks if tier is Tier.HOST else 0
        return self._allocators[tier].num_free - promised

    def used(self, tier: Tier) -> int:
        """Blocks owned by sequences."""
        vacated = len(self.changes.vacated_host_blocks) if tier is Tier.HOST else 0
        return self._allocators[tier].num_used - vacated

    def num_on(self, tier: Tier) -> int:
        """Sequences that hold blocks of the tier."""
        return self._num_on[tier]

    def has_moved(self, sequence: Sequence) -> bool:
        """Whether the next plan already moves it."""
        return sequence.sequence_id in self.changes.swaps

    def lacks_block(self, sequence: Sequence) -> bool:
        """Whether one more token needs one more block."""
        return sequence.num_computed_tokens >= len(sequence.blocks) * self._block_tokens

    def admit(self, sequence: Sequence, tier: Tier) -> None:
        """Gives it blocks for all it has to prefill, so that a prompt once begun never runs out of room."""
        tokens = sequence.token_ids
        sequence.state = State.RUNNING
        sequence.tier = tier
        sequence.blocks = self._allocators[tier].allocate(-(-len(tokens) // self._block_tokens))
        sequence.num_prefill_tokens = len(tokens)
        sequence.num_computed_tokens = 0
        sequence.num_passed_over = 0
        self._num_on[tier] += 1
        self.num_tokens_to_prefill += len(tokens)
        insort(self.sequences, sequence, key=_arrival)
        self.changes.new_sequences.append(
            NewSequence(
                sequence_id=sequence.sequence_id,
                token_ids=tokens,
                tier=tier,
                blocks=tuple(sequence.blocks),
                sampling=sequence.remaining_sampling,
                num_generated_tokens=len(sequence.outputs),
            )
        )

    def note_prefilled(self, num_tokens: int) -> None:
        """So many more tokens of prompts are scheduled."""
        self.num_tokens_to_prefill -= num_tokens

    def promise_host_block(self) -> None:
        """Keeps a host block for a sequence that lacks one and may yet be passed over in this plan."""
        self._promised_host_blocks += 1

    def redeem_promises(self) -> None:
        """From here on, promised blocks are given by `grow` or free again."""
        self._promised_host_blocks = 0

    def grow(self, sequence: Sequence) -> None:
        """Gives it the block that it lacks for one more token."""
        blocks = self._allocators[sequence.tier].allocate(1)
        sequence.blocks += blocks
        self.changes.new_blocks[sequence.sequence_id] = tuple(blocks)

    def move(self, sequence: Sequence, target: Tier) -> None:
        """Swaps it out or in, at most once in a plan. It keeps as many blocks as it had."""
        blocks = self._allocators[target].allocate(len(sequence.blocks))
        if target is Tier.GPU:
            self.changes.vacated_host_blocks += sequence.blocks
        else:
            self._allocators[Tier.GPU].free(sequence.blocks)
        self._num_on[sequence.tier] -= 1
        self._num_on[target] += 1
        sequence.blocks = blocks
        sequence.tier = target
        self.changes.swaps[sequence.sequence_id] = Swap(sequence.sequence_id, target, tuple(blocks))

    def leave(self, sequence: Sequence, state: State) -> None:
        """Takes its blocks back at once: the executor runs plans in order, so the next owner writes later."""
        self._allocators[sequence.tier].free(sequence.blocks)
        self._num_on[sequence.tier] -= 1
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
        self._allocators[Tier.HOST].free(changes.vacated_host_blocks)
        return changes
