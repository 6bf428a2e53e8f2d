"""The kernels that draw on a GPU, in Triton's interpreter, against what the CPU draws."""

import numpy as np
import pytest
import torch
from support.sampling import sampling_rows

from gpu_svc.sampling import Change, SamplingRows, sample
from gpu_svc.triton_sampling import sample_on_device


def noise(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * spread


def assert_same(logits: torch.Tensor, parameters: SamplingRows, *changes: Change) -> None:
    """Tokens, rows without numbers, and log-probabilities."""
    expected = sample(logits.clone(), parameters, changes)
    ours = sample_on_device(logits.clone(), parameters, changes)
    assert ours.tokens.tolist() == expected.tokens.tolist()
    assert ours.bad_rows.tolist() == expected.bad_rows.tolist()
    for row, other in zip(ours.logprobs, expected.logprobs, strict=True):
        assert row.row == other.row
        assert row.chosen == pytest.approx(other.chosen, abs=1e-5)
        assert [token for token, _ in row.top] == [token for token, _ in other.top]
        assert [value for _, value in row.top] == pytest.approx([value for _, value in other.top], abs=1e-5)


@pytest.mark.parametrize(("vocab_size", "spread"), [(257, 0.05), (2100, 2.0)])
def test_parameters_of_all_kinds(vocab_size: int, spread: float) -> None:
    columns = {
        "temperature": [0, 1, 1, 0.3, 1.8, 0.7, 1, 1, 1e-4, 1],
        "top_k": [5, 0, 1, 50, 0, 30, 300, 0, 0, vocab_size + 1],
        "top_p": [1, 1, 1, 1, 0.9, 0.5, 0.999, 1e-6, 0.8, 1],
        "min_p": [0, 0, 0, 0, 0, 0.02, 0, 0, 0, 0.3],
        "num_logprobs": [-1, 2, -1, 0, -1, -1, -1, 3, -1, -1],
    }
    parameters = sampling_rows(10, **columns, seed=np.arange(10) * 2**50 + 7, draw=np.arange(10) * 3)
    assert_same(noise(10, vocab_size, spread=spread), parameters)


def test_many_draws_of_one_distribution() -> None:
    assert_same(noise(1, 700).expand(24, -1).contiguous(), sampling_rows(24, temperature=1.0, draw=np.arange(24)))


def test_equal_logits_are_all_kept_or_all_left_out() -> None:
    logits = torch.zeros(4, 60)
    logits[:, 40:50] = 2.0
    assert_same(
        logits, sampling_rows(4, temperature=1.0, top_k=[4, 11, 0, 12], top_p=[1, 1, 0.7, 0.9], draw=np.arange(4))
    )


def test_what_a_grammar_excludes_is_never_drawn() -> None:
    def exclude(logits: torch.Tensor) -> None:
        logits[1, :290] = float("-inf")
        logits[2, 1:] = float("-inf")

    parameters = sampling_rows(
        4, temperature=[1, 1, 1, 0], top_k=[0, 200, 0, 0], top_p=[1, 0.99, 0.5, 1], num_logprobs=[-1, 3, 0, 1]
    )
    assert_same(noise(4, 300), parameters, Change(np.array([1, 2]), exclude))


def test_rows_without_numbers_are_reported_and_no_neighbour_notices() -> None:
    logits = noise(6, 300)
    logits[1, 7] = float("nan")
    logits[2, 9] = float("inf")
    logits[4] = float("-inf")
    parameters = sampling_rows(6, temperature=[1, 1, 1, 1, 1, 0], top_p=[1, 0.9, 0.9, 0.9, 0.9, 1], num_logprobs=1)
    assert_same(logits, parameters)
