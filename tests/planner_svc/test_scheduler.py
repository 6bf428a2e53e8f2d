"""Fabricated results in, exact plans out. Every plan is also checked by the executor of `support.planning`."""

import pytest
from support.planning import Loop, expected_tokens, make_capacity, make_estimator

from planner_svc.scheduler import (
    AdmissionError,
    AdmissionReason,
    Applied,
    Counters,
    Scheduler,
    SequenceRequest,
    TokenEvent,
)
from svc_common.plan import (
    ExecutionError,
    IterationPlan,
    IterationResult,
    Mode,
    NewBlocks,
    NewSequence,
    PrefillChunk,
    Sampling,
    SubBatch,
    Swap,
    Tier,
    TokenLogprobs,
)

FREE_CPU = make_estimator(cpu_token_s=1e-9)


def without_prediction(plan: IterationPlan | None) -> IterationPlan:
    assert plan is not None
    return IterationPlan(
        **{name: getattr(plan, name) for name in IterationPlan.__dataclass_fields__ if name != "predicted_s"}
    )


def make_plan(iteration: int, mode: Mode = Mode.GPU_ONLY, **fields) -> IterationPlan:
    return IterationPlan(epoch=1, iteration=iteration, mode=mode, **fields)


def test_a_request_from_prompt_to_release():
    loop = Loop(make_capacity(10, 0, max_batch_tokens=5))
    loop.add(7, max_new_tokens=3)
    prompt = loop.requests[1].prompt
    assert without_prediction(loop.step()) == make_plan(
        1,
        new_sequences=(NewSequence(1, prompt, Tier.GPU, (0, 1), Sampling(seed=1), 0),),
        sub_batches=(SubBatch((PrefillChunk(1, 0, 5),)),),
    )
    assert loop.streams[1] == []
    assert without_prediction(loop.step()) == make_plan(2, sub_batches=(SubBatch((PrefillChunk(1, 5, 2),)),))
    assert len(loop.streams[1]) == 1
    assert without_prediction(loop.step()) == make_plan(3, sub_batches=(SubBatch(gpu_decodes=(1,)),))
    assert without_prediction(loop.step()) == make_plan(
        4, new_blocks=(NewBlocks(1, (2,)),), sub_batches=(SubBatch(gpu_decodes=(1,)),)
    )
    assert loop.streams[1] == expected_tokens(prompt, 3, frozenset())
    assert loop.finishes == {1: "length"}
    assert without_prediction(loop.step()) == make_plan(5, released=(1,))
    assert not loop.scheduler.has_work()
    assert loop.scheduler.plan(now=0.0) is None


def test_the_last_token_needs_no_room():
    loop = Loop(make_capacity(2, 0))
    loop.add(7, max_new_tokens=2)  # 8 tokens of KV, 9 in all
    loop.run_until_idle()
    assert loop.finishes == {1: "length"}


def test_prediction_of_a_plan():
    loop = Loop(make_capacity(10, 0))
    loop.add(7, max_new_tokens=5)
    plan = loop.step()
    # 2 layers of 1 ms and the prefill's attention, head 0.1 ms, overhead 0.1 ms.
    assert plan.predicted_s == pytest.approx(2 * 1e-3 + 2e-4, rel=1e-2)
    # It took 1 ms, which the next prediction follows at once, and then on and on.
    for _ in range(3):
        assert loop.step().predicted_s == pytest.approx(1e-3, rel=0.2)


def test_one_plan_runs_and_one_waits():
    loop = Loop(make_capacity(10, 0))
    loop.add(4, max_new_tokens=5)
    assert loop.plan().sub_batches == (SubBatch((PrefillChunk(1, 0, 4),)),)
    assert loop.plan().sub_batches == (SubBatch(gpu_decodes=(1,)),)  # its input is not known yet, nor needed
    assert not loop.scheduler.has_work()
    assert loop.scheduler.plan(now=0.0) is None
    loop.apply()
    assert loop.scheduler.has_work()
    loop.run_until_idle()
    # One prompt, four decodes, no more: length is known before the tokens are. Then a release.
    assert [plan.sub_batches == () for plan in loop.plans] == [False] * 5 + [True]


