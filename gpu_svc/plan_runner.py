"""Runs the plans of one Execute stream in order on the executor's thread, and hands their results to the event loop.

Between two iterations nothing is done that can be done beside one: a plan is parsed when it comes, and where the next
plan waits, a result is handed over only once that plan's layers are about to run.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor as ThreadExecutor
from functools import partial

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import SpanContext, get_current_span

from gpu_svc.executor import Executor
from gpu_svc.limits import InvalidPlanError
from gpu_svc.wire import plan_from_pb
from neoflex.v1 import executor_pb2 as pb
from svc_common.plan import ExecutionError, IterationPlan, IterationResult
from svc_common.telemetry.propagation import parent_of

Begun = Callable[[], None]
"""Told on the executor's thread that the layers of a plan are about to run."""


class PlanRunner:
    """Belongs to the event loop's thread, but for what is said to run on the executor's."""

    def __init__(self, executor: Executor, thread: ThreadExecutor, most_pending: int) -> None:
        """`thread` has one worker, the only one to touch `executor`. `most_pending`: plans without a sent result."""
        self._executor = executor
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(most_pending)
        # Both threads use these two; single operations on a deque are atomic.
        self._plans: deque[Callable[[Begun], IterationResult]] = deque()
        self._ended: deque[IterationResult | Exception] = deque()
        self._results: asyncio.Queue[IterationResult | Exception | None] = asyncio.Queue()
        self._num_pending = 0
        self._is_complete = False
        self._parents: dict[int, SpanContext] = {}
        """The planner's spans of plans that are traced, by iteration, until their results are sent."""
        self.running: tuple[IterationPlan, float] | None = None
        """The plan that runs and since when, by time.monotonic()."""

    async def take(self, requests: AsyncIterator[pb.ExecuteRequest]) -> None:
        """All plans of a stream, to its end; `results` then end with that of the last one."""
        try:
            async for request in requests:
                await self._room.acquire()
                self._num_pending += 1
                self._plans.append(self._read(request.plan, time.perf_counter_ns()))
                self._thread.submit(self._run_next)
        finally:
            self._is_complete = True
            if not self._num_pending:
                self._results.put_nowait(None)

    async def results(self) -> AsyncIterator[IterationResult]:
        """In the order of the plans. Raises what an executor raises that is broken."""
        while (result := await self._results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result
            self._num_pending -= 1
            self._room.release()
            if self._is_complete and not self._num_pending:
                return

    def parent_of(self, result: IterationResult) -> SpanContext | None:
        """The span of the plan that yielded it, asked for once; None where that is not traced."""
        return self._parents.pop(result.iteration, None)

    def close(self) -> None:
        """Nobody is there for the results: plans that have not begun do not run."""
        self._plans.clear()

    def _read(self, message: pb.IterationPlan, received_ns: int) -> Callable[[Begun], IterationResult]:
        """What to do about a plan, on the executor's thread; one that can't be read fails there in its turn."""
        trace_context = self._trace_context(message)
        try:
            plan = plan_from_pb(message)
        except InvalidPlanError as error:
            text = str(error)
            kind = ExecutionError.INVALID_PLAN
            return lambda begun: self._executor.fail(message.epoch, message.iteration, kind, text)
        return partial(self._run, plan, received_ns, trace_context)

    def _trace_context(self, message: pb.IterationPlan) -> Context | None:
        """None where it is not traced."""
        if not message.traceparent:
            return None
        context = parent_of([("traceparent", message.traceparent)])
        parent = get_current_span(context).get_span_context()
        if not parent.trace_flags.sampled:
            return None
        self._parents[message.iteration] = parent
        return context

    def _run(
        self, plan: IterationPlan, received_ns: int, trace_context: Context | None, begun: Begun
    ) -> IterationResult:
        self.running = plan, time.monotonic()
        # What is logged meanwhile belongs there.
        token = attach(trace_context) if trace_context is not None else None
        try:
            return self._executor.run(plan, received_ns, begun)
        finally:
            self.running = None
            if token is not None:
                detach(token)

    def _run_next(self) -> None:
        """On the executor's thread."""
        try:
            run = self._plans.popleft()
        except IndexError:
            return
        try:
            self._ended.append(run(self._hand_over))
        except Exception as error:
            self._ended.append(error)
        if not self._plans:
            self._hand_over()

    def _hand_over(self) -> None:
        """On the executor's thread: results so far are to be sent."""
        if self._ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._ended:
            self._results.put_nowait(self._ended.popleft())
