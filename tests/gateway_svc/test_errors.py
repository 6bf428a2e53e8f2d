"""What callers are told when something is wrong: status, OpenAI's shape, and which field."""

import asyncio
import json
from typing import Any

import httpx2
import openai as openai_package
import pytest
from openai import AsyncOpenAI
from support.fake_planner import Answer, FakePlanner, RunningPlanner

from svc_common.errors import (
    FieldViolation,
    ServiceError,
    already_exists,
    invalid_arguments,
    resource_exhausted,
    unavailable,
)

HI: Any = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BUSY = {"message": "the queue is full", "type": "rate_limit_error", "param": None, "code": "queue_full"}


@pytest.mark.parametrize("stream", [False, True])
async def test_overload(stream: bool, openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(refusal=resource_exhausted("QUEUE_FULL", "the queue is full", "planner.max", 1.2))
    with pytest.raises(openai_package.RateLimitError) as caught:
        await openai.chat.completions.create(model="tiny", messages=HI, stream=stream)
    error = caught.value
    assert error.response.headers["retry-after"] == "2"
    assert error.body == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


async def test_openais_client_tries_again(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.answers = [Answer(refusal=resource_exhausted("QUEUE_FULL", "full", "planner.max", 0.01))]
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=1) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Hello"
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (unavailable("LOADING", "not yet", 3.0), 503, "loading", "3"),
        (unavailable("DRAINING", "no more"), 503, "draining", "1"),
        (already_exists("DUPLICATE_REQUEST_ID", "runs already"), 409, "duplicate_request_id", None),
    ],
)
async def test_other_refusals(
    refusal: ServiceError, status: int, code: str, retry_after: str | None, http: httpx2.AsyncClient, fake: FakePlanner
) -> None:
    fake.answer = Answer(refusal=refusal)
    for body in ({"messages": HI}, {"messages": HI, "stream": True}):
        response = await http.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers.get("retry-after") == retry_after


async def test_a_server_that_is_loading(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    fake.model_refusal = unavailable("LOADING", "not yet", 1.0)
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "x"})):
        assert (await http.post(path, json=body)).status_code == 503
    assert (await http.get("/v1/models")).status_code == 503
    fake.model_refusal = None
    assert (await http.get("/v1/models")).status_code == 200


async def test_nobody_at_the_planners_address(http: httpx2.AsyncClient, planner: RunningPlanner) -> None:
    await planner.server.stop(0)
    response = await http.post(CHAT, json={"messages": HI})
    assert response.status_code == 503
    assert planner.address in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"


FIELDS = {
    "request.sampling.top_p": "top_p",
    "request.sampling.logit_bias[7]": "logit_bias[7]",
    "request.stopping.stop[2]": "stop[2]",
    "request.stopping.max_tokens": "max_tokens",
    "request.output.logprobs": "top_logprobs",
    "request.chat.messages": "messages",
    "request.chat.messages[1].tool_calls[0].arguments_json": "messages[1].tool_calls[0].arguments_json",
    "request.chat.tools": "tools",
    "request.constraint.json_schema": "response_format",
    "request.service_class": "service_class",
    "request.targets.ttft": "x-slo-ttft-ms",
}


@pytest.mark.parametrize("field", FIELDS)
async def test_the_planners_complaints_name_the_json_field(
    field: str, http: httpx2.AsyncClient, fake: FakePlanner
) -> None:
    fake.answer = Answer(refusal=invalid_arguments((FieldViolation(field, "must be good"),)))
    body = {"messages": HI, "max_tokens": 5, "response_format": {"type": "json_object"}}
    error = (await http.post(CHAT, json=body)).json()["error"]
    assert error == {
        "message": f"{FIELDS[field]}: must be good",
        "type": "invalid_request_error",
        "param": FIELDS[field],
        "code": "invalid_value",
    }


