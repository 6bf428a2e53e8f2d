"""Classes: what priority and share mean for the order of prompts, and that none waits for ever."""

from collections import Counter

import pytest
from support.planning import Loop, make_capacity, make_estimator

from planner_svc.scheduler import Scheduler, SequenceRequest, ServiceClass, Targets
from planner_svc.scheduler.batch import Batch, Chunk
from planner_svc.scheduler.order import in_order
from planner_svc.scheduler.prefix_sums import DueTokens
from planner_svc.scheduler.sequence import Sequence
from planner_svc.scheduler.shares import Shares
from planner_svc.scheduler.urgency import AGED_TTFTS, BATCH_TTFT_S, arrive
from planner_svc.scheduler.waiting import WaitingQueue
from svc_common.plan import IterationResult, Sampling, Tier, Timings

HIGH, LOW = ServiceClass("high", Targets(1.0, 0.1), priority=2), ServiceClass("low", priority=-1)
TWO_THIRDS, ONE_THIRD = ServiceClass("two", share=2.0), ServiceClass("one", share=1.0)


def prompt(sequence_id: int, service_class: ServiceClass, num_tokens: int = 10, arrival_s: float = 0.0) -> Sequence:
    request = SequenceRequest(
        (0,) * num_tokens, 5, Sampling(), frozenset(), service_class.targets, service_class=service_class
    )
    sequence = Sequence(sequence_id, request)
    arrive(sequence, arrival_s)
    return sequence


def known(*classes: ServiceClass) -> Shares:
    shares = Shares()
    for service_class in classes:
        shares.meet(service_class)
    return shares


def computing(service_class: ServiceClass, num_tokens: int) -> Batch:
    """So many tokens, one of them of an answer."""
    chunk = Chunk(prompt(99, service_class, num_tokens), 0, num_tokens - 1, num_tokens, Tier.GPU)
    return Batch(([chunk], []), [prompt(98, service_class)])


def ids(sequences: list[Sequence]) -> list[int]:
    return [sequence.sequence_id for sequence in sequences]


# --- order


def test_a_higher_priority_goes_first_even_when_it_can_no_longer_be_in_time():
    prompts = [prompt(1, LOW), prompt(2, HIGH), prompt(3, LOW), prompt(4, HIGH, arrival_s=5.0)]
    assert ids(in_order(prompts, 5.0, 1e4, known(HIGH, LOW))) == [4, 2, 1, 3]


def test_a_prompt_that_waited_too_long_takes_its_class_share_of_the_highest_priority():
    now = AGED_TTFTS * BATCH_TTFT_S + 1
    prompts = [*(prompt(number, LOW) for number in (1, 2, 3)), *(prompt(n, HIGH, 10, now) for n in (4, 5, 6))]
    shares = known(HIGH, LOW)
    shares.compete({"high", "low"})
    assert ids(in_order(prompts, now, 1e4, shares)) == [1, 4, 2, 5, 3, 6]


def test_of_what_cannot_all_be_in_time_the_lowest_priority_is_put_off():
    """At 1,000 tokens a second, 1.1 s of work for 1 s: the shorter low one waits, not the long high one."""
    low = ServiceClass("low", Targets(1.0, 0.1), priority=1)
    prompts = [prompt(1, low, 200), prompt(2, HIGH, 800), prompt(3, low, 100)]
    assert ids(in_order(prompts, 0.0, 1000.0, known(HIGH, low))) == [2, 3, 1]


def test_classes_of_one_priority_take_turns_by_their_shares():
    prompts = [prompt(number, ONE_THIRD) for number in (1, 2, 3)]
    prompts += [prompt(number, TWO_THIRDS) for number in (4, 5, 6, 7)]
    assert ids(in_order(prompts, 0.0, 1e4, known(ONE_THIRD, TWO_THIRDS))) == [1, 4, 5, 2, 6, 7, 3]


def test_nobody_saves_up_tokens():
    shares = known(ONE_THIRD, TWO_THIRDS)
    shares.compete({"two"})
    shares.charge(computing(TWO_THIRDS, 1000))
    shares.compete({"one", "two"})
    prompts = [prompt(1, ONE_THIRD), prompt(2, TWO_THIRDS), prompt(3, TWO_THIRDS), prompt(4, ONE_THIRD)]
    assert list(shares.turns((item, 10) for item in prompts).values()) == [500, 500, 505, 510]
    # Who has had more than its share keeps that on its account while it has nothing to do.
    shares.charge(computing(ONE_THIRD, 300))
    shares.compete({"two"})
    shares.compete({"one", "two"})
    assert shares.turns([(prompts[0], 10)]) == {1: 800}


# --- the queue


def test_every_class_is_looked_at_however_many_wait_in_another():
    queue = WaitingQueue()
    for number in range(1, 1001):
        queue.append(prompt(number, HIGH, arrival_s=number / 1e4))
    for number in range(1001, 1041):
        queue.append(prompt(number, LOW))
    assert ids(queue.first(48)) == [*range(1, 49), *range(1001, 1041)]
    assert (queue.num_of("high"), queue.num_of("low"), queue.num_of("unknown")) == (1000, 40, 0)
    assert queue.head is not None
    assert queue.head.sequence_id == 1


