"""Sequences that begin alike share blocks: who finds what, what it saves, and what must never be shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import Loop, make_capacity

from planner_svc.scheduler import SequenceRequest
from planner_svc.scheduler.blocks import BlockAllocator
from planner_svc.scheduler.prefix import extend_keys
from svc_common.plan import Sampling, Tier

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
"""Of two full blocks of four tokens, and two tokens more."""


def add(loop: Loop, prompt: tuple[int, ...], salt: str | None = "", max_new_tokens: int = 3) -> int:
    request = SequenceRequest(prompt, max_new_tokens, Sampling(), frozenset(), cache_salt=salt)
    sequence_id = loop.scheduler.add(request, now=0.0)
    loop.requests[sequence_id], loop.streams[sequence_id] = request, []
    return sequence_id


def cached(loop: Loop, sequence_id: int) -> int:
    return loop.scheduler.history(sequence_id).num_cached_tokens


# --- blocks


def keys_of(*tokens: int, salt: str = "", block_tokens: int = 2) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, salt, tokens, block_tokens)
    return keys


def test_a_key_stands_for_all_tokens_up_to_its_block() -> None:
    keys = keys_of(1, 2, 3, 4, 5)
    assert len(keys) == 2
    assert keys_of(1, 2, 3, 4) == keys
    assert keys_of(9, 2, 3, 4)[1] != keys[1]
    assert keys_of(1, 2, 3, 4, salt="tenant")[0] != keys[0]
    extend_keys(grown := keys_of(1, 2), "", (1, 2, 3, 4), 2)
    assert grown == keys


def test_what_nobody_owns_stays_until_its_room_is_needed() -> None:
    allocator, keys = BlockAllocator(4), keys_of(1, 2, 3, 4)
    blocks = allocator.allocate(2)
    allocator.note_content(blocks, keys)
    allocator.free(blocks)
    assert (allocator.num_free, allocator.find(keys)) == (4, blocks)
    allocator.allocate(2)
    assert allocator.find(keys) == blocks  # Empty blocks went first,
    allocator.allocate(1)
    assert allocator.find(keys) == blocks[:1]  # then a prefix' end before its beginning.


def test_a_shared_block_is_free_when_its_last_owner_has_gone() -> None:
    allocator, keys = BlockAllocator(2), keys_of(1, 2)
    blocks = allocator.allocate(1)
    allocator.note_content(blocks, keys)
    allocator.share(allocator.find(keys))
    assert (allocator.num_owned_alone(blocks), allocator.num_owned(blocks)) == (0, 1)
    allocator.free(blocks)
    assert (allocator.num_used, allocator.num_owned_alone(blocks)) == (1, 1)
    allocator.free(blocks)
    assert (allocator.num_used, allocator.num_owned(blocks)) == (0, 0)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks)


def test_the_same_content_is_known_once() -> None:
    allocator, keys = BlockAllocator(2), keys_of(1, 2)
    first, second = allocator.allocate(1), allocator.allocate(1)
    allocator.note_content(first, keys)
    allocator.note_content(second, keys)
    allocator.free(second)
    assert allocator.find(keys) == first
    assert allocator.allocate(1) == second


@given(st.lists(st.tuples(st.sampled_from("asf"), st.integers(0, 5)), max_size=60))
def test_blocks_balance_whatever_is_shared(steps: list[tuple[str, int]]) -> None:
    allocator, contents = BlockAllocator(5), [keys_of(number, number, number, 7) for number in range(6)]
    owners: list[tuple[list[int], int]] = []
    for step, number in steps:
        if step == "a" and allocator.num_free >= 2:
            owners.append((allocator.allocate(2), number))
            allocator.note_content(owners[-1][0], contents[number])
        elif step == "s" and (found := allocator.find(contents[number])):
            allocator.share(found)
            owners.append((found, number))
        elif step == "f" and owners:
            allocator.free(owners.pop(number % len(owners))[0])
        owned = {block for blocks, _ in owners for block in blocks}
        assert allocator.num_used == len(owned)
    for blocks, _ in owners:
        allocator.free(blocks)
    assert sorted(allocator.allocate(5)) == [0, 1, 2, 3, 4]


# --- the scheduler, against an executor that checks what each block holds


def test_a_prompt_that_begins_alike_computes_the_rest_only() -> None:
    loop = Loop(make_capacity(32, 0))
    first = add(loop, PROMPT)
    loop.run_until_idle()
    second = add(loop, (*PROMPT[:9], 8, 8))
    loop.run_until_idle()
    assert (cached(loop, first), cached(loop, second)) == (0, 8)
    assert loop.scheduler.counters.cached_tokens == 8
    assert loop.scheduler.counters.prefilled_tokens == 10 + 3


def test_it_shares_with_one_that_still_runs() -> None:
    loop = Loop(make_capacity(32, 0))
    add(loop, PROMPT, max_new_tokens=20)
    loop.plan()
    loop.apply()
    second = add(loop, PROMPT, max_new_tokens=20)
    loop.plan()
    assert loop.scheduler.history(second).num_cached_tokens == 8
    # Ten tokens are three blocks each; two of them are the same.
    assert loop.scheduler.gpu_blocks_used == 4
    loop.run_until_idle()
    assert loop.executor.times_shared > 0
    assert loop.scheduler.gpu_blocks_used == 0


def test_the_last_token_is_always_computed() -> None:
    """Eight tokens fill two blocks, but something has to yield the ninth."""
    loop = Loop(make_capacity(32, 0))
    add(loop, PROMPT[:8])
    loop.run_until_idle()
    again = add(loop, PROMPT[:8])
    loop.run_until_idle()
    assert cached(loop, again) == 4


def test_the_next_turn_of_a_conversation_finds_the_answer_too() -> None:
    loop = Loop(make_capacity(32, 0))
    first = add(loop, PROMPT, max_new_tokens=8)
    loop.run_until_idle()
    answer = tuple(loop.streams[first])
    second = add(loop, (*PROMPT, *answer, 1, 2))
    loop.run_until_idle()
    assert cached(loop, second) == 16


@pytest.mark.parametrize("salts", [("", None), (None, None), ("", "tenant"), ("one", "two")])
def test_tenants_share_nothing(salts: tuple[str | None, str | None]) -> None:
    loop = Loop(make_capacity(32, 0))
    add(loop, PROMPT, salts[0])
    loop.run_until_idle()
    second = add(loop, PROMPT, salts[1])
    loop.run_until_idle()
    assert cached(loop, second) == 0
    assert loop.executor.times_shared == 0


def test_room_goes_to_those_who_need_it() -> None:
    """What is only kept never keeps a prompt waiting."""
    loop = Loop(make_capacity(4, 0))
    add(loop, PROMPT)
    loop.run_until_idle()
    add(loop, tuple(range(10, 22)), max_new_tokens=4)
    loop.run_until_idle()
    third = add(loop, PROMPT)
    loop.run_until_idle()
    assert cached(loop, third) == 0


def test_prompts_on_the_host_share_there() -> None:
    loop = Loop(make_capacity(0, 32), "asymmetric")
    add(loop, PROMPT, max_new_tokens=12)
    for _ in range(2):
        loop.plan()
        loop.apply()
    second = add(loop, PROMPT, max_new_tokens=12)
    loop.run_until_idle()
    assert cached(loop, second) == 8
    assert {tier for tier, _, _ in loop.executor.kv} == {Tier.HOST}


def test_a_recomputation_finds_what_is_left() -> None:
    """Four sequences on room for three: one yields, and computes only what others have taken since."""
    loop = Loop(make_capacity(9, 0), "gpu_only")
    ids = [add(loop, tuple((7 * number + place) % 23 for place in range(8)), max_new_tokens=8) for number in range(3)]
    loop.run_until_idle()
    assert all(len(loop.streams[key]) == 8 for key in ids)
    assert loop.scheduler.counters.preemptions > 0
