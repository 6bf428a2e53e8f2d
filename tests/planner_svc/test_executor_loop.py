"""Whatever becomes of the workers: no request hangs, those that can go on do, and service comes back.

What follows from the loss of the executor is in test_executor_loss.py."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import (
    CONTEXT_TOKENS,
    TOKENIZER,
    Rig,
    StartRig,
    collect,
    first_delta,
    refused,
    request,
    streaming,
)

from neoflex.v1 import executor_pb2
from neoflex.v1 import inference_pb2 as pb
from svc_common.policy import ExecutionPolicy

FOREVER = 150
LONG_PROMPT = "x" * 40
"""Ten blocks: more than the GPU of `two_tiers` has."""


def two_tiers() -> FakeExecutor:
    return FakeExecutor(gpu_blocks=8, host_blocks=100, iteration_s=0.02)


def answer_of(rig: Rig, text: str, num_tokens: int) -> list[int]:
    prompt = tuple(TOKENIZER.encode(text))
    return [rig.executor.answer(prompt, index) for index in range(num_tokens)]


def tokens_of(messages: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token for message in messages for token in message.delta.token_ids]


async def host_blocks(rig: Rig) -> int:
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    return int(info.host_blocks)


def has_host_blocks(rig: Rig, number: int) -> Callable[[], Any]:
    async def holds() -> bool:
        return await host_blocks(rig) == number

    return holds


async def is_not_ready(rig: Rig) -> bool:
    return not await rig.is_serving()


async def test_the_executor_dies_while_idle(start_rig: StartRig) -> None:
    rig = await start_rig()
    await rig.executor.kill()
    await rig.until(lambda: is_not_ready(rig))
    await rig.executor.start()
    await rig.until_ready()
    assert len((await rig.stub.Generate(request(max_tokens=3))).token_ids) == 3


async def test_epochs_say_what_the_planner_keeps_to_and_grow_over_restarts(start_rig: StartRig) -> None:
    rig = await start_rig(max_running_sequences=7, max_batch_tokens=33)
    [opened] = rig.executor.epochs
    assert (opened.max_sequences, opened.max_batch_tokens, opened.max_sequence_tokens) == (7, 33, CONTEXT_TOKENS)
    assert opened.profile
    # A planner with a slower clock: FakeExecutor complains of an epoch that does not follow.
    opened.epoch += 10**18
    rig.executor._epoch = opened.epoch
    await rig.server.stop(0)
    await rig.executor.disconnect()
    await start_rig(rig.executor)
    assert rig.executor.epochs[1].epoch == opened.epoch + 1


async def test_losing_cpu_attention_ends_what_fits_nowhere_else_and_all_others_go_on(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost())
    on_gpu = rig.stub.GenerateStream(streaming(request("the", max_tokens=25)))
    assert list((await first_delta(on_gpu)).token_ids) == answer_of(rig, "the", 1)
    on_host = rig.stub.GenerateStream(streaming(request(LONG_PROMPT, max_tokens=FOREVER)))
    await first_delta(on_host)
    assert rig.host is not None
    await rig.host.kill()
    code, reason, _ = await refused(collect(on_host))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "CPU_ATTENTION_LOST")
    rest = await collect(on_gpu)
    assert tokens_of(rest) == answer_of(rig, "the", 25)[1:]
    assert rest[-1].finished.usage.recomputations == 1
    assert await host_blocks(rig) == 0
    # Without the host tier the long prompt fits nowhere, but it will.
    code, reason, _ = await refused(rig.stub.Generate(request(LONG_PROMPT)))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "CPU_ATTENTION_LOST")
    await rig.host.start()
    await rig.until(has_host_blocks(rig, 100))
    answer = await rig.stub.Generate(request(LONG_PROMPT, max_tokens=4))
    assert list(answer.token_ids) == answer_of(rig, LONG_PROMPT, 4)
    assert [opened.profile for opened in rig.executor.epochs] == [True, False, False]


async def test_requests_go_on_when_cpu_attention_comes_back(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost())
    assert rig.host is not None
    await rig.host.kill()
    await rig.until(has_host_blocks(rig, 0))
    rig.executor.iteration_s = 0.1
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=25)))
    got = list((await first_delta(stream)).token_ids)
    await rig.host.start()
    await rig.until(has_host_blocks(rig, 100))
    rig.executor.iteration_s = 0
    rest = await collect(stream)
    assert got + tokens_of(rest) == answer_of(rig, "the", 25)
    assert rest[-1].finished.usage.recomputations == 1


async def test_opening_an_epoch_is_no_stall(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost(), watchdog_s=0.5)
    watch = rig.health.Watch(health_pb2.HealthCheckRequest(service="liveness"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=25)))
    await first_delta(stream)
    rig.executor.iteration_s = 0.08  # Goes on until the loss is noticed.
    rig.executor.open_s = 1.6  # Longer than a stall and the time between two looks.
    assert rig.host is not None
    await rig.host.kill()
    assert (await collect(stream))[-1].finished.usage.recomputations == 1
    change = asyncio.ensure_future(watch.read())
    await asyncio.sleep(0.1)
    assert not change.done()
    watch.cancel()
    await asyncio.wait([change])


async def test_cpu_attention_that_restarts_unseen_is_attached_anew(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost())
    assert rig.host is not None
    rig.host.region_epoch = 0
    await rig.until(lambda: len(rig.executor.epochs) == 2)
    await rig.until(lambda: rig.host is not None and rig.host.region_epoch == rig.executor.epochs[-1].epoch)
    assert len((await rig.stub.Generate(request(LONG_PROMPT, max_tokens=4))).token_ids) == 4


async def test_a_host_only_server_is_not_ready_without_its_host(start_rig: StartRig) -> None:
    executor = two_tiers()
    executor.gpu_blocks = 0
    rig = await start_rig(executor, FakeHost(), mode="asymmetric")
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)))
    await first_delta(stream)
    assert rig.host is not None
    await rig.host.kill()
    assert (await refused(collect(stream)))[1] == "CPU_ATTENTION_LOST"
    await rig.until(lambda: is_not_ready(rig))
    assert await rig.is_serving("liveness")
    assert (await refused(rig.stub.Generate(request())))[1] == "CPU_ATTENTION_LOST"
    await rig.host.start()
    await rig.until_ready()
    assert len((await rig.stub.Generate(request(max_tokens=3))).token_ids) == 3


async def test_start_up_waits_for_both_workers(start_rig: StartRig) -> None:
    host = FakeHost()
    rig = await start_rig(two_tiers(), host, ready=False)
    await host.kill()
    await rig.executor.kill()
    rig.executor.epochs.clear()
    await asyncio.sleep(0.3)
    assert not await rig.is_serving()
    await rig.executor.start()
    await asyncio.sleep(0.3)
    assert not await rig.is_serving()
    await host.start()
    await rig.until_ready()
    assert await host_blocks(rig) == 100


async def test_tables_are_measured_again_where_the_host_was_missing(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost())
    assert rig.host is not None
    await rig.host.kill()
    await rig.executor.kill()
    await rig.until(lambda: is_not_ready(rig))
    await rig.executor.start()
    await rig.until_ready()
    assert await host_blocks(rig) == 0
    await rig.host.start()
    await rig.until(has_host_blocks(rig, 100))
    assert rig.executor.epochs[-1].profile


@pytest.mark.parametrize(
    "error",
    [
        executor_pb2.EXECUTION_ERROR_DEVICE,
        executor_pb2.EXECUTION_ERROR_INVALID_PLAN,
        executor_pb2.EXECUTION_ERROR_STALE,
    ],
)
async def test_a_failed_iteration_is_computed_again_in_the_next_epoch(
    error: executor_pb2.ExecutionError, start_rig: StartRig
) -> None:
    rig = await start_rig(FakeExecutor(iteration_s=0.02))
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=30)))
    got = list((await first_delta(stream)).token_ids)
    rig.executor.fail_next = (error, "out of luck")
    rest = await collect(stream)
    assert got + tokens_of(rest) == answer_of(rig, "the", 30)
    assert rest[-1].finished.usage.recomputations == 1
    assert [opened.profile for opened in rig.executor.epochs] == [True, False]


async def test_a_result_that_makes_no_sense_costs_the_running_requests_only(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(FakeExecutor(iteration_s=0.02))
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)))
    await first_delta(stream)

    def nonsense(plan: executor_pb2.IterationPlan) -> executor_pb2.IterationResult:
        return executor_pb2.IterationResult(epoch=plan.epoch, iteration=plan.iteration + 5)

    monkeypatch.setattr(rig.executor, "_run", nonsense)
    assert (await refused(collect(stream)))[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_FAILED")
    monkeypatch.undo()
    await rig.until(lambda: is_not_ready(rig))
    await rig.until_ready()
    assert list((await rig.stub.Generate(request("the", max_tokens=3))).token_ids) == answer_of(rig, "the", 3)


async def test_an_attachment_that_keeps_failing_is_tried_ever_less_often(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost())
    assert rig.host is not None
    rig.host.refuses = True
    rig.host.region_epoch = 0
    await rig.until(lambda: len(rig.executor.epochs) == 2)  # That of the loss is a first try.
    await asyncio.sleep(4)
    # Further ones come 1 s, 2 s, 4 s ... apart.
    assert 1 <= len(rig.executor.epochs) - 2 <= 2
    assert len((await rig.stub.Generate(request("the", max_tokens=3))).token_ids) == 3


async def test_one_of_two_services_is_lost_and_all_streams_go_on(start_rig: StartRig) -> None:
    """Nothing fits on the GPU; what lay in the lost pool is computed again in the other."""
    executor = FakeExecutor(gpu_blocks=0, host_blocks=60, iteration_s=0.02)
    rig = await start_rig(executor, [FakeHost(), FakeHost()], mode="asymmetric")
    texts = ("the", "abc", "of", "in")
    streams = [rig.stub.GenerateStream(streaming(request(text, max_tokens=40))) for text in texts]
    got = [list((await first_delta(stream)).token_ids) for stream in streams]
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert [(pool.num_blocks, pool.num_threads, pool.error) for pool in info.host_pools] == [(60, 1, ""), (60, 1, "")]
    used = list((await rig.load()).host_pool_blocks_used)
    assert min(used) > 0
    await rig.hosts[1].kill()
    for text, tokens, rest in zip(texts, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
        assert rest[-1].finished.usage.recomputations == 1
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert [(pool.num_blocks, pool.error) for pool in info.host_pools] == [(60, ""), (0, "nobody there")]
    assert info.host_blocks == 60
    await rig.hosts[1].start()
    await rig.until(has_host_blocks(rig, 120))
    assert len((await rig.stub.Generate(request(max_tokens=3))).token_ids) == 3


async def test_a_service_that_restarts_before_it_is_missed_loses_nothing(start_rig: StartRig) -> None:
    executor = FakeExecutor(gpu_blocks=0, host_blocks=60, iteration_s=0.02)
    rig = await start_rig(executor, [FakeHost(), FakeHost()], mode="asymmetric")
    streams = [rig.stub.GenerateStream(streaming(request(text, max_tokens=40))) for text in ("the", "abc")]
    got = [list((await first_delta(stream)).token_ids) for stream in streams]
    rig.hosts[0].region_epoch = 0
    for text, tokens, rest in zip(("the", "abc"), got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    assert await host_blocks(rig) == 120


async def test_a_change_of_policy_amid_answers(start_rig: StartRig) -> None:
    """Streams go on in an epoch that begins at once, with the same tokens; nothing is measured twice."""
    rig = await start_rig(two_tiers(), FakeHost())
    texts = ("the", "abc", LONG_PROMPT)
    streams = [rig.stub.GenerateStream(streaming(request(text, max_tokens=60))) for text in texts]
    for stream in streams:
        await first_delta(stream)
    partition = ExecutionPolicy(resident_layers=1, prefill_cpu_layers=1, decode_cpu_layers=1)
    for policy in (partition, None, partition):
        num_epochs = len(rig.executor.epochs)
        rig.server._loop.change_policy(policy)
        await rig.until(lambda num=num_epochs: len(rig.executor.epochs) > num and bool(rig.executor.held))
    for text, stream in zip(texts, streams, strict=True):
        assert tokens_of(await collect(stream))[-5:] == answer_of(rig, text, 60)[-5:]
    asked = [(epoch.policy.decode_cpu_layers, epoch.profile) for epoch in rig.executor.epochs]
    assert asked == [(0, True), (1, True), (0, False), (1, False)]
    rig.server._loop.change_policy(partition)
    await asyncio.sleep(0)
    assert len(rig.executor.epochs) == 4


async def test_a_policy_without_room_for_a_request_in_hand_is_given_up(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers on the CPU may leave the host less room for KV; what was accepted goes on all the same."""
    partition = ExecutionPolicy(resident_layers=1, prefill_cpu_layers=1, decode_cpu_layers=1)
    executor = two_tiers()

    def size_pool(epoch: executor_pb2.OpenEpochRequest) -> str:
        executor.host_blocks = 10 if epoch.policy.decode_cpu_layers else 100
        return ""

    executor.refuses_epoch = size_pool
    rig = await start_rig(executor, FakeHost())
    loop = rig.server._loop
    stream = rig.stub.GenerateStream(streaming(request(LONG_PROMPT, max_tokens=60)))
    await first_delta(stream)
    loop.change_policy(partition)
    await rig.until(lambda: len(executor.epochs) == 3 and bool(executor.held))
    monkeypatch.setattr(loop, "_policies", SimpleNamespace(consider=lambda *_: partition, opened=lambda *_: None))
    await loop._consider_policy(loop._epochs.number)
    assert loop._epochs.policy is None
    assert tokens_of(await collect(stream))[-5:] == answer_of(rig, LONG_PROMPT, 60)[-5:]
    assert [epoch.policy.decode_cpu_layers for epoch in executor.epochs] == [0, 1, 0]
    # With nobody in hand there is room. What is too long from then on never fits, whatever there was before.
    await loop._consider_policy(loop._epochs.number)
    await rig.until(has_host_blocks(rig, 10))
    code, reason, _ = await refused(rig.stub.Generate(request(LONG_PROMPT, max_tokens=60)))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_KV")


