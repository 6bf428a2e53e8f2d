"""What stops, crashes or starves NEO's published scheduler does not stop this one; and what users saw elsewhere."""

from collections import Counter

import pytest
from support.planning import Loop, make_capacity, make_estimator

from planner_svc.scheduler.urgency import MAX_PASSED_OVER
from svc_common.plan import Tier

SLOW_CPU = make_estimator(cpu_token_s=1e-2)
POLICIES = ("auto", "gpu_only", "asymmetric", "same_layer", "decoupled")


def test_a_queue_head_larger_than_the_gpu_stops_nothing():
    loop = Loop(make_capacity(20, 60), "auto", SLOW_CPU, max_waiting=10_000)
    for number in range(60):
        loop.add(79 if number % 5 == 0 else 10, max_new_tokens=60)
    loop.run_until_idle()
    assert len(loop.finishes) == 60


@pytest.mark.parametrize("policy", ["auto", "asymmetric"])
@pytest.mark.parametrize(
    ("gpu_blocks", "host_blocks", "start", "end"), [(3, 10, Tier.GPU, Tier.HOST), (10, 3, Tier.GPU, Tier.GPU)]
)
def test_a_lone_request_that_outgrows_the_smaller_tier_moves_to_the_larger(policy, gpu_blocks, host_blocks, start, end):
    loop = Loop(make_capacity(gpu_blocks, host_blocks), policy, SLOW_CPU)
    loop.add(10, max_new_tokens=31)
    assert loop.step().new_sequences[0].tier is start
    while loop.scheduler.num_running and len(loop.streams[1]) < 30:
        loop.step()
    assert loop.executor.sequences[1].tier is end
    loop.run_until_idle()
    assert loop.scheduler.counters.recomputed_tokens == 0


def test_one_that_outgrows_the_host_moves_to_the_gpu_past_younger_ones():
    loop = Loop(make_capacity(8, 4), "asymmetric", SLOW_CPU)
    loop.add(26, max_new_tokens=2)  # fills the GPU, then leaves
    loop.add(10, max_new_tokens=20)  # must start on the host, and outgrows it
    loop.step()
    assert loop.executor.sequences[2].tier is Tier.HOST
    loop.add(8, max_new_tokens=16)
    loop.add(8, max_new_tokens=16)
    loop.run_until_idle()
    assert len(loop.finishes) == 4


@pytest.mark.parametrize("host_blocks", [0, 1, 4])
def test_the_gpu_takes_prompts_however_small_the_host_is(host_blocks):
    loop = Loop(make_capacity(12, host_blocks))
    loop.add(16, max_new_tokens=20)
    assert loop.step().new_sequences[0].tier is Tier.GPU
    loop.run_until_idle()


def test_the_gpu_takes_prompts_while_the_host_is_full():
    loop = Loop(make_capacity(4, 4), "asymmetric")
    loop.add(10, max_new_tokens=2)
    loop.add(15, max_new_tokens=2)
    loop.add(10, max_new_tokens=2)
    loop.step()
    assert (loop.scheduler.gpu_blocks_used, loop.scheduler.host_blocks_used) == (3, 4)
    loop.step()
    assert [(new.sequence_id, new.tier) for new in loop.step().new_sequences] == [(3, Tier.GPU)]
    loop.run_until_idle()


@pytest.mark.parametrize(("gpu_blocks", "host_blocks"), [(40, 0), (0, 40)])
def test_a_lone_prompt_may_fill_a_whole_tier(gpu_blocks, host_blocks):
    loop = Loop(make_capacity(gpu_blocks, host_blocks))
    loop.add(157, max_new_tokens=4)
    loop.run_until_idle()
    assert loop.finishes == {1: "length"}


