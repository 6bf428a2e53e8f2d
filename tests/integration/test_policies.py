"""Whichever processor computes which layers, the tokens are transformers' greedy fp32 tokens."""

import asyncio

import pytest
from support.reference import Verdict

from neoflex import AsyncClient

NUM_TOKENS = 16
TIERS = {"gpu": {"kv_bytes": "8MiB"}, "cpu_attn": {"kv_bytes": "64MiB"}}
POLICIES = {
    "partition_of_decodes": {"decode_policy": "partition", "cpu_layers": 12},
    "cpu_only": {"prefill_policy": "cpu_only", "decode_policy": "cpu_only"},
}


def serve(stack, reference, prompts) -> Verdict:
    """All prompts at once, every token judged."""

    async def run():
        async with AsyncClient(stack.address) as client:
            requests = (
                client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
                for prompt in prompts
            )
            return await asyncio.gather(*requests)

    verdict = Verdict()
    for number, (prompt, answer) in enumerate(zip(prompts, asyncio.run(run()), strict=True)):
        assert len(answer.token_ids) == NUM_TOKENS
        reference.judge(prompt, answer.token_ids, verdict, f"request {number}")
    print(f"\n{verdict}")
    return verdict


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_under_a_policy(name, start, reference, prompts):
    limits = {"max_batch_tokens": 64, "max_sequence_tokens": 512}  # Few points to measure at the start.
    stack = start(planner={**limits, **POLICIES[name]}, **TIERS)
    verdict = serve(stack, reference, prompts[:6])
    assert verdict.mismatches == []
