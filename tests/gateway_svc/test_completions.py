"""/v1/completions, as OpenAI's own client sees it."""

from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from support.fake_planner import START, Answer, FakePlanner, byte_token, logprob

from neoflex.v1 import inference_pb2 as pb


async def test_a_whole_answer(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    answer = await openai.completions.create(model="tiny", prompt="Say ", max_tokens=7, temperature=0)
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Hello", "stop", None)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert fake.requests == [
        pb.GenerateRequest(
            request_id=answer.id,
            text="Say ",
            sampling=pb.SamplingOptions(temperature=0),
            stopping=pb.StoppingOptions(max_tokens=7),
        )
    ]


async def test_a_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.completions.create(
        model="tiny", prompt="Say ", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["Hel", "lo", ""]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
async def test_prompts_in_every_form(prompt: Any, expected: Any, openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answers = [Answer(pieces=[str(number)]) for number in range(2 * len(expected))]
    answer = await openai.completions.create(model="tiny", prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    by_id = sorted(fake.requests, key=lambda request: request.request_id)
    got = [request.text or list(request.token_ids.ids) for request in by_id]
    assert got == [item for item in expected for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5 * len(expected)


async def test_seeds_depend_on_the_answer_and_not_on_the_prompt(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    await openai.completions.create(model="tiny", prompt=["a", "b"], n=2, seed=7)
    seeds = {(request.text, request.sampling.seed) for request in fake.requests}
    assert seeds == {("a", 7), ("a", 8), ("b", 7), ("b", 8)}


async def test_echo(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    answer = await openai.completions.create(model="tiny", prompt="Say ", echo=True)
    assert answer.choices[0].text == "Say Hello"
    assert not fake.requests[0].output.HasField("prompt_logprobs")
    answer = await openai.completions.create(model="tiny", prompt=[72, 105], echo=True)
    assert answer.choices[0].text == "HiHello"
    stream = await openai.completions.create(model="tiny", prompt="Say ", echo=True, stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["Say ", "Hel", "lo", ""]


async def test_logprobs(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    half = byte_token(0xC3)
    fake.answer = Answer(pieces=["é", "x"], logprobs=lambda token: logprob(token, -0.5, (half, -0.25)))
    answer = await openai.completions.create(model="tiny", prompt="Say ", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["é", "x"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"bytes:\\xc3": -0.25, "é": -0.5}, {"bytes:\\xc3": -0.25, "x": -0.5}]
    assert logprobs.text_offset == [0, 1]
    assert fake.requests[0].output == pb.OutputOptions(logprobs=1)


async def test_log_probabilities_of_a_prompt_alone(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    """As evaluation harnesses ask for them."""
    fake.answer = Answer(
        pieces=["x"],
        finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH),
        prompt_logprobs=(logprob(ord("H"), -1.0), logprob(ord("i"), -2.0)),
    )
    answer = await openai.completions.create(model="tiny", prompt="Hi", echo=True, logprobs=0, max_tokens=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hi", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<|start|>", "H", "i"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
    assert choice.logprobs.top_logprobs == [None, {"H": -1.0}, {"i": -2.0}]
    assert choice.logprobs.text_offset == [0, 0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    [request] = fake.requests
    assert request.output == pb.OutputOptions(logprobs=0, prompt_logprobs=0)
    assert request.stopping.max_tokens == 1
    assert [tokenized.text for tokenized in fake.tokenized] == ["Hi"]


async def test_echoed_log_probabilities_in_a_stream(openai: AsyncOpenAI, fake: FakePlanner) -> None:
    fake.answer = Answer(prompt_logprobs=(logprob(ord("i"), -2.0),))
    stream = await openai.completions.create(model="tiny", prompt=[72, 105], echo=True, logprobs=0, stream=True)
    tokens: list[str] = []
    offsets: list[int] = []
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        if logprobs := chunk.choices[0].logprobs:
            tokens += logprobs.tokens or []
            offsets += logprobs.text_offset or []
    assert text == "HiHello"
    assert tokens == list("HiHello")
    assert offsets == list(range(7))
    assert START not in fake.detokenized[0]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "best of": ({"best_of": 2}, "best_of", "must be n, 1, is 2"),
    "suffix": ({"suffix": "x"}, "suffix", "is not supported"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "at least 1 without echo"),
    "chat's logprobs": ({"logprobs": True}, "logprobs", "must be a number of tokens"),
    "too many": ({"prompt": ["a"] * 65, "n": 2}, "n", "must be at most 128, is 130"),
    "empty": ({"prompt": []}, "prompt", "none of them empty"),
    "mixed": ({"prompt": ["a", 1]}, "prompt", "a list of token ids"),
    "negative": ({"prompt": [-1]}, "prompt", "a list of token ids"),
    "messages": ({"messages": []}, "messages", "is not supported"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_asked(name: str, http: httpx2.AsyncClient, fake: FakePlanner) -> None:
    extra, param, text = BAD[name]
    response = await http.post("/v1/completions", json={"prompt": "x", **extra})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert text in error["message"]
    assert fake.requests == []


async def test_best_of_may_be_n(http: httpx2.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": "x", "n": 2, "best_of": 2, "suffix": None})
    assert len(response.json()["choices"]) == 2
