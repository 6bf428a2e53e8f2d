"""Which host pool a sequence goes to, what pools cost, and what becomes of sequences when one pool is lost."""

from dataclasses import replace

import pytest
from support.planning import Loop, make_capacity, make_estimator

from planner_svc.estimator import (
    Calibration,
    CohortLoad,
    HardwareSpec,
    IterationLoad,
    ModelFigures,
    OperationTables,
    RooflineEstimator,
    SubBatchLoad,
    TableEstimator,
)
from planner_svc.scheduler import Capacity, Scheduler, SequenceRequest
from planner_svc.scheduler.pools import HostPools
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence
from planner_svc.simulator.executor import SimulatedExecutor
from svc_common.plan import Mode, PoolWork, Sampling, Tier, Timings

FREE_CPU = make_estimator(cpu_token_s=1e-6)


def slower_second_pool(factor: float) -> TableEstimator:
    """The second pool's service takes so many times as long."""
    estimator = make_estimator(cpu_token_s=1e-5)
    estimator.cpu_scales[1] = factor
    return estimator


def resident(residency: Residency, sequence_id: int, num_tokens: int, pool: int) -> Sequence:
    sequence = waiting(sequence_id, num_tokens)
    residency.admit(sequence, Tier.HOST, pool)
    sequence.advance_to(num_tokens)
    return sequence


def waiting(sequence_id: int, num_tokens: int, max_new_tokens: int = 4) -> Sequence:
    request = SequenceRequest((5,) * num_tokens, max_new_tokens, Sampling(), frozenset())
    return Sequence(sequence_id, request)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1), (2.5, 1), (3.5, 0)])
def test_the_pool_that_would_have_attended_soonest_is_chosen(factor, expected):
    """With the newcomer's 4 blocks, 10 are in the first pool or 4 in the second: alike at 2.5 times the time."""
    capacity = make_capacity(0, (40, 40))
    residency = Residency(capacity)
    pools = HostPools(capacity, residency, slower_second_pool(factor), margin_share=0.0)
    resident(residency, 1, 28, pool=0)
    assert pools.for_newcomer(waiting(2, 16), 4, pools.states()) == expected
    assert pools.for_resident(waiting(2, 16), 4) == expected


def test_a_pool_without_room_is_not_chosen():
    capacity = make_capacity(0, (40, 6))
    residency = Residency(capacity)
    pools = HostPools(capacity, residency, FREE_CPU, margin_share=0.0)
    resident(residency, 1, 80, pool=0)
    resident(residency, 2, 8, pool=1)
    # Four blocks are free in the second pool, of which its resident's next one stays free.
    assert pools.for_newcomer(waiting(3, 16), 4, pools.states()) == 0
    assert pools.for_newcomer(waiting(3, 12), 3, pools.states()) == 1
    assert pools.for_resident(waiting(3, 16), 4) == 1


def test_nobody_goes_to_a_pool_that_it_would_outgrow_with_nowhere_to_go():
    capacity = make_capacity(2, (4, 10))
    pools = HostPools(capacity, Residency(capacity), FREE_CPU, margin_share=0.0)
    assert pools.for_newcomer(waiting(1, 8, max_new_tokens=9), 2, pools.states()) == 1  # less free: but the second
    assert pools.for_newcomer(waiting(1, 8, max_new_tokens=30), 2, pools.states()) == 1
    large_gpu = make_capacity(10, (4, 10))
    pools = HostPools(large_gpu, Residency(large_gpu), FREE_CPU, margin_share=0.0)
    resident(pools._residency, 1, 36, pool=1)
    assert pools.for_resident(waiting(2, 8, max_new_tokens=30), 2) == 0


def test_shares_follow_the_speed_of_those_attached():
    def shares(sizes, factor):
        capacity = make_capacity(0, sizes)
        return HostPools(capacity, Residency(capacity), slower_second_pool(factor), 0.0).shares()

    assert shares((40, 40), 3.0) == pytest.approx((0.75, 0.25), rel=0.01)
    assert shares((40, 0), 3.0) == (1.0, 0.0)
    assert shares((40,), 1.0) == ()


def test_an_iteration_waits_for_the_slowest_pool():
    estimator = slower_second_pool(2.0)
    loads = [
        SubBatchLoad(num_cpu_decodes=6, cpu_context_tokens=6000, num_outputs=6, cpu_pools=pools)
        for pools in ((), ((6, 6000), (0, 0)), ((4, 4000), (2, 2000)), ((3, 3000), (3, 3000)))
    ]
    one, all_first, balanced, slow = (estimator.iteration_s(IterationLoad(load)) for load in loads)
    layers = estimator.num_layers
    assert all_first == one
    assert one - balanced == pytest.approx(layers * 2000 * 1e-5)
    assert slow == one  # half of it at half the speed
    assert estimator.terms(IterationLoad(loads[2])).cpu_pools_s == pytest.approx((layers * 0.04, layers * 0.04))
    assert estimator.terms(IterationLoad(loads[0])).cpu_pools_s == ()
    cohort = CohortLoad(6, 6000, layers, 6, cpu_pools=((4, 4000), (2, 2000)))
    assert estimator.iteration_s(IterationLoad(cohort=cohort)) < estimator.iteration_s(
        IterationLoad(cohort=CohortLoad(6, 6000, layers, 6))
    )


def test_measured_factors_count():
    measured = make_estimator()
    tables = OperationTables((), (), (), (), (), 0.0, 0.0, cpu_pool_factors=(1.0, 1.5))
    assert measured.cpu_decode_s(2, 200, 1) == measured.cpu_decode_s(2, 200)
    measured._pool_factors = TableEstimator(tables, 2)._pool_factors
    assert measured.cpu_decode_s(2, 200, 1) == pytest.approx(1.5 * measured.cpu_decode_s(2, 200))


