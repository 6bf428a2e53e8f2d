"""What callers are told instead of an answer: codes, reasons and details, before a request costs anything."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2
from support.fake_workers import FakeExecutor, FakeHost
from support.planner_rig import (
    CONTEXT_TOKENS,
    MODEL,
    TOKENIZER,
    StartRig,
    collect,
    detail,
    first_delta,
    refused,
    request,
    streaming,
)
from support.tiny_tokenizers import TOOL

from neoflex.v1 import inference_pb2 as pb

FOREVER = 150
"""Tokens of an answer that a test ends by other means; with `slow` it would take seconds."""


def slow() -> FakeExecutor:
    return FakeExecutor(iteration_s=0.02)


async def test_a_bad_field_is_named_and_costs_nothing(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request()
    message.sampling.top_p = 1.5
    code, reason, error = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("request.sampling.top_p", "must be in (0, 1], is 1.5")
    assert rig.executor.plans == []
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.counters.refused_requests, info.counters.accepted_requests) == (1, 0)


@pytest.mark.parametrize(
    ("message", "field", "limit"),
    [
        (request("the", max_tokens=CONTEXT_TOKENS), "request.stopping.max_tokens", f"at most {CONTEXT_TOKENS - 1}"),
        (request("x" * CONTEXT_TOKENS), "request.text", f"at most {CONTEXT_TOKENS - 1} tokens"),
        (request("the", max_tokens=170), "request.stopping.max_tokens", "at most 161 tokens"),
        (request("x" * 170, max_tokens=1), "request.text", "at most 161 tokens"),
    ],
)
async def test_what_can_never_fit_is_refused(
    message: pb.GenerateRequest, field: str, limit: str, start_rig: StartRig
) -> None:
    rig = await start_rig(FakeExecutor(gpu_blocks=40))
    code, _, error = await refused(rig.stub.Generate(message))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == field
    assert limit in violation.description


async def test_default_max_tokens_fit_the_cache(start_rig: StartRig) -> None:
    rig = await start_rig(FakeExecutor(gpu_blocks=10))
    answer = await rig.stub.Generate(pb.GenerateRequest(text="the"))
    assert answer.usage.completion_tokens == 10 * 4 + 1 - 1
    rig = await start_rig(FakeExecutor(gpu_blocks=1000))
    answer = await rig.stub.Generate(pb.GenerateRequest(text="the"))
    assert answer.usage.completion_tokens == CONTEXT_TOKENS - 1


async def test_a_full_queue_is_refused_with_a_delay(start_rig: StartRig) -> None:
    rig = await start_rig(max_waiting_requests=2, max_running_sequences=1)
    rig.executor.gate.clear()
    calls = [asyncio.create_task(collect(rig.stub.GenerateStream(streaming(request())))) for _ in range(2)]

    async def one_runs_and_one_waits() -> bool:
        load = await rig.load()
        return (load.running_requests, load.waiting_requests) == (1, 1)

    await rig.until(one_runs_and_one_waits)
    calls.append(asyncio.create_task(collect(rig.stub.GenerateStream(streaming(request())))))

    async def two_wait() -> bool:
        return bool((await rig.load()).waiting_requests == 2)

    await rig.until(two_wait)
    code, reason, error = await refused(rig.stub.Generate(request()))
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    [violation] = detail(error, error_details_pb2.QuotaFailure).violations
    assert violation.subject == "planner.max_waiting_requests"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() == 10**9
    rig.executor.gate.set()
    for call in calls:
        assert (await call)[-1].finished.finish.reason == pb.FINISH_REASON_LENGTH
    await rig.stub.Generate(request())


async def test_an_id_in_use_is_refused_and_free_again_later(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request(max_tokens=FOREVER)
    message.request_id = "mine"
    stream = rig.stub.GenerateStream(streaming(message))
    await first_delta(stream)
    code, reason, _ = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    stream.cancel()
    await rig.until_free()
    message.stopping.max_tokens = 1
    assert (await rig.stub.Generate(message)).request_id == "mine"


async def test_a_template_that_refuses(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="robot", content="beep")]))
    code, reason, error = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "request.chat.messages"
    assert "unknown role robot" in violation.description


@pytest.mark.parametrize("form", ["text", "chat.messages"])
async def test_a_token_beyond_the_models_vocabulary(form: str, start_rig: StartRig) -> None:
    small = replace(MODEL, limits=replace(MODEL.limits, vocab_size=TOKENIZER.vocab_size - 1))
    rig = await start_rig(model=small)
    message, tokenize = pb.GenerateRequest(), pb.TokenizeRequest()
    if form == "text":
        message.text = tokenize.text = f"ab {TOOL}"
    else:
        message.chat.messages.add(role="user", content=TOOL)
        tokenize.chat.CopyFrom(message.chat)
    for call, field in ((rig.stub.Generate(message), f"request.{form}"), (rig.stub.Tokenize(tokenize), form)):
        code, reason, error = await refused(call)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OUTSIDE_VOCABULARY")
        [violation] = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == field
        assert f"token {TOKENIZER.vocab_size - 1}" in violation.description
    assert rig.executor.plans == []
    assert (await rig.stub.Generate(request("ab"))).usage.completion_tokens == 5


async def test_while_loading_callers_are_told_to_come_back(start_rig: StartRig) -> None:
    host = FakeHost()
    host.refuses = True
    rig = await start_rig(FakeExecutor(host_blocks=8), host, ready=False)
    code, reason, error = await refused(rig.stub.Generate(request()))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0
    assert (await refused(rig.stub.GetModelInfo(pb.GetModelInfoRequest())))[:2] == (code, reason)
    assert (await rig.stub.GetServerInfo(pb.GetServerInfoRequest())).gpu_blocks == 0
    assert (await rig.load()).max_waiting_requests == 1024
    assert not await rig.is_serving()
    assert await rig.is_serving("liveness")
    # What needs no executor is answered.
    assert (await rig.stub.Detokenize(pb.DetokenizeRequest(token_ids=[64]))).text == "a"


async def test_a_constraint_that_can_t_be_kept_to_is_refused_before_it_is_queued(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request()
    message.constraint.json_schema = '{"items": {"not": {}}}'
    code, reason, error = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINT_UNSUPPORTED")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "request.constraint.json_schema"
    assert violation.description == "$.items.not: this keyword is not supported"
    assert rig.executor.grammars == []
    rig.executor.grammar_error = "too large"
    message.constraint.regex = "[ab]"
    code, reason, error = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINT_UNSUPPORTED")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("request.constraint.regex", "too large")
    assert rig.executor.plans == []


async def test_an_answer_that_can_t_go_on_in_its_grammar_fails_alone(start_rig: StartRig) -> None:
    rig = await start_rig()
    rig.executor.failing_grammar = "no way on"
    other = rig.stub.Generate(request("other", max_tokens=20))
    message = request("the", max_tokens=20)
    message.constraint.regex = "[ab]*"
    code, reason, error = await refused(rig.stub.Generate(message))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONSTRAINT_FAILED")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("request.constraint", "no way on")
    assert (await other).usage.completion_tokens == 20
    await rig.until_free()
    assert rig.executor.problems == []
