"""Requests with targets: what is due bounds an iteration, sets the order, and decides who may use the CPU."""

import statistics

import pytest
from support.planning import Loop, make_capacity, make_estimator

from planner_svc.estimator import EMPTY_LOAD, Calibration, SubBatchLoad
from planner_svc.scheduler import DEFAULT_CLASS, Scheduler, SequenceRequest, ServiceClass, Targets
from planner_svc.scheduler.batch import Chunk
from planner_svc.scheduler.candidates import Shape, Work
from planner_svc.scheduler.order import in_order
from planner_svc.scheduler.pace import Pace
from planner_svc.scheduler.sequence import Sequence, State
from planner_svc.scheduler.shares import Shares
from planner_svc.scheduler.urgency import (
    AGED_TTFTS,
    INTERRUPTED_TTFTS,
    arrive,
    is_aged,
    is_aged_prompt,
    schedule_tokens,
    take_first_token,
)
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import IterationResult, PrefillChunk, Sampling, Tier, Timings

ESTIMATOR = make_estimator(linear_floor_s=1e-3, linear_token_s=1e-5, cpu_token_s=1e-5)
"""Two layers: a batch of up to 100 tokens takes 2 ms, each further token 20 us; 0.2 ms of overhead and head."""
IN_TIME = Targets(ttft_s=1.0, tpot_s=0.1)


def request(num_tokens: int, targets: Targets | None = IN_TIME, max_new_tokens: int = 50) -> SequenceRequest:
    return SequenceRequest((0,) * num_tokens, max_new_tokens, Sampling(), frozenset(), targets)


def prompt(sequence_id: int, num_tokens: int, arrival_s: float = 0.0, targets: Targets | None = IN_TIME) -> Sequence:
    sequence = Sequence(sequence_id, request(num_tokens, targets))
    arrive(sequence, arrival_s)
    return sequence


def decoding(sequence_id: int, context: int, tier: Tier = Tier.GPU) -> Sequence:
    sequence = prompt(sequence_id, context - 1)
    sequence.state, sequence.tier = State.RUNNING, tier
    sequence.num_prefill_tokens = sequence.num_computed_tokens = context - 1
    return sequence


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


# --- when tokens are due


def test_tokens_are_due_one_by_one_from_when_the_first_really_came():
    sequence = prompt(1, 10, arrival_s=5.0)
    assert sequence.due_s == 6.0
    schedule_tokens([sequence], end_s=5.5)
    assert sequence.due_s == pytest.approx(5.6)
    schedule_tokens([sequence], end_s=5.55)
    take_first_token(sequence, now=5.75)
    assert sequence.due_s == pytest.approx(5.75 + 2 * 0.1)
    assert not sequence.is_late


def test_a_late_first_token_loses_the_targets_and_gets_more_patience():
    sequence = prompt(1, 10)
    schedule_tokens([sequence], end_s=0.9)
    take_first_token(sequence, now=1.1)
    assert sequence.is_late
    sequence.num_passed_over = 8
    assert not is_aged(sequence)
    sequence.num_passed_over = 64
    assert is_aged(sequence)


# --- order of prompts


def test_prompts_run_by_due_time_and_not_by_arrival():
    urgent = Targets(ttft_s=0.2, tpot_s=0.1)
    prompts = [prompt(1, 10), prompt(2, 10, 0.1, urgent), prompt(3, 10, 0.0, None)]
    assert ids(in_order(prompts, 0.1, 1e4, Shares())) == [2, 1, 3]


def test_what_cannot_come_in_time_comes_last():
    prompts = [prompt(1, 10), prompt(2, 10, 0.5)]
    assert ids(in_order(prompts, 1.2, 1e4, Shares())) == [2, 1]


def test_the_longest_is_put_off_where_not_all_can_come_in_time():
    """At 1,000 tokens a second all three take 1.2 s; without the longest both others are in time."""
    prompts = [prompt(1, 300), prompt(2, 700), prompt(3, 200)]
    assert ids(in_order(prompts, 0.0, 1000.0, Shares())) == [1, 3, 2]


