"""The executor is killed, refuses to begin or is brought down by a request: who goes on, and who is told what."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import (
    TOKENIZER,
    Rig,
    StartRig,
    collect,
    detail,
    first_delta,
    refused,
    request,
    streaming,
)

from neoflex.v1 import executor_pb2
from neoflex.v1 import inference_pb2 as pb
from planner_svc.scheduler import MAX_LOSSES, MAX_LOSSES_IN_A_ROW
from svc_common.policy import ExecutionPolicy

FOREVER = 150
TEXTS = ("the", "abc", "of", "in")
POISON = "poison"


def prompt_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def answer_of(rig: Rig, text: str, num_tokens: int) -> list[int]:
    return [rig.executor.answer(prompt_of(text), index) for index in range(num_tokens)]


def tokens_of(messages: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token for message in messages for token in message.delta.token_ids]


async def gather_tokens(stream: Any, into: list[int]) -> None:
    async for message in stream:
        into += message.delta.token_ids


async def counters(rig: Rig) -> pb.ServerCounters:
    answer = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert isinstance(answer.counters, pb.ServerCounters)
    return answer.counters


async def why_not_ready(rig: Rig) -> str:
    return str((await rig.stub.GetServerInfo(pb.GetServerInfoRequest())).not_ready)


async def begin(rig: Rig, texts: tuple[str, ...] = TEXTS, max_tokens: int = 40) -> tuple[list[Any], list[list[int]]]:
    """Streams of which each has got its first tokens, and these."""
    streams = [rig.stub.GenerateStream(streaming(request(text, max_tokens=max_tokens))) for text in texts]
    return streams, [list((await first_delta(stream)).token_ids) for stream in streams]


def slow(**options: Any) -> FakeExecutor:
    return FakeExecutor(iteration_s=0.02, **options)


@pytest.mark.parametrize("restarts", [True, False])
async def test_streams_go_on_when_the_executor_is_back(restarts: bool, start_rig: StartRig) -> None:
    """Killed, or merely cut off: no token is missing, repeated or changed."""
    rig = await start_rig(slow())
    streams, got = await begin(rig)
    await (rig.executor.kill() if restarts else rig.executor.disconnect())
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    load = await rig.load()
    assert (load.waiting_requests, load.running_requests, load.gpu_blocks_used) == (len(TEXTS), 0, 0)
    assert await why_not_ready(rig) == "the executor was lost and is awaited"
    await rig.executor.start()
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
        assert rest[-1].finished.usage.recomputations == 1
    first, second = rig.executor.epochs
    assert second.epoch > first.epoch
    # One that lives on is measured once.
    assert second.profile is restarts
    counted = await counters(rig)
    assert counted.executor_losses == 1
    assert counted.recomputed_tokens >= sum(len(prompt_of(text)) for text in TEXTS)
    await rig.until_free()


async def test_an_executor_that_is_told_to_stop_is_no_loss(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("planner_svc.executor_loop.PROBE_EVERY_S", 0.02)
    rig = await start_rig(slow())
    streams, got = await begin(rig)
    rig.executor.stopping = True
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    assert await why_not_ready(rig) == "the executor was lost and is awaited"
    await rig.executor.kill()
    rig.executor.stopping = False
    await rig.executor.start()
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    assert (await counters(rig)).executor_losses == 0
    assert "executor let go: the executor has been told to stop" in caplog.text


async def test_while_the_executor_is_away_new_requests_are_refused(start_rig: StartRig) -> None:
    """However many come: those in hand wait, the others are told to come back."""
    rig = await start_rig(slow(), max_waiting_requests=3)
    streams, got = await begin(rig)
    await rig.executor.kill()
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    assert not await rig.is_serving()
    assert await rig.is_serving("liveness")
    for code, reason, error in await asyncio.gather(*(refused(rig.stub.Generate(request())) for _ in range(40))):
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST")
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0
    assert (await rig.load()).waiting_requests == len(TEXTS)
    await rig.executor.start()
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    await rig.until_ready()
    assert list((await rig.stub.Generate(request("the", max_tokens=3))).token_ids) == answer_of(rig, "the", 3)


@pytest.mark.parametrize("wait_s", [0, 0.3])
async def test_patience_ends(wait_s: float, start_rig: StartRig) -> None:
    rig = await start_rig(slow(), executor_wait_s=wait_s)
    streams, _ = await begin(rig)
    await rig.executor.kill()
    for stream in streams:
        code, reason, error = await refused(collect(stream))
        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST")
        assert (error.details() or "").endswith("did not come back within 0.3 s" if wait_s else "was lost")
    await rig.executor.start()
    await rig.until_ready()
    assert list((await rig.stub.Generate(request("the", max_tokens=3))).token_ids) == answer_of(rig, "the", 3)
    await rig.until_free()


async def test_what_ends_requests_ends_them_while_they_wait(start_rig: StartRig) -> None:
    """A deadline, a time limit, an abort and a caller that leaves."""
    rig = await start_rig(slow())
    past_deadline = rig.stub.GenerateStream(streaming(request("the", max_tokens=FOREVER)), timeout=1.0)
    limited = request("abc", max_tokens=FOREVER)
    limited.stopping.time_limit.FromMilliseconds(1000)
    timed_out = rig.stub.GenerateStream(streaming(limited))
    aborted = rig.stub.GenerateStream(
        pb.GenerateStreamRequest(
            request=pb.GenerateRequest(text="of", request_id="mine", stopping=pb.StoppingOptions(max_tokens=FOREVER))
        )
    )
    left = rig.stub.GenerateStream(streaming(request("in", max_tokens=FOREVER)))
    for stream in (past_deadline, timed_out, aborted, left):
        await first_delta(stream)
    await rig.executor.kill()
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    left.cancel()
    answer = await rig.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
    assert list(answer.aborted_request_ids) == ["mine"]
    assert (await collect(aborted))[-1].finished.finish.reason == pb.FINISH_REASON_ABORT
    assert (await collect(timed_out))[-1].finished.finish.reason == pb.FINISH_REASON_TIME_LIMIT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(past_deadline)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    async def is_empty() -> bool:
        return bool((await rig.load()).waiting_requests == 0)

    await rig.until(is_empty)
    await rig.executor.start()
    await rig.until_ready()
    await rig.until_free()


async def test_it_dies_again_and_again_with_work_getting_done_in_between(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    streams, got = await begin(rig, max_tokens=60)
    for _ in range(5):
        num_plans = len(rig.executor.plans)
        await rig.executor.kill()
        await rig.executor.start()
        await rig.until(lambda num=num_plans: len(rig.executor.plans) >= num + 4)
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 60)
    assert (await counters(rig)).executor_losses == 5


@pytest.mark.parametrize("num_generated", [0, 1, 7])
async def test_a_request_that_kills_the_executor_ends_alone(num_generated: int, start_rig: StartRig) -> None:
    """At its prompt, or at a token of its answer. All others, whenever they came, get their answers."""
    rig = await start_rig(slow(deadly=lambda prompt, num: prompt == prompt_of(POISON) and num >= num_generated))
    waiting = [rig.stub.Generate(request(text, max_tokens=30)) for text in TEXTS]
    poison = rig.stub.GenerateStream(streaming(request(POISON, max_tokens=FOREVER)))
    got: list[int] = []
    code, reason, error = await refused(gather_tokens(poison, got))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BREAKS_EXECUTOR")
    assert "3 times in a row" in (error.details() or "")
    assert got == answer_of(rig, POISON, num_generated)
    for text, answer in zip(TEXTS, waiting, strict=True):
        assert list((await answer).token_ids) == answer_of(rig, text, 30)
    assert rig.executor.num_deaths == MAX_LOSSES_IN_A_ROW
    await rig.until_free()


async def test_two_requests_that_kill_the_executor_end_and_no_other(start_rig: StartRig) -> None:
    poisons = (POISON, "venom")
    rig = await start_rig(slow(deadly=lambda prompt, num: prompt in map(prompt_of, poisons) and num == 3))
    waiting = [rig.stub.Generate(request(text, max_tokens=30)) for text in TEXTS]
    for code, reason, _ in await asyncio.gather(
        *(refused(rig.stub.Generate(request(text, max_tokens=30))) for text in poisons)
    ):
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BREAKS_EXECUTOR")
    for text, answer in zip(TEXTS, waiting, strict=True):
        assert list((await answer).token_ids) == answer_of(rig, text, 30)
    assert rig.executor.num_deaths <= 2 * MAX_LOSSES_IN_A_ROW
    await rig.until_free()


async def test_a_request_at_which_iterations_fail_ends_alone(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor lives and says so: the same without a restart."""
    rig = await start_rig(slow())
    run = rig.executor._run

    def fail_at_poison(plan: executor_pb2.IterationPlan) -> executor_pb2.IterationResult:
        ids = {chunk.sequence_id for batch in plan.sub_batches for chunk in batch.prefills}
        prompts = {new.sequence_id: tuple(new.token_ids) for new in plan.new_sequences}
        if any(prompts.get(sequence_id) == prompt_of(POISON) for sequence_id in ids):
            rig.executor.fail_next = (executor_pb2.EXECUTION_ERROR_DEVICE, "no")
        return run(plan)

    monkeypatch.setattr(rig.executor, "_run", fail_at_poison)
    waiting = [rig.stub.Generate(request(text, max_tokens=30)) for text in TEXTS]
    assert (await refused(rig.stub.Generate(request(POISON))))[1] == "BREAKS_EXECUTOR"
    for text, answer in zip(TEXTS, waiting, strict=True):
        assert list((await answer).token_ids) == answer_of(rig, text, 30)
    counted = await counters(rig)
    assert counted.executor_losses == 0
    await rig.until_free()


