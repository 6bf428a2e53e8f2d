import pytest

from planner_svc.scheduler.blocks import BlockAllocator


def test_hands_out_each_block_once_and_takes_it_back():
    allocator = BlockAllocator(4)
    first, second = allocator.allocate(3), allocator.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (allocator.num_free, allocator.num_used) == (0, 4)
    allocator.free(first)
    assert (allocator.num_free, allocator.num_used) == (3, 1)
    assert sorted(allocator.allocate(3)) == sorted(first)


def test_asking_for_more_than_is_free_takes_nothing():
    allocator = BlockAllocator(2)
    with pytest.raises(ValueError, match="3 blocks asked of 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_freeing_twice_is_refused():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks)
    assert allocator.num_free == 2


def test_a_tier_may_have_no_blocks():
    allocator = BlockAllocator(0)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 0
