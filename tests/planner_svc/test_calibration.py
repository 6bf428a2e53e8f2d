"""Online calibration: from timings alone each part of the cost finds its own factor, and one stall changes little."""

import random
from dataclasses import replace

import pytest

from planner_svc.estimator import (
    EMPTY_LOAD,
    Calibration,
    CohortLoad,
    DecodePoint,
    HardwareSpec,
    IterationLoad,
    LinearPoint,
    ModelFigures,
    OperationTables,
    PrefillPoint,
    RooflineEstimator,
    SubBatchLoad,
    TableEstimator,
)
from planner_svc.estimator.fit import Fit
from planner_svc.simulator.executor import timings_of
from svc_common.plan import Mode, Timings

TABLES = OperationTables(
    linear=(LinearPoint(1, 2e-3), LinearPoint(401, 6e-3)),
    prefill=tuple(PrefillPoint(c, p, 3e-8 * c * (c / 2 + p)) for c in (1, 400) for p in (0, 400)),
    gpu_decode=tuple(DecodePoint(n, n * mean, 2e-7 * n * mean) for n in (1, 64) for mean in (10, 1000)),
    cpu_decode=tuple(DecodePoint(n, n * mean, 1e-6 * n * mean) for n in (1, 64) for mean in (10, 1000)),
    head=(LinearPoint(1, 1e-3), LinearPoint(11, 2e-3)),
    swap_bytes_per_s=1e9,
    iteration_s=5e-3,
    cpu_copy=(LinearPoint(1, 1e-5), LinearPoint(101, 1e-4)),
    cpu_signal_s=1e-5,
)
BELIEVED = TableEstimator(TABLES, num_layers=4)
HARDWARE = HardwareSpec(
    gpu_flops_per_s=2e12,
    linear_efficiency=0.5,
    attention_efficiency=0.25,
    gpu_bytes_per_s=2e10,
    gpu_bandwidth_efficiency=0.8,
    cpu_bytes_per_s=1e10,
    cpu_bandwidth_efficiency=0.6,
    link_bytes_per_s=1e10,
    launch_s=5e-5,
    cpu_sequence_s=1e-6,
    cpu_hop_s=5e-5,
    iteration_s=1e-3,
)
MODEL = ModelFigures(4, 1024, 2816, 16, 4, 64, 32000)
PARTS = ("weights", "tokens", "prefill", "gpu_decode", "overhead", "cpu_decode", "head", "swap")


def loads(seed, with_cpu=True):
    """Loads of all kinds, as they come while serving."""
    generator = random.Random(seed)
    while True:
        chunks = ((generator.randint(1, 300), generator.choice((0, 300))),) if generator.random() < 0.5 else ()
        num_gpu, num_cpu = generator.randint(0, 40), generator.randint(0, 20) if with_cpu else 0
        first = SubBatchLoad(
            chunks, num_gpu, num_gpu * generator.randint(10, 900), num_cpu, num_cpu * 300, num_outputs=num_gpu + 1
        )
        second = SubBatchLoad(num_cpu_decodes=5, cpu_context_tokens=1000, num_outputs=5)
        is_split = with_cpu and generator.random() < 0.5
        swap_bytes = generator.choice((0, 10**7))
        yield IterationLoad(first, second if is_split else EMPTY_LOAD, swap_bytes)


def observe(calibration, truth, load, mode=Mode.ASYMMETRIC):
    """What an executor of this truth would report."""
    total_s, terms = truth.iteration_s(load), truth.terms(load)
    calibration.observe(mode, load, timings_of(total_s, terms))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("factor", [0.7, 1.3, 2.5])
def test_the_part_that_is_wrong_finds_its_factor(name, factor):
    calibration = Calibration(BELIEVED)
    factors = replace(calibration._factors, **{name: factor})
    truth = BELIEVED.calibrated(factors)
    for load, _ in zip(loads(1), range(150), strict=False):
        observe(calibration, truth, load)
    for load, _ in zip(loads(2), range(50), strict=False):
        predicted_s = calibration.estimator.iteration_s(load) * calibration.factor(Mode.ASYMMETRIC)
        assert predicted_s == pytest.approx(truth.iteration_s(load), rel=0.03)
    assert getattr(calibration._factors, name) == pytest.approx(factor, rel=0.1)


def test_work_that_slows_beside_the_cpu_is_told_from_slow_work():
    calibration = Calibration(BELIEVED)
    truth = BELIEVED.calibrated(replace(calibration._factors, contention=0.3))
    alone, both = loads(1, with_cpu=False), loads(2)
    for _ in range(100):
        observe(calibration, truth, next(alone), Mode.GPU_ONLY)
        observe(calibration, truth, next(both))
    assert calibration._factors.contention == pytest.approx(0.3, abs=0.06)
    assert calibration._factors.weights == pytest.approx(1.0, abs=0.05)


