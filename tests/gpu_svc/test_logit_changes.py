"""Penalties and biases against transformers' processors, token by token, and against OpenAI's formula."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gpu_svc.limits import InvalidPlanError
from gpu_svc.sampling import sample
from gpu_svc.sampling_table import SamplingTable
from svc_common.plan import NewSequence, Sampling, Tier

VOCAB_SIZE = 50
PROMPT = [3, 17, 3, 8, 41]
STEPS = 40


def table_of(*requests: tuple[Sampling, list[int], int]) -> SamplingTable:
    """Requests as (sampling, token_ids, num_generated_tokens), in the slots of their numbers."""
    table = SamplingTable(len(requests) + 1, VOCAB_SIZE, None)
    for slot, (sampling, token_ids, num_generated) in enumerate(requests):
        new = NewSequence(slot, tuple(token_ids), Tier.GPU, (), sampling, num_generated)
        table.insert(slot, new, np.array(token_ids, np.int32))
    return table


def changed(table: SamplingTable, slots: list[int], logits: torch.Tensor) -> torch.Tensor:
    changed = logits.clone()
    for change in table.changes(np.array(slots)):
        change.apply_(changed)
    return changed


def step_logits(step: int) -> torch.Tensor:
    """[1, VOCAB_SIZE], positive and negative."""
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 3


def test_repetition_penalty_equals_transformers_token_by_token() -> None:
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    table = table_of((Sampling(repetition_penalty=1.3), PROMPT, 0))
    tokens, slots = list(PROMPT), np.array([0])
    for step in range(STEPS):
        logits = step_logits(step)
        expected = processor(torch.tensor([tokens]), logits.clone())
        assert torch.equal(changed(table, [0], logits), expected)
        drawn = sample(logits.clone(), table.rows(slots), table.changes(slots)).tokens
        assert drawn[0] == expected.argmax()
        table.take_tokens(slots, drawn)
        tokens.append(int(drawn[0]))
    assert len(set(tokens[len(PROMPT) :])) > 5


def test_biases_equal_transformers() -> None:
    biases = ((4, 2.5), (9, -100.0), (41, 0.25))
    processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases])
    table = table_of((Sampling(logit_bias=biases), PROMPT, 0))
    logits = step_logits(0)
    assert torch.equal(changed(table, [0], logits), processor(torch.tensor([PROMPT]), logits.clone()))


def test_presence_and_frequency_are_openai_s_over_the_answer_alone() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c counted in what was generated."""
    sampling = Sampling(presence_penalty=0.75, frequency_penalty=-0.5)
    table = table_of((sampling, PROMPT, 0))
    counts = torch.zeros(VOCAB_SIZE)
    for step, token in enumerate([5, 5, 9, 3, 5, 9, 49, 0]):
        logits = step_logits(step)
        torch.testing.assert_close(
            changed(table, [0], logits), logits - counts * -0.5 - (counts > 0) * 0.75, rtol=0, atol=1e-6
        )
        table.take_tokens(np.array([0]), np.array([token]))
        counts[token] += 1


def test_all_together_in_the_documented_order() -> None:
    """Repetition, then frequency and presence, then biases; the filters are transformers'."""
    options: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampling = Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05, seed=3, logit_bias=((8, 1.5),), **options)
    answer = [8, 2, 2, 30]
    table, slots = table_of((sampling, PROMPT + answer, len(answer))), np.array([0])
    warp = LogitsProcessorList(
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]
    )
    repetition = RepetitionPenaltyLogitsProcessor(1.5)
    for step in range(STEPS):
        logits = step_logits(step)
        ids = torch.tensor([PROMPT + answer])
        expected = repetition(ids, logits.clone())
        counts = torch.bincount(torch.tensor(answer), minlength=VOCAB_SIZE)
        expected -= counts * 0.25 + (counts > 0) * 0.5
        expected[0, 8] += 1.5
        torch.testing.assert_close(changed(table, [0], logits), expected, rtol=1e-6, atol=1e-6)
        drawn = sample(logits.clone(), table.rows(slots), table.changes(slots)).tokens
        assert torch.isfinite(warp(ids, expected)[0, drawn[0]])
        table.take_tokens(slots, drawn)
        answer.append(int(drawn[0]))


