"""The real services behind the gateway, called by OpenAI's own clients, judged by transformers."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from support.blocks import blocks_held
from support.reference import Reference, load_transformers

from neoflex import Client
from neoflex.supervisor import LocalStack
from svc_common.model.store import ModelFiles
from svc_common.model.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"
ASK: Any = [{"role": "user", "content": "Name three planets."}]
PROMPT = "The capital of France is"
NUM_CLIENTS = 200
TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def stack(start_module: Any, tmp_path_factory: pytest.TempPathFactory) -> LocalStack:
    """A "GPU" cache too small for the loads below, so that the host has sequences, too."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    started: LocalStack = start_module(
        model={"chat_template": str(template)},
        gpu={"kv_bytes": "24MiB"},
        cpu_attn={"kv_bytes": "256MiB"},
        gateway={"listen": "127.0.0.1:0"},
    )
    return started


@pytest.fixture
def client(stack: LocalStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.http_url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture
async def aclient(stack: LocalStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.http_url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_greedy_completions_are_transformers(client: OpenAI, tokenizer: Tokenizer, reference: Reference) -> None:
    ids = tokenizer.encode(PROMPT)
    expected = tokenizer.decode(reference.greedy(ids, 16))
    options: Any = {"model": MODEL, "max_tokens": 16, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for prompt in (PROMPT, ids):
        whole = client.completions.create(prompt=prompt, **options)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 16)
    stream = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
    assert chunks[-1].usage == whole.usage
    echoed = client.completions.create(prompt=PROMPT, echo=True, **options)
    assert echoed.choices[0].text == PROMPT + expected


async def test_greedy_chat_is_transformers(aclient: AsyncOpenAI, tokenizer: Tokenizer, reference: Reference) -> None:
    text = "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n"
    tokens = reference.greedy(tokenizer.encode(text), 24)
    end = tokens.index(tokenizer.eos_token_ids[0]) if tokenizer.eos_token_ids[0] in tokens else 24
    expected = tokenizer.decode(tokens[:end])
    whole = await aclient.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_completion_tokens=24)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == ("stop" if end < 24 else "length")
    stream = await aclient.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[-1].usage == whole.usage


def test_log_probabilities_are_transformers(client: OpenAI, tokenizer: Tokenizer, files: ModelFiles) -> None:
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    rendered = "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n"
    of_completion, of_chat = completion.choices[0].logprobs, chat.choices[0].logprobs
    assert of_completion is not None
    assert of_completion.tokens is not None
    assert of_chat is not None
    assert of_chat.content is not None
    assert "".join(of_completion.tokens) == completion.choices[0].text
    joined = b"".join(bytes(item.bytes or ()) for item in of_chat.content)
    assert joined.decode() == chat.choices[0].message.content
    model = load_transformers(files)
    for prompt, text, logprobs, tops in (
        (PROMPT, completion.choices[0].text, of_completion.token_logprobs, of_completion.top_logprobs),
        (
            rendered,
            joined.decode(),
            [item.logprob for item in of_chat.content],
            [{top.token: top.logprob for top in item.top_logprobs} for item in of_chat.content],
        ),
    ):
        ids = tokenizer.encode(prompt)
        answer = tokenizer.encode(prompt + text)[len(ids) :]
        with torch.inference_mode():
            scores = model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert logprobs == pytest.approx([float(scores[i, token]) for i, token in enumerate(answer)], abs=2e-3)
        assert tops is not None
        for place, top in enumerate(tops):
            best = scores[place].topk(3).values.tolist()
            assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=2e-3)


def test_seeds_repeat_and_answers_differ(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 1.0, "n": 3, "seed": 7}
    first = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    second = client.chat.completions.create(**{**options, "n": 1, "seed": 8})
    assert second.choices[0].message.content == texts[1]


def test_stop_across_tokens_and_filters(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "1, 2, 3, 4,", "max_tokens": 32, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[5:9]
    stopped = client.completions.create(stop=[stop], **options).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    options["temperature"] = 1.0
    for filters in ({"top_k": 1}, {"min_p": 1.0}):  # Either leaves the likeliest token alone.
        assert client.completions.create(extra_body=filters, **options).choices[0].text == whole


def test_tools_are_rendered_by_the_template(client: OpenAI, stack: LocalStack, tokenizer: Tokenizer) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    tools: Any = [{"type": "function", "function": function}]
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "3"},
    ]
    response = httpx2.post(f"{stack.http_url}/tokenize", json={"messages": messages, "tools": tools})
    text = tokenizer.decode(response.json()["tokens"])
    assert 'Tools: [{"type": "function", "function": {"name": "add", "description": "Adds."' in text
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert "tool\n3\n" in text
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
    messages[1]["tool_calls"][0]["function"]["arguments"] = "[1"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    assert caught.value.param == "messages[1].tool_calls[0].arguments_json"


def test_answers_match_their_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "moons": {"type": "integer", "maximum": 99}},
        "required": ["name", "moons"],
        "additionalProperties": False,
    }
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "planet", "schema": schema, "strict": True}}
    options: Any = {"model": MODEL, "messages": ASK, "max_tokens": 100, "seed": 3, "response_format": response_format}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), schema)
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **options)]
    assert "".join(parts) == whole.message.content
    options["response_format"] = {"type": "json_object"}
    options["max_tokens"] = 16
    assert (client.chat.completions.create(**options).choices[0].message.content or "").lstrip().startswith("{")
    for outputs, pattern in (
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
    ):
        chosen = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"structured_outputs": outputs})
        assert re.fullmatch(pattern, chosen.choices[0].text)
    options["response_format"] = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "integer", "multipleOf": "x"}},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options)
    assert caught.value.param is not None
    assert caught.value.param.startswith("response_format")


