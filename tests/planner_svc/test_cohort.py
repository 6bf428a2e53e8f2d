"""A decoupled cohort: what it costs, and how its step spans iterations."""

import pytest
from support.planning import Loop, make_capacity, make_estimator

from planner_svc.estimator import CohortLoad, HardwareSpec, IterationLoad, ModelFigures, RooflineEstimator, SubBatchLoad
from planner_svc.estimator.estimator import hidden_cohort_layers
from planner_svc.scheduler import SequenceRequest, Targets
from svc_common.plan import CohortStep, IterationPlan, Mode, Sampling, SubBatch

MODEL = ModelFigures(8, 100, 200, 4, 2, 25, 1000)
HARDWARE = HardwareSpec(9e9, 0.5, 0.25, 2e8, 0.9, 4e7, 0.5, 1e7, 1e-4, 1e-5, 2e-5, 3e-4)
ESTIMATOR = RooflineEstimator(HARDWARE, MODEL)
BATCH = SubBatchLoad(((30, 0),), 2, 400, num_outputs=3)


def make_loop(num_layers: int = 8) -> Loop:
    """CPU attention takes as long as several layers of the batch. One prompt on the GPU, three on the host."""
    estimator = make_estimator(cpu_token_s=5e-5, num_layers=num_layers)
    loop = Loop(make_capacity(5, 100, max_batch_tokens=64), "decoupled", estimator)
    for _ in range(4):
        loop.add(12, max_new_tokens=8)
    loop.step()
    return loop


def run_step(loop: Loop) -> list[IterationPlan]:
    """Plans up to the one with which a step ends."""
    plans = [loop.step()]
    while plans[-1].cohort and plans[-1].cohort.start_layer + plans[-1].cohort.num_layers < loop.estimator.num_layers:
        plans.append(loop.step())
    return plans


def test_a_hidden_cohort_costs_its_linear_operations():
    layer_s = ESTIMATOR.linear_s(32) + ESTIMATOR.prefill_s(30, 0) + ESTIMATOR.gpu_decode_s(2, 400)
    attention_s, linear_s = ESTIMATOR.cpu_decode_s(5, 300), ESTIMATOR.linear_s(5)
    num_hidden = hidden_cohort_layers(8, layer_s, attention_s)
    assert num_hidden == pytest.approx(8 * layer_s / (attention_s + layer_s / 2))
    assert 2 < num_hidden < 8
    alone_s = ESTIMATOR.iteration_s(IterationLoad(BATCH))
    for num_layers in range(1, int(num_hidden) + 1):
        beside_s = ESTIMATOR.iteration_s(IterationLoad(BATCH, cohort=CohortLoad(5, 300, num_layers)))
        assert beside_s == pytest.approx(alone_s + num_layers * linear_s)
    longer = int(num_hidden) + 1
    tau_s = attention_s + linear_s + layer_s / 2
    over_s = longer * tau_s - 8 * layer_s
    assert ESTIMATOR.iteration_s(IterationLoad(BATCH, cohort=CohortLoad(5, 300, longer))) == pytest.approx(
        alone_s + over_s
    )


def test_the_mean_pass_of_the_simulation_spec():
    """pass = L t0 / (1 - linear / tau), and pass / tau layers: what GPU and cohort take agree just there."""
    layer_s = ESTIMATOR.linear_s(32) + ESTIMATOR.prefill_s(30, 0) + ESTIMATOR.gpu_decode_s(2, 400)
    attention_s, linear_s = ESTIMATOR.cpu_decode_s(5, 300), ESTIMATOR.linear_s(5)
    tau_s = attention_s + linear_s + layer_s / 2
    pass_s = 8 * layer_s / (1 - linear_s / tau_s)
    assert hidden_cohort_layers(8, layer_s, attention_s) == pytest.approx(pass_s / tau_s)


def test_a_cohort_beside_no_batch_and_its_head():
    load = CohortLoad(5, 300, 8, num_outputs=5)
    layers_s = 8 * (ESTIMATOR.cpu_decode_s(5, 300) + ESTIMATOR.linear_s(5))
    assert ESTIMATOR.iteration_s(IterationLoad(SubBatchLoad(), cohort=load)) == pytest.approx(
        layers_s + ESTIMATOR.head_s(5) + 3e-4
    )
    timeline = ESTIMATOR.timeline(IterationLoad(BATCH, cohort=CohortLoad(5, 300, 2)))
    assert timeline.cpu_s == pytest.approx(2 * ESTIMATOR.cpu_decode_s(5, 300))
    assert timeline.gpu_s == pytest.approx(ESTIMATOR.timeline(IterationLoad(BATCH)).gpu_s + 2 * ESTIMATOR.linear_s(5))


