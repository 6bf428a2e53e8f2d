"""Log-probabilities of a prompt against transformers, however the prompt is cut and wherever it is computed."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.gpu import BLOCK_TOKENS, load_decoder, load_torch_decoder
from support.reference import load_transformers

from svc_common.model.store import ModelFiles
from svc_common.plan import IterationResult, NewSequence, PrefillChunk, Sampling, SubBatch, Tier

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 257, 150)]


@pytest.fixture
def expected(checkpoint: Callable[[str], ModelFiles]) -> torch.Tensor:
    """[len(PROMPT) - 1, vocab_size]: position i predicts token i + 1."""
    with torch.inference_mode():
        logits = load_transformers(checkpoint("llama"))(torch.tensor([PROMPT])).logits[0, :-1]
    return torch.log_softmax(logits, -1)


def check(results: Sequence[IterationResult], expected: torch.Tensor, num_top: int, sequence_id: int = 1) -> None:
    """Each position once and in order."""
    at = 1
    for result in results:
        for of, part in result.prompt_logprobs:
            assert (of, part.start) == (sequence_id, at)
            for index in range(len(part)):
                position, row = part.position(index), expected[at - 1]
                assert position.chosen == pytest.approx(float(row[PROMPT[at]]), abs=2e-4)
                values, ids = row.topk(num_top)
                assert [value for _, value in position.top] == pytest.approx(values.tolist(), abs=2e-4)
                assert [token for token, _ in position.top] == ids.tolist()
                at += 1
    assert at == len(PROMPT)


@pytest.mark.parametrize("chunk_tokens", [1000, 65, 7])
@pytest.mark.parametrize("load", [load_decoder, load_torch_decoder])
def test_equal_transformers(make_driver, checkpoint, expected, chunk_tokens, load) -> None:
    driver = make_driver(load(checkpoint("llama")))
    driver.prefill(1, PROMPT, chunk_tokens=chunk_tokens, sampling=Sampling(num_prompt_logprobs=3))
    check(driver.results, expected, 3)


def test_on_the_host_and_none_of_the_likeliest(make_driver, checkpoint, expected, cpu_attention) -> None:
    driver = make_driver(load_decoder(checkpoint("llama")), cpu_attention=cpu_attention)
    driver.prefill(1, PROMPT, Tier.HOST, 40, Sampling(num_prompt_logprobs=0))
    check(driver.results, expected, 0)


def test_beside_others_and_over_two_sub_batches(make_driver, checkpoint, expected) -> None:
    """Another prompt's chunk comes first, and a decode shares the batch."""
    driver = make_driver(load_decoder(checkpoint("llama")))
    driver.prefill(7, [5, 6, 7])
    num_blocks = -(-len(PROMPT) // BLOCK_TOKENS)
    new = [
        NewSequence(i, tuple(PROMPT), Tier.GPU, tuple(driver.blocks(Tier.GPU, num_blocks * BLOCK_TOKENS)), sampling)
        for i, sampling in ((1, Sampling(num_prompt_logprobs=2)), (2, Sampling()))
    ]
    first = SubBatch(prefills=(PrefillChunk(2, 0, 20), PrefillChunk(1, 0, 70)), gpu_decodes=(7,))
    second = SubBatch(prefills=(PrefillChunk(1, 70, 80), PrefillChunk(2, 20, 3)))
    driver.results.clear()
    driver.run(first, second, new_sequences=tuple(new))
    check(driver.results, expected, 2)


def test_after_a_recomputation_the_answer_is_no_prompt(make_driver, checkpoint, expected) -> None:
    """Its last ten tokens were generated: what predicts them is not asked for."""
    driver = make_driver(load_decoder(checkpoint("llama")))
    blocks = tuple(driver.blocks(Tier.GPU, len(PROMPT) + BLOCK_TOKENS))
    new = NewSequence(1, tuple(PROMPT), Tier.GPU, blocks, Sampling(num_prompt_logprobs=0), num_generated_tokens=10)
    result = driver.run(SubBatch(prefills=(PrefillChunk(1, 0, len(PROMPT)),)), new_sequences=(new,))
    [(sequence_id, part)] = result.prompt_logprobs
    assert (sequence_id, part.start, len(part)) == (1, 1, len(PROMPT) - 11)


def test_a_prompt_of_one_token_has_none(make_driver, checkpoint) -> None:
    driver = make_driver(load_decoder(checkpoint("llama")))
    driver.prefill(1, [9], sampling=Sampling(num_prompt_logprobs=5))
    assert driver.results[0].prompt_logprobs == ()