def test_in_a_class_the_first_due_comes_first_whatever_came_first():
    queue = WaitingQueue()
    patient, hasty = (
        SequenceRequest((0,), 5, Sampling(), frozenset(), targets) for targets in (Targets(9, 1), Targets(1, 1))
    )
    for number, request in enumerate([patient, hasty, patient], 1):
        sequence = Sequence(number, request)
        arrive(sequence, 0.0)
        queue.append(sequence)
    assert ids(queue.first(2)) == [2, 1]
    assert ids(queue.refresh(now=2.0)) == [2]
    assert queue.refresh(now=2.0) == []
    assert ids(queue.first(2)) == [1, 3, 2]
    for sequence in list(queue):
        queue.remove(sequence)
    assert len(queue) == 0
    assert [(lanes.tokens.total, lanes.num_late_tokens) for lanes in queue.classes] == [(0, 0)]


def test_tokens_due_before_a_time():
    tokens = DueTokens()
    added = [(7.5, 100), (0.0, 20), (1e6, 3), (7.5, 50)]
    for due_s, num_tokens in added:
        tokens.add(due_s, num_tokens)
    assert [tokens.before(due_s) for due_s in (0.0, 7.0, 7.5, 1e5, 1e6, 1e12)] == [20, 20, 170, 170, 173, 173]
    for due_s, num_tokens in added:
        tokens.add(due_s, -num_tokens)
    assert (tokens.total, tokens.before(1e12)) == (0, 0)


# --- the whole scheduler


def serve(classes: list[ServiceClass], num_iterations: int, num_waiting: int, step_s: float = 0.01) -> Counter[str]:
    """Tokens that each class gets while `num_waiting` of each wait always."""
    loop = Loop(make_capacity(12, 0, max_batch_tokens=32), estimator=make_estimator(linear_floor_s=step_s / 2))
    scheduler, executor, now = loop.scheduler, loop.executor, 0.0
    class_of: dict[int, ServiceClass] = {}
    tokens: Counter[str] = Counter()
    for _ in range(num_iterations):
        for service_class in classes:
            while scheduler.num_waiting_of(service_class.name) < num_waiting:
                request = SequenceRequest(
                    (1,) * 6, 4, Sampling(), frozenset(), service_class.targets, service_class=service_class
                )
                class_of[scheduler.add(request, now)] = service_class
        plan = scheduler.plan(now)
        now += step_s
        assert plan is not None
        for event in scheduler.apply(executor.run(plan, round(step_s * 1e9)), now).tokens:
            tokens[class_of[event.sequence_id].name] += 1
    return tokens


def test_tokens_are_shared_out_by_weight_while_all_have_work():
    tokens = serve([ONE_THIRD, TWO_THIRDS], 600, num_waiting=4)
    assert tokens["two"] / tokens["one"] == pytest.approx(2.0, rel=0.1)


def test_a_lower_priority_gets_nothing_before_its_time_and_no_more_than_its_share_after():
    """Its first has waited 20 times its target after 400 iterations of 10 ms; from then on it takes a third."""
    low = ServiceClass("low", Targets(0.2, 1.0), priority=-1, share=1.0)
    high = ServiceClass("high", None, priority=1, share=2.0)
    before = serve([low, high], 390, num_waiting=4)
    assert before["low"] == 0
    after = serve([low, high], 1600, num_waiting=4)
    assert 30 <= after["low"] <= after["high"]


@pytest.mark.parametrize("host_blocks", [0, 16])
@pytest.mark.parametrize("policy", ["auto", "gpu_only"])
def test_nothing_starves_whatever_arrives_with_a_higher_priority(policy, host_blocks):
    """The low one, which alone fills most of the GPU, is let in after 20 times its target, and then never for long
    without a token though new ones of the high class come all the time."""
    loop = Loop(make_capacity(12, host_blocks, max_batch_tokens=32), policy)
    high, low = ServiceClass("high", priority=1), ServiceClass("low", Targets(0.05, 1.0))
    scheduler, now, last_token_at = loop.scheduler, 0.0, None
    number = scheduler.add(SequenceRequest((1,) * 30, 10, Sampling(), frozenset(), low.targets, low), now)
    for iteration in range(600):
        while scheduler.num_waiting_of("high") < 6:
            scheduler.add(SequenceRequest((1,) * 6, 6, Sampling(), frozenset(), None, high), now)
        plan = scheduler.plan(now)
        now += 0.01
        assert plan is not None
        events = scheduler.apply(loop.executor.run(plan), now).tokens
        for event in events:
            if event.sequence_id == number:
                assert last_token_at is None or iteration - last_token_at <= 100
                last_token_at = iteration
                if event.finish:
                    assert iteration >= 100  # its 20 targets
                    return
    raise AssertionError("the low one starves")


def test_one_class_costs_nothing_and_changes_nothing():
    request = SequenceRequest((1,) * 6, 4, Sampling(), frozenset())
    scheduler = Scheduler(make_capacity(12, 0), make_estimator(), "auto", 10)
    scheduler.add(request, 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(IterationResult(1, 1, ((1, 3),), timings=Timings(total_ns=10)), 0.1)
    assert scheduler._queue.shares.is_single