def test_an_aged_prompt_comes_first():
    prompts = [prompt(1, 10), prompt(2, 10, AGED_TTFTS * 1.0)]
    assert ids(in_order(prompts, AGED_TTFTS * 1.0 + 0.01, 1e4, Shares())) == [1, 2]


@pytest.mark.parametrize("ttft_s", [1e-9, 0.2])
def test_nobody_overtakes_by_asking_for_the_impossible(ttft_s):
    prompts = [prompt(1, 10), prompt(2, 10, targets=Targets(ttft_s, 0.1))]
    assert ids(in_order(prompts, 0.5, 1e4, Shares())) == [1, 2]


def test_how_long_a_prompt_is_patient():
    chat = ServiceClass("chat", Targets(3.0, 0.1))

    def aged_after_s(targets: Targets | None, service_class: ServiceClass) -> float:
        sequence = Sequence(1, SequenceRequest((0,), 1, Sampling(), frozenset(), targets, service_class))
        arrive(sequence, 0.0)
        return next(seconds for seconds in range(2000) if is_aged_prompt(sequence, seconds + 0.5))

    assert aged_after_s(None, DEFAULT_CLASS) == 1200
    assert [aged_after_s(Targets(ttft_s, 0.1), DEFAULT_CLASS) for ttft_s in (1e-9, 1.0, 5.0)] == [20, 20, 100]
    assert [aged_after_s(Targets(ttft_s, 0.1), chat) for ttft_s in (1e-9, 3.0, 5.0)] == [60, 60, 100]


def interrupted(sequence_id: int, due_s: float) -> Sequence:
    """Preempted after its first token, at time 0; the next one was due at `due_s`."""
    sequence = prompt(sequence_id, 100)
    sequence.outputs.append(3)
    sequence.is_late, sequence.due_s = True, due_s
    return sequence


def test_one_that_was_interrupted_is_patient_from_its_next_token_on():
    assert not is_aged_prompt(interrupted(1, due_s=1.0), 1.0 + INTERRUPTED_TTFTS)
    assert is_aged_prompt(interrupted(1, due_s=1.0), 1.1 + INTERRUPTED_TTFTS)
    assert INTERRUPTED_TTFTS < AGED_TTFTS


def test_of_aged_prompts_interrupted_ones_go_first_and_others_by_arrival():
    aged = [prompt(number, 100, targets=Targets(ttft_s, 0.1)) for number, ttft_s in ((1, 0.9), (2, 0.5), (3, 1.0))]
    begun, now = interrupted(4, due_s=20.0), 30.0
    assert ids(in_order([*aged, begun, prompt(5, 100, arrival_s=29.5)], now, 1e4, Shares())) == [4, 1, 2, 3, 5]


def test_late_prompts_hide_no_others_in_the_queue():
    queue = WaitingQueue()
    for number in range(1, 101):
        queue.append(prompt(number, 10, arrival_s=0.0 if number <= 50 else 2.0))
    queue.append(prompt(101, 10, targets=None))
    queue.refresh(now=1.5)
    assert ids(queue.first(2)) == [51, 52, 1, 2, 101]
    assert len(queue) == 101
    for sequence in list(queue):
        queue.remove(sequence)
    assert len(queue) == 0


# --- the size of an iteration


def run_plan(scheduler: Scheduler, now: float) -> tuple[object, float]:
    """One plan, executed in the time that is predicted for it."""
    plan = scheduler.plan(now)
    assert plan is not None
    finished = [
        (chunk.sequence_id, 1) for batch in plan.sub_batches[:1] for chunk in batch.prefills if chunk.num_tokens < 300
    ]
    tokens = (*finished, *((key, 1) for batch in plan.sub_batches for key in batch.gpu_decodes))
    end_s = now + plan.predicted_s
    result = IterationResult(1, plan.iteration, tokens, timings=Timings(total_ns=round(plan.predicted_s * 1e9)))
    scheduler.apply(result, end_s)
    return plan, end_s


