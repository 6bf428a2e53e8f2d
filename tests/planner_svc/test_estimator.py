"""Hand-worked numbers, and what must hold for any table however noisy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_svc.estimator import (
    Calibration,
    DecodePoint,
    LinearPoint,
    OperationTables,
    PrefillPoint,
    SubBatchLoad,
    TableEstimator,
)
from planner_svc.estimator.interpolation import Curve, Surface
from svc_common.plan import Mode

SECONDS = st.floats(0, 1e3, allow_nan=False)
QUANTITY = st.integers(1, 200)


def test_curve_between_below_and_beyond_its_points():
    curve = Curve([(10, 1.0), (20, 3.0), (40, 4.0)])
    assert curve(10) == 1.0
    assert curve(15) == 2.0
    assert curve(30) == 3.5
    assert curve(1) == 1.0  # a fixed cost remains
    assert curve(60) == pytest.approx(5.0)  # 0.05 s a unit, as in the last segment


def test_curve_of_one_point_is_constant():
    assert [Curve([(8, 2.0)])(x) for x in (1, 8, 100)] == [2.0, 2.0, 2.0]


def test_curve_holds_the_larger_measurement_against_noise():
    curve = Curve([(1, 5.0), (2, 4.0), (3, 6.0), (4, 5.5)])
    assert [curve(x) for x in (1, 2, 3, 4, 9)] == [5.0, 5.0, 6.0, 6.0, 6.0]


def test_surface_is_bilinear():
    surface = Surface([(1, 0, 1.0), (1, 10, 3.0), (3, 0, 2.0), (3, 10, 8.0)])
    assert surface(1, 5) == 2.0
    assert surface(3, 5) == 5.0
    assert surface(2, 5) == 3.5
    assert surface(2, 20) == pytest.approx((5.0 + 14.0) / 2)
    assert surface(4, 10) == pytest.approx(8.0 + 2.5)
    assert surface(0, 5) == 2.0


def test_surface_rows_may_be_measured_at_different_places():
    surface = Surface([(1, 0, 0.0), (1, 10, 10.0), (2, 5, 20.0), (2, 15, 40.0)])
    assert surface(1, 5) == 5.0
    assert surface(2, 10) == 30.0
    assert surface(1.5, 10) == 20.0
    assert surface(1, 15) == 15.0
    assert surface(2, 0) == 20.0


@given(st.lists(st.tuples(QUANTITY, SECONDS), min_size=1, max_size=8), QUANTITY, st.integers(0, 500))
def test_curve_never_falls(points, x, more):
    curve = Curve(points)
    assert 0 <= curve(x) <= curve(x + more) * (1 + 1e-9) + 1e-9


@given(
    st.lists(st.tuples(QUANTITY, QUANTITY, SECONDS), min_size=1, max_size=12),
    QUANTITY,
    QUANTITY,
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_surface_never_falls_along_either_quantity(points, x, y, more_x, more_y):
    surface = Surface(points)
    value = surface(x, y)
    assert value >= 0
    assert surface(x + more_x, y) >= value * (1 - 1e-9) - 1e-9
    assert surface(x, y + more_y) >= value * (1 - 1e-9) - 1e-9


def tables(**changes) -> OperationTables:
    """2 ms of linear work up to 100 tokens and 10 us for each further one; attention by context token."""
    values = {
        "linear": (LinearPoint(1, 2e-3), LinearPoint(100, 2e-3), LinearPoint(200, 3e-3)),
        "prefill": tuple(PrefillPoint(c, p, 1e-6 * c * (1 + p)) for c in (1, 100) for p in (0, 100)),
        "gpu_decode": tuple(DecodePoint(n, n * mean, 1e-6 * n * mean) for n in (1, 10) for mean in (10, 1000)),
        "cpu_decode": tuple(DecodePoint(n, n * mean, 1e-5 * n * mean) for n in (1, 10) for mean in (10, 1000)),
        "head": (LinearPoint(1, 1e-3), LinearPoint(11, 2e-3)),
        "swap_bytes_per_s": 1e9,
        "iteration_s": 5e-4,
    }
    return OperationTables(**(values | changes))


def test_operations_come_from_their_tables():
    estimator = TableEstimator(tables(), num_layers=4)
    assert estimator.linear_s(50) == pytest.approx(2e-3)
    assert estimator.linear_s(400) == pytest.approx(5e-3)
    assert estimator.prefill_s(50, 100) == pytest.approx(50e-6 * 101)
    assert estimator.gpu_decode_s(4, 400) == pytest.approx(4e-4)
    assert estimator.cpu_decode_s(4, 2000) == pytest.approx(2e-2)
    assert estimator.cpu_decode_s(20, 40_000) == pytest.approx(0.4)  # beyond the table on both sides
    assert estimator.head_s(6) == pytest.approx(1.5e-3)
    assert estimator.swap_s(2 * 10**6) == pytest.approx(2e-3)


def test_no_work_takes_no_time():
    estimator = TableEstimator(tables(), num_layers=4)
    operations = (
        estimator.linear_s(0),
        estimator.prefill_s(0, 10),
        estimator.gpu_decode_s(0, 0),
        estimator.cpu_decode_s(0, 0),
        estimator.head_s(0),
        estimator.swap_s(0),
    )
    assert operations == (0.0,) * 6
    assert estimator.iteration_s(SubBatchLoad()) == pytest.approx(5e-4)


def test_gpu_only_iteration():
    estimator = TableEstimator(tables(), num_layers=4)
    load = SubBatchLoad(prefill_chunks=((50, 0), (46, 100)), num_gpu_decodes=4, gpu_context_tokens=400, num_outputs=6)
    layer_s = 2e-3 + 50e-6 + 46e-6 * 101 + 4e-4
    assert estimator.iteration_s(load) == pytest.approx(4 * layer_s + 1.5e-3 + 5e-4)
    assert estimator.iteration_s(load, swap_out_bytes=6 * 10**5, swap_in_bytes=4 * 10**5) == pytest.approx(
        4 * layer_s + 1.5e-3 + 5e-4 + 1e-3
    )


def test_one_batch_with_cpu_decodes_runs_both_attentions_side_by_side():
    estimator = TableEstimator(tables(), num_layers=4)
    load = SubBatchLoad(
        num_gpu_decodes=4, gpu_context_tokens=400, num_cpu_decodes=2, cpu_context_tokens=200, num_outputs=6
    )
    assert estimator.iteration_s(load) == pytest.approx(4 * (2e-3 + max(4e-4, 2e-3)) + 1.5e-3 + 5e-4)


@pytest.mark.parametrize(
    ("cpu_context_0", "cpu_context_1", "layer_s"),
    [
        (100, 100, (2e-3 + 5e-5) + (2e-3 + 4e-4)),  # the CPU hides behind both stages
        (300, 100, (2e-3 + 5e-5) + 3e-3),  # cpu0 is longer than lin1 + gdec0
        (100, 500, 5e-3 + (2e-3 + 4e-4)),  # cpu1 is longer than lin0 + pre0
    ],
)
def test_two_sub_batches(cpu_context_0, cpu_context_1, layer_s):
    estimator = TableEstimator(tables(), num_layers=4)
    first = SubBatchLoad(
        prefill_chunks=((50, 0),),
        num_gpu_decodes=4,
        gpu_context_tokens=400,
        num_cpu_decodes=1,
        cpu_context_tokens=cpu_context_0,
        num_outputs=5,
    )
    second = SubBatchLoad(num_cpu_decodes=1, cpu_context_tokens=cpu_context_1, num_outputs=1)
    assert estimator.iteration_s(first, second) == pytest.approx(4 * layer_s + 1.5e-3 + 5e-4)


def test_operations_that_never_run_here_need_no_table():
    estimator = TableEstimator(tables(cpu_decode=(), swap_bytes_per_s=0.0), num_layers=4)
    assert estimator.cpu_decode_s(3, 300) == 0.0
    assert estimator.swap_s(10**9) == 0.0


def test_many_short_sequences_may_be_faster_than_one_long_one():
    """One sequence is shared by one thread, eight by four: at the same total they take less time."""
    points = (
        DecodePoint(1, 100, 1e-3),
        DecodePoint(1, 1000, 1e-2),
        DecodePoint(8, 800, 2e-3),
        DecodePoint(8, 8000, 2e-2),
    )
    estimator = TableEstimator(tables(cpu_decode=points), num_layers=4)
    assert estimator.cpu_decode_s(1, 800) == pytest.approx(8e-3)
    assert estimator.cpu_decode_s(8, 800) == pytest.approx(2e-3)


def test_calibration_moves_by_a_tenth_and_stays_in_bounds():
    calibration = Calibration()
    assert calibration.factor(Mode.GPU_ONLY) == 1.0
    calibration.observe(Mode.GPU_ONLY, predicted_s=1.0, measured_s=2.0)
    assert calibration.factor(Mode.GPU_ONLY) == pytest.approx(1.1)
    for _ in range(200):
        calibration.observe(Mode.GPU_ONLY, 1.0, 1000.0)
    assert calibration.factor(Mode.GPU_ONLY) == pytest.approx(4.0)
    for _ in range(200):
        calibration.observe(Mode.GPU_ONLY, 1.0, 1e-6)
    assert calibration.factor(Mode.GPU_ONLY) == pytest.approx(0.25)


def test_calibration_of_a_mode_that_never_ran_is_the_others():
    calibration = Calibration()
    calibration.observe(Mode.GPU_ONLY, 1.0, 3.0)
    assert calibration.factor(Mode.ASYMMETRIC) == calibration.factor(Mode.GPU_ONLY) == pytest.approx(1.2)
    calibration.observe(Mode.ASYMMETRIC, 1.0, 0.5)
    assert calibration.factor(Mode.ASYMMETRIC) == pytest.approx(1.13)
    assert calibration.factor(Mode.GPU_ONLY) == pytest.approx(1.2)


@pytest.mark.parametrize(("predicted_s", "measured_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_calibration_learns_nothing_from_an_iteration_without_times(predicted_s, measured_s):
    calibration = Calibration()
    calibration.observe(Mode.GPU_ONLY, predicted_s, measured_s)
    assert calibration.factor(Mode.GPU_ONLY) == 1.0