async def test_names_depend_on_what_was_sent(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    violations = (FieldViolation("request.stopping.max_tokens", "is too much"),)
    fake.answer = Answer(refusal=invalid_arguments(violations, "CONTEXT_EXCEEDED"))
    error = (await http.post(CHAT, json={"messages": HI, "max_completion_tokens": 5})).json()["error"]
    assert (error["param"], error["code"]) == ("max_completion_tokens", "context_length_exceeded")
    bad = (
        FieldViolation("request.token_ids.ids[0]", "is none"),
        FieldViolation("request.output.logprobs", "no"),
    )
    fake.answer = Answer(refusal=invalid_arguments(bad))
    error = (await http.post(COMPLETIONS, json={"prompt": [1]})).json()["error"]
    assert (error["param"], error["message"]) == ("prompt", "prompt: is none; logprobs: no")


async def test_one_refusal_ends_all_answers_of_a_request(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    forever = asyncio.Event()
    for stream in (False, True):
        refusal = resource_exhausted("QUEUE_FULL", "full", "planner.max", 1.0)
        fake.answers = [Answer(hold=forever), Answer(hold=forever), Answer(refusal=refusal)]
        response = await http.post(CHAT, json={"messages": HI, "n": 3, "stream": stream})
        assert response.status_code == 429
        for _ in range(2):
            async with asyncio.timeout(10):
                await fake.cancelled.acquire()
    assert fake.running == 0


async def test_an_error_in_the_midst_of_a_stream(
    openai: AsyncOpenAI, http: httpx2.AsyncClient, fake: FakePlanner
) -> None:
    fake.answer = Answer(failure=unavailable("CPU_ATTENTION_LOST", "the service was lost", 0.5))
    response = await http.post(CHAT, json={"messages": HI, "stream": True})
    *_, last, nothing = response.text.split("\n\n")
    assert nothing == ""
    event, data = last.split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "cpu_attention_lost"
    stream = await openai.chat.completions.create(model="tiny", messages=HI, stream=True)
    chunks = aiter(stream)
    text = "".join([(await anext(chunks)).choices[0].delta.content or "" for _ in range(3)])
    assert text == "Hello"
    with pytest.raises(openai_package.APIError, match="the service was lost"):
        await anext(chunks)


async def test_another_model(openai: AsyncOpenAI) -> None:
    with pytest.raises(openai_package.NotFoundError) as caught:
        await openai.chat.completions.create(model="huge", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai_package.NotFoundError):
        await openai.models.retrieve("huge")


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({}, "messages", "is required"),
    "empty messages": ({"messages": []}, "messages", "messages: must have at least 1 item"),
    "unknown field": ({"messages": HI, "reasoning_effort": "low"}, "reasoning_effort", "is not supported"),
    "unknown inner field": ({"messages": HI, "stream_options": {"x": 1}}, "stream_options.x", "is not supported"),
    "unknown in message": ({"messages": [{**HI[0], "audio": {}}]}, "messages[0].audio", "is not supported"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]", "expected tags"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0]", "is required"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "only parts of type \"text\" are supported, is 'image_url'",
    ),
    "text for a number": ({"messages": HI, "temperature": "1"}, "temperature", "must be a valid number, is '1'"),
    "not a number": ({"messages": HI, "temperature": float("nan")}, "temperature", "finite number"),
    "true for a number": ({"messages": HI, "n": True}, "n", "must be a valid integer"),
    "n": ({"messages": HI, "n": 129}, "n", "less than or equal to 128"),
    "max_tokens": ({"messages": HI, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "two limits": ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differs"),
    "stop": ({"messages": HI, "stop": [1]}, "stop[0]", "must be a valid string"),
    "bias": ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
    "bias of no token": ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias.-1", "must be a token id"),
    "store": ({"messages": HI, "store": True}, "store", "must be False"),
    "two constraints": (
        {"messages": HI, "structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "exactly one",
    ),
    "two formats": (
        {"messages": HI, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "cannot be given together",
    ),
    "format": ({"messages": HI, "response_format": {"type": "xml"}}, "response_format", "expected tags"),
    "list": ([], "", "must be a JSON object"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_asked(name: str, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    body, param, text = BAD[name]
    response = await http.post(CHAT, content=json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param or None)
    assert text in error["message"]
    assert fake.requests == []


async def test_null_is_as_good_as_absent(http: httpx2.AsyncClient) -> None:
    message = {"role": "user", "content": "Hi", "audio": None, "name": None}
    body = {"messages": [message], "reasoning_effort": None, "n": None, "stream": None, "tools": None, "logprobs": None}
    assert (await http.post(CHAT, json=body)).status_code == 200


async def test_null_deeper_down_is_a_value(http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    json_schema = {"name": "x", "schema": {"const": None}}
    body = {"messages": HI, "audio": None, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    await http.post(CHAT, json=body)
    assert json.loads(fake.requests[0].constraint.json_schema) == {"const": None}


@pytest.mark.parametrize("content", [b"", b"{", b'{"messages": }', b"\xff", b'{"prompt": "\\ud800"}'])
async def test_what_is_no_json(content: bytes, http: httpx2.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


async def test_unknown_paths_and_methods(http: httpx2.AsyncClient) -> None:
    response = await http.get("/v1/embeddings")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "Not Found: GET /v1/embeddings")
    response = await http.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"
