"""Stopping in order, what is written down of a stall, and the line that each request leaves."""

import asyncio
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import TOKENIZER, Rig, StartRig, collect, first_delta, refused, request, streaming

from neoflex.v1 import inference_pb2 as pb

FOREVER = 150


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers are looked at often; SIGUSR1 is left as it was."""
    monkeypatch.setattr("planner_svc.executor_loop.PROBE_EVERY_S", 0.05)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def answer_of(rig: Rig, text: str, num_tokens: int) -> list[int]:
    prompt = tuple(TOKENIZER.encode(text))
    return [rig.executor.answer(prompt, index) for index in range(num_tokens)]


def tokens_of(messages: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token for message in messages for token in message.delta.token_ids]


def two_tiers() -> FakeExecutor:
    return FakeExecutor(gpu_blocks=64, host_blocks=100, iteration_s=0.02)


# --- stopping in order


async def test_an_answer_that_is_read_slowly_is_waited_for(start_rig: StartRig) -> None:
    """It has ended in the engine, and stopping must not cut off what is still on its way."""
    rig = await start_rig()
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=40)))
    got = list((await first_delta(stream)).token_ids)
    hold = rig.stub.GenerateStream(streaming(request("abc", max_tokens=40)))
    await first_delta(hold)

    async def has_ended() -> bool:
        return (await rig.load()).running_requests == 0

    await rig.until(has_ended)
    stop = asyncio.create_task(rig.server.stop(30))
    assert got + tokens_of(await collect(stream)) == answer_of(rig, "the", 40)
    hold.cancel()
    await stop


async def test_a_host_that_is_told_to_stop_is_let_go_and_nothing_computed_is_lost(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), [FakeHost(), FakeHost()], mode="asymmetric")
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=60)))
    got = list((await first_delta(stream)).token_ids)
    first = rig.hosts[0]
    first.stopping = True
    await rig.until(lambda: len(rig.executor.epochs) == 2)
    assert first.region_epoch == rig.executor.epochs[0].epoch  # It was not asked for another.
    assert rig.hosts[1].region_epoch == rig.executor.epochs[1].epoch
    rest = await collect(stream)
    assert got + tokens_of(rest) == answer_of(rig, "the", 60)
    assert rest[-1].finished.usage.recomputations == 1
    # Whoever stops is not asked to come back.
    await rig.stub.Generate(request())
    assert len(rig.executor.epochs) == 2
    await first.kill()
    first.stopping = False
    await first.start()
    await rig.until(lambda: first.region_epoch == rig.executor.epochs[-1].epoch)


async def test_an_executor_that_is_told_to_stop_is_let_go_after_what_runs(start_rig: StartRig) -> None:
    rig = await start_rig(FakeExecutor(iteration_s=0.02))
    assert rig.executor.num_streams == 1
    rig.executor.stopping = True
    await rig.until(lambda: rig.executor.num_streams == 0)

    async def is_ready() -> bool:
        return await rig.is_serving()

    assert not await is_ready()
    assert len(rig.executor.epochs) == 1  # It is not asked to begin anew while it says so.
    rig.executor.stopping = False
    await rig.until_ready()
    assert list((await rig.stub.Generate(request("the", max_tokens=3))).token_ids) == answer_of(rig, "the", 3)


async def test_workers_that_are_told_to_stop_with_the_planner_serve_it_to_the_end(start_rig: StartRig) -> None:
    rig = await start_rig(two_tiers(), FakeHost(), mode="asymmetric")
    stream = rig.stub.GenerateStream(streaming(request("the", max_tokens=60)))
    got = list((await first_delta(stream)).token_ids)
    assert rig.host is not None
    rig.executor.stopping = rig.host.stopping = True
    stop = asyncio.create_task(rig.server.stop(30))
    rest = await collect(stream)
    assert got + tokens_of(rest) == answer_of(rig, "the", 60)
    assert rest[-1].finished.usage.recomputations == 0
    await stop
    await rig.until(lambda: rig.executor.num_streams == 0)
    assert len(rig.executor.epochs) == 1


# --- a stall


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> str:
    while True:
        if found := [message for message in caplog.messages if text in message]:
            return found[-1]
        await asyncio.sleep(0.01)


async def test_a_stall_is_written_down_with_all_that_is_known(
    start_rig: StartRig, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    executor = FakeExecutor(gpu_blocks=12, host_blocks=100)
    rig = await start_rig(
        executor, FakeHost(), logging={"dump_dir": str(tmp_path)}, watchdog_s=0.5, max_running_sequences=1
    )
    secret = "a secret that nobody may read"
    named = request(secret, max_tokens=20)
    named.request_id = "the-one"
    stream = rig.stub.GenerateStream(streaming(named))
    await first_delta(stream)
    executor.gate.clear()
    waiting = asyncio.ensure_future(rig.stub.Generate(request("abc")))
    message = await until_logged(caplog, "requests in hand and no result for")
    text = dumped(tmp_path)
    assert text.rstrip() == message.partition("\n")[2]
    assert re.search(r"^epoch \d+, driving; ready False, draining False$", text, re.M)
    assert "\nrequests: 1 run, 1 of at most 1024 wait\n" in text
    assert re.search(r"^blocks: GPU \d+ of 12, host 0 of 100$", text, re.M)
    assert re.search(
        r"^last plan: iteration \d+, gpu_only; sub-batch 0: 0 prompts with 0 tokens, 1 decodes on", text, re.M
    )
    assert re.search(r"^last result: iteration \d+, 1 tokens; took 0\.0 ms", text, re.M)
    prompt_tokens = len(TOKENIZER.encode(secret))
    assert re.search(rf"^1 'the-one' default running gpu \d+ {prompt_tokens} \d+/{prompt_tokens} \d+/20", text, re.M)
    assert re.search(r"^2 '[0-9a-f]+' default waiting - 0 1 0/0 0/5 0 0 0$", text, re.M)
    assert f"executor: epoch: {executor.epochs[-1].epoch}" in text
    assert f"CPU attention at 127.0.0.1:{rig.hosts[0]._address.rpartition(':')[2]}: epoch:" in text
    assert "== threads" in text
    assert secret not in text
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.counters.stalls == 1
    assert list(info.cpu_attention_addresses) == [host._address for host in rig.hosts]
    executor.gate.set()
    await collect(stream)
    await waiting


def dumped(directory: Path) -> str:
    [path] = directory.glob("planner_svc-*.dump")
    return path.read_text()


# --- the line of a request


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What each says, without what differs from run to run."""
    names = ("request_id", "gateway_id", "service_class", "prompt_tokens", "completion_tokens", "finish_reason")
    names += ("slo_met", "code", "reason")
    return [
        {"text": record.message, **{name: vars(record)[name] for name in names if name in vars(record)}}
        for record in caplog.records
        if record.name == "planner_svc.access_log"
    ]


