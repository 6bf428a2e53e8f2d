"""Filters against a plain reference, draws against the distribution, rows against their neighbours."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.sampling import sampling_rows as rows

from gpu_svc.sampling import SamplingRows, sample


def plain_distribution(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """token -> probability: each filter in turn, renormalised, one token at a time."""
    scaled = logits.astype(np.float64) / temperature
    kept = {int(i): float(np.exp(scaled[i] - scaled.max())) for i in np.argsort(-scaled, kind="stable")}
    if top_k:
        kept = dict(list(kept.items())[:top_k])
    total, mass, nucleus = sum(kept.values()), 0.0, {}
    for token, weight in kept.items():
        if mass >= np.float32(top_p) * total and nucleus:
            break
        nucleus[token] = weight
        mass += weight
    largest = max(nucleus.values())
    chosen = {token: weight for token, weight in nucleus.items() if weight >= np.float32(min_p) * largest}
    return {token: weight / sum(chosen.values()) for token, weight in chosen.items()}


def test_greedy_takes_the_best_and_draws_nothing() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]])
    drawn = sample(logits, rows(2))
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.logprobs == ()
    assert drawn.bad_rows.tolist() == []


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.5, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.9, 12, 0.9, 0.05),
        (1.0, 1, 1.0, 0.0),
        (2.0, 0, 1e-6, 0.0),
        (1.0, 1000, 0.99, 0.0),
    ],
)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square against the plain reference; 0.999 quantile approximated by Wilson and Hilferty."""
    num_draws = 6000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 2
    expected = plain_distribution(logits.numpy(), temperature, top_k, top_p, min_p)
    parameters = rows(
        num_draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, draw=np.arange(num_draws)
    )
    tokens = sample(logits.expand(num_draws, -1).contiguous(), parameters).tokens
    counts = np.bincount(tokens, minlength=40)
    assert set(np.flatnonzero(counts)) <= set(expected)
    # Bins with less than five expected draws are taken together.
    bins = [(counts[t], p * num_draws) for t, p in expected.items() if p * num_draws >= 5]
    rest = [(counts[t], p * num_draws) for t, p in expected.items() if p * num_draws < 5]
    if sum(e for _, e in rest) >= 5:
        bins.append((sum(c for c, _ in rest), sum(e for _, e in rest)))
    freedom = len(bins) - 1
    if freedom:
        limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert sum((count - want) ** 2 / want for count, want in bins) < limit
    else:
        assert counts.max() == num_draws


def test_filters_keep_the_same_tokens_as_the_reference_on_a_large_vocabulary() -> None:
    """Flat logits need more than the quick search looks at; sharp ones do not."""
    vocab_size = 5000
    generator = torch.Generator().manual_seed(1)
    for spread in (0.05, 1.0, 6.0):
        logits = torch.randn(vocab_size, generator=generator) * spread
        for top_k, top_p, min_p in ((0, 0.9, 0.0), (0, 0.3, 0.1), (2000, 0.9, 0.0), (50, 1.0, 0.0), (0, 0.999, 0.0)):
            expected = plain_distribution(logits.numpy(), 1.0, top_k, top_p, min_p)
            parameters = rows(100, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, draw=np.arange(100))
            tokens = sample(logits.expand(100, -1).contiguous(), parameters).tokens
            assert set(tokens.tolist()) <= set(expected)
            if len(expected) < 40:
                likely = {token for token, share in expected.items() if share > 0.1}
                assert likely <= set(tokens.tolist())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 3000, generator=generator) * 3
    parameters = rows(
        12,
        temperature=[0, 1, 0.5, 2, 1, 1, 0, 1.3, 1, 0.8, 1, 1],
        top_k=[0, 0, 5, 0, 2000, 1, 0, 0, 40, 0, 0, 0],
        top_p=[1, 0.9, 1, 1, 0.95, 1, 1, 0.5, 0.9, 1, 1, 0.9999],
        min_p=[0, 0, 0, 0.1, 0, 0, 0, 0.01, 0, 0, 0.3, 0],
        seed=np.arange(12) * 2**50,
        draw=np.arange(12) * 3,
        num_logprobs=[-1, 2, 0, -1, 5, -1, 1, -1, -1, -1, -1, 3],
    )
    together = sample(logits, parameters)
    alone_logprobs = []
    for i in range(12):
        columns = {name: getattr(parameters, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__}
        alone = sample(logits[i : i + 1], SamplingRows(**columns))
        assert alone.tokens[0] == together.tokens[i]
        alone_logprobs += [replace(row, row=i) for row in alone.logprobs]
    assert [row.row for row in together.logprobs] == [1, 2, 4, 6, 11]
    for ours, other in zip(together.logprobs, alone_logprobs, strict=True):
        assert ours.row == other.row
        assert ours.chosen == pytest.approx(other.chosen, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in other.top]


def test_equal_logits_are_all_kept_whatever_their_order() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 4] = 1.0
    drawn = {int(sample(logits, rows(1, temperature=1.0, top_k=2, draw=i)).tokens[0]) for i in range(200)}
    assert drawn == {0, 1, 2, 3, 4, 5}


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    (row,) = sample(logits, rows(1, temperature=0.3, top_k=1, num_logprobs=2)).logprobs
    expected = torch.log_softmax(logits[0], -1)
    assert row.chosen == pytest.approx(float(expected[2]))
    assert [token for token, _ in row.top] == [2, 1]
    assert [value for _, value in row.top] == pytest.approx([float(expected[2]), float(expected[1])])
    assert sample(logits, rows(1, num_logprobs=0)).logprobs[0].top == ()
    assert len(sample(logits, rows(1, num_logprobs=20)).logprobs[0].top) == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("everywhere", [False, True])
def test_rows_that_are_no_numbers_are_named_and_change_no_other(bad: float, everywhere: bool) -> None:
    """Greedy, drawn with every filter, with log-probabilities: each beside a bad row of its own kind."""
    good = torch.randn(4, 500, generator=torch.Generator().manual_seed(3))
    broken = good.clone()
    broken[:, slice(None) if everywhere else 77] = bad
    logits = torch.stack([good, broken], 1).flatten(0, 1)
    columns = {
        "temperature": np.repeat([0, 1.0, 0.7, 1.0], 2),
        "top_k": np.repeat([0, 0, 20, 0], 2),
        "top_p": np.repeat([1, 0.8, 0.9, 1], 2),
        "seed": np.repeat(np.arange(4), 2),
        "num_logprobs": np.repeat([2, -1, 0, 3], 2),
    }
    drawn = sample(logits, rows(8, **columns))
    assert drawn.bad_rows.tolist() == [1, 3, 5, 7]
    assert drawn.tokens[1::2].tolist() == [0, 0, 0, 0]
    alone = sample(good, rows(4, **{name: column[::2] for name, column in columns.items()}))
    assert drawn.tokens[::2].tolist() == alone.tokens.tolist()
    assert [row.row for row in drawn.logprobs] == [0, 4, 6]
    assert [row.top for row in drawn.logprobs] == [row.top for row in alone.logprobs]
