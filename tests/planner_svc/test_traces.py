"""TraceService over a real planner: traces are made while somebody listens, and for all who do."""

import asyncio
from dataclasses import replace
from typing import Any

from support.fake_workers import FakeExecutor, trace
from support.planner_rig import Rig, StartRig, collect, request, streaming

from neoflex.v1 import trace_pb2, trace_pb2_grpc
from planner_svc.traces import Traces
from svc_common.plan import Mode
from svc_common.trace import IterationTrace
from svc_common.trace_wire import trace_from_message


def traces_of(rig: Rig) -> Any:
    stub: Any = trace_pb2_grpc.TraceServiceStub(rig.channel)  # type: ignore[no-untyped-call]
    return stub.TraceIterations(trace_pb2.TraceIterationsRequest())


async def generate(rig: Rig, num_tokens: int) -> None:
    await collect(rig.stub.GenerateStream(streaming(request(max_tokens=num_tokens))))


async def test_iterations_are_traced_while_somebody_listens(start_rig: StartRig) -> None:
    executor = FakeExecutor()
    rig = await start_rig(executor)
    await generate(rig, 3)
    calls = [traces_of(rig), traces_of(rig)]
    readers = [asyncio.create_task(call.read()) for call in calls]
    await rig.until(lambda: len(rig.server._loop._drive._traces._listeners) == 2)
    assert not any(plan.trace for plan in executor.plans)
    num_before = len(executor.plans)
    await generate(rig, 4)
    traced = executor.plans[num_before:]
    assert all(plan.trace for plan in traced)
    for call, reader in zip(calls, readers, strict=True):
        got = [(await reader).trace, *[(await call.read()).trace for _ in range(3)]]
        expected = [trace_from_message(trace(plan)) for plan in traced[:4]]
        # The planner adds what it had predicted.
        assert all(item.predicted_ns > 0 for item in got)
        assert [replace(trace_from_message(item), predicted_ns=0) for item in got] == expected
        call.cancel()
    await rig.until(lambda: not rig.server._loop._drive._traces.are_wanted)
    num_before = len(executor.plans)
    await generate(rig, 3)
    assert not any(plan.trace for plan in executor.plans[num_before:])
    assert not executor.problems


async def test_a_slow_listener_misses_the_latest() -> None:
    traces = Traces()
    listening = traces.listen()
    first = asyncio.create_task(anext(listening))
    await asyncio.sleep(0)  # It listens from here on.
    assert traces.are_wanted
    for number in range(1000):
        traces.publish(IterationTrace(1, number, Mode.GPU_ONLY, 0, 0))
    assert (await first).iteration == 0
    assert [(await anext(listening)).iteration for _ in range(255)] == list(range(1, 256))
    await listening.aclose()
    assert not traces.are_wanted
