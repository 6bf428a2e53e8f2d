"""What callers get: answers and streams, and every way in which they end."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.fake_workers import FakeExecutor
from support.planner_rig import (
    TOKENIZER,
    StartRig,
    collect,
    first_delta,
    request,
    streaming,
)

from neoflex.v1 import inference_pb2 as pb
from svc_common.model.chat_template import Turn

FOREVER = 150
"""Tokens of an answer that a test ends by other means; with `slow` it would take seconds."""


def slow() -> FakeExecutor:
    return FakeExecutor(iteration_s=0.02)


# --- answers


async def test_generate_returns_the_whole_answer(start_rig: StartRig) -> None:
    rig = await start_rig()
    answer = await rig.stub.Generate(request("the", max_tokens=5))
    assert (answer.text, list(answer.token_ids)) == ("xyzab", [87, 88, 89, 64, 65])
    assert answer.finish == pb.Finish(reason=pb.FINISH_REASON_LENGTH)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.recomputations) == (1, 5, 0)
    assert 0 < answer.usage.time_to_first_token_ns <= answer.usage.duration_ns
    assert len(answer.request_id) == 32


async def test_a_stream_begins_with_the_prompt_and_ends_with_usage(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request("the", max_tokens=5)
    message.request_id = "mine"
    first, *deltas, last = await collect(rig.stub.GenerateStream(streaming(message)))
    assert first.started == pb.GenerationStarted(request_id="mine", prompt_tokens=1)
    assert "".join(delta.delta.text for delta in deltas) == "xyzab"
    assert [token for delta in deltas for token in delta.delta.token_ids] == [87, 88, 89, 64, 65]
    assert last.finished.finish.reason == pb.FINISH_REASON_LENGTH
    assert last.finished.usage.completion_tokens == 5


@pytest.mark.parametrize("form", ["text", "token_ids", "chat"])
async def test_each_form_of_prompt(form: str, start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request(max_tokens=1)
    if form == "text":
        message.text = "abc the"
        expected = TOKENIZER.encode("abc the")
    elif form == "token_ids":
        message.token_ids.ids.extend([5, 6, 7])
        expected = [5, 6, 7]
    else:
        message.chat.messages.add(role="user", content="the")
        expected = TOKENIZER.encode_chat([Turn("user", "the")])
    answer = await rig.stub.Generate(message)
    assert answer.usage.prompt_tokens == len(expected)
    assert list(rig.executor.plans[0].new_sequences[0].token_ids) == expected


async def test_sampling_reaches_the_executor(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request(max_tokens=1)
    options = message.sampling
    options.temperature, options.top_k, options.top_p, options.min_p, options.seed = 0.5, 7, 0.25, 0.125, 2**63
    await rig.stub.Generate(message)
    await rig.stub.Generate(request(max_tokens=1))
    given, default = (plan.new_sequences[0].sampling for plan in rig.executor.plans if plan.new_sequences)
    assert (given.temperature, given.top_k, given.top_p, given.min_p, given.seed, given.num_logprobs) == (
        0.5, 7, 0.25, 0.125, 2**63, -1,
    )  # fmt: skip
    assert (default.temperature, default.top_k, default.top_p, default.min_p) == (1, 0, 1, 0)


async def test_logprobs(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request(max_tokens=2)
    message.output.logprobs = 2
    whole = await rig.stub.Generate(message)
    assert [(p.chosen.token_id, p.chosen.logprob) for p in whole.logprobs] == [(87, -0.5), (88, -0.5)]
    assert [(t.token_id, t.logprob) for t in whole.logprobs[1].top] == [(88, -0.5), (89, -1.5)]
    message.output.logprobs = 0
    messages = await collect(rig.stub.GenerateStream(streaming(message)))
    positions = [position for item in messages for position in item.delta.logprobs]
    assert [(p.chosen.token_id, len(p.top)) for p in positions] == [(87, 0), (88, 0)]
    assert len((await rig.stub.Generate(request(max_tokens=2))).logprobs) == 0


async def test_64_at_once_each_get_their_own_answer(start_rig: StartRig) -> None:
    rig = await start_rig(max_running_sequences=16)
    texts = [chr(ord("!") + i) for i in range(64)]
    answers = await asyncio.gather(*(rig.stub.Generate(request(text, max_tokens=8)) for text in texts))
    for text, answer in zip(texts, answers, strict=True):
        prompt = tuple(TOKENIZER.encode(text))
        assert list(answer.token_ids) == [rig.executor.answer(prompt, i) for i in range(8)]
    await rig.until_free()
    assert rig.executor.most_plans_waiting <= 2


async def test_the_executor_always_has_a_plan_waiting(start_rig: StartRig) -> None:
    rig = await start_rig()
    rig.executor.gate.clear()
    call = asyncio.create_task(collect(rig.stub.GenerateStream(streaming(request(max_tokens=20)))))
    await rig.until(lambda: rig.executor.most_plans_waiting == 1)
    rig.executor.gate.set()
    await call


# --- ends


async def test_an_end_token_counts_and_shows_nothing(start_rig: StartRig) -> None:
    end = TOKENIZER.eos_token_ids[0]
    rig = await start_rig(FakeExecutor(answer=lambda prompt, index: end if index == 2 else 64 + index))
    answer = await rig.stub.Generate(request(max_tokens=10))
    assert (answer.text, list(answer.token_ids)) == ("ab", [64, 65, end])
    assert answer.finish == pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=end)
    assert answer.usage.completion_tokens == 3
    answer = await rig.stub.Generate(request(max_tokens=4, ignore_eos=True))
    assert (answer.text, list(answer.token_ids)) == ("abd", [64, 65, end, 67])
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_token_of_the_callers(start_rig: StartRig) -> None:
    rig = await start_rig()
    answer = await rig.stub.Generate(request("the", max_tokens=10, stop_token_ids=[89, 3], ignore_eos=True))
    assert (answer.text, answer.finish.stop_token_id) == ("xy", 89)


async def test_a_stop_text_across_tokens(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request("the", max_tokens=FOREVER, stop=["nope", "zab"])
    answer = await rig.stub.Generate(message)
    assert (answer.text, list(answer.token_ids)) == ("xy", [87, 88, 89, 64, 65])
    assert answer.finish == pb.Finish(reason=pb.FINISH_REASON_STOP, stop="zab")
    messages = await collect(rig.stub.GenerateStream(streaming(message)))
    texts = [item.delta.text for item in messages if item.HasField("delta")]
    assert "".join(texts) == "xy"
    assert [token for item in messages for token in item.delta.token_ids] == [87, 88, 89, 64, 65]
    await rig.until_free()


async def test_held_text_goes_out_when_the_length_ends_it(start_rig: StartRig) -> None:
    rig = await start_rig()
    answer = await rig.stub.Generate(request("the", max_tokens=4, stop=["zabc"]))
    assert (answer.text, answer.finish.reason) == ("xyza", pb.FINISH_REASON_LENGTH)


async def test_no_half_character(start_rig: StartRig) -> None:
    smile = [
        i for byte in "🙂".encode() for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == bytes([byte])
    ]
    rig = await start_rig(FakeExecutor(answer=lambda prompt, index: smile[index % 4], iteration_s=0.01))
    messages = await collect(rig.stub.GenerateStream(streaming(request(max_tokens=6))))
    texts = [item.delta.text for item in messages if item.HasField("delta")]
    assert "".join(texts) == "🙂"
    assert len([token for item in messages for token in item.delta.token_ids]) == 6


async def test_time_limit_returns_what_there_is(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    answer = await rig.stub.Generate(request("the", max_tokens=FOREVER, time_limit=Duration(nanos=300_000_000)))
    assert answer.finish.reason == pb.FINISH_REASON_TIME_LIMIT
    assert 0 < len(answer.token_ids) < FOREVER
    assert answer.text.startswith("xyzab"[: len(answer.token_ids)])
    await rig.until_free()


async def test_abort_ends_running_requests_by_id(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request(max_tokens=FOREVER)
    message.request_id = "mine"
    stream = rig.stub.GenerateStream(streaming(message))
    await first_delta(stream)
    answer = await rig.stub.Abort(pb.AbortRequest(request_ids=["other", "mine", "mine"]))
    assert list(answer.aborted_request_ids) == ["mine"]
    *_, last = await collect(stream)
    assert last.finished.finish.reason == pb.FINISH_REASON_ABORT
    assert 0 < last.finished.usage.completion_tokens < FOREVER
    await rig.until_free()
    assert list((await rig.stub.Abort(pb.AbortRequest(request_ids=["mine"]))).aborted_request_ids) == []


@pytest.mark.parametrize("way", ["cancel", "deadline", "unary cancel", "channel"])
async def test_a_caller_that_goes_takes_its_request_along(way: str, start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request(max_tokens=FOREVER)
    if way == "unary cancel":
        call = rig.stub.Generate(message)
        await rig.until(lambda: len(rig.executor.held) == 1)
        call.cancel()
    elif way == "deadline":
        stream = rig.stub.GenerateStream(streaming(message), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stream)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    elif way == "cancel":
        stream = rig.stub.GenerateStream(streaming(message))
        await first_delta(stream)
        stream.cancel()
    else:
        async with grpc.aio.insecure_channel(rig.server.address) as channel:
            stub = type(rig.stub)(channel)
            await first_delta(stub.GenerateStream(streaming(message)))
    num_plans = len(rig.executor.plans)
    await rig.until_free()
    # The plan that runs, the one that waits and the one that releases; the rest passed before the planner knew.
    assert len(rig.executor.plans) - num_plans <= 4
    load = await rig.load()
    assert (load.gpu_blocks_used, load.running_requests) == (0, 0)


async def test_a_slow_reader_holds_up_nobody_and_gets_all(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request("the", max_tokens=FOREVER)
    message.output.logprobs = 20  # So that the connection's buffers do not take it all.
    stream = rig.stub.GenerateStream(streaming(message))
    other = await rig.stub.Generate(request("abc", max_tokens=FOREVER))
    assert other.usage.completion_tokens == FOREVER
    await rig.until_free()
    tokens = [token for item in await collect(stream) for token in item.delta.token_ids]
    assert tokens == [rig.executor.answer(tuple(TOKENIZER.encode("the")), i) for i in range(FOREVER)]


async def test_a_constraint_is_made_ready_before_the_request_is_planned(start_rig: StartRig) -> None:
    rig = await start_rig()
    message = request("the", max_tokens=2)
    message.constraint.choice.texts.extend(["a", "b"])
    await rig.stub.Generate(message)
    [grammar] = rig.executor.grammars
    [new] = [new for plan in rig.executor.plans for new in plan.new_sequences]
    assert new.sampling.grammar == grammar != ""


async def test_log_probabilities_of_a_prompt_are_the_stream_s_first(start_rig: StartRig) -> None:
    rig = await start_rig(slow())
    message = request("abc the", max_tokens=3)
    message.output.prompt_logprobs = 2
    prompt = TOKENIZER.encode("abc the")
    _, first, *deltas, _ = await collect(rig.stub.GenerateStream(streaming(message)))
    positions = first.delta.prompt_logprobs
    assert [position.chosen.token_id for position in positions] == prompt[1:]
    assert [position.chosen.logprob for position in positions] == [-float(i) for i in range(1, len(prompt))]
    assert [item.token_id for item in positions[0].top] == [1, 2]
    assert not any(delta.delta.prompt_logprobs for delta in deltas)
    answer = await rig.stub.Generate(message)
    assert list(answer.prompt_logprobs) == list(positions)