def test_a_cohort_counts_with_the_layers_it_ran():
    calibration = Calibration(BELIEVED)
    truth = BELIEVED.calibrated(replace(calibration._factors, cpu_decode=1.6))
    load = SubBatchLoad(num_gpu_decodes=8, gpu_context_tokens=800, num_outputs=8)
    for _ in range(30):
        observe(calibration, truth, IterationLoad(load, cohort=CohortLoad(6, 3000, 2, 0)), Mode.DECOUPLED)
    assert calibration._factors.cpu_decode == pytest.approx(1.6, rel=0.02)
    assert calibration._factors.weights == pytest.approx(1.0, rel=0.02)
    assert calibration.factor(Mode.DECOUPLED) == pytest.approx(1.0, rel=0.02)


def test_the_knee_of_the_linear_operations_is_found():
    """Half the FLOP/s: the weights are as fast, and fewer tokens come for free."""
    slow = RooflineEstimator(replace(HARDWARE, linear_efficiency=0.25), MODEL)
    calibration = Calibration(RooflineEstimator(HARDWARE, MODEL))
    generator = random.Random(0)
    for _ in range(100):
        load = SubBatchLoad(((generator.randint(1, 500), 0),), 4, 400, num_outputs=5)
        observe(calibration, slow, IterationLoad(load), Mode.GPU_ONLY)
    for num_tokens in (1, 50, 100, 200, 400):
        expected_s = slow.linear_s(num_tokens)
        assert calibration.estimator.linear_s(num_tokens) == pytest.approx(expected_s, rel=0.02)


def test_a_swap_that_outlasts_the_layers_tells_of_the_link():
    slow = RooflineEstimator(replace(HARDWARE, link_bytes_per_s=HARDWARE.link_bytes_per_s / 2), MODEL)
    calibration = Calibration(RooflineEstimator(HARDWARE, MODEL))
    load = SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=10, num_outputs=1)
    for _ in range(30):
        observe(calibration, slow, IterationLoad(load, swap_out_bytes=10**9), Mode.GPU_ONLY)
    assert calibration._factors.swap == pytest.approx(2.0, rel=0.02)
    assert calibration._factors.weights == pytest.approx(1.0, rel=0.02)


def test_one_stall_changes_little_and_a_lasting_change_is_learned():
    fit = Fit((1.0, 1.0))
    for _ in range(50):
        fit.observe((1.0, 1.0), 2.0)
    fit.observe((1.0, 1.0), 200.0)
    assert fit.values == pytest.approx([1.0, 1.0], abs=0.1)
    for _ in range(10):
        fit.observe((1.0, 1.0), 2.0)
    assert fit.values == pytest.approx([1.0, 1.0], abs=0.02)
    for _ in range(16):
        fit.observe((1.0, 1.0), 4.0)
    assert fit.values == pytest.approx([2.0, 2.0], rel=0.05)


def test_factors_stay_in_bounds_whatever_is_measured():
    fit = Fit((1.0, 0.0))
    for measured in (1e9, 1e-9):
        for _ in range(200):
            fit.observe((1.0, 1.0), measured)
        assert 0.25 <= fit.values[0] <= 4.0
        assert 0.0 <= fit.values[1] <= 1.0


def test_noise_averages_out():
    generator, fit = random.Random(0), Fit((1.0, 1.0))
    for _ in range(300):
        first, second = generator.uniform(0.1, 2), generator.uniform(0.1, 2)
        fit.observe((first, second), (1.3 * first + 0.8 * second) * generator.uniform(0.9, 1.1))
    assert fit.values == pytest.approx([1.3, 0.8], rel=0.06)


def test_what_the_parts_miss_in_a_mode_stays_with_that_mode():
    """All parts are right, and yet it takes half again as long: waits that no part explains."""
    calibration = Calibration(BELIEVED)
    for load, _ in zip(loads(3), range(60), strict=False):
        total_s, terms = BELIEVED.iteration_s(load), BELIEVED.terms(load)
        late_s = terms.cpu_wait_s + 0.5 * total_s
        timings = replace(timings_of(total_s, terms), total_ns=round(1.5e9 * total_s), cpu_wait_ns=round(1e9 * late_s))
        calibration.observe(Mode.ASYMMETRIC, load, timings)
    assert calibration.factor(Mode.ASYMMETRIC) == pytest.approx(1.5, rel=0.03)
    assert calibration.factor(Mode.GPU_ONLY) == 1.0


@pytest.mark.parametrize(
    ("load", "timings"),
    [(SubBatchLoad(num_gpu_decodes=1, gpu_context_tokens=9, num_outputs=1), Timings()), (EMPTY_LOAD, Timings(10))],
)
def test_an_iteration_without_times_or_without_work_says_nothing(load, timings):
    empty = replace(TABLES, linear=(), prefill=(), gpu_decode=(), cpu_decode=(), head=(), iteration_s=0.0)
    for estimator in (BELIEVED,) if load.num_tokens else (TableEstimator(empty, 4),):
        calibration = Calibration(estimator)
        calibration.observe(Mode.GPU_ONLY, IterationLoad(load), timings)
        assert calibration.factor(Mode.GPU_ONLY) == 1.0
        assert calibration._factors == Calibration(estimator)._factors
