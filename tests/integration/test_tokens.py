"""Whatever the mode, placement, swap or preemption: the tokens are transformers' greedy fp32 tokens."""

import asyncio
from collections.abc import Sequence

import pytest
from support.reference import Reference, Verdict

from neoflex import AsyncClient
from neoflex.supervisor import LocalStack

NUM_TOKENS = 48


async def greedy(client: AsyncClient, prompt: Sequence[int], delay_s: float = 0.0) -> list[int]:
    await asyncio.sleep(delay_s)
    completion = await client.generate(
        token_ids=list(prompt), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout=300
    )
    return list(completion.token_ids)


def compare(stack: LocalStack, reference: Reference, waves: list[list[list[int]]]) -> Verdict:
    """Sends wave after wave of prompts, arrivals staggered, and judges every token."""

    async def run() -> list[tuple[list[int], list[int]]]:
        pairs = []
        async with AsyncClient(stack.address) as client:
            for wave in waves:
                answers = await asyncio.gather(*(greedy(client, p, 0.07 * i) for i, p in enumerate(wave)))
                pairs += zip(wave, answers, strict=True)
        return pairs

    verdict = Verdict()
    for number, (prompt, tokens) in enumerate(asyncio.run(run())):
        assert len(tokens) == NUM_TOKENS
        reference.judge(prompt, tokens, verdict, f"request {number}")
    print(f"\n{verdict}")
    return verdict


def waves_of(prompts: list[list[int]], sizes: Sequence[int]) -> list[list[list[int]]]:
    """The longest prompt comes first: the others arrive while it is prefilled."""
    return [[prompts[-1 - i % len(prompts)] for i in range(size)] for size in sizes]


def pressing_wave(prompts: list[list[int]]) -> list[list[int]]:
    """The longest prompt, then the others from short to long: many small ones start beside it and grow."""
    longest = prompts[-1]
    return [longest, *sorted(prompts[:-1], key=len), *sorted(prompts[:-1], key=len)[:4]]


# The longest prompt takes 94 blocks of 737,280 bytes: little is left to grow into.
PRESSED_KV_BYTES = 102 * 737_280
ALL_SIZES = (1, 2, 5, 12, 16)
MODES = {
    "gpu_only": ({"planner": {"mode": "gpu_only"}, "gpu": {"kv_bytes": "256MiB"}}, ALL_SIZES),
    # A third of what twelve requests need: the 1,500-token prompt alone is larger than the GPU cache.
    "asymmetric": (
        {
            "planner": {"mode": "asymmetric"},
            "gpu": {"kv_bytes": "40MiB"},
            "cpu_attn": {"kv_bytes": "256MiB", "num_threads": 2},
        },
        ALL_SIZES,
    ),
    "auto": ({"gpu": {"kv_bytes": "40MiB"}, "cpu_attn": {"kv_bytes": "256MiB"}}, ALL_SIZES),
    "everything_offloaded": ({"gpu": {"kv_bytes": 0}, "cpu_attn": {"kv_bytes": "256MiB"}}, (12,)),
    "mixed": ({"gpu": {"kv_bytes": "90MiB"}, "cpu_attn": {"kv_bytes": "256MiB"}}, (12,)),
}


@pytest.mark.parametrize("name", MODES)
def test_tokens_equal_transformers(name, start, reference, prompts):
    sections, sizes = MODES[name]
    stack = start(**sections)
    verdict = compare(stack, reference, waves_of(prompts, sizes))
    assert verdict.mismatches == []
    counters = stack.server_info().counters
    if name == "gpu_only":
        assert counters.offloading_iterations == 0
        assert counters.cpu_attended_tokens == 0
    else:
        assert counters.offloading_iterations > 0
        assert counters.cpu_attended_tokens > 0
    if name == "everything_offloaded":
        assert counters.gpu_attended_tokens == 0
    if name in ("asymmetric", "auto", "mixed"):
        assert counters.gpu_attended_tokens > 0


def test_tokens_survive_swapping(start, reference, prompts):
    """GPU-only with a host pool that only parks: preempted sequences are swapped out, then in again."""
    stack = start(planner={"mode": "gpu_only"}, gpu={"kv_bytes": PRESSED_KV_BYTES}, cpu_attn={"kv_bytes": "256MiB"})
    verdict = compare(stack, reference, [pressing_wave(prompts)])
    assert verdict.mismatches == []
    counters = stack.server_info().counters
    assert counters.swapped_in_bytes > 0
    assert counters.swapped_out_bytes > 0
    assert counters.cpu_attended_tokens == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tokens_survive_preemption(prefix_cache, start, reference, prompts):
    """No host pool at all: preempted sequences lose their KV, and are computed again or find what is left of it."""
    stack = start(kv={"prefix_cache": prefix_cache}, gpu={"kv_bytes": PRESSED_KV_BYTES}, cpu_attn={"kv_bytes": 0})
    verdict = compare(stack, reference, [pressing_wave(prompts)])
    assert verdict.mismatches == []
    counters = stack.server_info().counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens + counters.cached_tokens > 0
    assert (counters.cached_tokens > 0) == prefix_cache


def test_a_request_larger_than_the_gpu_cache(start, reference, prompts):
    """1,500 tokens of KV where the GPU has room for 160: served from the host with the same tokens."""
    stack = start(gpu={"kv_bytes": "8MiB"}, cpu_attn={"kv_bytes": "128MiB"})
    info = stack.server_info()
    assert info.gpu_blocks * info.block_tokens < len(prompts[-1])
    verdict = compare(stack, reference, [prompts[-1:]])
    assert verdict.mismatches == []
