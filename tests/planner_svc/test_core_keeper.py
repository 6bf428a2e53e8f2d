"""A planner whose CPU attention service has too few threads, too many, refuses to change them, or is lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import Rig, StartRig, first_delta, request, streaming

from neoflex.v1 import inference_pb2 as pb
from planner_svc import cores, executor_loop

ELASTIC = {"elastic": True, "max_threads": 4}
FOREVER = 150


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the service are frequent, and each decides."""
    monkeypatch.setattr(cores, "_WINDOW_S", 0.0)
    monkeypatch.setattr(cores, "_IDLE_S", 0.5)
    monkeypatch.setattr(executor_loop, "_PROBE_EVERY_S", 0.05)


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
        await asyncio.wait([self._task])


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
    assert "CPU attention threads: 1 -> 2: the executor waits 67% of its time" in caplog.text
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
    assert "CPU attention threads: not set to 2: INTERNAL: not now" in caplog.text
    assert (await info_of(rig)).counters.cpu_threads_grown == 0
    host.keeps_threads = False
    await rig.until(tells(rig, 2))
    assert set(host.set_threads) == {2}
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
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)))
    await first_delta(stream)
    load = Load(rig)
    await rig.until(lambda: host.num_threads == 2)
    await host.kill()
    await asyncio.wait([load._task])
    host.num_threads = 1
    await host.start()
    await rig.until_ready()
    load = Load(rig)
    await rig.until(lambda: host.num_threads == 2)
    assert host.set_threads == [2, 2]
    await load.end()
    stream.cancel()