def test_a_stop_seen_late_costs_one_discarded_token():
    loop = Loop(make_capacity(10, 0))
    prompt_tokens = expected_tokens((7, 8, 9), 5, frozenset())
    request = SequenceRequest((7, 8, 9), 5, Sampling(), frozenset({prompt_tokens[0]}))
    sequence_id = loop.scheduler.add(request, now=0.0)
    loop.streams[sequence_id] = []
    loop.plan()
    loop.plan()
    assert loop.apply() == (TokenEvent(1, prompt_tokens[0], None, "end_token"),)
    assert loop.scheduler.gpu_blocks_used == 0
    assert loop.plan().released == (1,)
    assert loop.apply() == ()  # the discarded one
    loop.apply()
    assert not loop.scheduler.has_work()


def test_logprobs_travel_with_their_token():
    scheduler = Scheduler(make_capacity(10, 0), FREE_CPU, "auto", 10)
    scheduler.add(SequenceRequest((1, 2), 2, Sampling(num_logprobs=1), frozenset()), now=0.0)
    scheduler.plan(now=0.0)
    logprobs = TokenLogprobs(-0.25, ((5, -0.25),))
    applied = scheduler.apply(IterationResult(1, 1, ((1, 5),), logprobs={1: logprobs}), now=0.0)
    assert applied == Applied((TokenEvent(1, 5, logprobs, None),))


def test_decodes_come_before_prompts_and_prompts_in_order_of_arrival():
    loop = Loop(make_capacity(100, 0, max_batch_tokens=8))
    loop.add(4, max_new_tokens=9)
    loop.step()
    loop.add(10, max_new_tokens=9)
    loop.add(3, max_new_tokens=9)
    assert loop.step().sub_batches == (SubBatch((PrefillChunk(2, 0, 7),), gpu_decodes=(1,)),)
    assert loop.step().sub_batches == (SubBatch((PrefillChunk(2, 7, 3), PrefillChunk(3, 0, 3)), gpu_decodes=(1,)),)


def test_the_latest_on_a_full_gpu_is_swapped_out_and_decodes_on_the_cpu():
    loop = Loop(make_capacity(5, 8), "asymmetric")
    loop.add(6, max_new_tokens=8)
    loop.add(6, max_new_tokens=8)
    for _ in range(3):
        loop.step()
    # 8 tokens each fill two blocks; one is left for the first, none for the second.
    assert without_prediction(loop.step()) == make_plan(
        4,
        Mode.ASYMMETRIC,
        swaps=(Swap(2, Tier.HOST, (0, 1)),),
        new_blocks=(NewBlocks(1, (4,)), NewBlocks(2, (2,))),
        sub_batches=(SubBatch(gpu_decodes=(1,)), SubBatch(cpu_decodes=(2,))),
    )
    loop.run_until_idle()
    assert loop.scheduler.counters.swaps_out == 1
    assert loop.scheduler.counters.recomputed_tokens == 0


def test_a_victim_goes_to_the_host_and_its_blocks_to_the_older_in_the_same_plan():
    loop = Loop(make_capacity(5, 8), "asymmetric")
    loop.add(6, max_new_tokens=8)
    loop.add(7, max_new_tokens=8)
    loop.step()
    assert loop.step().new_blocks == ()
    # The younger, a token longer, needs its third block first and takes the last one.
    assert loop.step().new_blocks == (NewBlocks(2, (4,)),)
    plan = loop.step()
    assert plan.swaps == (Swap(2, Tier.HOST, (0, 1, 2)),)
    assert plan.new_blocks[0].sequence_id == 1
    assert plan.new_blocks[0].blocks[0] in (2, 3, 4)
    assert loop.scheduler.counters.preemptions == 1
    loop.run_until_idle()