def test_tables_give_each_layer_of_the_cohort_its_share_of_the_batch():
    """Five layers beside two: three beside the first one's attention, two beside the second's."""
    estimator = make_estimator(cpu_token_s=1e-4, num_layers=5)
    batch = SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=10, num_outputs=1)
    layer_s = estimator.linear_s(1) + estimator.gpu_decode_s(1, 10)
    attention_s = 2.5 * layer_s
    context = round(attention_s / 1e-4)
    cohort = CohortLoad(1, context, 2)
    assert estimator.cpu_decode_s(1, context) == pytest.approx(context * 1e-4)
    expected_s = 2 * estimator.linear_s(1) + 3 * layer_s + max(context * 1e-4, 2 * layer_s)
    fixed_s = estimator.iteration_s(IterationLoad(batch)) - 5 * layer_s
    assert estimator.iteration_s(IterationLoad(batch, cohort=cohort)) == pytest.approx(expected_s + fixed_s)


def test_a_step_goes_through_all_layers_and_yields_its_tokens_last():
    loop = make_loop()
    before = {key: len(stream) for key, stream in loop.streams.items()}
    plans = run_step(loop)
    assert len(plans) > 1
    assert all(plan.mode is Mode.DECOUPLED for plan in plans)
    parts = [plan.cohort for plan in plans if plan.cohort]
    members = parts[0].sequence_ids
    assert members == (2, 3, 4)
    assert [part.sequence_ids for part in parts] == [members] * len(plans)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.num_layers)
    assert [part.start_layer for part in parts] == starts[:-1]
    assert starts[-1] == 8
    gained = {key: len(stream) - before[key] for key, stream in loop.streams.items()}
    assert gained == {1: len(plans), 2: 1, 3: 1, 4: 1}
    assert plans[0].sub_batches == (SubBatch(gpu_decodes=(1,)),)
    loop.run_until_idle()
    assert loop.scheduler.counters.decoupled_iterations > 0


def test_a_member_that_leaves_keeps_its_blocks_until_the_step_ends():
    loop = make_loop()
    first = loop.step()
    assert isinstance(first.cohort, CohortStep)
    used = loop.scheduler.host_blocks_used
    loop.cancel(3)
    assert loop.scheduler.host_blocks_used == used
    plans = run_step(loop)
    assert all(plan.released == () for plan in plans)
    assert plans[-1].cohort
    assert plans[-1].cohort.sequence_ids == (2, 3, 4)
    following = loop.step()
    assert following.released == (3,)
    assert following.cohort
    assert following.cohort.sequence_ids == (2, 4)
    loop.run_until_idle()


def test_a_step_ends_though_all_its_members_left():
    loop = make_loop()
    loop.step()
    for sequence_id in (1, 2, 3, 4):
        loop.cancel(sequence_id)
    assert loop.scheduler.has_work()
    loop.run_until_idle()


def test_a_new_epoch_forgets_the_step():
    loop = make_loop()
    loop.step()
    loop.cancel(2)
    loop.reset()
    plan = loop.step()
    assert plan.cohort is None
    assert [new.sequence_id for new in plan.new_sequences] == [1, 3, 4]
    loop.run_until_idle()


def test_no_member_is_taken_where_a_token_is_due():
    """Auto leaves the choice; a host sequence with targets is never in a step."""
    loop = Loop(make_capacity(0, 100), "auto", make_estimator(cpu_token_s=1e-4, num_layers=8))
    request = SequenceRequest((1,) * 12, 5, Sampling(), frozenset(), Targets(100.0, 10.0))
    for _ in range(3):
        loop.scheduler.add(request, now=0.0)
    modes = set()
    while (plan := loop.scheduler.plan(0.0)) is not None:
        modes.add(plan.mode)
        loop.scheduler.apply(loop.executor.run(plan), now=0.0)
    assert Mode.DECOUPLED not in modes
