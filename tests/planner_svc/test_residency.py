"""Blocks, sequences and what the executor is told of them stay in step."""

from support.planning import make_capacity

from planner_svc.scheduler import SequenceRequest
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State
from svc_common.plan import NewBlocks, Sampling, Swap, Tier


def admitted(residency: Residency, sequence_id: int, num_tokens: int, tier: Tier) -> Sequence:
    sequence = Sequence(sequence_id, SequenceRequest((5,) * num_tokens, 10, Sampling(), frozenset()))
    residency.admit(sequence, tier)
    sequence.advance_to(num_tokens)
    return sequence


def test_a_prompt_gets_all_its_blocks_at_once():
    residency = Residency(make_capacity(4, 4))
    sequence = admitted(residency, 1, 9, Tier.GPU)
    assert (sequence.blocks, residency.used(Tier.GPU), residency.free(Tier.GPU)) == ([0, 1, 2], 3, 1)
    assert not residency.lacks_block(sequence)
    sequence.advance_to(12)
    assert residency.lacks_block(sequence)


def test_host_blocks_left_by_a_swap_in_are_free_from_the_next_plan_on():
    residency = Residency(make_capacity(4, 4))
    sequence = admitted(residency, 1, 9, Tier.HOST)
    residency.take_changes()
    residency.move(sequence, Tier.GPU)
    assert (residency.used(Tier.HOST), residency.free(Tier.HOST)) == (0, 1)
    assert residency.take_changes().ordered_swaps() == (Swap(1, Tier.GPU, (0, 1, 2)),)
    assert residency.free(Tier.HOST) == 4


def test_gpu_blocks_left_by_a_swap_out_are_free_at_once():
    residency = Residency(make_capacity(4, 4))
    sequence = admitted(residency, 1, 9, Tier.GPU)
    residency.take_changes()
    residency.move(sequence, Tier.HOST)
    assert (residency.free(Tier.GPU), residency.free(Tier.HOST)) == (4, 1)
    assert (residency.num_on(Tier.GPU), residency.num_on(Tier.HOST)) == (0, 1)


def test_moves_to_the_host_come_before_moves_to_the_gpu():
    residency = Residency(make_capacity(8, 8))
    on_host = admitted(residency, 1, 4, Tier.HOST)
    on_gpu = admitted(residency, 2, 4, Tier.GPU)
    residency.take_changes()
    residency.move(on_host, Tier.GPU)
    residency.move(on_gpu, Tier.HOST)
    swaps = residency.take_changes().ordered_swaps()
    assert [(swap.sequence_id, swap.target) for swap in swaps] == [(2, Tier.HOST), (1, Tier.GPU)]
    assert set(swaps[0].blocks).isdisjoint({0})  # block 0 of the host is still to be read


def test_a_promised_host_block_is_neither_free_nor_used_until_it_is_given():
    residency = Residency(make_capacity(0, 4))
    sequence = admitted(residency, 1, 4, Tier.HOST)
    residency.take_changes()
    residency.promise_host_block(0)
    assert (residency.free(Tier.HOST), residency.used(Tier.HOST)) == (2, 1)
    residency.redeem_promises()
    residency.grow(sequence)
    assert (residency.free(Tier.HOST), residency.used(Tier.HOST)) == (2, 2)
    assert residency.take_changes().ordered_new_blocks() == (NewBlocks(1, (1,)),)


def test_one_that_leaves_is_released_and_nothing_else_is_said_of_it():
    residency = Residency(make_capacity(4, 4))
    sequence = admitted(residency, 1, 4, Tier.GPU)
    residency.take_changes()
    residency.move(sequence, Tier.HOST)
    residency.grow(sequence)
    residency.leave(sequence, State.FINISHED)
    changes = residency.take_changes()
    assert (changes.released, changes.ordered_swaps(), changes.ordered_new_blocks()) == ([1], (), ())
    assert (residency.used(Tier.GPU), residency.used(Tier.HOST), residency.sequences) == (0, 0, [])
