"""Keeps one cpu_attn_svc at the number of threads that CoreController decides on, and the estimator informed of it."""

import logging
import time
from collections import deque

from planner_svc.cores import Change, CoreController
from planner_svc.counters import Counters
from planner_svc.cpu_load import Sample
from planner_svc.estimator import TableEstimator
from planner_svc.executor_client import HostClient, HostStatus, ThreadsUnchangedError
from svc_common.plan import IterationPlan, IterationResult, PoolWork

logger = logging.getLogger(__name__)


class CoreKeeper:
    """Called by ExecutorLoop. Only `adjust` waits for anybody, and no plan waits for `adjust`."""

    def __init__(self, controller: CoreController, counters: Counters, pool: int = 0) -> None:
        """`pool`: the service's."""
        self._pool = pool
        self._name = f"CPU attention threads of pool {pool}"
        self._controller = controller
        self._counters = counters
        self._estimator: TableEstimator | None = None
        self._planned: deque[tuple[int, int]] = deque()
        """(sequences of the host in it, sequences of the host left out) of each plan whose result is to come."""
        self._wanted: Change | None = None
        """Decided, and not known to be done."""

    @property
    def limits(self) -> tuple[int, int] | None:
        """Fewest and most threads; None where their number is left alone."""
        return self._controller.limits

    def measured(self, estimator: TableEstimator, num_threads: int) -> None:
        """The estimator's tables are new, their attention on the CPU computed by `num_threads`."""
        self._estimator = estimator
        self._controller.measured_with(num_threads)
        self._inform()

    def begin_epoch(self) -> None:
        """Plans of the epoch before have no result, and what was wanted may be meant for a process that is gone."""
        self._planned.clear()
        self._wanted = None

    def planned(self, plan: IterationPlan, num_in_pool: int) -> None:
        """`num_in_pool`: sequences with their KV there."""
        if plan.pool_decodes:
            num_attended = plan.pool_decodes[self._pool]
        else:
            num_attended = sum(len(batch.cpu_decodes) for batch in plan.sub_batches)
            num_attended += len(plan.cohort.sequence_ids) if plan.cohort else 0
        num_prefills = sum(len(batch.prefills) for batch in plan.sub_batches)
        self._planned.append((num_attended, max(0, num_in_pool - num_attended - num_prefills)))

    def observe(self, result: IterationResult) -> None:
        """Of the oldest plan without one."""
        num_attended, num_left_out = self._planned.popleft()
        timings = result.timings
        work, wait_ns = PoolWork(timings.cpu_attention_ns, result.cpu_attended_tokens), timings.cpu_wait_ns
        if result.pool_work:
            # The executor waits for all services; so long for each as it would if the others took no time.
            hidden_ns = max(pool.attention_ns for pool in result.pool_work) - wait_ns
            work = result.pool_work[self._pool]
            wait_ns = max(0, work.attention_ns - max(0, hidden_ns))
        sample = Sample(
            total_s=timings.total_ns / 1e9,
            cpu_wait_s=wait_ns / 1e9,
            cpu_attention_s=work.attention_ns / 1e9,
            cpu_tokens=work.attended_tokens,
            num_attended=num_attended,
            num_left_out=num_left_out,
        )
        self._controller.observe(sample, time.monotonic())

    def note(self, status: HostStatus) -> None:
        """What the service, attached in this epoch, says of itself: others may change its threads, too."""
        controller, before = self._controller, self._controller.num_threads
        if self._wanted and status.num_threads == self._wanted.num_threads:
            self._done(self._wanted)  # Though it did not say so.
        else:
            if status.num_threads != before:
                self._wanted = None
            if before not in (0, status.num_threads):
                logger.info(
                    "%s: %d -> %d, by somebody else",
                    self._name,
                    before,
                    status.num_threads,
                )
            controller.note(status.num_threads, status.max_threads, time.monotonic())
        self._inform()

    async def adjust(self, host: HostClient) -> None:
        """Changes the threads where that is due. After a failure the next call tries again, or something better."""
        is_attending = any(num_attended for num_attended, _ in self._planned)
        self._wanted = change = self._controller.decide(time.monotonic(), is_attending) or self._wanted
        if change:
            try:
                await host.set_threads(change.num_threads)
            except ThreadsUnchangedError as error:
                logger.warning("%s: not set to %d: %s", self._name, change.num_threads, error)
            else:
                if self._wanted is change:  # The epoch is still the same.
                    self._done(change)
        self._inform()

    def _done(self, change: Change) -> None:
        before = self._controller.num_threads
        self._wanted = None
        self._controller.done(change, time.monotonic())
        if change.num_threads > before:
            self._counters.cpu_threads_grown += 1
        else:
            self._counters.cpu_threads_shrunk += 1
        logger.info("%s: %d -> %d: %s", self._name, before, change.num_threads, change.reason)

    def _inform(self) -> None:
        if self._estimator:
            self._estimator.cpu_scales[self._pool] = self._controller.cpu_scale
