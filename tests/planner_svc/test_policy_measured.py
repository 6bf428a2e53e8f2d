"""A machine from measured tables, and the keeper that chooses by it."""

import pytest
from support.policies import LAYER, model

from planner_svc.estimator import DecodePoint, LinearPoint, OperationTables, PrefillPoint
from planner_svc.policy import (
    Lane,
    PolicyEstimator,
    RequestMix,
    ServiceMemory,
    measured_figures,
    measured_machine,
)
from svc_common.policy import ExecutionPolicy

MEMORY = ServiceMemory(
    gpu_bytes=8_000_000_000,
    gpu_kv_bytes=1_000_000_000,
    host_bytes=100_000_000_000,
    host_kv_bytes=4_000_000_000,
    layer_bytes=1_100_000_000,
    other_bytes=500_000_000,
)
TABLES = OperationTables(
    linear=(LinearPoint(1, 0.01), LinearPoint(100, 0.03)),
    prefill=(PrefillPoint(10, 0, 0.001), PrefillPoint(100, 0, 0.01), PrefillPoint(100, 100, 0.03)),
    gpu_decode=(DecodePoint(1, 100, 0.001), DecodePoint(4, 4000, 0.02)),
    cpu_decode=(DecodePoint(1, 100, 0.002), DecodePoint(4, 4000, 0.08)),
    head=(LinearPoint(1, 0.005),),
    swap_bytes_per_s=1e9,
    iteration_s=0.003,
    cpu_signal_s=0.0001,
    cpu_linear=(LinearPoint(1, 0.05), LinearPoint(100, 0.4)),
    cpu_prefill=(PrefillPoint(100, 0, 0.1),),
    link_bytes_per_s=2e9,
)


def estimator(num_layers: int = 6) -> PolicyEstimator:
    figures = measured_figures(model(num_layers), MEMORY)
    return PolicyEstimator(figures, measured_machine(TABLES, figures, MEMORY))


def test_times_are_those_of_the_tables():
    mix = RequestMix(100, 2, 1, 1000)
    found = estimator().predict(ExecutionPolicy(6), mix)
    head_s = 0.005
    attention_s = 101 * 0.02 / 4000
    assert found.decode.iteration_s == pytest.approx(6 * (0.01 + attention_s) + head_s + 0.003)
    assert found.prefill.iteration_s == pytest.approx(6 * (0.03 + 0.01) + head_s + 0.003)
    on_cpu = estimator().predict(ExecutionPolicy(0, 6, 6), mix)
    assert on_cpu.prefill.busy_s[Lane.CPU] == pytest.approx(6 * (0.4 + 0.1))
    assert on_cpu.decode.busy_s[Lane.CPU] == pytest.approx(6 * (0.05 + 101 * 0.08 / 4000))
    streamed = estimator().predict(ExecutionPolicy(2), mix).decode
    assert streamed.iteration_s == pytest.approx(4 * 1.1e9 / 2e9)


def test_a_point_above_a_later_one_counts_as_that():
    figures = measured_figures(model(), MEMORY)
    tables = OperationTables(
        **{name: getattr(TABLES, name) for name in TABLES.__slots__}
        | {"linear": (LinearPoint(1, 0.02), LinearPoint(2, 0.01), LinearPoint(4, 0.04))}
    )
    curve = measured_machine(tables, figures, MEMORY).gpu.linear
    flop = 2 * LAYER.dense_parameters
    assert [curve.seconds(tokens, flop) for tokens in (1, 2, 4, 8)] == pytest.approx([0.01, 0.01, 0.04, 0.08])


def test_caches_of_fixed_size_bound_the_sequences():
    mix = RequestMix(1000, 1000, 4, 4096)
    found = estimator().memory(ExecutionPolicy(4), mix)
    assert found.gpu.kv == MEMORY.gpu_kv_bytes
    assert found.gpu.total == 4 * 1.1e9 + 0.5e9 + 2 * 1.1e9 + 1e9
    # 1.2 GB of KV each: no sequence has room on the GPU, three and a third on the host.
    assert found.num_host_sequences == 4
    assert not found.fits(estimator().machine)
    three = estimator().memory(ExecutionPolicy(4), RequestMix(1000, 1000, 3, 4096))
    assert three.host.kv == 3.6e9


def test_without_layers_on_the_cpu_there_is_no_machine():
    figures = measured_figures(model(), MEMORY)
    tables = OperationTables((LinearPoint(1, 0.1),), (), (), (), (), 0.0, 0.0)
    with pytest.raises(ValueError, match="know no layers on the CPU"):
        measured_machine(tables, figures, MEMORY)


# Streaming binds: 0.55 s a layer, which is computed in 0.04 s. After the last one has come it and the two resident ones
# are computed, the head and the rest.
AFTER_S = 3 * 0.04 + 0.005 + 0.003
COLD_S = 4 * 0.55 + AFTER_S


@pytest.mark.parametrize(
    ("policy", "warm_s"),
    [
        (ExecutionPolicy(2), 4 * 0.55),  # Decodes stream the same: the link never rests.
        (ExecutionPolicy(2, 0, 4), 0.04 + 2 * 0.55 + AFTER_S),  # They stream none: two layers are still there.
        (ExecutionPolicy(2, 0, 2), COLD_S),  # They stream others.
    ],
)
def test_prompts_find_in_the_buffers_what_was_left_there(policy, warm_s):
    figures = measured_figures(model(6), MEMORY)
    machine = measured_machine(TABLES, figures, MEMORY)
    mix = RequestMix(100, 2, 1, 1000)
    cold, warm = (PolicyEstimator(figures, machine, warm=warm).predict(policy, mix).ttft_s for warm in (False, True))
    assert cold == pytest.approx(COLD_S)
    assert warm == pytest.approx(warm_s)
