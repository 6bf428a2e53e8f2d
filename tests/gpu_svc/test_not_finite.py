"""A model that computes NaN for a certain token: sequences with it fail, and none beside or after them is touched."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gpu import Driver, load_decoder, load_torch_decoder

from svc_common.model.store import ModelFiles
from svc_common.plan import CohortStep, IterationResult, NewSequence, PrefillChunk, Sampling, SubBatch, Swap, Tier

MakeDriver = Callable[..., Driver]
GetFiles = Callable[[str], ModelFiles]
BAD_TOKEN = 99
PROMPTS = {i: [(i * 41 + j * 17 + j * j) % 90 for j in range(5 + 4 * i)] for i in range(1, 5)}
POISONED = [5, 6, BAD_TOKEN, 7, 8, 9, 10]
NEVER_BAD = Sampling(logit_bias=((BAD_TOKEN, -100.0),))
DRAWN = replace(NEVER_BAD, temperature=1.0, top_p=0.9, seed=11, num_logprobs=2)


@pytest.fixture(scope="module")
def files(checkpoint: GetFiles, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Llama's, but the embedding of one token is NaN."""
    good = checkpoint("llama").directory
    directory = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(good, directory, dirs_exist_ok=True)
    tensors = load_file(good / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = math.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return ModelFiles("poisoned", directory)


def decode(driver: Driver, ids: tuple[int, ...], tier: Tier) -> IterationResult:
    return driver.run(SubBatch(gpu_decodes=ids) if tier is Tier.GPU else SubBatch(cpu_decodes=ids))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("tier", "host_kv_dtype"), [(Tier.GPU, None), (Tier.HOST, None), (Tier.HOST, torch.int8)])