def test_a_sequence_on_the_host_comes_back_once_a_margin_stays_free():
    loop = Loop(make_capacity(5, 8), "asymmetric")
    loop.add(6, max_new_tokens=8)
    loop.add(6, max_new_tokens=20)
    for _ in range(4):
        loop.step()
    swapped_in = [plan for _ in range(10) for plan in [loop.step()] if plan.swaps]
    # Only when the first has left: 4 blocks and their margin would not fit beside it.
    assert [(plan.iteration, plan.swaps[0].target) for plan in swapped_in] == [(9, Tier.GPU)]
    assert swapped_in[0].released == (1,)
    assert swapped_in[0].sub_batches == (SubBatch(gpu_decodes=(2,)),)
    loop.run_until_idle()
    assert loop.scheduler.counters.recomputed_tokens == 0


def test_without_a_host_the_latest_is_recomputed_with_its_tokens_and_its_random_stream():
    loop = Loop(make_capacity(5, 0))
    loop.add(6, max_new_tokens=8)
    loop.add(7, max_new_tokens=8)
    for _ in range(3):
        loop.step()
    assert loop.step().released == (2,)
    assert (loop.scheduler.num_waiting, loop.scheduler.num_running) == (1, 1)
    assert loop.scheduler.history(2).num_recomputations == 1
    for _ in range(4):
        loop.step()
    generated = tuple(loop.streams[2])
    assert len(generated) == 3
    plan = loop.step()
    assert plan.released == (1,)
    assert plan.new_sequences[0].token_ids == loop.requests[2].prompt + generated
    assert plan.new_sequences[0].num_generated_tokens == 3
    assert plan.new_sequences[0].sampling == Sampling(seed=2)
    assert plan.sub_batches == (SubBatch((PrefillChunk(2, 0, 10),)),)
    loop.run_until_idle()
    counters = loop.scheduler.counters
    assert (counters.preemptions, counters.recomputed_tokens, counters.prefilled_tokens) == (1, 9, 6 + 7 + 1)


def test_prompts_go_to_the_host_when_the_gpu_is_full_and_wait_when_both_are():
    loop = Loop(make_capacity(4, 4), "asymmetric")
    for _ in range(4):
        loop.add(6, max_new_tokens=2)
    plan = loop.step()
    assert [(new.sequence_id, new.tier, new.blocks) for new in plan.new_sequences] == [
        (1, Tier.GPU, (0, 1)),
        (2, Tier.HOST, (0, 1)),
    ]
    assert loop.scheduler.num_waiting == 2
    loop.run_until_idle()


def test_asymmetric_forced_splits_cpu_decodes_over_both_sub_batches():
    loop = Loop(make_capacity(0, 100), "asymmetric", make_estimator(cpu_token_s=1e-3))
    for _ in range(4):
        loop.add(6, max_new_tokens=3)
    loop.step()
    plan = loop.step()
    assert plan.mode is Mode.ASYMMETRIC
    assert plan.sub_batches == (SubBatch(cpu_decodes=(3, 4)), SubBatch(cpu_decodes=(1, 2)))


def test_gpu_only_parks_on_the_host_and_never_computes_there():
    loop = Loop(make_capacity(5, 8), "gpu_only")
    loop.add(6, max_new_tokens=8)
    loop.add(7, max_new_tokens=8)
    loop.add(1, max_new_tokens=2)
    for _ in range(3):
        loop.step()
    plan = loop.step()
    assert plan.swaps == (Swap(2, Tier.HOST, (0, 1, 2)),)
    assert plan.sub_batches == (SubBatch(gpu_decodes=(1,)),)
    assert loop.scheduler.num_waiting == 1  # the third does not overtake the parked one
    loop.run_until_idle()
    assert set(loop.executor.modes) == {Mode.GPU_ONLY}
    counters = loop.scheduler.counters
    assert (counters.swaps_out, counters.swaps_in, counters.recomputed_tokens) == (1, 1, 0)


