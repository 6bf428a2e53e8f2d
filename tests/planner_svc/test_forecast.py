"""Early refusal: what is predicted, what is learned, and what it does for those that are let in."""

import random

import pytest
from support.machines import SPEC
from support.overload import Outcome, run_classes
from support.planning import make_capacity, make_estimator

from planner_svc.estimator import Calibration
from planner_svc.scheduler import AdmissionReason, LateError, SequenceRequest, ServiceClass, Targets
from planner_svc.scheduler.costs import Costs
from planner_svc.scheduler.forecast import Flow, Forecast, came_late
from planner_svc.scheduler.residency import Residency
from planner_svc.scheduler.sequence import Sequence, State
from planner_svc.scheduler.urgency import arrive
from planner_svc.scheduler.waiting import WaitingQueue
from planner_svc.simulator.spec import parse_profile
from svc_common.plan import Sampling, Tier
from svc_common.workloads.workload import Arrival

CAPACITY = make_capacity(50, 0, block_tokens=16, max_batch_tokens=512)
"""Room for 800 tokens."""
ESTIMATOR = make_estimator()
RATE = 0.8 * 420 / 8.96e-3
"""Of prefill, as in test_victims: 37,500 tokens a second."""
CHAT = ServiceClass("chat", Targets(1.0, 1.0), refuses_late=True)


class Door:
    """A forecast and what it looks at."""

    def __init__(self):
        self.residency, self.queue = Residency(CAPACITY), WaitingQueue()
        calibration = Calibration(ESTIMATOR)
        costs = Costs(CAPACITY, calibration)
        self.forecast = Forecast(CAPACITY, calibration, costs, self.residency, self.queue)
        self.next_id = 1

    def sequence(self, num_tokens, service_class=CHAT, arrival_s=0.0):
        request = SequenceRequest(
            (1,) * num_tokens, 9, Sampling(), frozenset(), service_class.targets, service_class=service_class
        )
        sequence = Sequence(self.next_id, request)
        self.next_id += 1
        arrive(sequence, arrival_s)
        return sequence

    def run(self, num_tokens):
        """One that decodes on the GPU."""
        sequence = self.sequence(num_tokens)
        self.begin(sequence, num_tokens)

    def begin(self, sequence, num_computed):
        """Of its prompt, the rest is still to come."""
        self.residency.admit(sequence, Tier.GPU)
        sequence.advance_to(num_computed)
        self.residency.note_prefilled(num_computed)

    def wait(self, num_tokens, service_class=CHAT, arrival_s=0.0):
        self.queue.append(self.sequence(num_tokens, service_class, arrival_s))

    def predicted_s(self, num_tokens, service_class=CHAT, start_s=0.0):
        """Of the first token: what a target that nothing reaches is refused with."""
        refusing = ServiceClass(
            service_class.name, Targets(1e-9, 1e3), service_class.priority, service_class.share, refuses_late=True
        )
        with pytest.raises(LateError) as refusal:
            self.forecast.check(self.sequence(num_tokens, refusing).request, start_s, 0.0)
        assert refusal.value.reason is AdmissionReason.TTFT_UNREACHABLE
        return refusal.value.predicted_s


def test_what_waits_and_what_is_begun_and_the_prompt_itself_are_computed_first():
    door = Door()
    door.run(16)
    assert door.predicted_s(100) == pytest.approx(100 / RATE, rel=0.01)
    assert door.predicted_s(100, start_s=2.0) == pytest.approx(2 + 100 / RATE, rel=0.01)
    hasty = ServiceClass("chat", Targets(1e-10, 1e3))  # due before the one that is asked for
    door.wait(200, hasty)
    assert door.predicted_s(100) == pytest.approx(300 / RATE, rel=0.01)
    begun = door.sequence(50)
    door.begin(begun, 20)
    assert door.predicted_s(100) == pytest.approx(330 / RATE, rel=0.01)
    door.residency.leave(begun, begun.state.FINISHED)
    door.wait(400)  # due later
    assert door.predicted_s(100) == pytest.approx(300 / RATE, rel=0.01)


def test_who_is_ahead_depends_on_priority_and_share():
    door = Door()
    door.run(16)
    door.wait(100, ServiceClass("above", priority=1))
    door.wait(50, ServiceClass("below", priority=-1))
    assert door.predicted_s(100) == pytest.approx(200 / RATE, rel=0.01)
    door.wait(300, ServiceClass("beside", share=0.5))
    assert door.predicted_s(100) == pytest.approx(250 / RATE, rel=0.01)  # half of its own 100 tokens
    door.queue.put_back(door.sequence(80, ServiceClass("below", priority=-1)))
    assert door.predicted_s(100) == pytest.approx(330 / RATE, rel=0.01)


def test_beyond_the_free_room_the_measured_rate_counts():
    door = Door()
    door.run(600)
    unmeasured_s = door.predicted_s(260)
    door.wait(5, ServiceClass("below", priority=-1))
    for now, num_admitted in ((-3.0, 0), (-2.0, 100), (0.0, 100)):
        door.forecast.note_plan(num_admitted, now)
    # 600 tokens fill 38 blocks of 50: 192 tokens have room, 68 wait for it at 50 a second.
    assert door.predicted_s(260) == pytest.approx(unmeasured_s + 68 / 50)
    assert door.predicted_s(192) < 0.1
    # Ends make room faster: 400 tokens in the same two seconds, and nobody else came for it.
    for now in (-2.0, 0.0):
        door.forecast.note_plan(0, now)
        ended = door.sequence(400)
        ended.state = State.RUNNING
        door.forecast.note_end(ended)
    assert door.predicted_s(260) == pytest.approx(unmeasured_s + 68 / 200)


