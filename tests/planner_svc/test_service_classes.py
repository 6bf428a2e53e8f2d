"""Service classes over gRPC: which holds, what is reported, and what is refused for coming too late."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from support.planner_rig import Rig, StartRig, collect, detail, refused, request, streaming

from neoflex.v1 import inference_pb2 as pb

CLASSES = {
    "batch": {},
    "chat": {"ttft_s": 60, "tpot_s": 60, "priority": 5, "share": 2},
    "hasty": {"ttft_s": 1e-3, "tpot_s": 60, "on_overload": "refuse"},
    "rapid": {"ttft_s": 60, "tpot_s": 1e-4, "on_overload": "refuse"},
}
NANOSECOND = 1


async def start(start_rig: StartRig) -> Rig:
    return await start_rig(classes=CLASSES, default_class="batch", max_running_sequences=1)


def of_class(name: str, text: str = "the") -> pb.GenerateRequest:
    message = request(text)
    message.service_class = name
    return message


async def runs_one(rig: Rig) -> bool:
    return bool((await rig.load()).running_requests == 1)


async def classes(rig: Rig) -> dict[str, pb.ServiceClass]:
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    return {item.name: item for item in info.service_classes}


async def test_the_server_describes_its_classes(start_rig: StartRig) -> None:
    rig = await start(start_rig)
    described = await classes(rig)
    assert list(described) == ["batch", "chat", "hasty", "rapid"]
    assert [name for name, item in described.items() if item.is_default] == ["batch"]
    chat = described["chat"]
    assert (chat.priority, chat.share, chat.refuses_late) == (5, 2, False)
    assert (chat.targets.ttft.seconds, chat.targets.tpot.seconds) == (60, 60)
    assert not described["batch"].HasField("targets")
    assert described["rapid"].refuses_late


async def test_without_configuration_there_is_one_class(start_rig: StartRig) -> None:
    rig = await start_rig()
    assert list((await classes(rig)).values()) == [pb.ServiceClass(name="default", is_default=True, share=1)]
    assert not (await rig.stub.Generate(request())).usage.HasField("targets_met")


async def test_an_unknown_class_is_refused_by_name(start_rig: StartRig) -> None:
    rig = await start(start_rig)
    code, reason, error = await refused(rig.stub.Generate(of_class("vip")))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "request.service_class"
    assert violation.description == "must be one of batch, chat, hasty, rapid, is 'vip'"


async def test_answers_say_whether_they_were_in_time_and_classes_count_it(start_rig: StartRig) -> None:
    rig = await start(start_rig)
    assert not (await rig.stub.Generate(request())).usage.HasField("targets_met")
    assert (await rig.stub.Generate(of_class("chat"))).usage.targets_met
    late = of_class("chat")
    late.targets.ttft.nanos = NANOSECOND
    *_, last = await collect(rig.stub.GenerateStream(streaming(late)))
    assert last.finished.usage.HasField("targets_met")
    assert not last.finished.usage.targets_met
    described = await classes(rig)
    counts = {name: (item.requests_in_time, item.requests_late) for name, item in described.items()}
    assert counts == {"batch": (0, 0), "chat": (1, 1), "hasty": (0, 0), "rapid": (0, 0)}


async def test_an_idle_server_refuses_nothing(start_rig: StartRig) -> None:
    rig = await start(start_rig)
    for name in ("hasty", "rapid"):
        assert (await rig.stub.Generate(of_class(name, "x" * 100))).usage.completion_tokens == 5
        await rig.until_free()


@pytest.mark.parametrize(
    ("name", "reason", "subject"),
    [
        ("hasty", "TTFT_UNREACHABLE", "planner.classes.hasty.ttft_s"),
        ("rapid", "TPOT_UNREACHABLE", "planner.classes.rapid.tpot_s"),
    ],
)
async def test_what_would_come_too_late_is_refused_with_a_delay(
    name: str, reason: str, subject: str, start_rig: StartRig
) -> None:
    rig = await start(start_rig)
    rig.executor.gate.clear()
    running = rig.stub.Generate(of_class("batch"))

    await rig.until(lambda: runs_one(rig))
    code, got_reason, error = await refused(rig.stub.Generate(of_class(name, "x" * 100)))
    assert (code, got_reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
    [violation] = detail(error, error_details_pb2.QuotaFailure).violations
    assert violation.subject == subject
    assert 10**8 <= detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() <= 30 * 10**9
    # A class that queues takes the same targets.
    message = of_class("chat", "x" * 100)
    message.targets.ttft.nanos = message.targets.tpot.nanos = NANOSECOND
    waiting = rig.stub.Generate(message)

    async def one_waits() -> bool:
        return bool((await rig.load()).waiting_requests == 1)

    await rig.until(one_waits)
    load = {item.name: (item.running_requests, item.waiting_requests) for item in (await rig.load()).classes}
    assert load == {"batch": (1, 0), "chat": (0, 1), "hasty": (0, 0), "rapid": (0, 0)}
    rig.executor.gate.set()
    await running
    assert not (await waiting).usage.targets_met
    described = await classes(rig)
    assert {key: item.requests_refused for key, item in described.items() if item.requests_refused} == {name: 1}
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.counters.refused_requests == 1


async def test_a_higher_priority_goes_first(start_rig: StartRig) -> None:
    rig = await start(start_rig)
    rig.executor.gate.clear()
    order: list[str] = []

    async def ask(name: str) -> None:
        await rig.stub.Generate(of_class(name))
        order.append(name)

    calls = []
    for number, name in enumerate(["batch", "batch", "chat"], 1):
        calls.append(asyncio.create_task(ask(name)))

        async def all_in_hand(expected: int = number) -> bool:
            load = await rig.load()
            return bool(load.running_requests + load.waiting_requests == expected)

        await rig.until(all_in_hand)
        if number == 1:  # It runs before the others come.
            await rig.until(lambda: runs_one(rig))
    rig.executor.gate.set()
    await asyncio.gather(*calls)
    assert order == ["batch", "chat", "batch"]