async def test_what_brings_the_executor_down_together_does_not_do_so_for_ever(start_rig: StartRig) -> None:
    """Each request passes alone; the executor dies of any two answers of which one has begun."""
    rig = await start_rig(FakeExecutor())

    def deadly(prompt: tuple[int, ...], num_generated: int) -> bool:
        return len(rig.executor.held) > 1 and num_generated > 0

    rig.executor.deadly = deadly
    calls = [rig.stub.Generate(request(text, max_tokens=FOREVER)) for text in TEXTS]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    for error in errors:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    assert errors
    assert rig.executor.num_deaths <= MAX_LOSSES * len(TEXTS)
    await rig.until_free()


async def test_a_loss_while_a_constraint_is_made_ready(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who runs is blamed for it; a constraint at which it happens each time is refused."""
    rig = await start_rig(slow())
    executor = rig.executor

    async def die(request: Any, context: Any) -> executor_pb2.CompileGrammarResponse:
        executor.num_deaths += 1
        executor.deadly = lambda prompt, num: True
        await asyncio.sleep(0.05)
        executor.deadly = lambda prompt, num: False
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        raise AssertionError

    streams, got = await begin(rig, max_tokens=FOREVER)
    monkeypatch.setattr(executor, "CompileGrammar", die)
    await executor.disconnect()
    await executor.start()
    await rig.until_ready()
    message = request()
    message.constraint.regex = "[ab]*"
    for _ in range(3):
        assert (await refused(rig.stub.Generate(message)))[:2] == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST")
        await rig.until_ready()
    code, reason, _ = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BREAKS_EXECUTOR")
    executor.iteration_s = 0
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, FOREVER)


@pytest.mark.parametrize("order", ["executor first", "host first"])
async def test_both_workers_are_lost_together(order: str, start_rig: StartRig) -> None:
    """What fits on the host only waits for the host as well."""
    rig = await start_rig(slow(gpu_blocks=8, host_blocks=100), FakeHost())
    long_text = "x" * 40
    texts = ("the", long_text)
    streams, got = await begin(rig, texts)
    assert rig.host is not None
    for dies in (rig.executor, rig.host) if order == "executor first" else (rig.host, rig.executor):
        await dies.kill()
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    await rig.executor.start()
    await asyncio.sleep(1.5)
    await rig.host.start()
    for text, tokens, rest in zip(texts, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    await rig.until_free()


async def test_lost_while_an_epoch_is_opened(start_rig: StartRig) -> None:
    """That of a change of policy is not yet there when the executor dies; and once more."""
    rig = await start_rig(slow(host_blocks=100), FakeHost())
    streams, got = await begin(rig)
    rig.executor.open_s = 0.2
    for policy in (ExecutionPolicy(1, 1, 1), None):
        num_epochs = rig.executor.num_opening
        rig.server._loop.change_policy(policy)
        await rig.until(lambda num=num_epochs: rig.executor.num_opening > num)
        await rig.executor.kill()
        await rig.until(lambda: not rig.server._engine.availability.is_open)
        await rig.executor.start()
        await rig.until(lambda: rig.server._engine.availability.is_open)
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    assert (await counters(rig)).executor_losses == 2


async def test_a_first_epoch_that_is_refused_is_explained(
    start_rig: StartRig, caplog: pytest.LogCaptureFixture
) -> None:
    """To callers, in the status, and once in the log; when the cause is gone, service begins."""
    caplog.set_level(logging.WARNING)
    rig = await start_rig(FakeExecutor(refuses_epoch=lambda request: "no room for 7 bytes"), ready=False)
    await rig.until(lambda: len(rig.executor.epochs) >= 2)
    code, reason, error = await refused(rig.stub.Generate(request()))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    assert error.details() == "the model is being loaded: no room for 7 bytes"
    assert (await refused(rig.stub.GetModelInfo(pb.GetModelInfoRequest())))[2].details() == error.details()
    assert await why_not_ready(rig) == error.details()
    assert [record.getMessage() for record in caplog.records] == ["not ready: no room for 7 bytes"]
    rig.executor.refuses_epoch = lambda request: ""
    await rig.until_ready()
    assert await why_not_ready(rig) == ""
    assert (await counters(rig)).executor_losses == 0


async def test_a_policy_that_is_refused_gives_way_to_the_one_before(start_rig: StartRig) -> None:
    rig = await start_rig(slow(host_blocks=100), FakeHost())
    streams, got = await begin(rig)
    rig.executor.refuses_epoch = lambda request: "no room" if request.policy.decode_cpu_layers else ""
    rig.server._loop.change_policy(ExecutionPolicy(1, 1, 1))
    for text, tokens, rest in zip(TEXTS, got, await asyncio.gather(*map(collect, streams)), strict=True):
        assert tokens + tokens_of(rest) == answer_of(rig, text, 40)
    assert [epoch.policy.decode_cpu_layers for epoch in rig.executor.epochs] == [0, 1, 0]


async def test_another_model_is_not_served(start_rig: StartRig) -> None:
    rig = await start_rig(FakeExecutor(model_digest="0123456789abcdef"), ready=False)
    await rig.until(lambda: len(rig.executor.epochs) >= 1)

    async def is_told() -> bool:
        return "another model" in await why_not_ready(rig)

    await rig.until(is_told)
    assert not await rig.is_serving()


async def test_a_request_whose_logits_are_no_numbers_ends_alone(start_rig: StartRig) -> None:
    """Its blocks are free for others at once, and nobody shares what it left in them."""
    rig = await start_rig(
        FakeExecutor(gpu_blocks=100, not_finite=lambda prompt, num: prompt == prompt_of(POISON) and num == 2)
    )
    waiting = [rig.stub.Generate(request(text, max_tokens=30)) for text in TEXTS]
    poison = rig.stub.GenerateStream(streaming(request(POISON, max_tokens=FOREVER)))
    got: list[int] = []
    code, reason, _ = await refused(gather_tokens(poison, got))
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS")
    assert got == answer_of(rig, POISON, 2)
    for text, answer in zip(TEXTS, waiting, strict=True):
        assert list((await answer).token_ids) == answer_of(rig, text, 30)
    assert len(rig.executor.epochs) == 1
    await rig.until_free()
    rig.executor.not_finite = lambda prompt, num: False
    answer = await rig.stub.Generate(request(POISON, max_tokens=3))
    assert list(answer.token_ids) == answer_of(rig, POISON, 3)
    assert answer.usage.cached_tokens == 0


async def test_constraints_in_hand_are_made_ready_before_the_first_iteration(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request("the", max_tokens=40)
    message.constraint.regex = "[ab]*"
    stream = rig.stub.GenerateStream(streaming(message))
    got = list((await first_delta(stream)).token_ids)
    await rig.executor.kill()
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    num_plans = len(rig.executor.plans)
    await rig.executor.start()
    await rig.until(lambda: len(rig.executor.grammars) == 2)
    assert len(rig.executor.plans) == num_plans
    assert rig.executor.grammars[0] == rig.executor.grammars[1]
    assert got + tokens_of(await collect(stream)) == answer_of(rig, "the", 40)


async def test_waiting_for_the_executor_is_no_stall(start_rig: StartRig) -> None:
    rig = await start_rig(slow(), watchdog_s=0.2)
    streams, _ = await begin(rig)
    await rig.executor.kill()
    await rig.until(lambda: not rig.server._engine.availability.is_open)
    await asyncio.sleep(0.4)
    assert rig.server._engine.is_alive()
    for stream in streams:
        stream.cancel()