def test_one_swapped_out_and_evicted_again_in_the_same_plan_is_only_released():
    loop = Loop(make_capacity(8, 11, block_tokens=1), "asymmetric")
    loop.add(3, max_new_tokens=6)
    loop.add(6, max_new_tokens=6)
    loop.step()
    loop.add(2, max_new_tokens=9)
    loop.step()
    loop.step()
    assert [loop.executor.sequences[key].tier for key in (1, 2, 3)] == [Tier.GPU, Tier.HOST, Tier.GPU]
    # The first takes the third's place on the GPU, the second then takes its place on the host.
    plan = loop.step()
    assert (plan.released, plan.swaps) == ((3,), ())
    assert (loop.scheduler.history(3).num_recomputations, loop.scheduler.counters.preemptions) == (1, 2)
    loop.run_until_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_growth_beyond_both_pools_degrades_to_queueing(policy):
    loop = Loop(make_capacity(6, 8, max_sequences=50), policy, max_waiting=10_000)
    for _ in range(40):
        loop.add(3, max_new_tokens=20)
    loop.run_until_idle()
    assert len(loop.finishes) == 40
    assert loop.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_sequences_hold_blocks_than_the_executor_has_rows(policy):
    loop = Loop(make_capacity(100, 100, max_sequences=3), policy)
    for _ in range(10):
        loop.add(3, max_new_tokens=4)
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (3, 7)
    loop.run_until_idle()


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 7])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_over_the_token_budget_is_chunked(policy, max_batch_tokens):
    loop = Loop(make_capacity(20, 30, max_batch_tokens=max_batch_tokens), policy, max_waiting=100)
    for _ in range(6):
        loop.add(50, max_new_tokens=3)
    loop.run_until_idle()
    assert len(loop.finishes) == 6


def test_none_is_passed_over_for_long_however_slow_the_cpu():
    loop = Loop(make_capacity(40, 200, max_batch_tokens=64, max_sequences=64), "auto", SLOW_CPU, max_waiting=1000)
    for _ in range(24):
        loop.add(20, max_new_tokens=40)
    last_seen: dict[int, int] = {}
    worst_gap = 0
    for iteration in range(300):
        if not loop.scheduler.has_work():
            break
        loop.plan()
        for event in loop.apply():
            worst_gap = max(worst_gap, iteration - last_seen.get(event.sequence_id, iteration))
            last_seen[event.sequence_id] = iteration
    assert loop.executor.cpu_decodes > 0
    # The rest of a step that began without it, its turns of waiting, and a whole step.
    num_layers = loop.estimator.num_layers
    assert MAX_PASSED_OVER < worst_gap <= num_layers - 1 + MAX_PASSED_OVER + num_layers
    loop.run_until_idle()


def test_a_slow_cpu_is_asked_once_in_a_while_only():
    loop = Loop(make_capacity(40, 200, max_batch_tokens=64, max_sequences=64), "auto", SLOW_CPU, max_waiting=1000)
    for _ in range(24):
        loop.add(20, max_new_tokens=40)
    plans = [loop.step() for _ in range(5 * (MAX_PASSED_OVER + 1))]
    cpu_decodes = Counter(key for plan in plans for batch in plan.sub_batches for key in batch.cpu_decodes)
    steps = [plan.cohort for plan in plans if plan.cohort and plan.cohort.start_layer == 0]
    cpu_decodes += Counter(key for step in steps for key in step.sequence_ids)
    assert cpu_decodes
    assert max(cpu_decodes.values()) < len(plans) / 5


def test_prompts_leave_the_token_budget_to_cpu_decodes():
    loop = Loop(make_capacity(0, 1000, max_batch_tokens=8), "asymmetric", max_waiting=100)
    loop.add(3, max_new_tokens=9)
    loop.add(3, max_new_tokens=9)
    loop.step()
    for _ in range(5):
        loop.add(50, max_new_tokens=2)
    plan = loop.step()
    assert sorted(sequence_id for batch in plan.sub_batches for sequence_id in batch.cpu_decodes) == [1, 2]
    assert sum(batch.num_tokens for batch in plan.sub_batches) == 8


def test_one_holding_blocks_never_waits_for_another_that_holds_the_rest():
    """Both need one more block and none is left on either tier: the older takes it from the younger."""
    loop = Loop(make_capacity(4, 4), "asymmetric")
    for _ in range(4):
        loop.add(6, max_new_tokens=10)
    loop.run_until_idle()
    assert len(loop.finishes) == 4


def test_a_request_larger_than_the_whole_gpu_is_served():
    loop = Loop(make_capacity(2, 100))
    loop.add(200, max_new_tokens=5)
    plan = loop.step()
    assert plan.new_sequences[0].tier is Tier.HOST
    loop.run_until_idle()
    assert loop.scheduler.counters.same_layer_iterations == 4


@pytest.mark.parametrize(("gpu_blocks", "host_blocks"), [(1, 6), (6, 1), (0, 6), (6, 0), (3, 3)])
def test_the_smallest_pools_serve_one_after_another(gpu_blocks, host_blocks):
    for policy in POLICIES if gpu_blocks >= 3 else ("auto", "asymmetric", "same_layer", "decoupled"):
        loop = Loop(make_capacity(gpu_blocks, host_blocks, max_batch_tokens=3), policy)
        for _ in range(5):
            loop.add(6, max_new_tokens=7)
        loop.run_until_idle()
        assert len(loop.finishes) == 5
