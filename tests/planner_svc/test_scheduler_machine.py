"""The scheduler against an executor that checks every plan: whatever happens, in whatever order, all are served."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.planning import NUM_TOKEN_IDS, FakeExecutor, expected_tokens, make_estimator

from planner_svc.scheduler import (
    DEFAULT_CLASS,
    MAX_LOSSES,
    MAX_LOSSES_IN_A_ROW,
    AdmissionError,
    Capacity,
    Scheduler,
    SequenceRequest,
    ServiceClass,
    Targets,
    Verdict,
)
from planner_svc.scheduler.sequence import State
from svc_common.plan import IterationPlan, IterationResult, Sampling

CAPACITIES = st.builds(
    Capacity,
    gpu_blocks=st.sampled_from([0, 3, 7, 8, 9, 10, 12, 16]),
    host_pools=st.one_of(
        st.sampled_from([0, 3, 7, 8, 9, 10, 12, 16]).map(lambda size: (size,)),
        st.lists(st.sampled_from([0, 2, 5, 7, 10]), min_size=2, max_size=3).map(tuple),
    ),
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
CLASSES = st.sampled_from(
    [
        DEFAULT_CLASS,
        ServiceClass("chat", priority=2, share=0.5, refuses_late=True),
        ServiceClass("chat too", priority=2, share=3.0),
        ServiceClass("batch", priority=-1),
    ]
)
TARGETS = st.sampled_from([None, None, Targets(0.02, 0.01), Targets(0.5, 0.1), Targets(60.0, 1.0)])
REQUESTS = st.builds(
    SequenceRequest,
    prompt=st.tuples(TOKENS, st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8])).map(lambda draw: (draw[0],) * (draw[1] + 1)),
    max_new_tokens=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 9, 12]),
    sampling=st.sampled_from([Sampling(), Sampling(num_logprobs=0)]),
    end_token_ids=st.sampled_from([frozenset(), frozenset(), frozenset({3, 11})]),
    targets=TARGETS,
    service_class=CLASSES,
    cache_salt=st.sampled_from([None, "", "", "another tenant"]),
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
        self.estimator = estimator
        self.losses: dict[int, tuple[int, int, int]] = {}
        """Of the executor, by sequence: tokens at the last one, in a row without a token in between, in all."""
        self.scheduler = Scheduler(capacity, estimator, policy, max_waiting)
        self.executor = FakeExecutor(capacity, policy=policy, num_layers=estimator.num_layers)
        self.unapplied: deque[IterationPlan] = deque()
        self.stale: list[IterationResult] = []
        self.expected: dict[int, list[int]] = {}
        self.streams: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.requests: dict[int, SequenceRequest] = {}
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
            self.requests[sequence_id] = request
            self.expected[sequence_id] = expected_tokens(request.prompt, request.max_new_tokens, request.end_token_ids)
            self.streams[sequence_id] = []

    @rule()
    def plan(self):
        self.now += 0.01
        had_work = self.scheduler.has_work()
        oldest = next((item for item in self.scheduler._residency.sequences if item.num_unscheduled), None)
        plan = self.scheduler.plan(self.now)
        # Room is made by later arrivals only: whoever is oldest keeps what it has.
        assert oldest is None or oldest.state is not State.WAITING
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
    @rule(data=st.data(), estimator=ESTIMATORS, change=st.sampled_from(["none", "a pool is lost", "all"]))
    def reset(self, data, estimator, change):
        if change == "all":
            self.capacity = data.draw(CAPACITIES)
        elif change == "a pool is lost":
            lost_pool = data.draw(st.integers(0, len(self.capacity.host_pools) - 1))
            pools = (0 if pool == lost_pool else size for pool, size in enumerate(self.capacity.host_pools))
            self.capacity = replace(self.capacity, host_pools=tuple(pools))
        self.epoch += 1
        self.estimator = estimator
        lost = set(self.scheduler.reset(self.capacity, estimator, self.epoch))
        assert lost == {key for key in self.open if not self._fits(key)}
        self.open -= lost
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == len(self.open)
        if self.unapplied:
            self.stale = [self.executor.run(plan) for plan in self.unapplied]
        self.unapplied.clear()
        self.executor = FakeExecutor(self.capacity, self.epoch, self.policy, estimator.num_layers)

    @precondition(lambda self: self.executor.num_iterations > 3)
    @rule(is_certain=st.booleans())
    def lose_executor(self, is_certain):
        """Whoever it computed has lost it once more; who ends by that, ends alone."""
        running = frozenset().union(*(plan.sequence_ids for plan in self.unapplied)) & self.open
        expected = {}
        for key in running:
            num_outputs, (num_before, in_a_row, total) = len(self.streams[key]), self.losses.get(key, (-1, 0, 0))
            in_a_row = (in_a_row if num_before == num_outputs else 0) + 1
            in_a_row = min(in_a_row, MAX_LOSSES_IN_A_ROW - (not is_certain))
            self.losses[key] = num_outputs, in_a_row, total + 1
            if in_a_row == MAX_LOSSES_IN_A_ROW:
                expected[key] = Verdict.BREAKS_EXECUTOR
            elif total + 1 >= MAX_LOSSES:
                expected[key] = Verdict.LOST_TOO_OFTEN
        assert dict(self.scheduler.lose(running, is_certain)) == expected
        # One at a time is tried, so that no two end for what one of them did.
        assert sum(verdict is Verdict.BREAKS_EXECUTOR for verdict in expected.values()) <= 1
        for key in expected:
            self.scheduler.finish(key)
        self.open -= expected.keys()
        assert self.scheduler.num_running == self.scheduler.gpu_blocks_used == self.scheduler.host_blocks_used == 0
        self.epoch += 1
        assert self.scheduler.reset(self.capacity, self.estimator, self.epoch) == ()
        self.unapplied.clear()
        self.executor = FakeExecutor(self.capacity, self.epoch, self.policy, self.estimator.num_layers)

    def _fits(self, sequence_id: int) -> bool:
        """Whether it can be served to its end on the GPU or in one of the pools."""
        capacity, request = self.capacity, self.requests[sequence_id]
        num_tokens = len(request.prompt) + request.max_new_tokens
        places = [capacity.gpu_blocks, *(capacity.host_pools if self.policy != "gpu_only" else ())]
        num_blocks = -(-(num_tokens - 1) // capacity.block_tokens)
        return num_tokens <= capacity.max_sequence_tokens and num_blocks <= max(places)

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
        names = {self.requests[key].service_class.name for key in self.open}
        assert sum(scheduler.num_waiting_of(name) for name in names) == scheduler.num_waiting
        assert 0 <= scheduler.gpu_blocks_used <= self.capacity.gpu_blocks
        assert scheduler.host_blocks_used == sum(scheduler.pool_blocks_used)
        assert all(
            0 <= used <= size for used, size in zip(scheduler.pool_blocks_used, self.capacity.host_pools, strict=True)
        )

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
        assert self.scheduler._residency.num_tokens_to_prefill == self.scheduler._queue.num_returned_tokens == 0
        assert all(lanes.tokens.total == lanes.num_late_tokens == 0 for lanes in self.scheduler._queue.classes)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=250, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = pytest.mark.timeout(120)(TestSchedulerMachine)
