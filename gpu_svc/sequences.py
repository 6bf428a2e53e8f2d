"""The executor's state of every sequence, as arrays by slot; applies a plan's differences and checks its work.

A slot is a row of all arrays. Batches are gathered from them without a Python step per token.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_svc.block_ownership import BlockOwnership
from gpu_svc.grammars import Grammars
from gpu_svc.kv_swap import BlockMoves
from gpu_svc.limits import Int32Array, InvalidPlanError, Limits, check_mode
from gpu_svc.sampling_table import SamplingTable
from svc_common.plan import IterationPlan, NewBlocks, NewSequence, PrefillChunk, SubBatch, Swap, Tier

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moves:
    to_host: BlockMoves
    to_gpu: BlockMoves
    new_gpu_blocks: Int32Array
    """That sequences got to write into, with whatever their last owner left there."""


class SequenceTable:
    """Rows of arrays are valid for the slots in `slot_of`."""

    def __init__(
        self,
        limits: Limits,
        block_tokens: int,
        num_gpu_blocks: int,
        host_pools: Iterable[int],
        vocab_size: int,
        grammars: Grammars | None = None,
    ) -> None:
        """`host_pools`: blocks of each. Without `grammars` no sequence may have one."""
        size = limits.max_sequences
        self._limits = limits
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._pool_ends = np.cumsum([0, *host_pools])
        """Where each pool's blocks end, after a 0."""
        self.owned = {
            Tier.GPU: BlockOwnership(Tier.GPU, num_gpu_blocks),
            Tier.HOST: BlockOwnership(Tier.HOST, int(self._pool_ends[-1])),
        }
        self.pool_blocks_used = [0] * (len(self._pool_ends) - 1)
        """Owned by sequences, by host pool."""
        self.slot_of: dict[int, int] = {}
        self._free_slots = list(range(size - 1, -1, -1))
        self.sequence_ids = np.zeros(size, np.uint64)
        self.prompts: list[Int32Array] = [np.zeros(0, np.int32)] * size
        self.prompt_tokens = np.zeros(size, np.int64)
        self.computed_tokens = np.zeros(size, np.int64)
        """Tokens whose K and V are in the cache."""
        self.last_token = np.zeros(size, np.int64)
        """Input of the next decode, once the whole prompt is computed."""
        self.tier = np.zeros(size, np.int8)
        self.pool = np.zeros(size, np.int64)
        """Host pool of those on the host."""
        self.num_blocks = np.zeros(size, np.int64)
        self.block_tables = np.zeros((size, 16), np.int32)
        """Owned blocks in order; grows wider as sequences do."""
        self.answer_at = np.zeros(size, np.int64)
        """Where the answer begins: the prompt as the caller gave it ends here."""
        self.sampling = SamplingTable(size, vocab_size, grammars)

    # --- differences

    def apply(self, plan: IterationPlan) -> Moves:
        """Takes over a plan's releases, new sequences, swaps and blocks. Raises InvalidPlanError.

        All blocks that fall free are free before any is claimed: a plan may hand on in one step what it takes.
        """
        for sequence_id in plan.released:
            self._release(sequence_id)
        swaps = [(self._slot(swap.sequence_id), swap) for swap in plan.swaps]
        sources = [self._give_up_blocks(slot, swap) for slot, swap in swaps]
        fresh = [self._insert(new) for new in plan.new_sequences]
        to_host, to_gpu = self._take_swap_targets(swaps, sources)
        fresh += [self._append_blocks(blocks) for blocks in plan.new_blocks]
        return Moves(to_host, to_gpu, np.concatenate([np.zeros(0, np.int32), *fresh]))

    def _slot(self, sequence_id: int) -> int:
        slot = self.slot_of.get(sequence_id)
        if slot is None:
            raise InvalidPlanError(f"sequence {sequence_id} is not known")
        return slot

    def _release(self, sequence_id: int) -> None:
        slot = self._slot(sequence_id)
        del self.slot_of[sequence_id]
        self._release_blocks(slot)
        self.prompts[slot] = np.zeros(0, np.int32)
        self.sampling.release(slot)
        self._free_slots.append(slot)

    def _insert(self, new: NewSequence) -> Int32Array:
        """Its own blocks, where they are on the GPU."""
        if new.sequence_id in self.slot_of:
            raise InvalidPlanError(f"sequence {new.sequence_id} is known already")
        if not self._free_slots:
            raise InvalidPlanError(f"sequence {new.sequence_id} is one more than {self._limits.max_sequences}")
        if not 0 < len(new.token_ids) <= self._limits.max_sequence_tokens:
            raise InvalidPlanError(
                f"sequence {new.sequence_id} has {len(new.token_ids)} tokens; 1 to {self._limits.max_sequence_tokens}"
            )
        token_ids = np.array(new.token_ids, np.int32)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= self._vocab_size:
            raise InvalidPlanError(f"sequence {new.sequence_id} has token ids outside the vocabulary")
        num_cached = new.num_cached_tokens
        if num_cached % self._block_tokens or not 0 <= num_cached < len(token_ids):
            raise InvalidPlanError(
                f"sequence {new.sequence_id}: {num_cached} of {len(token_ids)} tokens cached; whole blocks of "
                f"{self._block_tokens}, and less than all"
            )
        num_shared = num_cached // self._block_tokens
        if num_shared > len(new.blocks):
            raise InvalidPlanError(
                f"sequence {new.sequence_id}: {num_cached} tokens cached in {len(new.blocks)} blocks"
            )
        if not 0 <= new.num_generated_tokens < len(new.token_ids):
            raise InvalidPlanError(f"sequence {new.sequence_id} has no prompt before what was generated")
        slot = self._free_slots.pop()
        self.slot_of[new.sequence_id] = slot
        self.sequence_ids[slot] = new.sequence_id
        self.prompts[slot] = token_ids
        self.prompt_tokens[slot] = len(token_ids)
        self.computed_tokens[slot] = num_cached
        self.tier[slot] = new.tier.value
        self.num_blocks[slot] = 0
        self.answer_at[slot] = len(token_ids) - new.num_generated_tokens
        self.sampling.insert(slot, new, token_ids)
        return self._add_blocks(slot, new.sequence_id, np.array(new.blocks, np.int32), num_shared)

    def _append_blocks(self, more: NewBlocks) -> Int32Array:
        """The blocks, where they are on the GPU."""
        return self._add_blocks(self._slot(more.sequence_id), more.sequence_id, np.array(more.blocks, np.int32))

    def _add_blocks(self, slot: int, sequence_id: int, blocks: Int32Array, num_shared: int = 0) -> Int32Array:
        """Returns those on the GPU that it does not share."""
        tier = Tier(self.tier[slot])
        num_new = self.owned[tier].claim(blocks, sequence_id, num_shared)
        if tier is Tier.HOST and len(blocks):
            self._claim_pool(slot, sequence_id, blocks, num_new)
        start = int(self.num_blocks[slot])
        end = start + len(blocks)
        while end > self.block_tables.shape[1]:
            self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)], axis=1)
        self.block_tables[slot, start:end] = blocks
        self.num_blocks[slot] = end
        return blocks[num_shared if tier is Tier.GPU else len(blocks) :]

    def _claim_pool(self, slot: int, sequence_id: int, blocks: Int32Array, num_new: int) -> None:
        pools = np.searchsorted(self._pool_ends, blocks, side="right") - 1
        pool = self.pool[slot] if self.num_blocks[slot] else pools[0]
        if (pools != pool).any():
            raise InvalidPlanError(f"sequence {sequence_id} gets host blocks of several pools: {blocks.tolist()}")
        self.pool[slot] = pool
        self.pool_blocks_used[pool] += num_new

    def _release_blocks(self, slot: int) -> Int32Array:
        """Those that it had."""
        blocks = self.block_tables[slot, : self.num_blocks[slot]].copy()
        tier = Tier(self.tier[slot])
        num_free = self.owned[tier].release(blocks)
        if tier is Tier.HOST:
            self.pool_blocks_used[self.pool[slot]] -= num_free
        return blocks

    def first_block(self, slots: Slots) -> NDArray[np.int64]:
        """[n] the first block of each one's host pool, 0 of those on the GPU: from there on its cache counts."""
        on_host = self.tier[slots] == Tier.HOST.value
        return np.where(on_host, self._pool_ends[self.pool[slots]], 0)

    def _filled_blocks(self, slot: int) -> int:
        return -(-int(self.computed_tokens[slot]) // self._block_tokens)

    def _give_up_blocks(self, slot: int, swap: Swap) -> Int32Array:
        if self.tier[slot] == swap.target.value:
            raise InvalidPlanError(f"sequence {swap.sequence_id} is on the {swap.target.name.lower()} already")
        blocks = self._release_blocks(slot)
        self.tier[slot] = swap.target.value
        self.num_blocks[slot] = 0
        return blocks

    def _take_swap_targets(
        self, swaps: list[tuple[int, Swap]], sources: list[Int32Array]
    ) -> tuple[BlockMoves, BlockMoves]:
        """To the host, and to the GPU."""
        moved: dict[Tier, list[tuple[Int32Array, ...]]] = {Tier.GPU: [], Tier.HOST: []}
        for (slot, swap), source in zip(swaps, sources, strict=True):
            filled = self._filled_blocks(slot)
            if len(swap.blocks) < filled:
                raise InvalidPlanError(f"sequence {swap.sequence_id} moves {filled} blocks into {len(swap.blocks)}")
            target = np.array(swap.blocks, np.int32)
            self._add_blocks(slot, swap.sequence_id, target)
            tokens = self.computed_tokens[slot] - np.arange(filled) * self._block_tokens
            num_tokens = np.minimum(tokens, self._block_tokens).astype(np.int32)
            moved[swap.target].append((source[:filled], target[:filled], num_tokens))
        to_host, to_gpu = _joined(moved[Tier.HOST]), _joined(moved[Tier.GPU])
        reused = np.intersect1d(to_host.target, to_gpu.source)
        if len(reused):
            raise InvalidPlanError(f"host blocks {reused.tolist()} are written before they are read")
        return to_host, to_gpu

    # --- work

    def check_work(self, plan: IterationPlan) -> None:
        """Whether the sub-batches can run on the state as it is now. Raises InvalidPlanError."""
        check_mode(plan)
        batches = plan.sub_batches
        self.check_num_tokens(sum(batch.num_tokens for batch in batches))
        seen: set[int] = set()
        computed: dict[int, int] = {}  # of prompts that go on from the first sub-batch to the second
        for batch in batches:
            continued, computed = computed, {}
            ids = batch.sequence_ids
            if len(set(ids)) < len(ids) or seen.intersection(ids) - continued.keys():
                repeated = next(one for one in ids if ids.count(one) > 1 or one in seen - continued.keys())
                raise InvalidPlanError(f"sequence {repeated} appears twice")
            seen.update(ids)
            for chunk in batch.prefills:
                self._check_chunk(chunk, continued.pop(chunk.sequence_id, None))
                computed[chunk.sequence_id] = chunk.start + chunk.num_tokens
            if continued.keys() & {*batch.gpu_decodes, *batch.cpu_decodes}:
                raise InvalidPlanError("a sequence prefills and decodes in one iteration")
            self.check_decodes(batch.gpu_decodes, Tier.GPU)
            self.check_decodes(batch.cpu_decodes, Tier.HOST)

    def _check_chunk(self, chunk: PrefillChunk, continued_at: int | None) -> None:
        """`continued_at`: where the sub-batch before leaves the same prompt."""
        slot = self._slot(chunk.sequence_id)
        end = chunk.start + chunk.num_tokens
        computed = self.computed_tokens[slot] if continued_at is None else continued_at
        if chunk.start != computed or chunk.num_tokens < 1 or end > self.prompt_tokens[slot]:
            raise InvalidPlanError(
                f"sequence {chunk.sequence_id}: chunk {chunk.start} to {end}, but {computed} of "
                f"{self.prompt_tokens[slot]} prompt tokens are computed"
            )
        self._check_room(chunk.sequence_id, slot, end)

    def check_num_tokens(self, num_tokens: int) -> None:
        """Of all sub-batches, or of a cohort. Raises InvalidPlanError."""
        if num_tokens > self._limits.max_batch_tokens:
            raise InvalidPlanError(f"{num_tokens} tokens in an iteration; at most {self._limits.max_batch_tokens}")

    def check_decodes(self, sequence_ids: tuple[int, ...], tier: Tier) -> None:
        """Whether these sequences can decode one token on `tier`. Raises InvalidPlanError."""
        slots = self.slots(sequence_ids)
        after = self.computed_tokens[slots] + 1
        bad = (
            (self.tier[slots] != tier.value)
            | (after <= self.prompt_tokens[slots])
            | (after > np.minimum(self.num_blocks[slots] * self._block_tokens, self._limits.max_sequence_tokens))
        )
        for slot in slots[bad][:1]:
            sequence_id = int(self.sequence_ids[slot])
            if self.tier[slot] != tier.value:
                raise InvalidPlanError(f"sequence {sequence_id} decodes on the {tier.name.lower()}, where it is not")
            if self.computed_tokens[slot] < self.prompt_tokens[slot]:
                raise InvalidPlanError(f"sequence {sequence_id} decodes before its prompt is computed")
            self._check_room(sequence_id, int(slot), int(self.computed_tokens[slot]) + 1)

    def _check_room(self, sequence_id: int, slot: int, num_tokens: int) -> None:
        if num_tokens > self._limits.max_sequence_tokens:
            raise InvalidPlanError(f"sequence {sequence_id} exceeds {self._limits.max_sequence_tokens} tokens")
        if num_tokens > self.num_blocks[slot] * self._block_tokens:
            raise InvalidPlanError(
                f"sequence {sequence_id} has {self.num_blocks[slot]} blocks, too few for {num_tokens} tokens"
            )

    def slots(self, sequence_ids: Iterable[int]) -> Slots:
        """[n] rows of known sequences. Raises InvalidPlanError."""
        try:
            return np.array([*map(self.slot_of.__getitem__, sequence_ids)], np.int64)
        except KeyError as error:
            raise InvalidPlanError(f"sequence {error.args[0]} is not known") from None

    # --- progress

    def advance(self, sub_batch: SubBatch) -> None:
        """Counts the K and V that a sub-batch stored."""
        for chunk in sub_batch.prefills:
            self.computed_tokens[self.slot_of[chunk.sequence_id]] += chunk.num_tokens
        self.computed_tokens[self.slots(sub_batch.gpu_decodes + sub_batch.cpu_decodes)] += 1

    def take_tokens(self, slots: Slots, tokens: NDArray[np.int64]) -> None:
        """Keeps sampled tokens as the next inputs."""
        self.last_token[slots] = tokens
        self.sampling.take_tokens(slots, tokens)


def _joined(moved: list[tuple[Int32Array, ...]]) -> BlockMoves:
    if not moved:
        return BlockMoves(*(np.zeros(0, np.int32) for _ in range(3)))
    return BlockMoves(*(np.concatenate(part) for part in zip(*moved, strict=True)))