def test_neighbours_get_the_same_tokens(
    tier: Tier, host_kv_dtype: Any, files: ModelFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """In the same batches, and in the blocks that the poisoned one leaves, which hold less than it did."""
    decoder = load_decoder(files)
    options = {"host_kv_dtype": host_kv_dtype} if host_kv_dtype else {}
    drivers: list[Driver] = []
    poisoned = 9
    for with_poisoned in (False, True):
        service = cpu_attention if tier is Tier.HOST else ()
        driver = make_driver(decoder, 40 if tier is Tier.GPU else 0, service, **options)
        drivers.append(driver)
        for sequence_id in (1, 2, 3):
            driver.prefill(sequence_id, PROMPTS[sequence_id], tier, sampling=DRAWN, room_tokens=16)
        if with_poisoned:
            blocks = driver.blocks(tier, len(POISONED) + 5)
            new = NewSequence(poisoned, tuple(POISONED), tier, tuple(blocks.tolist()), DRAWN)
            result = driver.run(SubBatch(prefills=(PrefillChunk(poisoned, 0, len(POISONED)),)), new_sequences=(new,))
            assert (result.not_finite, result.tokens, result.logprobs) == ((poisoned,), ((poisoned, 0),), {})
        ids = (1, poisoned, 2, 3) if with_poisoned else (1, 2, 3)
        for _ in range(3):
            result = decode(driver, ids, tier)
            assert result.not_finite == ((poisoned,) if with_poisoned else ())
            assert set(result.logprobs) == {1, 2, 3}
        if with_poisoned:
            driver.run(released=(poisoned,))
            driver.free[tier][0][:] = blocks.tolist()
        # Its first token lies where the poisoned one's did, and most of its block is what that left.
        driver.prefill(4, PROMPTS[4][:1], tier, sampling=DRAWN, room_tokens=8)
        for _ in range(6):
            decode(driver, (1, 2, 3, 4), tier)
    alone, beside = drivers
    assert {key: beside.tokens[key] for key in (1, 2, 3, 4)} == alone.tokens
    assert not any(result.not_finite for result in beside.results[-6:])


@pytest.mark.usefixtures("backend")
def test_what_comes_from_a_host_block_with_a_poisoned_rest(
    files: ModelFiles, make_driver: MakeDriver, cpu_attention: Any
) -> None:
    """A sequence that was on the host in another's blocks is swapped in, rest and all."""
    driver = make_driver(load_decoder(files), 20, cpu_attention)
    host = driver.blocks(Tier.HOST, 16)
    new = NewSequence(9, tuple(POISONED), Tier.HOST, tuple(host.tolist()))
    driver.run(SubBatch(prefills=(PrefillChunk(9, 0, len(POISONED)),)), new_sequences=(new,))
    driver.run(released=(9,))
    new = NewSequence(1, tuple(PROMPTS[1][:5]), Tier.HOST, tuple(host.tolist()), NEVER_BAD)
    driver.run(SubBatch(prefills=(PrefillChunk(1, 0, 5),)), new_sequences=(new,))
    swap = Swap(1, Tier.GPU, driver.blocks(Tier.GPU, 16))
    result = driver.run(SubBatch(gpu_decodes=(1,)), swaps=(swap,))
    assert result.not_finite == ()
    assert decode(driver, (1,), Tier.GPU).not_finite == ()
    exact = make_driver(load_decoder(files), 20)
    exact.prefill(1, PROMPTS[1][:5], sampling=NEVER_BAD)
    decode(exact, (1,), Tier.GPU)
    decode(exact, (1,), Tier.GPU)
    assert driver.tokens[1] == exact.tokens[1]


def test_in_a_cohort(files: ModelFiles, make_driver: MakeDriver, cpu_attention: Any) -> None:
    driver = make_driver(load_decoder(files), 40, cpu_attention)
    driver.prefill(1, PROMPTS[1], Tier.GPU, sampling=NEVER_BAD, room_tokens=16)
    for sequence_id, prompt in ((2, PROMPTS[2]), (9, POISONED)):
        driver.prefill(sequence_id, prompt, Tier.HOST, sampling=NEVER_BAD, room_tokens=16)
    first = driver.run(SubBatch(gpu_decodes=(1,)), cohort=CohortStep((2, 9), 0, 2))
    last = driver.run(SubBatch(gpu_decodes=(1,)), cohort=CohortStep((2, 9), 2, 1))
    assert (first.not_finite, last.not_finite) == ((), (9,))
    assert [sequence_id for sequence_id, _ in last.tokens] == [1, 2, 9]


def test_in_log_probabilities_of_a_prompt(files: ModelFiles, make_driver: MakeDriver) -> None:
    """In one chunk of it, and the last is not yet computed."""
    driver = make_driver(load_decoder(files))
    sampling = Sampling(num_prompt_logprobs=0)
    new = NewSequence(1, (*POISONED, 1, 2, 3), Tier.GPU, tuple(driver.blocks(Tier.GPU, 16).tolist()), sampling)
    result = driver.run(SubBatch(prefills=(PrefillChunk(1, 0, 2),)), new_sequences=(new,))
    assert (result.not_finite, len(result.prompt_logprobs)) == ((), 1)
    assert driver.run(SubBatch(prefills=(PrefillChunk(1, 2, 3),))).not_finite == (1,)


def test_experts_chosen_by_scores_that_are_no_numbers(
    checkpoint: GetFiles, make_driver: MakeDriver, tmp_path: Path
) -> None:
    good = checkpoint("mixtral").directory
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    tensors = load_file(good / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    files = ModelFiles("poisoned", tmp_path)
    for decoder in (load_decoder(files), load_torch_decoder(files)):
        alone, beside = make_driver(decoder), make_driver(decoder)
        for driver in (alone, beside):
            driver.prefill(1, PROMPTS[1], sampling=NEVER_BAD)
        beside.prefill(9, POISONED)
        for _ in range(4):
            decode(alone, (1,), Tier.GPU)
            assert decode(beside, (9, 1), Tier.GPU).not_finite == (9,)
        assert beside.tokens[1] == alone.tokens[1]