async def test_each_request_leaves_one_line(start_rig: StartRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = await start_rig(FakeExecutor(iteration_s=0.02), classes={"default": {}, "chat": {"ttft_s": 60, "tpot_s": 60}})
    finished = request("the", max_tokens=3)
    finished.request_id, finished.service_class = "one", "chat"
    await rig.stub.Generate(finished, metadata=(("x-request-id", "req-7"),))
    cancelled = request("abc", max_tokens=FOREVER)
    cancelled.request_id = "two"
    stream = rig.stub.GenerateStream(streaming(cancelled))
    await first_delta(stream)
    stream.cancel()
    await rig.until(lambda: len(lines(caplog)) == 2)
    refusal = request("the", max_tokens=10**6)
    refusal.request_id = "three"
    assert (await refused(rig.stub.Generate(refusal)))[0] is grpc.StatusCode.INVALID_ARGUMENT
    first, second, third = lines(caplog)
    assert first == {
        "text": "request finished",
        "request_id": "one",
        "gateway_id": "req-7",
        "service_class": "chat",
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "finish_reason": "length",
        "slo_met": True,
    }
    record = next(record for record in caplog.records if record.message == "request finished")
    values = vars(record)
    assert values["ttft_s"] + 2 * values["tpot_s"] == pytest.approx(values["duration_s"], rel=1e-6)
    assert (values["cached_tokens"], values["recomputations"]) == (0, 0)
    assert second.pop("completion_tokens") >= 1
    assert second == {"text": "request cancelled", "request_id": "two", "service_class": "default", "prompt_tokens": 1}
    assert third == {
        "text": "request refused",
        "request_id": "three",
        "code": "INVALID_ARGUMENT",
        "reason": "CONTEXT_EXCEEDED",
    }


async def test_lines_can_be_had_without(start_rig: StartRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rig = await start_rig(logging={"access": False})
    await rig.stub.Generate(request("the", max_tokens=3))
    await refused(rig.stub.Generate(request("the", max_tokens=10**6)))
    assert lines(caplog) == []
