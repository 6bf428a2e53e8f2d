"""Gemma 3 on real text, where it has been fetched: windows in most layers, two rotary embeddings, more norms.

neoflex model fetch gemma-3-270m
"""

import asyncio

import pytest
from support.policy_pairs import serve_under_every_pair
from support.reference import Reference, Verdict
from support.steering import steered_stack

from neoflex import AsyncClient
from neoflex.supervisor import LocalStack
from svc_common.model.store import ModelFiles, ModelNotFoundError, resolve
from svc_common.model.tokenizer import load_tokenizer

MODEL = "gemma-3-270m"
NUM_TOKENS = 24
TEXTS = (
    "The capital of France is",
    "Photosynthesis is the process by which",
    "def fibonacci(n):\n    ",
    # Longer than the sliding window of 512 tokens.
    "Once upon a time there was a small village at the foot of a mountain. " * 44 + "\n\nWhat happened there is",
)


@pytest.fixture(scope="module")
def gemma() -> ModelFiles:
    try:
        return resolve(MODEL)
    except ModelNotFoundError as error:
        pytest.skip(f"NOT TESTED: {error}")


@pytest.fixture(scope="module")
def prompts(gemma: ModelFiles) -> list[list[int]]:
    """Converts the tokenizer, too, before a service has to."""
    tokenizer = load_tokenizer(gemma)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    assert len(encoded[-1]) > 600
    return encoded


@pytest.fixture(scope="module")
def reference(gemma: ModelFiles) -> Reference:
    return Reference(gemma)


def answers(stack: LocalStack, prompts: list[list[int]]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with AsyncClient(stack.address) as client:
            completions = await asyncio.gather(
                *(
                    client.generate(token_ids=p, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300)
                    for p in prompts
                )
            )
        return [list(completion.token_ids) for completion in completions]

    return asyncio.run(run())


@pytest.mark.parametrize(("mode", "gpu_kv", "host_kv"), [("gpu_only", "64MiB", 0), ("asymmetric", "4MiB", "96MiB")])
def test_tokens_equal_transformers(mode, gpu_kv, host_kv, start, reference, prompts):
    cpu_attn = {"kv_bytes": host_kv, "num_threads": 1}
    stack = start(model={"source": MODEL}, planner={"mode": mode}, gpu={"kv_bytes": gpu_kv}, cpu_attn=cpu_attn)
    verdict = Verdict()
    for number, (prompt, tokens) in enumerate(zip(prompts, answers(stack, prompts), strict=True)):
        assert len(tokens) == NUM_TOKENS
        reference.judge(prompt, tokens, verdict, f"request {number}")
    print(f"\n{verdict}")
    assert verdict.mismatches == []
    attended = stack.server_info().counters.cpu_attended_tokens
    assert attended > 600 if mode == "asymmetric" else attended == 0


def test_tokens_under_every_pair_of_policies_and_each_change(reference, prompts):
    """Windows and two kinds of rotary embedding in layers on either processor."""
    planner = {"max_batch_tokens": 256, "max_sequence_tokens": 1024}
    tiers = {"gpu": {"kv_bytes": "32MiB"}, "cpu_attn": {"kv_bytes": "128MiB"}}
    with steered_stack(model={"source": MODEL}, planner=planner, **tiers) as steered:
        verdict = serve_under_every_pair(steered, 18, reference, prompts)
    assert verdict.mismatches == []