def test_finishing_frees_blocks_at_once_and_drops_tokens_in_flight():
    loop = Loop(make_capacity(2, 0))
    loop.add(6, max_new_tokens=2)
    loop.add(6, max_new_tokens=2)
    loop.plan()
    loop.scheduler.finish(1)
    loop.scheduler.finish(1)
    loop.scheduler.finish(77)
    assert loop.scheduler.gpu_blocks_used == 0
    plan = loop.plan()
    assert plan.released == (1,)
    assert [(new.sequence_id, set(new.blocks)) for new in plan.new_sequences] == [(2, {0, 1})]
    assert loop.apply() == ()
    assert [event.sequence_id for event in loop.apply()] == [2]


def test_finishing_one_that_waits_tells_the_executor_nothing():
    loop = Loop(make_capacity(2, 0))
    loop.add(6, max_new_tokens=2)
    loop.scheduler.finish(1)
    assert not loop.scheduler.has_work()
    assert loop.scheduler.num_waiting == 0


def test_finishing_the_only_one_still_yields_a_plan_that_releases():
    loop = Loop(make_capacity(2, 0))
    loop.add(6, max_new_tokens=2)
    loop.step()
    loop.scheduler.finish(1)
    assert loop.scheduler.has_work()
    assert without_prediction(loop.step()) == make_plan(2, released=(1,))


# --- admission


@pytest.mark.parametrize(
    ("policy", "num_prompt", "max_new", "reason", "field", "limit"),
    [
        ("auto", 0, 1, AdmissionReason.TOO_SMALL, "prompt", 1),
        ("auto", 1, 0, AdmissionReason.TOO_SMALL, "max_new_tokens", 1),
        ("auto", 60, 1, AdmissionReason.EXCEEDS_CONTEXT, "prompt", 60),
        ("auto", 50, 11, AdmissionReason.EXCEEDS_CONTEXT, "max_new_tokens", 60),
        ("auto", 41, 1, AdmissionReason.EXCEEDS_KV, "prompt", 41),
        ("auto", 40, 2, AdmissionReason.EXCEEDS_KV, "max_new_tokens", 41),
        ("asymmetric", 40, 2, AdmissionReason.EXCEEDS_KV, "max_new_tokens", 41),
        ("gpu_only", 20, 2, AdmissionReason.EXCEEDS_KV, "max_new_tokens", 21),
    ],
)
def test_what_can_never_be_served_is_refused(policy, num_prompt, max_new, reason, field, limit):
    loop = Loop(make_capacity(5, 10, max_sequence_tokens=60), policy)
    with pytest.raises(AdmissionError) as refusal:
        loop.add(num_prompt, max_new)
    assert (refusal.value.reason, refusal.value.field, refusal.value.limit) == (reason, field, limit)
    assert loop.scheduler.num_waiting == 0
    assert not loop.scheduler.has_work()


@pytest.mark.parametrize(("policy", "max_new"), [("auto", 21), ("asymmetric", 21), ("gpu_only", 1)])
def test_what_just_fits_is_served(policy, max_new):
    loop = Loop(make_capacity(5, 10, max_sequence_tokens=60), policy)
    loop.add(20, max_new)
    loop.run_until_idle()
    assert loop.finishes == {1: "length"}


def test_a_full_queue_refuses_and_takes_again():
    loop = Loop(make_capacity(5, 0), max_waiting=1)
    loop.add(4, 2)
    with pytest.raises(AdmissionError) as refusal:
        loop.add(4, 2)
    assert (refusal.value.reason, refusal.value.limit) == (AdmissionReason.QUEUE_FULL, 1)
    loop.step()
    assert loop.add(4, 2) == 2


# --- results


