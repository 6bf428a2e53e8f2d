"""Workloads from a line of text: the same text gives the same requests, distributed as it says."""

import statistics
from itertools import pairwise

import pytest

from svc_common.workloads import InputError
from svc_common.workloads.generated import generate, is_generated
from svc_common.workloads.workload import Arrival


def gaps(text: str) -> list[float]:
    times = [item.at_s for item in generate(text).arrivals]
    return [after - before for before, after in pairwise(times)]


def test_what_is_generated():
    assert is_generated("poisson:requests=3")
    assert is_generated("gamma")
    assert not is_generated("poisson.json")
    assert not is_generated("traces/poisson:1")


def test_regular_arrivals_of_one_length():
    workload = generate("regular:requests=3,prompt=7,output=2")
    assert workload.arrivals == [Arrival(0.0, 7, 2), Arrival(1.0, 7, 2), Arrival(2.0, 7, 2)]
    assert workload.own_rate is None
    assert len(generate("regular:requests=3", limit=2).arrivals) == 2
    assert len(generate("regular:requests=3", limit=9).arrivals) == 3


def test_the_text_decides_everything():
    text = "poisson:requests=50,prompt=10-90,output=40~0.7,seed=3"
    assert generate(text) == generate(text)
    assert generate(text).arrivals[:20] == generate(text, limit=20).arrivals
    assert generate(text).arrivals != generate(text.replace("seed=3", "seed=4")).arrivals


def test_gaps():
    assert statistics.mean(gaps("poisson:requests=4000")) == pytest.approx(1, rel=0.05)
    assert statistics.stdev(gaps("poisson:requests=4000")) == pytest.approx(1, rel=0.1)
    bunched = gaps("gamma:requests=20000,cv=2")
    assert statistics.mean(bunched) == pytest.approx(1, rel=0.05)
    assert statistics.stdev(bunched) == pytest.approx(2, rel=0.1)


def test_lengths():
    arrivals = generate("poisson:requests=4000,prompt=10-30,output=200~0.8").arrivals
    prompts = [item.prompt_tokens for item in arrivals]
    outputs = [item.output_tokens for item in arrivals]
    assert (min(prompts), max(prompts)) == (10, 30)
    assert statistics.mean(prompts) == pytest.approx(20, rel=0.03)
    assert statistics.mean(outputs) == pytest.approx(200, rel=0.05)
    # Of a log-normal distribution: mean / exp(sigma^2 / 2).
    assert statistics.median(outputs) == pytest.approx(200 / 1.377, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:cv=2", "'cv=2' must be KEY=VALUE, each key once, of the keys requests, prompt, output, seed"),
        ("poisson:prompt", "'prompt' must be KEY=VALUE"),
        ("poisson:seed=1,seed=2", "'seed=2' must be KEY=VALUE, each key once"),
        ("poisson:requests=0", "requests: must be from 1 to 1e+07, is 0"),
        ("poisson:requests=1.5", "requests: must be a whole number, is 1.5"),
        ("poisson:prompt=many", "prompt: must be a number, is 'many'"),
        ("poisson:prompt=-5", "prompt: must be from 1 to 1e+07, is -5"),
        ("poisson:prompt=9-5", "prompt: the lower bound 9 is above the upper one, 5"),
        ("poisson:output=9~9", "output: must be from 0 to 5, is 9"),
        ("poisson:output=nan~1", "output: must be from 1 to 1e+07, is nan"),
        ("gamma:cv=0", "cv: must be from 0.01 to 100, is 0"),
    ],
)
def test_a_bad_text_is_refused_with_its_key_and_limit(text, message):
    with pytest.raises(InputError) as refusal:
        generate(text)
    assert str(refusal.value).startswith(f"--workload {text}: {message}")
