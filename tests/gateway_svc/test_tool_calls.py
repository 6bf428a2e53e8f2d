"""Calls of tools, as OpenAI's own client asks for them and reads them."""

import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from support.fake_planner import Answer, FakePlanner

from neoflex.v1 import inference_pb2 as pb

ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}\\""]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}\\""]}'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]
HI: Any = [{"role": "user", "content": "Add one"}]


@pytest.fixture(autouse=True)
def hermes(fake: FakePlanner) -> None:
    fake.info.tool_call_format = pb.TOOL_CALL_FORMAT_HERMES


async def test_tools_are_shown_and_calls_come_back(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(pieces=["Well.", f"<tool_call>{ADD}</tool_call>", "<tool_call>{'"])
    answer = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well.<tool_call>{'"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)
    [request] = fake.requests
    assert not request.HasField("constraint")
    add, ping = request.chat.tools
    assert (add.name, add.description) == ("add", "Adds.")
    assert json.loads(add.parameters_json_schema) == TOOLS[0]["function"]["parameters"]
    assert ping == pb.Tool(name="ping")


async def test_streamed_calls(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(pieces=["<tool", '_call>{"name": "add", "argu', 'ments": {"a"', ": 1}}", "</tool_call>"])
    stream = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)
    deltas, reason, call_id = [], None, None
    async for chunk in stream:
        reason = chunk.choices[0].finish_reason
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            deltas.append((call.index, call.function.name, call.function.arguments))
            call_id = call_id or call.id
    assert deltas == [(0, "add", ""), (0, None, '{"a"'), (0, None, ": 1}")]
    assert reason == "tool_calls"
    assert call_id is not None
    assert call_id.startswith("call-")


async def test_a_conversation_with_calls(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answers = [Answer(pieces=[f"<tool_call>{ADD}</tool_call>"])]
    first = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    message = first.choices[0].message
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "add", "content": "3"}
    sent: Any = [*HI, message, result]
    await openai.chat.completions.create(model="tiny", messages=sent, tools=TOOLS)
    call = pb.ToolCall(id=message.tool_calls[0].id, name="add", arguments_json=ARGUMENTS)
    assert list(fake.requests[1].chat.messages) == [
        pb.ChatMessage(role="user", content="Add one"),
        pb.ChatMessage(role="assistant", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="3", tool_call_id=call.id),
    ]


async def test_no_tools_are_shown_where_none_may_be_called(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(pieces=[f"<tool_call>{ADD}</tool_call>"])
    answer = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert list(fake.requests[0].chat.tools) == []


async def test_a_named_tool_is_forced_by_its_schema(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(pieces=['{"a"', ": 1}"])
    choice: Any = {"type": "function", "function": {"name": "add"}}
    answer = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice=choice)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(fake.requests[0].constraint.json_schema) == TOOLS[0]["function"]["parameters"]
    assert len(fake.requests[0].chat.tools) == 2


@pytest.mark.parametrize("parallel", [True, False])
async def test_required_calls(parallel: bool, openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(pieces=[f'[{ADD}, {{"name": "ping", "arguments": {{}}}}]'])
    answer = await openai.chat.completions.create(
        model="tiny", messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel
    )
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls if call.type == "function"] == ["add", "ping"][: 1 + parallel]
    assert answer.choices[0].finish_reason == "tool_calls"
    schema = json.loads(fake.requests[0].constraint.json_schema)
    assert schema["minItems"] == 1
    assert schema.get("maxItems") == (None if parallel else 1)
    add, ping = schema["items"]["anyOf"]
    assert add["properties"] == {"name": {"const": "add"}, "arguments": TOOLS[0]["function"]["parameters"]}
    assert ping["properties"]["arguments"] == {"type": "object", "properties": {}}


async def test_mistral_gets_ids_that_its_template_takes(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.info.tool_call_format = pb.TOOL_CALL_FORMAT_MISTRAL
    fake.answer = Answer(pieces=[f"[{ADD}]"])
    answer = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    [call] = answer.choices[0].message.tool_calls or []
    assert len(call.id) == 9
    assert call.id.isalnum()


async def test_a_promise_that_is_not_kept_is_said(http: httpx2.AsyncClient) -> None:
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    body = {"messages": HI, "tools": [tool]}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["x-warning"] == "tools: strict is kept only where tool_choice forces a call: add"
    response = await http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert "x-warning" not in response.headers


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "another tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
        "must name one of the tools, is 'rm'",
    ),
    "no choice": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", 'must be "none", "auto"'),
    "empty": ({"tools": []}, "tools", "must not be empty"),
    "twice": ({"tools": [TOOLS[1], TOOLS[1]]}, "tools", "different names"),
    "bad name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    "format, too": (
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format",
        "cannot be given together with tools",
    ),
    "old form": ({"functions": []}, "functions", "is not supported"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_asked(name: str, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    extra, param, text = BAD[name]
    response = await http.post("/v1/chat/completions", json={"messages": HI, **extra})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert text in error["message"]
    assert fake.requests == []


async def test_a_model_whose_calls_nobody_can_read(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.info.tool_call_format = pb.TOOL_CALL_FORMAT_UNSPECIFIED
    body = {"messages": HI, "tools": TOOLS}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    fake.answer = Answer(pieces=[f"[{ADD}]"])
    response = await http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
