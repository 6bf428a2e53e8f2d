"""Drives the serving planner's core controller in a simulation: threads of attention on the CPU follow the load."""

from planner_svc.cores import CoreController, ThreadLimits
from planner_svc.cpu_load import Sample
from planner_svc.estimator import Factors, Timeline
from planner_svc.scheduler import Scheduler
from planner_svc.simulator.executor import SimulatedExecutor
from planner_svc.simulator.policy import Policy
from svc_common.plan import IterationPlan

_DECIDES_EVERY_S = 1.0
"""As CoreKeeper is asked by the planner."""


class ElasticCores:
    """An Observer. The machine's figures are those of the most threads; with fewer, attention takes longer by as much.

    Starts with the most, as measured tables would. The scheduler is not told: it learns from what iterations take.
    """

    def __init__(self, least: int, most: int, executor: SimulatedExecutor, factors: Factors) -> None:
        """`factors`: by which the executor's estimator multiplies; its `cpu_decode` is changed here."""
        self._most = most
        self._executor = executor
        self._factors = factors
        self._controller = CoreController(ThreadLimits(least, most))
        self._controller.measured_with(most)
        self._controller.note(most, most, 0.0)
        self._next_s = _DECIDES_EVERY_S
        self.changes: list[tuple[float, int]] = [(0.0, most)]
        """(seconds, threads from then on), the first at the start."""

    def observe(self, start_s: float, plan: IterationPlan, timeline: Timeline, policy: Policy) -> None:
        """An iteration starts; what it takes is known already, and counts when it ends."""
        assert isinstance(policy, Scheduler)
        num_attended = sum(len(batch.cpu_decodes) for batch in plan.sub_batches)
        num_attended += len(plan.cohort.sequence_ids) if plan.cohort else 0
        num_prefills = sum(len(batch.prefills) for batch in plan.sub_batches)
        # Up to its start: the number of threads does not change within an iteration.
        while self._next_s <= start_s:
            self._decide(self._next_s, num_attended > 0)
            self._next_s += _DECIDES_EVERY_S
        result = self._executor.latest_result
        sample = Sample(
            total_s=result.timings.total_ns / 1e9,
            cpu_wait_s=result.timings.cpu_wait_ns / 1e9,
            cpu_attention_s=result.timings.cpu_attention_ns / 1e9,
            cpu_tokens=result.cpu_attended_tokens,
            num_attended=num_attended,
            num_left_out=max(0, sum(policy.num_by_pool) - num_attended - num_prefills),
        )
        self._controller.observe(sample, start_s + timeline.total_s)

    def _decide(self, now: float, is_attending: bool) -> None:
        change = self._controller.decide(now, is_attending)
        if change is None:
            return
        self._controller.done(change, now)
        self._factors.cpu_decode = self._most / change.num_threads
        self.changes.append((now, change.num_threads))

    def mean(self, until_s: float) -> float:
        """Threads on average from the start to `until_s`, which is above 0."""
        ends = [at_s for at_s, _ in self.changes[1:]] + [until_s]
        spans = zip(self.changes, ends, strict=True)
        return sum(num * max(0.0, min(end_s, until_s) - at_s) for (at_s, num), end_s in spans) / until_s