def test_a_flow_is_measured_over_the_time_that_counts():
    flow = Flow()
    assert flow.tokens_per_s(0.0) == 0.0
    for start_s in (0.0, 100.0):
        flow.advance_to(start_s, counts_on=True)
        flow.advance_to(start_s + 1, counts_on=True)
        flow.add(30)
        flow.advance_to(start_s + 3, counts_on=False)
        flow.add(50)
    # Between the first mark and the last: 50, 30 and 50 tokens in 2 + 1 + 2 seconds.
    assert flow.tokens_per_s(200.0) == pytest.approx(130 / 5)
    flow.advance_to(200.0, counts_on=True)
    assert flow.tokens_per_s(205.0) == pytest.approx(130 / 10)  # nothing comes for five more
    for _ in range(32):
        flow.add(1)
    assert flow.tokens_per_s(201.0) == pytest.approx(31 / 1)  # the first has gone by


def test_a_pace_that_the_gpu_does_not_keep_is_refused():
    door = Door()
    door.run(16)
    request = door.sequence(10, ServiceClass("chat", Targets(60, 1e-3), refuses_late=True)).request
    with pytest.raises(LateError) as refusal:
        door.forecast.check(request, 0.0, 0.0)
    error = refusal.value
    assert (error.reason, error.field, error.target_s) == (AdmissionReason.TPOT_UNREACHABLE, "tpot", 1e-3)
    assert error.predicted_s == pytest.approx(2.2e-3, rel=0.05)


@pytest.mark.parametrize("service_class", [CHAT, ServiceClass("chat", None, refuses_late=True)])
def test_an_idle_executor_and_a_class_without_targets_refuse_nothing(service_class):
    door = Door()
    if service_class.targets is None:
        door.run(700)
        door.wait(10_000)
    door.forecast.check(door.sequence(30_000_000, service_class).request, 0.0, 0.0)


def test_outcomes_move_the_factor_and_it_stays_within_bounds():
    door = Door()
    door.run(16)
    before_s = door.predicted_s(100)
    late, in_time = door.sequence(10), door.sequence(10)
    late.is_late = True
    door.forecast.note_first_token(late)
    assert door.predicted_s(100) == pytest.approx(1.25 * before_s)
    for _ in range(40):
        door.forecast.note_first_token(in_time)
    assert door.predicted_s(100) == pytest.approx(before_s)
    for sequence, bound in ((late, 4.0), (in_time, 0.2)):
        for _ in range(800):
            door.forecast.note_first_token(sequence)
        assert door.predicted_s(100) == pytest.approx(bound * before_s)


def test_one_request_counts_as_late_once_and_as_soon_as_that_is_known():
    door = Door()
    door.run(16)
    before_s = door.predicted_s(100)
    sequence = door.sequence(10)
    door.forecast.note_overdue([sequence, door.sequence(10, ServiceClass("queueing", CHAT.targets))])
    assert door.predicted_s(100) == pytest.approx(1.25 * before_s)
    sequence.is_late, sequence.first_token_s, sequence.outputs = True, 10.0, [1, 1]
    door.forecast.note_first_token(sequence)
    door.forecast.note_last_token(sequence, 99.0)
    assert door.predicted_s(100) == pytest.approx(1.25 * before_s)
    slow = door.sequence(10)
    slow.first_token_s, slow.outputs = 10.0, [1, 1]
    door.forecast.note_last_token(slow, 11.0)
    assert door.predicted_s(100) == pytest.approx(1.25 * before_s)
    door.forecast.note_last_token(slow, 11.1)
    assert door.predicted_s(100) == pytest.approx(1.25**2 * before_s)


def test_a_pace_is_judged_on_average():
    sequence = Door().sequence(5)
    assert not came_late(sequence, 99.0)  # its first token has not come
    sequence.first_token_s = 10.0
    sequence.outputs = [1, 1, 1]
    assert not came_late(sequence, 12.0)
    assert came_late(sequence, 12.1)


# --- what it is good for

PROFILE = parse_profile(SPEC, "box", "spec")


def poisson(num_requests: int, rate: float, prompt: int, output: int) -> list[Arrival]:
    rng, at_s, arrivals = random.Random(3), 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(rate)
        arrivals.append(Arrival(at_s, rng.randint(1, 2 * prompt), rng.randint(1, 2 * output)))
    return arrivals


def serve_both_ways(rate: float, prompt: int, output: int) -> tuple[list[Outcome], list[Outcome]]:
    """By a class that queues and by one that refuses."""
    load = poisson(700, rate, prompt, output)
    queueing, refusing = (ServiceClass("chat", PROFILE.targets, refuses_late=refuses) for refuses in (False, True))
    queued, met = (run_classes(PROFILE, [(item, kind) for item in load]) for kind in (queueing, refusing))
    return queued, met


def num_in_time(outcomes: list[Outcome]) -> int:
    return sum(item.in_time for item in outcomes)


@pytest.mark.parametrize(
    ("rate", "prompt", "output", "share"),
    [
        (45.0, 150, 60, 0.95),
        (60.0, 150, 60, 0.95),
        (40.0, 40, 150, 0.9),  # The first ends come only when half of the load has arrived.
    ],
)
def test_under_overload_the_accepted_are_in_time_and_no_fewer_than_without_refusal(rate, prompt, output, share):
    """At 1.5 and 2 times what the machine sustains."""
    queued, met = serve_both_ways(rate, prompt, output)
    accepted = [item for item in met if item.refusal is None]
    assert num_in_time(accepted) >= share * len(accepted)
    assert num_in_time(met) >= num_in_time(queued)


def test_without_overload_hardly_anything_is_refused():
    queued, met = serve_both_ways(20.0, 150, 60)
    assert num_in_time(queued) == 700
    assert num_in_time(met) >= 0.99 * 700
