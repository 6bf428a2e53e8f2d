"""Quantised weights through the real services: the tokens of transformers with the same rounded weights."""

import asyncio

import pytest
from support.quantised import rounded_reference
from support.reference import Verdict

from neoflex import AsyncClient, Client

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def int8_reference(files):
    return rounded_reference(files, "int8")


@pytest.mark.parametrize(
    "planner",
    [{"mode": "asymmetric"}, {"decode_policy": "partition", "cpu_layers": 12}],
    ids=["two_sub_batches", "cpu_layers"],
)
def test_int8_weights_beside_the_host_tier(planner, start, int8_reference, prompts):
    chosen = sorted(prompts, key=len)[:4]
    stack = start(
        planner=planner,
        gpu={"dtype": "int8", "kv_bytes": "4MiB"},
        kv={"dtype": "fp32"},
        cpu_attn={"kv_bytes": "64MiB"},
    )
    with Client(stack.address) as client:
        assert client.model_info().compute_dtype == "int8"

    async def run() -> list[list[int]]:
        async with AsyncClient(stack.address) as client:
            requests = [
                client.generate(token_ids=p, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
                for p in chosen
            ]
            return [list(completion.token_ids) for completion in await asyncio.gather(*requests)]

    answers = asyncio.run(run())
    assert stack.server_info().counters.cpu_attention_ns > 0
    verdict = Verdict()
    for prompt, tokens in zip(chosen, answers, strict=True):
        assert len(tokens) == NUM_TOKENS
        int8_reference.judge(prompt, tokens, verdict)
    assert verdict.mismatches == [], str(verdict)
