"""A planner whose CPU attention service has too few threads, too many, refuses to change them, or is lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import Rig, StartRig, request

from neoflex.v1 import inference_pb2 as pb
from planner_svc import cores, executor_loop
from planner_svc.core_keeper import CoreKeeper
from planner_svc.counters import Counters
from planner_svc.cpu_load import Sample
from svc_common.plan import (
    CohortStep,
    IterationPlan,
    IterationResult,
    Mode,
    PoolWork,
    PrefillChunk,
    SubBatch,
    Timings,
)

ELASTIC = {"elastic": True, "max_threads": 4}
FOREVER = 150


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the service are frequent, and each decides."""
    monkeypatch.setattr(cores, "_WINDOW_S", 0.0)
    monkeypatch.setattr(cores, "_IDLE_S", 0.5)
    monkeypatch.setattr(executor_loop, "PROBE_EVERY_S", 0.05)


def host_only(threads_needed: int) -> FakeExecutor:
    return FakeExecutor(gpu_blocks=0, host_blocks=200, iteration_s=0.005, threads_needed=threads_needed)


class Load:
    """Requests, one after the other, until it ends."""

    def __init__(self, rig: Rig) -> None:
        self._task = asyncio.create_task(self._run(rig))

    async def _run(self, rig: Rig) -> None:
        while True:
            await rig.stub.Generate(request("the", max_tokens=FOREVER))

    async def end(self) -> None:
        self._task.cancel()
        await self.until_lost()

    async def until_lost(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)


async def info_of(rig: Rig) -> pb.GetServerInfoResponse:
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert isinstance(info, pb.GetServerInfoResponse)
    return info


def tells(rig: Rig, num_threads: int) -> Callable[[], Any]:
    async def holds() -> bool:
        return (await info_of(rig)).cpu_attention_threads == num_threads

    return holds


