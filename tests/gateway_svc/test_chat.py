"""/v1/chat/completions, as OpenAI's own client sees it."""

import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError
from support.fake_planner import END, Answer, FakePlanner, byte_token, logprob

from neoflex.v1 import inference_pb2 as pb

HI: Any = [{"role": "user", "content": "Hi"}]


async def test_a_whole_answer(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(cached_tokens=3)
    answer = await openai.chat.completions.create(model="tiny", messages=HI)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    [request] = fake.requests
    assert request.request_id == answer.id
    expected = pb.GenerateRequest(
        request_id=answer.id, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
    )
    # Absent fields stay absent, so that the server's defaults hold.
    expected.stopping.SetInParent()
    expected.sampling.SetInParent()
    for group in ("stopping", "sampling"):
        if not request.HasField(group):
            expected.ClearField(group)
    assert request == expected


async def test_a_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "Hel", "lo", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 4
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 6)


async def test_the_wire_form_of_a_stream(http: httpx2.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


async def test_usage_in_each_event(http: httpx2.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "stream": True, "stream_options": options}
    response = await http.post("/v1/chat/completions", json=body)
    events = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 3, 5, 6, 6]
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}


async def test_every_option_reaches_the_planner(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    await openai.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "9": 2.5},
        seed=-1,
        stop=["x", "yz"],
        max_completion_tokens=12,
        logprobs=True,
        top_logprobs=2,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={
            "top_k": 40,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "stop_token_ids": [3, 4],
            "ignore_eos": True,
            "service_class": "batch",
            "cache_salt": "tenant 7",
        },
    )
    [request] = fake.requests
    turns = [(turn.role, turn.content) for turn in request.chat.messages]
    assert turns == [("system", "Be brief."), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    assert request.sampling == pb.SamplingOptions(
        temperature=0.5,
        top_p=0.25,
        top_k=40,
        min_p=0.125,
        seed=2**64 - 1,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100, 9: 2.5},
    )
    assert request.stopping == pb.StoppingOptions(
        stop=["x", "yz"], stop_token_ids=[3, 4], ignore_eos=True, max_tokens=12
    )
    assert request.output == pb.OutputOptions(logprobs=2)
    assert request.service_class == "batch"
    assert request.cache_salt == "tenant 7"
    assert not request.HasField("targets")


async def test_n_answers_have_seeds_and_ids_of_their_own(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answers = [Answer(pieces=[text]) for text in "abc"]
    answer = await openai.chat.completions.create(model="tiny", messages=HI, n=3, seed=2**63 - 1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"a", "b", "c"}
    requests = {request.request_id: request.sampling.seed for request in fake.requests}
    assert requests == {answer.id: 2**63 - 1, f"{answer.id}-1": 2**63, f"{answer.id}-2": 2**63 + 1}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)


async def test_n_streams_are_told_apart(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="tiny", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "Hello", 1: "Hello"}
    assert reasons == {0: "stop", 1: "stop"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 12)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (pb.FINISH_REASON_LENGTH, "length"),
        (pb.FINISH_REASON_TIME_LIMIT, "length"),
        (pb.FINISH_REASON_ABORT, "abort"),
    ],
)
async def test_finish_reasons(
    reason: pb.FinishReason, expected: str, http: httpx2.AsyncClient, fake: FakePlanner
) -> None:
    fake.answer = Answer(finish=pb.Finish(reason=reason))
    response = await http.post("/v1/chat/completions", json={"messages": HI})
    assert response.json()["choices"][0]["finish_reason"] == expected


async def test_logprobs_hold_text_and_bytes_and_not_the_end(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    half = byte_token(0xC3)

    def of(token: int) -> pb.PositionLogprobs:
        return logprob(token, -0.5, (ord("é"), -0.25), (half, float("-inf")))

    fake.answer = Answer(pieces=["H", "i"], logprobs=of)
    answer = await openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(item.token, item.logprob, item.bytes) for item in logprobs.content] == [
        ("H", -0.5, [72]),
        ("i", -0.5, [105]),
    ]
    top = [(item.token, item.logprob, item.bytes) for item in logprobs.content[1].top_logprobs]
    assert top == [("é", -0.25, [0xC3, 0xA9]), ("\ufffd", -9999.0, [0xC3])]
    # Each token is asked for once.
    await openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    assert fake.detokenized == [sorted({END, half, *map(ord, "Hié")})]


async def test_streamed_logprobs_come_with_their_text(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    stream = await openai.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True)
    seen = []
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        tokens = [item.token for item in logprobs.content or ()] if logprobs else []
        seen.append((chunk.choices[0].delta.content, tokens))
    assert seen == [("", []), ("Hel", list("Hel")), ("lo", list("lo")), (None, [])]
    assert fake.requests[0].output == pb.OutputOptions(logprobs=0)


@pytest.mark.parametrize(
    ("response_format", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, pb.Constraint(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [None, 1]}, "strict": True}},
            pb.Constraint(json_schema='{"enum": [null, 1]}'),
        ),
    ],
)
async def test_response_format(
    response_format: Any, constraint: pb.Constraint | None, openai: AsyncOpenAI, fake: FakePlanner
) -> None:
    await openai.chat.completions.create(model="tiny", messages=HI, response_format=response_format)
    assert fake.requests[0].HasField("constraint") == (constraint is not None)
    assert fake.requests[0].constraint == (constraint or pb.Constraint())


@pytest.mark.parametrize(
    ("outputs", "constraint"),
    [
        ({"json": {"type": "null"}}, pb.Constraint(json_schema='{"type": "null"}')),
        ({"json_object": True}, pb.Constraint(json_object=True)),
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"choice": ["a", "b"]}, pb.Constraint(choice=pb.Choice(texts=["a", "b"]))),
        ({"grammar": 'root ::= "a"'}, pb.Constraint(ebnf='root ::= "a"')),
    ],
)
async def test_structured_outputs(
    outputs: Any, constraint: pb.Constraint, openai: AsyncOpenAI, fake: FakePlanner
) -> None:
    await openai.chat.completions.create(model="tiny", messages=HI, extra_body={"structured_outputs": outputs})
    assert fake.requests[0].constraint == constraint


async def test_an_answer_can_be_sent_back_as_it_came(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    answer = await openai.chat.completions.create(model="tiny", messages=HI)
    sent: Any = [*HI, answer.choices[0].message, {"role": "user", "content": "More"}]
    await openai.chat.completions.create(model="tiny", messages=sent)
    assert [turn.content for turn in fake.requests[1].chat.messages] == ["Hi", "Hello", "More"]


async def test_parsed_answers(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    """The client's own way to get a typed answer."""
    from pydantic import BaseModel

    class Planet(BaseModel):
        name: str
        moons: int

    fake.answer = Answer(pieces=['{"name": "Mars"', ', "moons": 2}'])
    answer = await openai.chat.completions.parse(model="tiny", messages=HI, response_format=Planet)
    assert answer.choices[0].message.parsed == Planet(name="Mars", moons=2)
    assert json.loads(fake.requests[0].constraint.json_schema)["required"] == ["name", "moons"]


async def test_a_mistake_is_a_bad_request(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    with pytest.raises(BadRequestError) as caught:
        await openai.chat.completions.create(model="tiny", messages=HI, top_logprobs=2)
    assert (caught.value.param, caught.value.code) == ("top_logprobs", "invalid_value")
    assert fake.requests == []