def test_each_pool_finds_its_own_factor():
    """The second takes three times what is believed, the first what is believed."""
    calibration = Calibration(make_estimator())
    load = IterationLoad(
        SubBatchLoad(num_cpu_decodes=6, cpu_context_tokens=6000, num_outputs=6, cpu_pools=((3, 3000), (3, 3000)))
    )
    seconds = calibration.base.terms(load).cpu_pools_s
    work = tuple(PoolWork(round(factor * 1e9 * s), 3000) for factor, s in zip((1, 3), seconds, strict=True))
    total_s = calibration.base.iteration_s(load)
    for _ in range(60):
        timings = Timings(total_ns=round(1e9 * total_s), cpu_attention_ns=sum(item.attention_ns for item in work))
        calibration.observe(Mode.SAME_LAYER, load, timings, work)
    ratios = [
        calibration.estimator.cpu_decode_s(3, 3000, pool) / calibration.base.cpu_decode_s(3, 3000) for pool in (0, 1, 2)
    ]
    assert ratios == pytest.approx([1.0, 3.0, 1.0], rel=0.02)


@pytest.mark.parametrize("policy", ["auto", "asymmetric", "same_layer", "decoupled"])
def test_equal_pools_share_equally_and_do_so_again_after_sequences_end(policy):
    loop = Loop(make_capacity(0, (40, 40), max_sequences=30, max_batch_tokens=200), policy, FREE_CPU)
    for _ in range(12):
        loop.add(8, max_new_tokens=12)
    while loop.scheduler.num_by_pool != (6, 6):
        loop.step()
    first = [item for item in loop.scheduler._residency.sequences if item.pool == 0]
    for sequence in first[:4]:
        loop.cancel(sequence.sequence_id)
    for _ in range(4):
        loop.add(8, max_new_tokens=12)
    while sum(loop.scheduler.num_by_pool) != 12:
        loop.step()
    assert loop.scheduler.num_by_pool == (6, 6)
    loop.run_until_idle()


def test_a_slow_pool_gets_less():
    capacity = make_capacity(0, (400, 400), max_sequences=64, max_batch_tokens=800)
    loop = Loop(capacity, "same_layer", slower_second_pool(3))
    for _ in range(16):
        loop.add(40, max_new_tokens=20)
    while sum(loop.scheduler.num_by_pool) != 16:
        loop.step()
    assert loop.scheduler.num_by_pool == (12, 4)


@pytest.mark.parametrize("policy", ["auto", "asymmetric", "same_layer", "decoupled"])
def test_sequences_of_a_lost_pool_go_on_in_the_other(policy):
    loop = Loop(make_capacity(0, (20, 20)), policy, FREE_CPU)
    for _ in range(8):
        loop.add(8, max_new_tokens=12)
    for _ in range(7):
        loop.step()
    assert min(loop.scheduler.num_by_pool) > 0
    loop.reset(make_capacity(0, (0, 20)))
    loop.run_until_idle()
    assert len(loop.finishes) == 8


def test_only_what_fits_in_no_other_pool_is_lost():
    loop = Loop(make_capacity(4, (20, 6)), "asymmetric", FREE_CPU)
    small, large = loop.add(8, max_new_tokens=12), loop.add(40, max_new_tokens=12)
    loop.step()
    assert loop.scheduler.reset(make_capacity(4, (0, 6)), FREE_CPU, epoch=2) == (large,)
    assert loop.scheduler.num_waiting == 1
    assert small in loop.scheduler._live


HARDWARE = HardwareSpec(
    gpu_flops_per_s=1e14,
    linear_efficiency=0.5,
    attention_efficiency=0.3,
    gpu_bytes_per_s=3e11,
    gpu_bandwidth_efficiency=0.8,
    cpu_bytes_per_s=4e10,
    cpu_bandwidth_efficiency=0.8,
    link_bytes_per_s=2e10,
    launch_s=5e-5,
    cpu_sequence_s=0.0,
    cpu_hop_s=5e-5,
    iteration_s=1e-3,
)
MODEL = ModelFigures(8, 2048, 8192, 16, 8, 128, 32000)


def burst_s(host_pools: tuple[int, ...], cpu_share: float) -> float:
    """Of 80 requests at once on a simulated machine, each of whose pools has so much of the CPU."""
    estimator = RooflineEstimator(replace(HARDWARE, cpu_bytes_per_s=cpu_share * HARDWARE.cpu_bytes_per_s), MODEL)
    capacity = Capacity(60, host_pools, 16, 128, 1024, 2048, 16 * int(estimator.kv_bytes_per_token))
    scheduler = Scheduler(capacity, estimator, "same_layer", 1000)
    executor = SimulatedExecutor(estimator, estimator.kv_bytes_per_token, host_pools)
    for _ in range(80):
        scheduler.add(SequenceRequest((0,) * 150, 60, Sampling(), frozenset()), 0.0)
    now, most_apart = 0.0, 0
    while plan := scheduler.plan(now):
        seconds, result = executor.run(plan)
        now += seconds
        scheduler.apply(result, now)
        if scheduler.num_waiting:
            most_apart = max(most_apart, max(scheduler.num_by_pool) - min(scheduler.num_by_pool))
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert len(host_pools) == 1 or most_apart <= 2
    return now


def test_two_halves_of_a_cpu_serve_as_much_as_the_whole():
    whole_s = burst_s((800,), 1.0)
    assert burst_s((400, 400), 0.5) == pytest.approx(whole_s, rel=0.05)
    assert burst_s((400,), 0.5) > 1.2 * whole_s
