"""The scheduler against an executor that checks every plan: whatever happens, in whatever order, all are served."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.planning import NUM_TOKEN_IDS, FakeExecutor, expected_tokens, make_estimator

from planner_svc.plan import IterationPlan, IterationResult, Sampling, Tier
from planner_svc.scheduler import AdmissionError, Capacity, Scheduler, SequenceRequest

CAPACITIES = st.builds(
    Capacity,
    gpu_blocks=st.integers(0, 8),
    host_blocks=st.integers(0, 10),
    block_tokens=st.integers(1, 4),
    max_sequences=st.integers(1, 6),
    max_batch_tokens=st.integers(1, 12),
    max_sequence_tokens=st.integers(8, 40),
    block_bytes=st.just(1024),
)
ESTIMATORS = st.sampled_from(
    [
        make_estimator(),
        make_estimator(cpu_token_s=1e-2),  # the CPU can hide nothing
        make_estimator(cpu_token_s=1e-4),  # it can hide a few tokens
        make_estimator(linear_floor_s=1e-6, linear_token_s=1e-6, cpu_token_s=1e-6),
        make_estimator(cpu_token_s=0.0, linear_floor_s=0.0, linear_token_s=0.0),  # nothing costs anything
    ]
)
PROMPTS = st.lists(st.integers(0, NUM_TOKEN_IDS - 1), min_size=1, max_size=14).map(tuple)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        capacity=CAPACITIES,
        estimator=ESTIMATORS,
        policy=st.sampled_from(["auto", "gpu_only", "asymmetric"]),
        max_waiting=st.integers(1, 12),
    )
    def start(self, capacity, estimator, policy, max_waiting):
        self.capacity, self.policy, self.epoch = capacity, policy, 1
        self.scheduler = Scheduler(capacity, estimator, policy, max_waiting)
        self.executor = FakeExecutor(capacity, policy=policy)
        self.unapplied: deque[IterationPlan] = deque()
        self.stale: list[IterationResult] = []
        self.expected: dict[int, list[int]] = {}
        self.streams: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.now = 0.0

    # --- what may happen

    @rule(
        prompt=PROMPTS,
        max_new_tokens=st.integers(1, 10),
        end_token_ids=st.frozensets(st.integers(0, NUM_TOKEN_IDS - 1), max_size=2),
        num_logprobs=st.sampled_from([-1, 0]),
    )
    def add(self, prompt, max_new_tokens, end_token_ids, num_logprobs):
        request = SequenceRequest(prompt, max_new_tokens, Sampling(num_logprobs=num_logprobs), end_token_ids)
        waiting = self.scheduler.num_waiting
        try:
            sequence_id = self.scheduler.add(request, self.now)
        except AdmissionError:
            assert self.scheduler.num_waiting == waiting
            return
        self.open.add(sequence_id)
        self.expected[sequence_id] = expected_tokens(prompt, max_new_tokens, end_token_ids)
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
        for event in self.scheduler.apply(result).tokens:
            assert event.sequence_id in self.open
            stream = self.streams[event.sequence_id]
            stream.append(event.token_id)
            expected = self.expected[event.sequence_id]
            assert stream == expected[: len(stream)]
            assert (event.finish is not None) == (len(stream) == len(expected))
            if event.finish:
                self.open.remove(event.sequence_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        sequence_id = data.draw(st.sampled_from(sorted(self.open)))
        self.scheduler.finish(sequence_id)
        self.scheduler.finish(sequence_id)
        self.open.remove(sequence_id)

    @precondition(lambda self: self.epoch < 4)
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
        self.executor = FakeExecutor(self.capacity, self.epoch, self.policy)

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
        assert self.scheduler.apply(self.stale.pop()).tokens == ()

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
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = pytest.mark.timeout(120)(TestSchedulerMachine)
