"""Models with int8 and int4 weights against transformers with the same rounded weights; a real cpu_attn_svc beside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gpu import Driver, dense_logits, load_decoder
from support.quantised import rounded_reference
from support.reference import Verdict

from svc_common.decoder.dtypes import DTYPES
from svc_common.model.store import ModelFiles
from svc_common.model.weight_types import WeightTypeName
from svc_common.plan import SubBatch, Tier

GetFiles = Callable[[str], ModelFiles]
QUANTISED: list[WeightTypeName] = ["int8", "int4"]
PROMPT = [(i * 37 + 11) % 257 for i in range(75)]
PROMPTS = {i: [(i * 53 + j * 31 + j * j) % 257 for j in range(3 + 11 * i)] for i in range(1, 5)}


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("variant", ["llama-tied", "llama-biases", "qwen3", "gemma3", "phi3", "opt", "qwen2-moe"])
def test_logits_equal_transformers_with_the_same_weights(
    variant: str, dtype: WeightTypeName, checkpoint: GetFiles
) -> None:
    """What is left is the rounding of rows to 16 bits."""
    files = checkpoint(variant)
    decoder = load_decoder(files, DTYPES[dtype])
    assert decoder.weight_dtype == DTYPES[dtype]
    assert decoder.dtype == torch.float32
    actual, expected = dense_logits(decoder, PROMPT), rounded_reference(files, dtype).logits(PROMPT)
    exact = dense_logits(load_decoder(files), PROMPT)
    off = float((actual - expected).abs().max() / expected.std())
    assert off < 5e-3
    # And the weights really are others.
    assert float((exact - expected).abs().max() / expected.std()) > 10 * off


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("variant", ["llama", "qwen2-moe"])
def test_greedy_tokens_are_the_same_in_every_placement(
    variant: str,
    dtype: WeightTypeName,
    checkpoint: GetFiles,
    make_driver: Callable[..., Driver],
    cpu_attention: Any,
) -> None:
    files = checkpoint(variant)
    decoder, reference = load_decoder(files, DTYPES[dtype]), rounded_reference(files, dtype)
    placements = {
        "gpu": (Tier.GPU, SubBatch(gpu_decodes=tuple(PROMPTS)), None),
        "host": (Tier.HOST, SubBatch(cpu_decodes=tuple(PROMPTS)), None),
        "halves": (Tier.HOST, SubBatch(cpu_decodes=(1, 3)), SubBatch(cpu_decodes=(2, 4))),
    }
    for name, (tier, first, second) in placements.items():
        driver = make_driver(decoder, 60, cpu_attention)
        for sequence_id, prompt in PROMPTS.items():
            driver.prefill(sequence_id, prompt, tier, chunk_tokens=5 + 2 * sequence_id, room_tokens=20)
        for _ in range(12):
            driver.run(first, *([second] if second else []))
        verdict = Verdict()
        for sequence_id, prompt in PROMPTS.items():
            assert len(driver.tokens[sequence_id]) == 13
            reference.judge(prompt, driver.tokens[sequence_id], verdict, f"{name} {sequence_id}")
        assert not verdict.mismatches, str(verdict)
        driver.executor.close_epoch()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_sequence_gets_the_same_bits_whatever_its_neighbours(dtype: WeightTypeName, checkpoint: GetFiles) -> None:
    decoder = load_decoder(checkpoint("qwen2-moe"), DTYPES[dtype])
    torch.manual_seed(0)
    ids, positions = torch.randint(0, 257, (103,)), torch.arange(103)
    attended = torch.randn(103, decoder.spec.num_q_heads, decoder.spec.head_dim)

    def run(rows: slice) -> torch.Tensor:
        hidden, workspace = decoder.embed(ids[rows], positions[rows]), decoder.workspace(positions[rows])
        for layer in range(decoder.spec.num_layers):
            decoder.pre_attention(layer, hidden, workspace)
            hidden = decoder.post_attention(layer, attended[rows], hidden)
        return decoder.logits(hidden).clone()

    together = run(slice(0, 103))
    for start, end in ((0, 1), (1, 9), (9, 22), (22, 54), (54, 103)):
        assert torch.equal(run(slice(start, end)), together[start:end])