def test_forced_calls_match_their_schema(client: OpenAI) -> None:
    colour = {"type": "string", "enum": ["red", "green"]}
    parameters = {"type": "object", "properties": {"colour": colour}, "required": ["colour"]}
    parameters["additionalProperties"] = False
    tools: Any = [
        {"type": "function", "function": {"name": "paint", "parameters": parameters}},
        {"type": "function", "function": {"name": "wash", "parameters": {"type": "object", "properties": {}}}},
    ]
    options: Any = {"model": MODEL, "messages": ASK, "tools": tools, "max_tokens": 120, "temperature": 0}
    named = client.chat.completions.create(
        tool_choice={"type": "function", "function": {"name": "paint"}}, **options
    ).choices[0]
    [call] = named.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "paint"
    jsonschema.validate(json.loads(call.function.arguments), parameters)
    assert (named.finish_reason, named.message.content) == ("stop", None)
    names, arguments, reason = [], "", None
    for chunk in client.chat.completions.create(
        tool_choice="required", parallel_tool_calls=False, stream=True, **options
    ):
        reason = chunk.choices[0].finish_reason
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
    assert names in (["paint"], ["wash"])
    assert isinstance(json.loads(arguments), dict)
    assert reason == "tool_calls"


def test_penalties_and_biases(client: OpenAI, tokenizer: Tokenizer) -> None:
    options: Any = {"model": MODEL, "prompt": "one two one two one", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    first = tokenizer.encode(plain)[0]
    banned = client.completions.create(logit_bias={str(first): -100}, **options).choices[0].text
    assert tokenizer.encode(banned)[0] != first
    wanted = client.completions.create(logit_bias={str(first): 100}, **options).choices[0].text
    assert wanted == tokenizer.decode([first] * 12)
    varied = client.completions.create(frequency_penalty=2, presence_penalty=2, **options)
    assert varied.choices[0].text != plain
    assert client.completions.create(extra_body={"repetition_penalty": 1.9}, **options).choices[0].text != plain


def test_log_probabilities_of_a_prompt_are_transformers(
    client: OpenAI, tokenizer: Tokenizer, files: ModelFiles
) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=0)
    [choice] = answer.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == PROMPT
    assert choice.logprobs.text_offset == [0, 3, 11, 14, 21]
    ids = tokenizer.encode(PROMPT)
    with torch.inference_mode():
        scores = load_transformers(files)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = [float(scores[i, token]) for i, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-3)


def test_the_planners_refusals(client: OpenAI) -> None:
    for options, param in (
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"extra_body": {"service_class": "vip"}}, "service_class"),
        ({"extra_headers": {"x-slo-ttft-ms": "100"}}, "x-slo-tpot-ms"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=ASK, **options)  # type: ignore[call-overload]
        assert caught.value.param == param


def test_models_and_tokens(client: OpenAI, stack: LocalStack, tokenizer: Tokenizer) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with httpx2.Client(base_url=stack.http_url or "") as http:
        tokens = http.post("/tokenize", json={"prompt": "naïve café 🎉"}).json()["tokens"]
        assert tokens == tokenizer.encode("naïve café 🎉")
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "naïve café 🎉"
        assert http.get("/health").status_code == 200


def test_half_of_200_clients_hang_up_and_no_block_stays(stack: LocalStack) -> None:
    """Streams and whole answers, each left at a moment of its own; the others are complete."""
    chance = random.Random(1)
    leave_after_s = [chance.uniform(0.05, 2.0) for _ in range(NUM_CLIENTS)]

    async def call(http: httpx2.AsyncClient, number: int) -> str:
        body = {"prompt": [number + 100] * 40, "max_tokens": 8, "ignore_eos": True, "stream": number % 4 < 2}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            return "".join([part async for part in response.aiter_text()])

    async def leave(http: httpx2.AsyncClient, number: int) -> str:
        try:
            async with asyncio.timeout(leave_after_s[number]):
                return await call(http, number)
        except TimeoutError:
            return ""

    async def run() -> list[str]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=stack.http_url or "", limits=limits, timeout=240) as http:
            return await asyncio.gather(*((leave if i % 2 else call)(http, i) for i in range(NUM_CLIENTS)))

    texts = asyncio.run(run())
    for text in texts[::4]:
        assert text.endswith("data: [DONE]\n\n")
    for text in texts[2::4]:
        assert '"completion_tokens":8' in text
    assert sum(not text for text in texts[1::2]) >= NUM_CLIENTS // 8
    deadline = time.monotonic() + 60
    while any(blocks_held(stack)):
        assert time.monotonic() < deadline, blocks_held(stack)
        time.sleep(0.05)
    with Client(stack.address) as own:
        counters, load = own.server_info().counters, own.load()
    assert counters.accepted_requests == counters.finished_requests
    assert (load.waiting_requests, load.running_requests) == (0, 0)
    assert counters.offloading_iterations > 0


def test_the_gateway_is_started_again(stack: LocalStack, client: OpenAI) -> None:
    pid = stack.pids["gateway_svc"]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while stack.pids.get("gateway_svc", pid) == pid or not stack.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.models.list().data[0].id == MODEL
