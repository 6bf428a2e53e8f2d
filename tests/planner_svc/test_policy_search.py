"""The search against all policies there are, what it may not do, and its reasons in words."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import MIX, estimator

from planner_svc.policy import NoPolicyError, PolicySearch, RequestMix, layers_text, pair_text, reasons
from svc_common.policy import ExecutionPolicy, PolicyKind

SMALL = {"gpu_bytes": 6e9, "host_bytes": 20e9, "cpu_per_s": 50e9}
"""Room for two of six layers beside buffers."""


def everything(figures, mix):
    """All policies that fit."""
    num_layers = figures.model.num_layers
    for decode in range(num_layers + 1):
        for prefill in range(decode + 1):
            for resident in range(num_layers - prefill + 1):
                found = figures.predict(ExecutionPolicy(resident, prefill, decode), mix)
                if found.memory.fits(figures.machine):
                    yield found


@settings(max_examples=25, deadline=None)
@given(
    gpu_bytes=st.floats(2e9, 9e9),
    link_per_s=st.floats(1e9, 60e9),
    cpu_flops=st.floats(1e11, 2e13),
    prompt=st.integers(1, 1000),
    batch=st.integers(1, 40),
)
def test_nothing_that_fits_is_much_better(gpu_bytes, link_per_s, cpu_flops, prompt, batch):
    figures = estimator(6, gpu_bytes=gpu_bytes, host_bytes=40e9, link_per_s=link_per_s, cpu_flops=cpu_flops)
    mix = RequestMix(prompt, 16, batch, 4096)
    best = min((found.total_s for found in everything(figures, mix)), default=None)
    if best is None:
        with pytest.raises(NoPolicyError):
            PolicySearch(figures).compare(mix)
        return
    comparison = PolicySearch(figures).compare(mix)
    assert comparison.best.total_s <= 1.02 * best
    totals = [found.total_s for found in comparison.by_kind]
    assert totals == sorted(totals)
    assert totals[0] == comparison.best.total_s
    for found in comparison.by_kind:
        assert found.memory.gpu.total <= figures.machine.gpu.memory_bytes
        assert found.memory.host.total <= figures.machine.cpu.memory_bytes
    assert len({found.kinds for found in comparison.by_kind}) == len(totals)


def test_what_fits_the_gpu_stays_there():
    best = PolicySearch(estimator()).compare(MIX).best
    assert best.policy == ExecutionPolicy(4)
    assert best.kinds == (PolicyKind.RESIDENT, PolicyKind.RESIDENT)


def test_long_prompts_are_streamed_and_decodes_partitioned():
    mix = RequestMix(2000, 32, 4, 16_384)
    best = PolicySearch(estimator(6, **SMALL)).compare(mix).best
    assert best.kinds == (PolicyKind.OFFLOAD, PolicyKind.PARTITION)
    assert best.policy.prefill_cpu_layers == 0


def test_short_prompts_stay_with_a_fast_cpu():
    mix = RequestMix(4, 64, 1, 16_384)
    best = PolicySearch(estimator(6, gpu_bytes=1.5e9, cpu_per_s=200e9, link_per_s=1e9)).compare(mix).best
    assert best.kinds == (PolicyKind.CPU_ONLY, PolicyKind.CPU_ONLY)


def test_what_is_lacking_is_named():
    with pytest.raises(NoPolicyError, match="GPU memory: even with all layers on the CPU"):
        PolicySearch(estimator(6, gpu_bytes=1e9)).compare(MIX)
    with pytest.raises(NoPolicyError, match="2 sequences of 111 tokens and the weights need"):
        PolicySearch(estimator(6, gpu_bytes=3e9, host_bytes=3e9)).compare(MIX)


def test_reasons_name_what_binds():
    figures = estimator(6, **SMALL)
    comparison = PolicySearch(figures).compare(RequestMix(2000, 32, 4, 16_384))
    told = reasons(figures, comparison)
    assert told[0].startswith("Prefill by offloading (")
    assert told[1] == (
        "Decode by partition (5 CPU, 1 resident): the CPU works 181 ms of 213 ms an iteration, the GPU 28.1 ms."
    )
    rest = [line for line in told if line.startswith("offloading takes")]
    assert "times as long: in decode the link up works" in rest[0]
    assert pair_text(comparison.best) == "offloading / partition"
    best = comparison.best
    counts = [int(part.split()[0]) for part in layers_text(best, 6, of_decode=True).split(", ")]
    assert sum(counts) == 6
    assert layers_text(replace(best, policy=ExecutionPolicy(6, 0, 4)), 6, of_decode=False) == "6 resident"
