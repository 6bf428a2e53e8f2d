"""When plans run and when their results go out, with an executor that computes nothing and waits to be told."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_svc.plan_runner import PlanRunner
from neoflex.v1 import executor_pb2 as pb
from svc_common.plan import ExecutionError, IterationPlan, IterationResult

_PATIENCE_S = 20.0


class Steps:
    """Of one plan: what the executor waits for, and what it has come to."""

    def __init__(self) -> None:
        self.entered, self.may_begin, self.may_end = (threading.Event() for _ in range(3))


class Executor:
    """Plan n waits for its steps, where it has any."""

    def __init__(self, steps: dict[int, Steps]) -> None:
        self.steps = steps
        self.calls: list[tuple[str, int]] = []

    def run(self, plan: IterationPlan, received_ns: int, begun: Callable[[], None]) -> IterationResult:
        self.calls.append(("run", plan.iteration))
        if plan.iteration == 13:
            raise MemoryError("no luck")
        steps = self.steps.get(plan.iteration)
        if steps:
            steps.entered.set()
            assert steps.may_begin.wait(_PATIENCE_S)
        begun()
        if steps:
            assert steps.may_end.wait(_PATIENCE_S)
        return IterationResult(plan.epoch, plan.iteration)

    def fail(self, epoch: int, iteration: int, kind: ExecutionError, message: str) -> IterationResult:
        self.calls.append(("fail", iteration))
        return IterationResult(epoch, iteration, error=kind, error_message=message)


def request(iteration: int, mode: "pb.ExecutionMode" = pb.EXECUTION_MODE_GPU_ONLY) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(plan=pb.IterationPlan(epoch=1, iteration=iteration, mode=mode))


async def stream(*requests: pb.ExecuteRequest) -> AsyncIterator[pb.ExecuteRequest]:
    for each in requests:
        yield each


class Run:
    """A runner at work on a stream; `results` is filled as they come."""

    def __init__(self, steps: dict[int, Steps] | None = None, most_pending: int = 4) -> None:
        self.executor = Executor(steps or {})
        self.thread = ThreadPoolExecutor(1)
        self.runner = PlanRunner(self.executor, self.thread, most_pending)  # type: ignore[arg-type]
        self.results: list[IterationResult] = []
        self.first_came = asyncio.Event()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_: object) -> None:
        for steps in self.executor.steps.values():
            steps.may_begin.set()
            steps.may_end.set()
        await asyncio.to_thread(self.thread.shutdown)

    async def take(self, *requests: pb.ExecuteRequest) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            await self.runner.take(stream(*requests))

    async def collect(self) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            async for result in self.runner.results():
                self.results.append(result)
                self.first_came.set()

    @property
    def came(self) -> list[int]:
        return [result.iteration for result in self.results]


async def reached(event: threading.Event) -> None:
    """And everything that the executor's thread had told the loop before."""
    assert await asyncio.to_thread(event.wait, _PATIENCE_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_result_goes_out_once_the_next_plan_has_begun():
    first, second = Steps(), Steps()
    async with Run({1: first, 2: second}) as run:
        collecting = asyncio.create_task(run.collect())
        await run.take(request(1), request(2))
        first.may_begin.set()
        first.may_end.set()
        await reached(second.entered)
        assert run.came == []
        second.may_begin.set()
        async with asyncio.timeout(_PATIENCE_S):
            await run.first_came.wait()
        assert run.came == [1]
        second.may_end.set()
        await collecting
        assert run.came == [1, 2]


async def test_a_result_that_no_plan_follows_goes_out_at_once():
    async with Run() as run:
        await run.take(request(1))
        await run.collect()
        assert run.came == [1]


async def test_a_plan_that_cannot_be_read_fails_in_its_turn():
    first = Steps()
    async with Run({1: first}) as run:
        await run.take(request(1), request(2, pb.EXECUTION_MODE_UNSPECIFIED), request(3))
        await reached(first.entered)
        assert run.executor.calls == [("run", 1)]
        first.may_begin.set()
        first.may_end.set()
        await run.collect()
        assert run.executor.calls == [("run", 1), ("fail", 2), ("run", 3)]
        assert [result.error for result in run.results] == [None, ExecutionError.INVALID_PLAN, None]
        assert run.results[1].error_message == "mode 0 is none"


async def test_plans_that_nobody_waits_for_do_not_run():
    first = Steps()
    async with Run({1: first}) as run:
        await run.take(request(1), request(2), request(3))
        await reached(first.entered)
        run.runner.close()
        first.may_begin.set()
        first.may_end.set()
        await asyncio.to_thread(run.thread.shutdown)
        assert run.executor.calls == [("run", 1)]


async def test_no_more_plans_are_taken_than_results_are_sent():
    second = Steps()
    second.may_begin.set()
    second.may_end.set()
    async with Run({2: second}, most_pending=2) as run:
        taking = asyncio.create_task(run.take(*map(request, range(1, 8))))
        await reached(second.entered)
        await asyncio.to_thread(lambda: run.thread.submit(lambda: None).result())
        assert run.executor.calls == [("run", 1), ("run", 2)]
        await run.collect()
        await taking
        assert run.came == list(range(1, 8))


async def test_a_broken_executor_is_no_result():
    async with Run() as run:
        await run.take(request(12), request(13))
        with pytest.raises(MemoryError, match="no luck"):
            await run.collect()
        assert run.came == [12]


async def test_a_stream_that_breaks_ends_after_its_results():
    async def broken() -> AsyncIterator[pb.ExecuteRequest]:
        yield request(1)
        raise ConnectionError("gone")

    async with Run() as run:
        with pytest.raises(ConnectionError):
            await run.runner.take(broken())
        await run.collect()
        assert run.came == [1]
        empty = Run()
        await empty.take()
        await empty.collect()
        assert empty.came == []