async def test_no_policy_is_chosen_any_more_while_it_drains(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that had begun before may take a second: what it finds would have all answers computed again."""
    rig = await start_rig(two_tiers(), FakeHost())
    engine, executor_loop, event_loop = rig.server._engine, rig.server._loop, asyncio.get_running_loop()

    class Policies:
        def consider(self, demand: object, now_s: float) -> ExecutionPolicy:
            event_loop.call_soon_threadsafe(engine.drain)
            return ExecutionPolicy(resident_layers=1, prefill_cpu_layers=1, decode_cpu_layers=1)

    monkeypatch.setattr(executor_loop, "_policies", Policies())
    await executor_loop._consider_policy(executor_loop._epochs.number)
    assert engine.is_draining
    assert executor_loop._epochs.policy is None


async def test_cpu_layers_go_with_the_cpu_attention_service(start_rig: StartRig) -> None:
    """The executor then computes them itself; what that takes is measured when it first happens."""
    executor, host = FakeExecutor(host_blocks=100, iteration_s=0.02), FakeHost()
    rig = await start_rig(executor, host, decode_policy="partition", cpu_layers=1)
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)))
    await first_delta(stream)
    await host.kill()
    assert tokens_of(await collect(stream))[-5:] == answer_of(rig, "the", FOREVER)[-5:]
    asked = [(epoch.policy.decode_cpu_layers, epoch.profile) for epoch in rig.executor.epochs]
    assert asked[:3] == [(1, True), (1, False), (1, True)]
    await host.start()
    await rig.until(has_host_blocks(rig, 100))
    assert rig.executor.epochs[-1].policy.decode_cpu_layers == 1
    assert not rig.executor.epochs[-1].profile