def test_a_row_depends_on_its_own_sequence_only() -> None:
    requests = [
        (Sampling(), PROMPT, 0),
        (Sampling(presence_penalty=1.0), [1, 2, 2], 2),
        (Sampling(logit_bias=((7, 3.0),)), PROMPT, 0),
        (Sampling(repetition_penalty=2.0, frequency_penalty=1.0), list(range(40)), 20),
        (Sampling(temperature=1.0), [0], 0),
    ]
    logits = torch.cat([step_logits(step) for step in range(5)])
    table, order = table_of(*requests), [3, 0, 2, 4, 1]
    tokens = np.array([9, 8, 7, 6, 5])
    for _ in range(3):
        together = changed(table, order, logits)
        for row, slot in enumerate(order):
            assert torch.equal(changed(table, [slot], logits[row : row + 1]), together[row : row + 1])
        assert torch.equal(together[1], logits[1])
        assert torch.equal(together[3], logits[3])
        table.take_tokens(np.array(order), tokens)


def test_counts_rebuilt_from_a_sequence_are_those_that_were_kept() -> None:
    """As after a recomputation; more than one growth of the arrays on the way."""
    sampling = Sampling(presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.2, logit_bias=((4, 1.0),))
    kept, answer = table_of((sampling, PROMPT, 0)), []
    for step in range(100):
        token = step * 7 % VOCAB_SIZE
        kept.take_tokens(np.array([0]), np.array([token]))
        answer.append(token)
    rebuilt = table_of((sampling, PROMPT + answer, len(answer)))
    logits = step_logits(1)
    assert torch.equal(changed(kept, [0], logits), changed(rebuilt, [0], logits))


def test_a_released_slot_leaves_nothing_behind() -> None:
    table = table_of((Sampling(presence_penalty=2.0), PROMPT, 3), (Sampling(logit_bias=((1, 5.0),)), PROMPT, 0))
    logits = step_logits(0)
    for slot in (0, 1):
        table.release(slot)
        assert torch.equal(changed(table, [slot], logits), logits)
    sampling = Sampling(frequency_penalty=1.0)
    table.insert(1, NewSequence(9, (2,), Tier.GPU, (), sampling), np.array([2], np.int32))
    assert torch.equal(changed(table, [1], logits), logits)
    table.take_tokens(np.array([1]), np.array([6]))
    expected = logits.clone()
    expected[0, 6] -= 1
    assert torch.equal(changed(table, [1], logits), expected)


def test_long_contexts_make_wide_rows() -> None:
    table = SamplingTable(3, 1000, None)
    token_ids = tuple(range(900))
    sampling = Sampling(repetition_penalty=2.0)
    table.insert(2, NewSequence(1, token_ids, Tier.GPU, (), sampling), np.array(token_ids, np.int32))
    logits = torch.ones(1, 1000)
    assert changed(table, [2], logits).sum() == 900 * 0.5 + 100


def test_logprobs_stay_those_of_the_model() -> None:
    logits = step_logits(7)
    best = int(logits.argmax())
    table = table_of((Sampling(num_logprobs=1, logit_bias=((best, -100.0), (11, 100.0))), PROMPT, 0))
    drawn = sample(logits.clone(), table.rows(np.array([0])), table.changes(np.array([0])))
    (row,) = drawn.logprobs
    expected = torch.log_softmax(logits[0], -1)
    assert drawn.tokens.tolist() == [11]
    assert row.chosen == pytest.approx(float(expected[11]))
    assert row.top == ((best, pytest.approx(float(expected[best]))),)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="sequence 0 has a bias for a token outside the vocabulary"):
        table_of((Sampling(logit_bias=((VOCAB_SIZE, 1.0),)), PROMPT, 0))


def test_a_repetition_penalty_that_is_none_is_refused() -> None:
    """A message that leaves it out says 0."""
    with pytest.raises(InvalidPlanError, match="sequence 0 has no repetition penalty above 0"):
        table_of((Sampling(repetition_penalty=0.0), PROMPT, 0))