async def test_threads_follow_the_load_and_are_told(start_rig: StartRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = FakeHost()
    rig = await start_rig(host_only(threads_needed=3), host, cpu_attn=ELASTIC, mode="asymmetric")
    load = Load(rig)
    await rig.until(tells(rig, 3))
    assert host.set_threads == [2, 3]
    info = await info_of(rig)
    assert (info.cpu_attention_min_threads, info.cpu_attention_max_threads) == (1, 4)
    assert (info.counters.cpu_threads_grown, info.counters.cpu_threads_shrunk) == (2, 0)
    assert "CPU attention threads of pool 0: 1 -> 2: the executor waits 67% of its time" in caplog.text
    await load.end()
    await rig.until(tells(rig, 1))
    info = await info_of(rig)
    assert (info.counters.cpu_threads_grown, info.counters.cpu_threads_shrunk) == (2, 1)
    assert host.set_threads == [2, 3, 1]


async def test_nothing_changes_unless_asked_for(start_rig: StartRig) -> None:
    host = FakeHost()
    rig = await start_rig(host_only(threads_needed=3), host, mode="asymmetric")
    load = Load(rig)
    host.num_threads = 2  # By somebody else.
    await rig.until(tells(rig, 2))
    host.num_threads = 3
    await rig.until(tells(rig, 3))
    await load.end()
    info = await info_of(rig)
    assert (info.cpu_attention_min_threads, info.cpu_attention_max_threads) == (0, 0)
    assert host.set_threads == []


async def test_a_refusal_is_no_more_than_that(start_rig: StartRig, caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    host.keeps_threads = True
    rig = await start_rig(host_only(threads_needed=2), host, cpu_attn=ELASTIC, mode="asymmetric")
    load = Load(rig)
    await rig.until(lambda: len(host.set_threads) >= 2)
    assert "CPU attention threads of pool 0: not set to 2: INTERNAL: not now" in caplog.text
    assert (await info_of(rig)).counters.cpu_threads_grown == 0
    host.keeps_threads = False
    await rig.until(tells(rig, 2))
    assert set(host.set_threads) == {2}
    assert (await info_of(rig)).counters.cpu_threads_grown == 1
    await load.end()


async def test_a_service_that_does_not_answer_holds_up_nobody(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = FakeHost()
    host.says_so.clear()
    rig = await start_rig(host_only(threads_needed=2), host, cpu_attn=ELASTIC, mode="asymmetric")
    load = Load(rig)
    await rig.until(lambda: host.set_threads == [2])
    monkeypatch.setattr(cores, "_MIN_ITERATIONS", 10**9)  # The next look is to find this change alone.
    assert len((await rig.stub.Generate(request("abc", max_tokens=3))).token_ids) == 3
    assert "CPU attention threads" not in caplog.text  # It is still being waited for.
    await rig.until(tells(rig, 2))
    assert "CPU attention threads of pool 0: not set to 2: DEADLINE_EXCEEDED" in caplog.text
    assert (await info_of(rig)).counters.cpu_threads_grown == 1
    await load.end()


async def test_a_change_by_somebody_else_is_taken_over(start_rig: StartRig) -> None:
    host = FakeHost()
    rig = await start_rig(host_only(threads_needed=2), host, cpu_attn=ELASTIC, mode="asymmetric")
    load = Load(rig)
    await rig.until(lambda: host.num_threads == 2)
    host.num_threads = 8
    # First to the most allowed, and then to what the load needs.
    await rig.until(lambda: host.set_threads == [2, 4, 3])
    await load.end()


async def test_a_service_that_is_back_grows_again(start_rig: StartRig) -> None:
    host = FakeHost()
    rig = await start_rig(host_only(threads_needed=2), host, cpu_attn=ELASTIC, mode="asymmetric")
    load = Load(rig)
    await rig.until(lambda: host.num_threads == 2)
    await host.kill()
    await load.until_lost()
    host.num_threads = 1
    await host.start()
    await rig.until_ready()
    load = Load(rig)
    await rig.until(lambda: host.num_threads == 2)
    assert host.set_threads == [2, 2]
    await load.end()


def test_what_a_plan_leaves_out_is_told_with_its_result() -> None:
    seen: list[Sample] = []

    class Listener(cores.CoreController):
        def observe(self, sample: Sample, now: float) -> None:
            seen.append(sample)

    keeper = CoreKeeper(Listener(None), Counters())
    batches = (SubBatch(prefills=(PrefillChunk(9, 0, 4),), cpu_decodes=(1, 2)), SubBatch(cpu_decodes=(3,)))
    keeper.planned(IterationPlan(1, 1, Mode.ASYMMETRIC, sub_batches=batches), num_in_pool=7)
    keeper.planned(IterationPlan(1, 2, Mode.DECOUPLED, cohort=CohortStep((1, 2), 0, 3)), num_in_pool=6)
    timings = Timings(total_ns=4_000_000_000, cpu_wait_ns=1_000_000_000, cpu_attention_ns=3_000_000_000)
    keeper.observe(IterationResult(1, 1, timings=timings, cpu_attended_tokens=50))
    keeper.observe(IterationResult(1, 2, timings=timings, cpu_attended_tokens=60))
    assert seen == [Sample(4.0, 1.0, 3.0, 50, 3, 3), Sample(4.0, 1.0, 3.0, 60, 2, 4)]
    # An epoch that ends leaves plans without results.
    keeper.planned(IterationPlan(1, 3, Mode.GPU_ONLY), num_in_pool=5)
    keeper.begin_epoch()
    keeper.planned(IterationPlan(2, 1, Mode.GPU_ONLY), num_in_pool=1)
    keeper.observe(IterationResult(2, 1))
    assert seen[2] == Sample(0.0, 0.0, 0.0, 0, 0, 1)


def test_each_pool_is_judged_by_its_own_work() -> None:
    """The first attends for 3 s, of which 2 are waited for; the second's 2 s would have been waited for 1 s alone."""
    seen: list[Sample] = []

    class Listener(cores.CoreController):
        def observe(self, sample: Sample, now: float) -> None:
            seen.append(sample)

    keepers = [CoreKeeper(Listener(None), Counters(), pool) for pool in (0, 1)]
    plan = IterationPlan(1, 1, Mode.SAME_LAYER, sub_batches=(SubBatch(cpu_decodes=(1, 2, 3)),), pool_decodes=(2, 1))
    work = (PoolWork(3_000_000_000, 50), PoolWork(2_000_000_000, 20))
    timings = Timings(total_ns=4_000_000_000, cpu_wait_ns=2_000_000_000, cpu_attention_ns=5_000_000_000)
    for keeper, num_in_pool in zip(keepers, (3, 1), strict=True):
        keeper.planned(plan, num_in_pool=num_in_pool)
        keeper.observe(IterationResult(1, 1, timings=timings, cpu_attended_tokens=70, pool_work=work))
    assert seen == [Sample(4.0, 2.0, 3.0, 50, 2, 1), Sample(4.0, 1.0, 2.0, 20, 1, 0)]
