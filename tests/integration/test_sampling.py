"""Penalties, structured output and log-probabilities of prompts through the real services, under memory pressure."""

import asyncio
import json
import re

import jsonschema
import pytest
import torch
from support.reference import TIE, load_transformers
from support.schemas import SCHEMAS
from transformers import RepetitionPenaltyLogitsProcessor

from neoflex import AsyncClient, Client, Completion, FinishReason, InvalidArgumentError

PENALTY = 1.3
BIASES = {28: -5.0, 260: 3.0}
NUM_TOKENS = 64
BLOCK_BYTES = 737_280
# Room for a few of the requests: those that begin and grow push others out.
STACKS = {
    # With the prefix cache a preempted sequence would find its own KV again.
    "recomputing": {
        "kv": {"prefix_cache": False},
        "gpu": {"kv_bytes": 17 * BLOCK_BYTES},
        "cpu_attn": {"kv_bytes": 0},
    },
    "offloading": {"gpu": {"kv_bytes": 11 * BLOCK_BYTES}, "cpu_attn": {"kv_bytes": "128MiB"}},
}
ASKED = ("object", "oneOf by a constant", "array of enum", "uuid", "optional properties", "nested")
PATTERN = r"[A-Z][a-z]{2,8}, [0-9]{1,3}"
CHOICES = ("certainly", "certainly not", "perhaps")


@torch.inference_mode()
def check_penalized(model: torch.nn.Module, prompt: list[int], tokens: tuple[int, ...]) -> None:
    """Each token is the best after transformers' penalty, the presence penalty and the biases, or ties with it."""
    repetition = RepetitionPenaltyLogitsProcessor(PENALTY)
    rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    for step, token in enumerate(tokens):
        logits = repetition(torch.tensor([[*prompt, *tokens[:step]]]), rows[step : step + 1].clone())[0]
        logits[list(set(tokens[:step]))] -= 0.5
        for biased, bias in BIASES.items():
            logits[biased] += bias
        assert float(logits.max() - logits[token]) <= TIE


@torch.inference_mode()
def check_prompt(model: torch.nn.Module, prompt: list[int], answer: Completion) -> None:
    rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1)
    assert [position.chosen.token_id for position in answer.prompt_logprobs] == prompt[1:]
    for row, position in zip(rows, answer.prompt_logprobs, strict=True):
        assert position.chosen.logprob == pytest.approx(float(row[position.chosen.token_id]), abs=2e-3)
        assert position.top[0].logprob == pytest.approx(float(row.max()), abs=2e-3)


@pytest.mark.parametrize("name", STACKS)
def test_beside_one_another(name, start, files, prompts):
    stack = start(**STACKS[name])
    by_length = sorted(prompts[:-1], key=len, reverse=True)
    scored, penalized = [*by_length[:2], by_length[-1]], by_length[2:6]

    async def ask() -> tuple[list[Completion], list[Completion], list[Completion]]:
        async with AsyncClient(stack.address) as client:

            def with_penalties(prompt):
                return client.generate(
                    token_ids=prompt,
                    max_tokens=NUM_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                    repetition_penalty=PENALTY,
                    presence_penalty=0.5,
                    logit_bias=BIASES,
                    timeout=300,
                )

            def with_prompt_logprobs(prompt):
                return client.generate(
                    token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=1, timeout=300
                )

            def constrained(seed, **constraint):
                question = "Describe one thing, in the form that you were told."
                return client.generate(question, max_tokens=200, seed=seed, timeout=300, **constraint)

            groups = (
                [with_prompt_logprobs(prompt) for prompt in scored],
                [with_penalties(prompt) for prompt in penalized],
                [
                    *(constrained(1, json_schema=SCHEMAS[asked]) for asked in ASKED),
                    *(constrained(seed, regex=PATTERN) for seed in (3, 4)),
                    *(constrained(seed, choice=CHOICES) for seed in (5, 6)),
                ],
            )
            answers = await asyncio.gather(*(asyncio.gather(*group) for group in groups))
            return tuple(answers)

    with_scores, with_penalties, structured = asyncio.run(ask())
    model = load_transformers(files)
    for prompt, answer in zip(penalized, with_penalties, strict=True):
        check_penalized(model, prompt, answer.token_ids)
    for prompt, answer in zip(scored, with_scores, strict=True):
        check_prompt(model, prompt, answer)
    assert {answer.finish.reason for answer in structured} == {FinishReason.STOP}
    texts = iter(answer.text for answer in structured)
    for asked in ASKED:
        jsonschema.validate(json.loads(next(texts)), SCHEMAS[asked])
    assert all(re.fullmatch(PATTERN, next(texts)) for _ in range(2))
    assert {*texts} <= {*CHOICES}
    counters = stack.server_info().counters
    if name == "recomputing":
        assert counters.recomputed_tokens > 0
    else:
        assert counters.cpu_attended_tokens > 0
    with Client(stack.address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            client.generate("x", json_schema={"properties": {"a": {"uniqueItems": True}}})
        [violation] = caught.value.violations
        assert violation.field == "request.constraint.json_schema"
        assert violation.description == "$.properties.a.uniqueItems: this keyword is not supported"
        cut = client.generate("x", max_tokens=3, json_schema=SCHEMAS["uuid"])
        assert cut.finish.reason is FinishReason.LENGTH
