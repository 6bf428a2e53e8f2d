"""What the scheduler learns of the requests that come, and from it how prompts follow decodes."""

import pytest

from planner_svc.scheduler.pace import Mix
from planner_svc.scheduler.sequence import Sequence, SequenceRequest
from svc_common.plan import Sampling


def mix_of(*requests: tuple[int, int]) -> Mix:
    """After the arrival of (prompt tokens, most tokens of the answer)."""
    mix = Mix()
    for number, (prompt_tokens, max_tokens) in enumerate(requests, 1):
        mix.arrive(Sequence(number, SequenceRequest((5,) * prompt_tokens, max_tokens, Sampling(), frozenset())))
    return mix


def test_before_any_answer_ends_answers_are_little_longer_than_asked_for():
    """In a burst whole batches decode before the first ends: counted in full, prompts would be held back until then."""
    mix = mix_of(*[(1000, 100)] * 40)
    assert mix.output_tokens == pytest.approx(100)
    mix.take_tokens(40 * 60)
    assert mix.output_tokens == pytest.approx(140)
    assert mix.prefill_per_decode == pytest.approx(1000 / 140)


def test_answers_that_end_early_shorten_what_is_expected():
    """100 asked for, and four answers of 20: 180 tokens over 5 ends, each end forgetting a hundredth."""
    mix = mix_of((50, 100))
    for _ in range(4):
        mix.take_tokens(20)
        mix.finish()
    generated = 20 * sum(0.99**k for k in range(1, 5))
    ends = sum(0.99**k for k in range(4))
    assert mix.output_tokens == pytest.approx((100 + generated) / (1 + ends))
    assert mix.output_tokens == pytest.approx(36, rel=0.02)


def test_answers_under_way_count_beside_those_that_ended():
    """The short ones end first."""
    mix = mix_of(*[(50, 100)] * 2)
    mix.take_tokens(10)
    mix.finish()
    mix.take_tokens(90)
    assert mix.output_tokens == pytest.approx((100 + 9.9 + 90) / 2)