def test_a_long_prompt_is_cut_so_that_no_due_token_is_late():
    capacity = make_capacity(1000, 0, max_batch_tokens=5000, max_sequence_tokens=10_000)
    scheduler = Scheduler(capacity, ESTIMATOR, "auto", 10)
    scheduler.add(request(20, Targets(1.0, 0.01)), 0.0)
    _, now = run_plan(scheduler, 0.0)
    scheduler.add(request(3000, Targets(0.05, 1.0)), now)
    plan = scheduler.plan(now)
    # 10 ms until the next token: 0.2 ms fixed, 2 ms for 100 tokens, and 20 us for each of some 390 others.
    assert 0.009 < plan.predicted_s <= 0.01
    assert 400 < plan.sub_batches[0].prefills[0].num_tokens < 500


def test_a_prompt_without_hurry_takes_what_costs_nothing():
    """Long before it is due it fills the batch to the knee of 100 tokens (within 5 %), beside the decode."""
    capacity = make_capacity(1000, 0, max_batch_tokens=5000, max_sequence_tokens=10_000)
    scheduler = Scheduler(capacity, ESTIMATOR, "auto", 10)
    scheduler.add(request(20, Targets(1.0, 1.0)), 0.0)
    _, now = run_plan(scheduler, 0.0)
    scheduler.add(request(3000, Targets(60.0, 1.0)), now)
    assert scheduler.plan(now).sub_batches[0].prefills[0].num_tokens == 105


def test_without_targets_a_prompt_runs_in_one_piece():
    capacity = make_capacity(1000, 0, max_batch_tokens=5000, max_sequence_tokens=10_000)
    scheduler = Scheduler(capacity, ESTIMATOR, "auto", 10)
    scheduler.add(request(400, None), 0.0)
    assert scheduler.plan(0.0).sub_batches[0].prefills == (PrefillChunk(1, 0, 400),)


# --- what an iteration is made of


def make_work(num_gpu: int = 2, num_cpu: int = 4, chunk_tokens: tuple[int, ...] = (60, 90)) -> Work:
    gpu = [decoding(number, 50) for number in range(1, num_gpu + 1)]
    cpu = [decoding(100 + number, 40, Tier.HOST) for number in range(num_cpu)]
    work = Work(ESTIMATOR, gpu, cpu, (0, 0))
    work.take([Chunk(prompt(200 + index, size), 0, size, size, Tier.HOST) for index, size in enumerate(chunk_tokens)])
    return work


def test_two_sub_batches_share_tokens_and_cpu_attention_evenly():
    first, second = make_work().loads(Shape(150, 4, is_split=True))
    # 156 tokens in all: 78 each. The second prompt is cut between the two.
    assert first == SubBatchLoad(((60, 0), (14, 0)), 2, 100, 2, 80, 74, 0, num_outputs=5)
    assert second == SubBatchLoad(((76, 14),), 0, 0, 2, 80, 76, 14, num_outputs=3)


def test_a_shape_takes_from_the_front():
    batch = make_work().batch(Shape(70, 1))
    assert [(chunk.sequence.sequence_id, chunk.num_tokens) for chunk in batch.chunks[0]] == [(200, 60), (201, 10)]
    assert (ids(batch.gpu_decodes), ids(batch.cpu_decodes[0]), batch.cpu_decodes[1]) == ([1, 2], [100], [])
    assert [chunk.is_last for chunk in batch.chunks[0]] == [True, False]


def test_the_results_order_is_that_of_the_sub_batches():
    batch = make_work().batch(Shape(150, 4, is_split=True))
    assert ids(batch.sequences_with_output()) == [200, 1, 2, 102, 103, 201, 100, 101]
    assert batch.sub_batches()[1].prefills == (PrefillChunk(201, 14, 76),)


