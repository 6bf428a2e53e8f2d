"""Estimates beside published measurements: benchmarks/policies.py has the whole table."""

import pytest

from planner_svc.advisor.machines import read_machine
from planner_svc.advisor.models import find_spec
from planner_svc.policy import PolicyEstimator, PolicySearch, RequestMix, decoder_figures
from svc_common.policy import ExecutionPolicy, PolicyKind


def estimator(model: str, hardware: str) -> PolicyEstimator:
    return PolicyEstimator(decoder_figures(find_spec(model), 2, 2), read_machine(hardware))


@pytest.mark.parametrize(
    ("model", "gpu", "batch", "published"),
    [
        ("opt-66b", "a100-40", 1, 11.1),
        ("opt-66b", "h100-80", 1, 5.0),
        ("opt-66b", "a100-40", 16, 3.9),
        ("llama-2-70b", "a100-40", 1, 11.3),
        ("llama-2-70b", "h100-80", 1, 5.1),
        ("llama-2-70b", "a100-40", 16, 4.1),
    ],
)
def test_offloading_against_the_cpu_alone(model, gpu, batch, published):
    """128 tokens in, 32 out, IISWC 2024."""
    figures, mix = estimator(model, f"{gpu}+sapphire-rapids"), RequestMix(128, 32, batch, 100_000)
    num_layers = figures.model.num_layers
    offloading = figures.predict(ExecutionPolicy(0), mix).total_s
    cpu = figures.predict(ExecutionPolicy(0, num_layers, num_layers), mix).total_s
    assert offloading / cpu == pytest.approx(published, rel=0.25)


@pytest.mark.parametrize("model", ["opt-30b", "opt-66b", "llama-2-70b"])
def test_long_prompts_are_streamed_and_decodes_partitioned(model):
    """FlexInfer's choice on Ice Lake and an A100 of 40 GB, 512 tokens in, 32 out."""
    figures, mix = estimator(model, "a100-40"), RequestMix(512, 32, 8, 100_000)
    best = PolicySearch(figures).compare(mix).best
    assert best.kinds == (PolicyKind.OFFLOAD, PolicyKind.PARTITION)
    assert 1 - best.total_s / figures.predict(ExecutionPolicy(0), mix).total_s == pytest.approx(0.8, abs=0.1)