def test_a_result_that_does_not_answer_the_plan_changes_nothing():
    loop = Loop(make_capacity(5, 0))
    loop.add(4, 2)
    with pytest.raises(ValueError, match="not the one expected"):
        loop.scheduler.apply(IterationResult(1, 1), now=0.0)
    loop.plan()
    for result, message in (
        (IterationResult(1, 2, ((1, 5),)), "not the one expected"),
        (IterationResult(1, 1, ()), "other sequences"),
        (IterationResult(1, 1, ((2, 5),)), "other sequences"),
        (IterationResult(1, 1, error=ExecutionError.DEVICE), "failed"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.scheduler.apply(result, now=0.0)
    assert [event.finish for event in loop.apply()] == [None]


def test_counters():
    loop = Loop(make_capacity(2, 8), "asymmetric")
    assert loop.scheduler.counters == Counters()
    loop.add(6, 3)
    loop.add(6, 4)
    loop.run_until_idle()
    assert loop.scheduler.counters == Counters(
        gpu_only_iterations=1, asymmetric_iterations=2, same_layer_iterations=1, prefilled_tokens=12, generated_tokens=7
    )


# --- failure


def test_reset_recomputes_from_prompt_and_applied_tokens_in_order_of_arrival():
    loop = Loop(make_capacity(10, 0))
    for _ in range(3):
        loop.add(4, max_new_tokens=5)
    loop.step()
    loop.plan()
    loop.add(4, max_new_tokens=5)
    late = loop.executor.run(loop.unapplied.popleft())
    assert loop.scheduler.reset(loop.capacity, FREE_CPU, epoch=2) == ()
    assert (loop.scheduler.num_waiting, loop.scheduler.num_running, loop.scheduler.gpu_blocks_used) == (4, 0, 0)
    assert loop.scheduler.apply(late, now=0.0) == Applied()
    plan = loop.scheduler.plan(now=0.0)
    assert (plan.epoch, plan.iteration, plan.released) == (2, 1, ())
    assert [(new.sequence_id, len(new.token_ids), new.num_generated_tokens) for new in plan.new_sequences] == [
        (1, 5, 1),
        (2, 5, 1),
        (3, 5, 1),
        (4, 4, 0),
    ][: len(plan.new_sequences)]
    assert plan.new_sequences[0].token_ids == loop.requests[1].prompt + tuple(loop.streams[1])
    assert [loop.scheduler.history(key).num_recomputations for key in (1, 4)] == [1, 0]


def test_what_lay_on_a_lost_host_is_computed_again_where_there_is_room():
    loop = Loop(make_capacity(4, 4), "asymmetric")
    for _ in range(4):
        loop.add(6, max_new_tokens=3)
    loop.step()
    assert loop.scheduler.host_blocks_used == 2
    loop.reset(make_capacity(4, 0))
    assert loop.scheduler.num_waiting == 4
    loop.run_until_idle()
    assert len(loop.finishes) == 4


def test_reset_loses_what_no_longer_fits():
    loop = Loop(make_capacity(4, 8))
    loop.add(6, max_new_tokens=3)
    loop.add(20, max_new_tokens=5)
    loop.step()
    assert loop.scheduler.reset(make_capacity(4, 0), FREE_CPU, epoch=2) == (2,)
    assert loop.scheduler.num_waiting == 1
    with pytest.raises(ValueError, match="epoch 2 does not follow 2"):
        loop.scheduler.reset(loop.capacity, FREE_CPU, epoch=2)


@pytest.mark.parametrize(("policy", "host_blocks"), [("auto", 0), ("gpu_only", 1000)])
def test_without_attention_on_the_cpu_prompts_fill_the_gpu_at_once(policy, host_blocks):
    # Ten tokens cost what one does, so that pacing would let in few more; the CPU would be worth it.
    estimator = make_estimator(linear_token_s=1e-4, cpu_token_s=1e-9)
    capacity = make_capacity(40, host_blocks, max_sequences=40, max_batch_tokens=400)
    loop = Loop(capacity, policy, estimator=estimator)
    for _ in range(40):
        loop.add(num_prompt_tokens=32, max_new_tokens=128)
    plan = loop.plan()
    # Eight blocks each, and a ninth kept free for each.
    assert [chunk.num_tokens for chunk in plan.sub_batches[0].prefills] == [32] * 4
