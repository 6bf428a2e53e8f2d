"""Drives the executor through one epoch: plans go to it and results come back, until a reason comes to end it."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from planner_svc.engine import Engine
from planner_svc.executor_client import ExecutorClient, PlanStream
from planner_svc.host_watch import HostWatch
from planner_svc.iteration_meters import IterationMeters
from planner_svc.scheduler import TokenEvent
from planner_svc.traces import Traces
from svc_common.plan import ExecutionError, IterationPlan, IterationResult

PLANS_AHEAD = 2
"""One runs, one waits."""

logger = logging.getLogger(__name__)


class EpochEnd(Enum):
    """Why an epoch is over though the executor is well."""

    HOST_LOST = "a CPU attention service is lost"
    HOST_BACK = "a CPU attention service can be attached again"
    FAILED = "an iteration failed"
    POLICY = "layers are to run elsewhere"
    HOST_STOPS = "a CPU attention service has been told to stop"
    EXECUTOR_STOPS = "the executor has been told to stop"

    @property
    def takes_results(self) -> bool:
        """Whether what runs and what waits is still worth having: nobody is lost."""
        return self not in (EpochEnd.HOST_LOST, EpochEnd.FAILED)


class Drive:
    """Of one epoch after the other; what the last one left can be read until the next begins."""

    def __init__(
        self,
        engine: Engine,
        executor: ExecutorClient,
        watches: Sequence[HostWatch],
        traces: Traces,
        meters: IterationMeters,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._watches = tuple(watches)
        self._traces = traces
        self._meters = meters
        self._in_flight: deque[IterationPlan] = deque()
        """Plans of this epoch whose results are still to come."""
        self.is_under_way = False
        self.has_progressed = False
        """This epoch has yielded a result."""
        self.requested_end: EpochEnd | None = None
        self.lost_pools: set[int] = set()
        """By what their services say or do not say, in this epoch."""

    async def run(self, device: str) -> EpochEnd:
        """Feeds plans and takes results until the epoch is over. Raises ExecutorLostError."""
        stream = self._executor.execute()
        results: deque[IterationResult | Exception] = deque()
        reader = asyncio.create_task(self._read(stream, results))
        self.requested_end = None
        self.lost_pools.clear()
        self._in_flight.clear()
        self.has_progressed = False
        self.is_under_way = True
        try:
            return await self._exchange(stream, results, device)
        finally:
            self.is_under_way = False
            reader.cancel()
            stream.close()

    def request_end(self, end: EpochEnd, lost_pool: int | None = None) -> None:
        """`lost_pool`: of the CPU attention service that is the reason."""
        if lost_pool is not None:
            self.lost_pools.add(lost_pool)
        self.requested_end = end
        self._engine.wake.set()

    def forget_plans(self) -> None:
        """None of them will be answered any more."""
        self._in_flight.clear()

    @property
    def failed_ids(self) -> Collection[int]:
        """Sequences of the plan that failed: the oldest one, as what was sent after it never ran."""
        return self._in_flight[0].sequence_ids if self._in_flight else ()

    @property
    def running_ids(self) -> frozenset[int]:
        """Sequences of all plans whose results are still to come."""
        return frozenset().union(*(plan.sequence_ids for plan in self._in_flight))

    async def _exchange(
        self, stream: PlanStream, results: "deque[IterationResult | Exception]", device: str
    ) -> EpochEnd:
        in_flight = self._in_flight
        self._engine.wake.set()
        while True:
            await self._engine.wake.wait()
            self._engine.wake.clear()
            tokens: list[TokenEvent] = []
            applied: list[tuple[IterationPlan, IterationResult]] = []
            end = self.requested_end
            while results and (end is None or end.takes_results):
                result = results.popleft()
                if isinstance(result, Exception):
                    self._engine.in_hand.deliver(tokens)
                    raise result
                if result.error is not None:
                    end = self._end_of(result)
                else:
                    plan = in_flight.popleft()
                    self.has_progressed = True
                    applied.append((plan, result))
                    tokens += self._engine.apply(result)
                    for watch in self._watches:
                        watch.cores.observe(result)
                    if result.trace is not None:
                        self._traces.publish(replace(result.trace, predicted_ns=round(plan.predicted_s * 1e9)))
            try:
                # Plan first: the executor must not wait while text is made of tokens.
                if end is None:
                    await self._feed(stream)
            finally:
                self._engine.in_hand.deliver(tokens)
                for plan, result in applied:
                    self._meters.applied(plan, result, device)
            if end is not None and not (end.takes_results and in_flight):
                return end

    async def _feed(self, stream: PlanStream) -> None:
        """Sends plans until enough are on their way or nothing is to be done. Raises ExecutorLostError."""
        while len(self._in_flight) < PLANS_AHEAD and (plan := self._engine.plan()):
            for watch, num_in_pool in zip(self._watches, self._engine.num_by_pool, strict=True):
                watch.cores.planned(plan, num_in_pool)
            plan = self._meters.planned(plan)
            self._in_flight.append(plan)
            await stream.send(replace(plan, trace=True) if self._traces.are_wanted else plan)

    async def _read(self, stream: PlanStream, results: "deque[IterationResult | Exception]") -> None:
        """Puts what the executor sends, its loss included, where the exchange finds it."""
        try:
            async for result in stream.results():
                results.append(result)
                self._engine.wake.set()
        except Exception as error:
            results.append(error)
            self._engine.wake.set()

    def _end_of(self, result: IterationResult) -> EpochEnd:
        assert result.error is not None
        with self._meters.failed(result):
            logger.error("iteration %d failed: %s: %s", result.iteration, result.error.value, result.error_message)
        return EpochEnd.HOST_LOST if result.error is ExecutionError.CPU_ATTENTION_LOST else EpochEnd.FAILED
