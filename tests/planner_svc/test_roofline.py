"""The analytic estimate: numbers worked by hand, and the vectors of the shared simulation spec where it is at hand."""

import json
from pathlib import Path

import pytest

from planner_svc.estimator import HardwareSpec, IterationLoad, ModelFigures, RooflineEstimator, SubBatchLoad, Timeline
from planner_svc.simulator.spec import parse_profile

_PLACES = [folder / "shared" / "simulation" / "spec.json" for folder in Path(__file__).resolve().parents]
SHARED_SPEC = next((place for place in _PLACES if place.exists()), None)
"""Beside the repository, where it is at hand."""

MODEL = ModelFigures(
    num_layers=2,
    hidden_size=100,
    intermediate_size=200,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=25,
    vocab_size=1000,
)
"""Per layer 2 * 100 * 25 * 6 + 3 * 100 * 200 = 90,000 weights; 200 bytes of KV a token."""
HARDWARE = HardwareSpec(
    gpu_flops_per_s=9e9,
    linear_efficiency=0.5,
    attention_efficiency=0.25,
    gpu_bytes_per_s=2e8,
    gpu_bandwidth_efficiency=0.9,
    cpu_bytes_per_s=4e7,
    cpu_bandwidth_efficiency=0.5,
    link_bytes_per_s=1e7,
    launch_s=1e-4,
    cpu_sequence_s=1e-5,
    cpu_hop_s=2e-5,
    iteration_s=3e-4,
)
ESTIMATOR = RooflineEstimator(HARDWARE, MODEL)
LINEAR_TOKEN_S = 2 * 90_000 / 4.5e9  # 40 us
LINEAR_FLOOR_S = 2 * 90_000 / 1.8e8  # 1 ms: the knee is at 25 tokens


def test_operations():
    assert MODEL.layer_parameters == 90_000
    assert MODEL.kv_bytes_per_token_layer == 200
    assert ESTIMATOR.linear_s(0) == 0
    assert ESTIMATOR.linear_s(25) == pytest.approx(LINEAR_FLOOR_S + 1e-4)
    assert ESTIMATOR.linear_s(50) == pytest.approx(50 * LINEAR_TOKEN_S + 1e-4)
    # 4 * 4 heads * 25 FLOP for each of 10 * 20 + 50 pairs, at 2.25 GFLOP/s
    assert ESTIMATOR.prefill_s(10, 20) == pytest.approx(400 * 250 / 2.25e9)
    assert ESTIMATOR.gpu_decode_s(3, 900) == pytest.approx(900 * 200 / 1.8e8)
    assert ESTIMATOR.cpu_decode_s(3, 900) == pytest.approx(900 * 200 / 2e7 + 3e-5 + 2e-5)
    assert ESTIMATOR.cpu_decode_s(0, 0) == 0
    assert ESTIMATOR.head_s(5) == pytest.approx(2e5 / 1.8e8 + 5 * 2e5 / 4.5e9)
    assert ESTIMATOR.swap_s(10**6) == pytest.approx(0.1)


def test_one_batch_hides_the_shorter_attention():
    load = SubBatchLoad(((30, 0),), 2, 400, 3, 300, num_outputs=6)
    gpu_s = ESTIMATOR.prefill_s(30, 0) + ESTIMATOR.gpu_decode_s(2, 400)
    layer_s = ESTIMATOR.linear_s(35) + max(gpu_s, ESTIMATOR.cpu_decode_s(3, 300))
    assert ESTIMATOR.iteration_s(IterationLoad(load)) == pytest.approx(2 * layer_s + ESTIMATOR.head_s(6) + 3e-4)


def test_two_sub_batches_hide_each_others_attention_but_at_the_ends():
    first = SubBatchLoad(((30, 0),), 2, 400, 1, 10, num_outputs=4)
    second = SubBatchLoad(((8, 30),), num_cpu_decodes=3, cpu_context_tokens=90, num_outputs=3)
    linear0, linear1 = ESTIMATOR.linear_s(33), ESTIMATOR.linear_s(11)
    gpu0 = ESTIMATOR.prefill_s(30, 0) + ESTIMATOR.gpu_decode_s(2, 400)
    gpu1 = ESTIMATOR.prefill_s(8, 30)
    cpu0, cpu1 = ESTIMATOR.cpu_decode_s(1, 10), ESTIMATOR.cpu_decode_s(3, 90)
    stages_s = max(linear0 + gpu1, cpu1) + max(linear1 + gpu0, cpu0)
    ends_s = linear0 / 2 + max(linear1 / 2 + gpu0, cpu0) + max(linear0 / 2 + gpu1, cpu1) + linear1 / 2
    expected_s = stages_s + ends_s + ESTIMATOR.head_s(8) + 3e-4
    assert ESTIMATOR.iteration_s(IterationLoad(first, second)) == pytest.approx(expected_s)


