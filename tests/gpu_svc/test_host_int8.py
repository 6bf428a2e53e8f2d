"""KV in int8 on the host beside exact KV on the GPU: tokens and log-probabilities; a real cpu_attn_svc."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu import BLOCK_TOKENS, Driver, load_decoder

from svc_common.model.store import ModelFiles
from svc_common.plan import Sampling, SubBatch, Swap, Tier

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]

PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 7)}
VARIANTS = ("llama", "mistral-window", "qwen2", "qwen3")
WITH_LOGPROBS = Sampling(num_logprobs=20)
INT8_RMS, INT8_GAP = 0.15, 0.5
"""How far log-probabilities of the best tokens may be from those of exact KV, and how close two tokens must be to swap
places. The random models are restless; a wrong scale or place gives several units."""


def assert_near(exact: Driver, rounded: Driver) -> None:
    """Greedy tokens and their log-probabilities, step by step until a sequence's tokens differ."""
    errors: list[float] = []
    rows = [[result.logprobs for result in driver.results] for driver in (exact, rounded)]
    for sequence_id, tokens in exact.tokens.items():
        ours = rounded.tokens[sequence_id]
        tops = [[dict(row[sequence_id].top) for row in side if sequence_id in row] for side in rows]
        for token, other, want, got in zip(tokens, ours, *tops, strict=True):
            errors += [want[one] - got[one] for one in want.keys() & got.keys()]
            if token != other:
                assert want[token] - want.get(other, -np.inf) < INT8_GAP, (sequence_id, token, other)
                break
    assert len(errors) > 20 * len(exact.tokens)
    assert float(np.sqrt(np.mean(np.square(errors)))) < INT8_RMS


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_on_the_host_stays_near_exact_kv(
    variant: str, checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Prompts in odd chunks over the host pool, then decodes that append to it."""
    decoder = load_decoder(checkpoint(variant))
    exact = make_driver(decoder, 200)
    rounded = make_driver(decoder, 0, cpu_attention, host_kv_dtype=torch.int8)
    for driver, tier in ((exact, Tier.GPU), (rounded, Tier.HOST)):
        for sequence_id, prompt in PROMPTS.items():
            driver.prefill(sequence_id, prompt, tier, 5 + 2 * sequence_id, WITH_LOGPROBS, room_tokens=20)
        for _ in range(8):
            ids = tuple(PROMPTS)
            driver.run(SubBatch(gpu_decodes=ids) if tier is Tier.GPU else SubBatch(cpu_decodes=ids))
    assert_near(exact, rounded)
    shape = rounded.executor.kv_shape
    assert sum(result.swapped_out_bytes for result in rounded.results) == (
        sum(map(len, PROMPTS.values())) * decoder.spec.num_layers * 2 * shape.num_kv_heads * shape.head_dim
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_swaps_into_int8_and_back(
    variant: str, checkpoint: GetFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """Amid a block, whose rest another sequence has filled with larger numbers before."""
    decoder = load_decoder(checkpoint(variant))
    drivers = [
        make_driver(decoder, 24),
        make_driver(decoder, 24, cpu_attention, host_kv_dtype=torch.int8),
    ]
    for driver, moves in zip(drivers, (False, True), strict=True):
        driver.executor._epoch.cache.blocks[:] = 1e3  # type: ignore[union-attr]
        driver.prefill(2, PROMPTS[2], Tier.GPU, sampling=WITH_LOGPROBS, room_tokens=22)
        swaps: dict[str, Any] = {}
        if moves:
            swaps = {"swaps": (Swap(2, Tier.HOST, driver.blocks(Tier.HOST, 47)),)}
        result = driver.run(SubBatch(**{"cpu_decodes" if moves else "gpu_decodes": (2,)}), **swaps)
        num_blocks = -(-len(PROMPTS[2]) // BLOCK_TOKENS)
        assert result.swapped_out_bytes == (num_blocks * driver.executor.kv_shape.host_block_bytes if moves else 0)
        for _ in range(3):
            driver.run(SubBatch(**{"cpu_decodes" if moves else "gpu_decodes": (2,)}))
        swaps = {"swaps": (Swap(2, Tier.GPU, driver.blocks(Tier.GPU, 47)),)} if moves else {}
        for _ in range(3):
            driver.run(SubBatch(gpu_decodes=(2,)), **swaps)
            swaps = {}
    assert_near(*drivers)


def test_int8_with_the_default_model(
    default_model: ModelFiles, make_driver: MakeDriver, start_cpu_attention: Callable[..., Any]
) -> None:
    decoder = load_decoder(default_model)
    service = start_cpu_attention(16 * 2**20)
    prompt = [(53 * i + i * i) % 40_000 for i in range(90)]
    exact = make_driver(decoder, 10, block_tokens=16)
    rounded = make_driver(decoder, 0, service, block_tokens=16, host_kv_dtype=torch.int8)
    for driver, tier in ((exact, Tier.GPU), (rounded, Tier.HOST)):
        driver.prefill(1, prompt, tier, 40, WITH_LOGPROBS, room_tokens=20)
        for _ in range(6):
            driver.run(SubBatch(gpu_decodes=(1,)) if tier is Tier.GPU else SubBatch(cpu_decodes=(1,)))
    assert_near(exact, rounded)