def test_cpu_attention_is_hidden_or_not():
    """1 ms of linear work hides 100 context tokens; 160 are in the two halves, 80 each."""
    assert make_work().cpu_excess_s(Shape(0, 4, is_split=True)) < 0
    # In one batch only the GPU's own attention of 100 tokens, 0.1 ms, stands beside 1.6 ms.
    assert make_work().cpu_excess_s(Shape(0, 4)) > 1.4e-3
    assert make_work().loads(Shape(0, 4))[1] == EMPTY_LOAD


# --- who may use the CPU


def make_pace(residents: list[Sequence], prefill_per_decode: float = 0.0) -> Pace:
    return Pace(
        ESTIMATOR, Calibration(ESTIMATOR), residents, 500, 64, prefill_per_decode, num_waiting=0, admits_all=False
    )


def test_the_cpu_takes_sequences_while_everybodys_tokens_come_in_time():
    """100 ms a token and 2 layers of 10 us a context token: about 4,700 tokens in two halves beside one another."""
    residents = [decoding(number, 1000, Tier.HOST) for number in range(1, 4)]
    assert make_pace(residents).allows(prompt(9, 900))
    assert not make_pace(residents).allows(prompt(9, 3000))


def test_late_sequences_take_no_pace_from_others():
    residents = [decoding(number, 3000, Tier.HOST) for number in range(1, 4)]
    assert not make_pace(residents).allows(prompt(9, 900))
    for sequence in residents:
        sequence.is_late = True
    assert make_pace(residents).allows(prompt(9, 900))


def test_without_targets_the_cpu_is_used_while_that_raises_throughput():
    """Two decodes on the GPU take 2.2 ms; a context of 100 on the CPU hides behind that in two halves, 10,000 don't."""
    residents = [decoding(number, 100) for number in range(1, 3)]
    for sequence in residents:
        sequence.is_late = False
    untargeted = [Sequence(item.sequence_id, request(99, None)) for item in residents]
    for sequence in untargeted:
        sequence.num_computed_tokens = 99
    assert make_pace(untargeted).allows(prompt(9, 100, targets=None))
    assert not make_pace(untargeted).allows(prompt(9, 10_000, targets=None))


def test_who_waits_for_a_parked_sequence_keeps_out_nobody_older():
    """With attention on the GPU alone: one parked on the host, an older prompt that is late already, a younger one."""
    loop = Loop(make_capacity(10, 10, max_batch_tokens=32), "gpu_only")
    scheduler, num_tokens = loop.scheduler, 0

    def step(now: float) -> None:
        nonlocal num_tokens
        plan = scheduler.plan(now)
        if plan is not None:
            num_tokens += len(scheduler.apply(loop.executor.run(plan), now).tokens)

    scheduler.add(request(16, None, 16), 0.0)
    step(0.0)
    scheduler.add(request(36, Targets(0.5, 0.1), 1), 0.0)
    step(0.0)
    scheduler.add(request(16, None, 8), 0.0)
    for number in range(1, 60):
        if number == 7:
            scheduler.add(request(4, None, 4), 0.6)
        step(number / 10)
    assert num_tokens == 16 + 1 + 8 + 4


def test_prompts_come_in_while_there_is_room_whatever_a_token_costs():
    """The knee is at two tokens: hardly anything comes for free, and yet the GPU's room fills."""
    loop = Loop(
        make_capacity(200, 0, max_batch_tokens=64, max_sequences=64, block_tokens=16),
        estimator=make_estimator(linear_token_s=5e-4),
    )
    for _ in range(130):
        loop.add(20, 150)
    num_decodes = []
    while (plan := loop.plan()) is not None:
        loop.apply()
        num_decodes += [len(batch.gpu_decodes) for batch in plan.sub_batches]
    assert statistics.mean(num_decodes) >= 15
    assert len(loop.finishes) == 130