def test_only_what_the_layers_do_not_hide_of_a_swap_counts():
    load = SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=10, num_outputs=1)
    alone_s = ESTIMATOR.iteration_s(IterationLoad(load))
    layers_s = alone_s - ESTIMATOR.head_s(1) - 3e-4
    assert ESTIMATOR.iteration_s(IterationLoad(load, swap_out_bytes=10, swap_in_bytes=20)) == alone_s
    # Both ways at once: the longer one counts.
    swapping_s = ESTIMATOR.iteration_s(IterationLoad(load, swap_out_bytes=10**6, swap_in_bytes=10**5))
    assert swapping_s == pytest.approx(alone_s + 0.1 - layers_s)


def test_prompts_of_host_sequences_use_the_link():
    load = SubBatchLoad(((10, 5000),), host_prefill_tokens=10, host_past_tokens=5000)
    fixed_s = ESTIMATOR.head_s(1) + 3e-4
    assert ESTIMATOR.iteration_s(IterationLoad(load)) == pytest.approx(5000 * 400 / 1e7 + fixed_s)


def test_timeline_of_an_iteration():
    first = SubBatchLoad(((30, 0),), 2, 400, 1, 10, num_outputs=4)
    second = SubBatchLoad(num_cpu_decodes=3, cpu_context_tokens=90, num_outputs=3)
    timeline = ESTIMATOR.timeline(IterationLoad(first, second, swap_out_bytes=1000, swap_in_bytes=500))
    gpu_layer_s = ESTIMATOR.linear_s(33) + ESTIMATOR.linear_s(3) + ESTIMATOR.prefill_s(30, 0)
    gpu_layer_s += ESTIMATOR.gpu_decode_s(2, 400)
    assert timeline.total_s == ESTIMATOR.iteration_s(IterationLoad(first, second, 1000, 500))
    assert timeline.gpu_s == pytest.approx(2 * gpu_layer_s + ESTIMATOR.head_s(7))
    assert timeline.cpu_s == pytest.approx(2 * (ESTIMATOR.cpu_decode_s(1, 10) + ESTIMATOR.cpu_decode_s(3, 90)))
    assert (timeline.link_out_s, timeline.link_in_s) == pytest.approx((1e-4, 5e-5))
    assert timeline.total_s >= timeline.gpu_s + 3e-4
    assert timeline + timeline == Timeline(*(2 * getattr(timeline, lane) for lane in Timeline.__dataclass_fields__))


@pytest.mark.skipif(SHARED_SPEC is None, reason="no shared/simulation/spec.json above the tests: VECTORS NOT CHECKED")
@pytest.mark.parametrize("name", ["t4", "a10g-8x", "h100x2-70b"])
def test_vectors_of_the_simulation_spec(name):
    document = json.loads(SHARED_SPEC.read_text())
    profile = parse_profile(document, name, "spec")
    estimator, vectors = profile.estimator, document["test_vectors"][name]
    single = SubBatchLoad(((400, 0),), 50, 800, num_outputs=51)  # S = 450
    # Of 52 items the head sees one more than the batch above.
    single_s = estimator.iteration_s(IterationLoad(single)) - estimator.head_s(51) + estimator.head_s(52)
    expected = {
        "lin_1": estimator.linear_s(1),
        "lin_64": estimator.linear_s(64),
        "lin_512": estimator.linear_s(512),
        "pref_372": estimator.prefill_s(372, 0),
        "pref_256_at_512": estimator.prefill_s(256, 512),
        "gdec_800": estimator.gpu_decode_s(2, 800),
        "cdec_50_20000": estimator.cpu_decode_s(50, 20000),
        "single_S450_c400_N800_X52": single_s,
    }
    for key, value in expected.items():
        assert value == pytest.approx(vectors[key], rel=1e-9), key
    # No batch has the sums of this vector (402 tokens pass the first's linear operations, the head sees 53 items).
    first = SubBatchLoad(((400, 0),), -8, 800, 10, 4000)
    second = SubBatchLoad(num_cpu_decodes=40, cpu_context_tokens=16000)
    two_s = estimator.iteration_s(IterationLoad(first, second, swap_out_bytes=400 * estimator.kv_bytes_per_token))
    assert two_s - estimator.head_s(43) + estimator.head_s(53) == pytest.approx(vectors["two"], rel=1e-9)
