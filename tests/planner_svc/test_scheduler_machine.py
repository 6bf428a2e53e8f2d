"""The scheduler against an executor that checks every plan: whatever happens, in whatever order, all are served."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.planning import NUM_TOKEN_IDS, FakeExecutor, expected_tokens, make_estimator

from planner_svc.scheduler import AdmissionError, Capacity, Scheduler, SequenceRequest
from svc_common.plan import IterationPlan, IterationResult, Sampling, Tier

CAPACITIES = st.builds(
    Capacity,
    gpu_blocks=st.sampled_from([0, 3, 7, 8, 9, 10, 12, 16]),
    host_blocks=st.sampled_from([0, 3, 7, 8, 9, 10, 12, 16]),
    block_tokens=st.sampled_from([1, 2, 3]),
    max_sequences=st.sampled_from([8, 5, 2, 1]),
    max_batch_tokens=st.sampled_from([24, 12, 8, 3, 1]),
    max_sequence_tokens=st.sampled_from([30, 12]),
    block_bytes=st.just(1024),
)
ESTIMATORS = st.sampled_from(
    [
        make_estimator(),
        make_estimator(cpu_token_s=1e-2, num_layers=7),  # the CPU can hide nothing
        make_estimator(cpu_token_s=1e-4, num_layers=4),  # it can hide a few tokens
        make_estimator(linear_floor_s=1e-6, linear_token_s=1e-6, cpu_token_s=1e-6, num_layers=3),
        make_estimator(cpu_token_s=0.0, linear_floor_s=0.0, linear_token_s=0.0),  # nothing costs anything
    ]
)
TOKENS = st.integers(0, NUM_TOKEN_IDS - 1)
REQUESTS = st.builds(
    SequenceRequest,
    prompt=st.tuples(TOKENS, st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8])).map(lambda draw: (draw[0],) * (draw[1] + 1)),
    max_new_tokens=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 12]),
    sampling=st.sampled_from([Sampling(), Sampling(num_logprobs=0)]),
    end_token_ids=st.sampled_from([frozenset(), frozenset(), frozenset({3, 11})]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        capacity=CAPACITIES,
        estimator=ESTIMATORS,
        policy=st.sampled_from(["auto", "asymmetric", "gpu_only", "same_layer", "decoupled"]),
        max_waiting=st.sampled_from([20, 5]),
        requests=st.lists(REQUESTS, min_size=5, max_size=9),
    )
    def start(self, capacity, estimator, policy, max_waiting, requests):
        self.capacity, self.policy, self.epoch = capacity, policy, 1
        self.scheduler = Scheduler(capacity, estimator, policy, max_waiting)
        self.executor = FakeExecutor(capacity, policy=policy, num_layers=estimator.num_layers)
        self.unapplied: deque[IterationPlan] = deque()
        self.stale: list[IterationResult] = []
        self.expected: dict[int, list[int]] = {}
        self.streams: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.now = 0.0
        self.add(requests)

    # --- what may happen

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests):
        for request in requests:
            waiting = self.scheduler.num_waiting
            try:
                sequence_id = self.scheduler.add(request, self.now)
            except AdmissionError:
                assert self.scheduler.num_waiting == waiting
                continue
            self.open.add(sequence_id)
            self.expected[sequence_id] = expected_tokens(request.prompt, request.max_new_tokens, request.end_token_ids)
            self.streams[sequence_id] = []

    @rule()
    def plan(self):
        self.now += 0.01
        had_work = self.scheduler.has_work()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            assert not self.scheduler.has_work()
            # Work never waits with nothing running.
            assert self.unapplied or not self.open
            return
        assert had_work
        self.unapplied.append(plan)
        assert len(self.unapplied) <= 2

    @precondition(lambda self: self.unapplied)
    @rule(total_ns=st.sampled_from([0, 1, 1_000_000, 10**12]))
    def apply(self, total_ns):
        result = self.executor.run(self.unapplied.popleft(), total_ns)
        for event in self.scheduler.apply(result, now=self.now).tokens:
            assert event.sequence_id in self.open
            stream = self.streams[event.sequence_id]
            stream.append(event.token_id)
            expected = self.expected[event.sequence_id]
            assert stream == expected[: len(stream)]
            assert (event.finish is not None) == (len(stream) == len(expected))
            if event.finish:
                self.open.remove(event.sequence_id)

    @rule(num_iterations=st.sampled_from([3, 7, 15]), ahead=st.booleans())
    def advance(self, num_iterations, ahead):
        for _ in range(num_iterations):
            self.plan()
            if ahead:
                self.plan()
            if self.unapplied:
                self.apply(1_000_000)

    @precondition(lambda self: len(self.open) > 2)
    @rule(data=st.data())
    def cancel(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.finish(sequence_id)
        self.scheduler.finish(sequence_id)
        self.open.remove(sequence_id)

    @precondition(lambda self: self.executor.num_iterations > 10)
    @rule(data=st.data(), lose_host=st.booleans(), estimator=ESTIMATORS, same_capacity=st.booleans())
    def reset(self, data, lose_host, estimator, same_capacity):
        if not same_capacity:
            self.capacity = data.draw(CAPACITIES)
        on_host = {key for key, known in self._planned_tiers().items() if known is Tier.HOST}
        self.epoch += 1
        lost = set(self.scheduler.reset(self.capacity, estimator, self.epoch, lose_host))
        assert lost <= self.open
        if same_capacity:
            assert lost == (on_host & self.open if lose_host else set())
        self.open -= lost
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == len(self.open)
        if self.unapplied:
            self.stale = [self.executor.run(plan) for plan in self.unapplied]
        self.unapplied.clear()
        self.executor = FakeExecutor(self.capacity, self.epoch, self.policy, estimator.num_layers)

    def _planned_tiers(self) -> dict[int, Tier]:
        """By sequence with KV in the executor once all its plans are done, or with tokens yet to come."""
        tiers = {key: known.tier for key, known in self.executor.sequences.items()}
        for plan in self.unapplied:
            tiers |= {new.sequence_id: new.tier for new in plan.new_sequences}
            tiers |= {swap.sequence_id: swap.target for swap in plan.swaps}
        return {key: tier for key, tier in tiers.items() if key not in self._waiting_ids()}

    def _waiting_ids(self) -> set[int]:
        return {sequence.sequence_id for sequence in self.scheduler._queue}

    @precondition(lambda self: self.stale)
    @rule()
    def late_result_of_an_earlier_epoch(self):
        assert self.scheduler.apply(self.stale.pop(), now=0.0).tokens == ()

    # --- what must hold

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.num_waiting + scheduler.num_running == len(self.open)
        assert 0 <= scheduler.gpu_blocks_used <= self.capacity.gpu_blocks
        assert 0 <= scheduler.host_blocks_used <= self.capacity.host_blocks

    def teardown(self):
        """Everything accepted finishes, and nothing is leaked."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(len(self.expected[key]) + 14 for key in self.open)
        for _ in range(20 * work + 20):
            if not (self.open or self.unapplied or self.scheduler.has_work()):
                break
            self.plan()
            self.plan()
            if self.unapplied:
                self.apply(1_000_000)
        assert not self.open
        assert not self.scheduler.has_work()
        assert self.executor.sequences == {}
        assert self.scheduler.gpu_blocks_used == self.scheduler.host_blocks_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=250, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = pytest.mark.timeout(120)(TestSchedulerMachine)
