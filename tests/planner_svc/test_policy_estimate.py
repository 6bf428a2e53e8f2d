"""Times, traffic and memory of execution policies against numbers worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policies import LAYER, MIX, estimator, machine, model

from planner_svc.policy import (
    Lane,
    Link,
    PolicyEstimator,
    RateCurve,
    RequestMix,
    Step,
    decoder_figures,
)
from svc_common.model.spec import ExpertsSpec, ModelSpec
from svc_common.policy import ExecutionPolicy, PolicyKind

GPU_LAYER_S = 0.01 + 2 * 105.5 * 1e5 / 1e11  # Weights read once, and KV of two sequences of 105.5 tokens.
CPU_LAYER_S = 0.1 + 2 * 105.5 * 1e5 / 1e10
HIDDEN_S = 2 * 1e4 / 4e9  # Of two tokens; as many go the other way.


def test_decode_on_the_gpu():
    found = estimator().predict(ExecutionPolicy(4), MIX).decode
    assert found.kind is PolicyKind.RESIDENT
    assert found.iteration_s == pytest.approx(4 * GPU_LAYER_S + 0.01 + 0.002)
    assert found.total_s == pytest.approx(10 * found.iteration_s)
    assert (found.up_bytes, found.down_bytes) == (0, 0)
    assert found.binding is Lane.GPU


def test_streamed_decode_takes_what_its_weights_take_on_the_link():
    found = estimator().predict(ExecutionPolicy(0), MIX).decode
    assert found.kind is PolicyKind.OFFLOAD
    assert found.iteration_s == pytest.approx(4 * 1e9 / 5e9)
    assert found.up_bytes == 4e9
    assert found.binding is Lane.UP


def test_resident_layers_hide_the_first_transfers_of_the_next_iteration():
    # Weights cross the link one after another all the time, all else of the iteration runs beside.
    found = estimator(6).predict(ExecutionPolicy(2), MIX).decode
    assert found.iteration_s == pytest.approx(4 * 1e9 / 5e9)
    fast = estimator(6, link_per_s=1e12).predict(ExecutionPolicy(2), MIX).decode
    assert fast.iteration_s == pytest.approx(6 * GPU_LAYER_S + 0.01 + 0.002)


def test_two_streamed_layers_stay_in_the_two_buffers():
    found = estimator().predict(ExecutionPolicy(2), MIX)
    assert found.decode.up_bytes == found.prefill.up_bytes == 0
    assert found.decode.iteration_s == pytest.approx(4 * GPU_LAYER_S + 0.01 + 0.002)
    assert found.memory.gpu.buffers == 2e9
    assert estimator().memory(ExecutionPolicy(3), MIX).gpu.buffers == 1e9
    # Prefill streams layers that decode computes on the CPU: the buffers are no place to stay.
    assert estimator(6).predict(ExecutionPolicy(2, 0, 2), MIX).decode.up_bytes > 2e9


def test_partitioned_decode_goes_through_both_processors():
    found = estimator().predict(ExecutionPolicy(2, 0, 2), MIX).decode
    assert (found.kind, found.num_groups) == (PolicyKind.PARTITION, 1)
    on_cpu, on_gpu = 2 * CPU_LAYER_S, 2 * GPU_LAYER_S + 0.01
    assert found.iteration_s == pytest.approx(HIDDEN_S + 0.001 + on_cpu + HIDDEN_S + 0.001 + on_gpu + 0.002)
    assert found.busy_s == pytest.approx({Lane.GPU: on_gpu, Lane.CPU: on_cpu, Lane.UP: HIDDEN_S, Lane.DOWN: HIDDEN_S})


def test_two_groups_where_arithmetic_bounds_both_sides():
    # 4,000 sequences: the GPU's layers take 0.04 s of arithmetic, the CPU's at half its rate 0.08 s; halves half.
    figures = estimator(cpu_flops=5e13, gpu_per_s=1e15, cpu_per_s=1e15, link_per_s=1e15, hop_s=0.0)
    mix = RequestMix(1, 3, 4000, 10_000)
    found = figures.predict(ExecutionPolicy(2, 2, 2), mix).decode
    assert found.num_groups == 2
    head_s = 0.04
    assert found.iteration_s == pytest.approx(0.08 + 0.08 + (2 * 0.04 + head_s) / 2 + 0.002, rel=1e-3)


def test_prefill_streams_first_and_then_computes_what_is_resident():
    found = estimator(6).predict(ExecutionPolicy(2), MIX)
    layer_s = 0.01 + 2 * 5050 * 1e6 / 1e13
    assert found.prefill.kind is PolicyKind.OFFLOAD
    assert found.ttft_s == pytest.approx(4 * 0.2 + layer_s + 2 * layer_s + 0.01 + 0.002)


def test_kv_of_prompts_goes_down_to_the_layers_that_decode_on_the_cpu():
    found = estimator().predict(ExecutionPolicy(4, 0, 3), MIX).prefill
    assert found.down_bytes == 3 * 200 * 100_000
    assert found.up_bytes == 0
    layer_s = 0.01 + 2 * 5050 * 1e6 / 1e13
    # Each layer's 20 MB take 4 ms, less than the next layer: all but nothing of it is hidden.
    assert found.total_s == pytest.approx(4 * layer_s + 0.01 + 0.002)


def test_a_slow_link_makes_prefill_wait_for_its_kv():
    found = estimator(link_per_s=0.5e9).predict(ExecutionPolicy(4, 0, 4), MIX).prefill
    first_s = 0.01 + 2 * 5050 * 1e6 / 1e13
    assert found.total_s == pytest.approx(first_s + 4 * 0.04 + 0.002)


def test_prompts_longer_than_an_iteration_bring_their_kv_back():
    mix = replace(MIX, prompt_tokens=100, batch_tokens=50, num_sequences=1)
    found = estimator().predict(ExecutionPolicy(4, 0, 4), mix).prefill
    assert found.num_iterations == 2
    assert found.down_bytes == 4 * 50 * 100_000
    assert found.up_bytes == 4 * 25 * 100_000  # Nothing before the first chunk, 50 tokens before the second.


def test_decodes_with_kv_on_the_host_attend_there_beside_the_gpu():
    on_gpu = estimator().decode(ExecutionPolicy(4), MIX, 0).iteration_s
    found = estimator().decode(ExecutionPolicy(4), MIX, 1)
    one_s = 105.5 * 1e5
    assert found.iteration_s == pytest.approx(on_gpu + 4 * (one_s / 1e10 + 2 * 0.001 - 2 * one_s / 1e11))
    assert found.busy_s[Lane.CPU] == pytest.approx(4 * one_s / 1e10)


def test_memory_of_each_tier():
    figures = estimator()
    found = figures.memory(ExecutionPolicy(1, 0, 2), MIX)
    assert found.gpu.weights == 1e9 + 1e9
    assert found.gpu.buffers == 2 * 1e9
    assert found.gpu.kv == 2 * 111 * 2 * 100_000
    assert found.gpu.activations == 200 * 100_000 + 2 * 1_000_000
    assert (found.host.weights, found.host.kv) == (3e9, 2 * 111 * 2 * 100_000)
    assert found.num_host_sequences == 0
    room = found.gpu.total - found.gpu.kv // 2
    less = PolicyEstimator(model(), machine(gpu_bytes=room)).memory(ExecutionPolicy(1, 0, 2), MIX)
    assert less.num_host_sequences == 1
    assert less.gpu.total == room
    assert less.host.kv - found.host.kv == found.gpu.kv // 2


def test_policies_that_cannot_be():
    with pytest.raises(ValueError, match="resident_layers must be in"):
        estimator().predict(ExecutionPolicy(5), MIX)
    with pytest.raises(ValueError, match="prefill_cpu_layers must be at most decode_cpu_layers, 1, is 2"):
        estimator().predict(ExecutionPolicy(0, 2, 1), MIX)


def test_a_curve_between_below_and_beyond_its_points():
    curve = RateCurve(((10, 1e12), (30, 2e12)))
    assert curve.seconds(0, 1e10) == 0
    assert curve.seconds(1, 1e10) == curve.seconds(10, 1e10) == pytest.approx(0.1)
    assert curve.seconds(20, 1e10) == pytest.approx((0.1 + 0.15) / 2)
    assert curve.seconds(60, 1e10) == pytest.approx(0.3)
    for points, complaint in (
        ((), "at least one"),
        (((2, 1.0), (1, 1.0)), "must rise"),
        (((1, 1.0), (2, 3.0)), "less time"),
    ):
        with pytest.raises(ValueError, match=complaint):
            RateCurve(points)


def test_traffic_both_ways_slows_what_runs_beside():
    link = Link(10.0, 8.0, 5.0)
    assert link.rates(100, 0) == (10.0, 8.0)
    up, down = link.rates(100, 40)
    assert (100 / up, 40 / down) == (pytest.approx(40 / 5 + 60 / 10), pytest.approx(40 / 5))


def test_experts_are_read_as_far_as_tokens_meet_them():
    layer = replace(LAYER, expert_parameters=100, expert_bytes=200, num_experts=8, experts_per_token=2)
    assert layer.weight_bytes == 1e9 + 8 * 200
    assert layer.experts_met(1) == pytest.approx(2)
    assert layer.experts_met(2) == pytest.approx(8 * (1 - 0.75**2))
    assert layer.experts_met(1000) == pytest.approx(8)
    found = estimator().predict(ExecutionPolicy(4), MIX).decode.iteration_s
    big = replace(layer, expert_parameters=500_000_000, expert_bytes=1_000_000_000)
    more = PolicyEstimator(model(layer=big), machine()).predict(ExecutionPolicy(4), MIX).decode.iteration_s
    assert more - found == pytest.approx(4 * 3.5 * 0.01)


def test_a_window_bounds_what_tokens_see():
    layer = replace(LAYER, window=10)
    assert layer.seen_tokens(5) == 5
    assert layer.seen_tokens(100) == 10
    assert layer.prompt_pairs(4) == 1 + 2 + 3 + 4
    assert layer.prompt_pairs(12) == 55 + 2 * 10


def test_figures_of_a_model():
    spec = ModelSpec(
        architecture="MixtralForCausalLM",
        num_layers=2,
        hidden_size=8,
        intermediate_size=16,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=100,
        context_tokens=64,
        norm_eps=1e-5,
        rope=None,
        tie_embeddings=False,
        eos_token_ids=(),
        checkpoint_dtype="bf16",
        experts=ExpertsSpec(4, 2, 16, True),
    )
    found = decoder_figures(spec, 2, 4)
    layer = found.layers[0]
    assert layer.dense_parameters == 16 * 8 + 8 * 8 + 4 * 8
    assert (layer.expert_parameters, layer.expert_bytes) == (3 * 16 * 8, 2 * 3 * 16 * 8)
    assert found.weight_sums[-1] + found.vocabulary_bytes == spec.weight_bytes(2)
    assert found.kv_sums == (0, 2 * 4 * 4, 2 * spec.num_layers * 4 * 4)
    assert layer.pair_flop == 4 * 2 * 4


def test_a_timeline_is_one_iteration_of_its_phase():
    figures = estimator()
    found = figures.predict(ExecutionPolicy(1, 0, 2), MIX)
    shown = figures.timeline(found, of_decode=True)
    assert shown.end_s - shown.start_s == pytest.approx(found.decode.iteration_s)
    layers = [(item.lane, item.layer) for item in shown.segments if item.step is Step.LAYER]
    assert layers == [(Lane.CPU, 0), (Lane.CPU, 1), (Lane.GPU, 2), (Lane.GPU, 3)]
    first = figures.timeline(found, of_decode=False)
    assert first.start_s == 0
    assert first.end_s == pytest.approx(found.prefill.total_s)
    for lane in Lane:
        own = sorted((item.start_s, item.end_s) for item in first.segments if item.lane is lane)
        assert all(early[1] <= late[0] + 1e-12 for early, late in pairwise(own))


policies = st.integers(1, 7).flatmap(
    lambda layers: st.tuples(
        st.just(layers), st.integers(0, layers), st.integers(0, layers), st.integers(0, layers)
    ).map(lambda n: (n[0], ExecutionPolicy(n[1] * (n[0] - min(n[2:])) // n[0], min(n[2:]), max(n[2:]))))
)
mixes = st.builds(
    RequestMix,
    prompt_tokens=st.integers(1, 3000),
    output_tokens=st.integers(1, 50),
    num_sequences=st.integers(1, 64),
    batch_tokens=st.sampled_from((256, 4096, 100_000)),
)
FASTER = ("link_per_s", "gpu_per_s", "cpu_per_s", "cpu_flops")


@settings(max_examples=60, deadline=None)
@given(policies, mixes, st.sampled_from(FASTER), st.floats(1, 20), st.integers(0, 64))
def test_faster_parts_never_make_it_slower(policy, mix, figure, factor, num_host):
    num_layers, policy = policy
    base = {"link_per_s": 5e9, "gpu_per_s": 100e9, "cpu_per_s": 10e9, "cpu_flops": 1e12}
    slow, fast = (estimator(num_layers, **base | {figure: base[figure] * scale}) for scale in (1.0, factor))
    num_host = min(num_host, mix.num_sequences)
    for phase in ("prefill", "decode"):
        before, after = (getattr(each, phase)(policy, mix, num_host) for each in (slow, fast))
        assert after.iteration_s <= before.iteration_s * (1 + 1e-9)
        assert after.total_s <= before.total_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(policies, mixes, st.integers(0, 64))
def test_more_resident_layers_never_make_it_slower(policy, mix, num_host):
    num_layers, policy = policy
    # Traffic both ways, which is spread evenly over a direction's bytes, would blur it.
    figures = estimator(num_layers, both_share=1.0)
    num_host = min(num_host, mix.num_sequences)
    if policy.resident_layers + policy.prefill_cpu_layers < num_layers:
        more = replace(policy, resident_layers=policy.resident_layers + 1)
        for phase in ("prefill", "decode"):
            before, after = (getattr(figures, phase)(each, mix, num_host) for each in (policy, more))
            assert after.total_s <= before.total_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(policies, mixes)
def test_no_iteration_is_shorter_than_its_busiest_lane(policy, mix):
    num_layers, policy = policy
    figures = estimator(num_layers)
    found = figures.predict(policy, mix)
    for phase in (found.prefill, found.decode):
        assert max(phase.busy_s.values()) <= phase.iteration_s * (1 + 1e-9)
    assert figures.floor_s(policy, mix) <= found.total_s * (1 + 1e-9)
